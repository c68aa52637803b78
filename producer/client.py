"""The client: publish jobs, follow their streams, ask what became of them.

async with Client(data=folder) as client:              # or kafka="host:9092", redis="redis://host"
    job = await client.submit(prompt="Why do mules ...", priority="interactive")
    async for item in client.stream(job.id): ...
    result = await client.result(job.id)
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from arriero.producer.follow import START, Ended, Item, Tokens, follow
from arriero.producer.publish import new_id, outgoing
from arriero.producer.recorded import state_in_log
from arriero.schemas.clock import Clock, SystemClock, now_ms, system_random
from arriero.schemas.codec import decode_event, decode_state, decode_worker, encode
from arriero.schemas.errors import (
    ArrieroError,
    BusUnavailable,
    ConflictingDuplicate,
    JobNotFound,
    NoLiveWorker,
)
from arriero.schemas.event import CancelRequested, Error, Event, Origin, Terminal, Usage
from arriero.schemas.job import BatchRef, Job, Message, PriorityClass, Sampling, body_digest, check_id
from arriero.schemas.names import NAMESPACE_DEFAULT, POOL_DEFAULT, Names
from arriero.schemas.state import JobState, stream_end
from arriero.schemas.token import FinishReason, Token
from arriero.schemas.worker import WorkerInfo
from arriero.transports.bus import Position, TokenBus
from arriero.transports.connect import Endpoints, make_bus, make_log
from arriero.transports.log import JobLog, Outgoing, Placed

SUBMIT_MANY_AT_ONCE: Final = 500
"""Records of one `publish` in `submit_many`: bounds memory, and what a failure leaves in doubt."""

PROJECTED_WITHIN_S: Final = 0.5
"""How long a job that nobody knows is looked for once more: longer than the projector lags in a healthy fleet."""


log = structlog.get_logger(__name__)


class Submitted(msgspec.Struct, frozen=True):
    """An accepted job. `origin` is where its record lies."""

    id: str
    origin: Origin
    digest: str
    """The body's, to tell whether a job under the same id asked for the same."""


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded outcome of a job."""

    id: str
    status: str
    text: str
    tokens: list[Token]
    finish_reason: FinishReason | None = None
    error: Error | None = None
    usage: Usage = Usage()
    event: Terminal

    @property
    def ok(self) -> bool:
        return self.status == "completed"


class Client:
    """A connection to one pool of one namespace.

    Give `data` (an embedded stack's folder) or both `kafka` and `redis`; or hand in a log and a bus that are open
    already and stay yours.
    """

    def __init__(
        self,
        *,
        data: Path | None = None,
        kafka: str | None = None,
        redis: str | None = None,
        namespace: str = NAMESPACE_DEFAULT,
        pool: str = POOL_DEFAULT,
        log: JobLog | None = None,
        bus: TokenBus | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.names = Names(namespace)
        self.pool = pool
        self.clock = clock or SystemClock()
        self._rng = rng or system_random()
        self._given = (log, bus)
        self._endpoints = None if log and bus else Endpoints(data=data, kafka=kafka, redis=redis)

    async def __aenter__(self) -> Client:
        async with AsyncExitStack() as stack:
            log, bus = self._given
            if self._endpoints is not None:
                log = await stack.enter_async_context(
                    make_log(
                        self._endpoints, names=self.names, clock=self.clock, rng=self._rng, client="arriero-client"
                    )
                )
                bus = await stack.enter_async_context(make_bus(self._endpoints, names=self.names, clock=self.clock))
            assert log is not None
            assert bus is not None
            self.log, self.bus = log, bus
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    # --- publishing ----------------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        id: str | None = None,
        model: str | None = None,
        priority: PriorityClass = "standard",
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tenant: str | None = None,
        deadline: float | None = None,
        ttl_s: float | None = None,
        affinity: str | None = None,
        metadata: dict[str, Any] | None = None,
        batch: BatchRef | None = None,
    ) -> Submitted:
        """Publish a job; when this returns it is accepted.

        `id` is an idempotency key: publishing again under it does no harm. `deadline` is Unix seconds, `ttl_s` the
        same from now on. Raises BadJob, LogUnavailable.
        """
        if ttl_s is not None:
            deadline = self.clock.time() + ttl_s
        given = {"model": model, "max_tokens": max_tokens, "tenant": tenant, "metadata": metadata, "sampling": sampling}
        job = Job(
            id=id if id is not None else self.new_id(),
            prompt=prompt,
            messages=None if messages is None else list(messages),
            stop=list(stop),
            deadline=deadline,
            affinity=affinity,
            batch=batch,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )
        return await self.submit_job(job, priority)

    def new_id(self) -> str:
        return new_id(self.clock, self._rng)

    async def submit_job(self, job: Job, priority: PriorityClass = "standard") -> Submitted:
        (outcome,) = await self._publish([job], [outgoing(job, self.names, self.pool, priority)])
        if isinstance(outcome, ArrieroError):
            raise outcome
        return outcome

    async def submit_many(
        self, jobs: Iterable[Job] | AsyncIterable[Job], priority: PriorityClass = "batch"
    ) -> AsyncIterator[Submitted | ArrieroError]:
        """Publish many jobs, some hundred in one go; yields in order what became of each: accepted, or why not."""
        waiting: list[Job] = []
        async for job in _each(jobs):
            waiting.append(job)
            if len(waiting) == SUBMIT_MANY_AT_ONCE:
                for outcome in await self._submit_some(waiting, priority):
                    yield outcome
                waiting = []
        for outcome in await self._submit_some(waiting, priority):
            yield outcome

    async def _submit_some(self, jobs: list[Job], priority: PriorityClass) -> list[Submitted | ArrieroError]:
        outcomes: list[Submitted | ArrieroError | None] = []
        good: list[Job] = []
        records: list[Outgoing] = []
        for job in jobs:
            try:
                records.append(outgoing(job, self.names, self.pool, priority))
                good.append(job)
                outcomes.append(None)
            except ArrieroError as error:
                outcomes.append(error)
        published = iter(await self._publish(good, records))
        return [next(published) if outcome is None else outcome for outcome in outcomes]

    async def _publish(self, jobs: list[Job], records: list[Outgoing]) -> list[Submitted | ArrieroError]:
        if not records:
            return []
        outcomes: list[Submitted | ArrieroError] = []
        for job, placed in zip(jobs, await self.log.publish(records), strict=True):
            if isinstance(placed, Placed):
                origin = Origin(placed.topic, placed.partition, placed.offset, placed.time_ms)
                outcomes.append(Submitted(job.id, origin, body_digest(job)))
            elif isinstance(placed, ArrieroError):
                outcomes.append(placed)
            else:
                raise placed
        return outcomes

    # --- following -----------------------------------------------------------------------------------------

    async def stream(
        self,
        job: Submitted | str,
        position: Position | int = START,
        *,
        moved: Callable[[Position], None] = lambda position: None,
    ) -> AsyncGenerator[Item, None]:
        """The job's tokens, each index once, then its end; from a position or an index on, as often as wanted.

        Waits for a job that does not exist yet. Raises BadJob(bad_id), JobNotFound when it has ended and its result has
        expired, and for a Submitted whose id belongs to a job that asked for something else, ConflictingDuplicate.
        """
        job_id = job if isinstance(job, str) else job.id
        check_id(job_id)
        await self._check_conflict(job)
        if isinstance(position, int):
            position = Position(count=position)
        async with aclosing(follow(self.bus, job_id, position, self._fetch_terminal, moved=moved)) as items:
            async for item in items:
                if isinstance(item, Ended):
                    await self._check_conflict(job)
                yield item

    async def _check_conflict(self, job: Submitted | str) -> None:
        if isinstance(job, Submitted) and (state := await self.peek(job.id)) is not None:
            check_conflict(job, state)

    async def text(self, job_id: str) -> AsyncGenerator[str, None]:
        """The job's text as it comes, the held-back tail included. Resets are not shown: for those use `stream`."""
        async with aclosing(self.stream(job_id)) as items:
            async for item in items:
                if isinstance(item, Tokens):
                    yield "".join(token.piece for token in item.tokens)
                elif isinstance(item, Ended):
                    yield item.end.tail

    async def result(self, job: Submitted | str, *, timeout_s: float | None = None) -> JobResult:
        """Wait for the job's recorded outcome.

        Raises TimeoutError, JobNotFound (expired), and for a Submitted whose id belongs to a job that asked for
        something else, ConflictingDuplicate.
        """
        job_id = job if isinstance(job, str) else job.id
        async with asyncio.timeout(timeout_s):
            state = await self.ended(job)
            event = await self._terminal_at(state.partition, state.terminal)
        if event is None:
            raise JobNotFound(f"job {job_id} has ended and its result has expired")
        end = stream_end(event)
        return JobResult(
            id=job_id,
            status=end.status,
            text=event.output.text,
            tokens=event.output.tokens,
            finish_reason=end.finish_reason,
            error=None if end.code is None else Error(end.code, end.error or ""),
            usage=event.usage,
            event=event,
        )

    async def ended(self, job: Submitted | str) -> JobState:
        """Wait for the job's end; its last state. Waits for a bus that is away; bound it with a timeout.

        Raises JobNotFound (expired), ConflictingDuplicate as `result` does.
        """
        job_id = job if isinstance(job, str) else job.id
        ended = False
        while True:
            state = await self.peek(job_id)
            if state is not None:
                if isinstance(job, Submitted):
                    check_conflict(job, state)
                if state.ended:
                    return state
            if ended:
                await asyncio.sleep(0.01)  # between the two writes of the projector; no message tells of the second
                continue
            async with aclosing(self.stream(job_id, Position(count=1 << 40))) as items:
                async for item in items:
                    ended = isinstance(item, Ended)

    # --- asking --------------------------------------------------------------------------------------------

    async def status(self, job_id: str) -> JobState:
        """What is known of a job. Raises JobNotFound.

        Read from the bus, and from the log when the bus does not know: that takes as long as reading a partition.
        Raises Unreadable when a later release has written what became of the job.
        """
        check_id(job_id)
        state = await self.peek(job_id)
        if state is None or (state.record is None and state.offset < 0):
            state = (
                await state_in_log(self.log, self.names, self.pool, job_id) or state or await self._state_soon(job_id)
            )
        if state is None:
            raise JobNotFound(f"job {job_id} is unknown here: never submitted, expired, or under another namespace")
        return state

    async def peek(self, job_id: str) -> JobState | None:
        """What the bus knows of a job, at once; None when that is nothing, or the bus is away."""
        try:
            (value,) = await self.bus.states([job_id])
            return None if value is None else decode_state(value)
        except BusUnavailable:
            return None
        except msgspec.MsgspecError:
            log.warning("state_unreadable", job_id=job_id)  # the log knows it
            return None

    async def history(self, job_id: str) -> list[Event]:
        """The job's events in order. Raises JobNotFound, Unreadable."""
        state = await self.status(job_id)
        if not state.history:
            return []
        records = await self.log.fetch(self.names.events, state.partition, state.history)
        return [decode_event(record.value) for record in records if record.value is not None]

    async def cancel(self, job_id: str, reason: str = "") -> None:
        """Ask for the job's end. It ends as cancelled, unless it has ended by then. Raises LogUnavailable.

        The request in the log is what counts; the flag on the bus makes it quick.
        """
        check_id(job_id)
        event = CancelRequested(id=job_id, time_ms=now_ms(self.clock), reason=reason[:500])
        (placed,) = await self.log.publish([Outgoing(self.names.events, job_id.encode(), encode(event))])
        if isinstance(placed, BaseException):
            raise placed
        with contextlib.suppress(BusUnavailable):  # else the projector raises the flag when the bus is back
            await self.bus.cancel(job_id)

    async def workers(self) -> list[WorkerInfo]:
        """The pool's live workers."""
        return [decode_worker(info) for info in (await self.bus.workers(self.pool)).values()]

    async def require_worker(self, within_s: float = 1.9) -> None:
        """Raises NoLiveWorker when none shows up in time. Jobs submitted meanwhile stay queued."""
        deadline = asyncio.get_running_loop().time() + within_s
        while not await self.workers():
            if asyncio.get_running_loop().time() >= deadline:
                raise NoLiveWorker(f"no worker of the pool {self.pool} is alive; the job stays queued until one is")
            await asyncio.sleep(0.2)

    # --- the log -------------------------------------------------------------------------------------------

    async def _state_soon(self, job_id: str) -> JobState | None:
        """The state of a job submitted a moment ago: its record is durable before the projector has seen it."""
        deadline = asyncio.get_running_loop().time() + PROJECTED_WITHIN_S
        while asyncio.get_running_loop().time() < deadline:  # states have no bell
            await asyncio.sleep(0.02)
            if (state := await self.peek(job_id)) is not None:
                return state
        return None

    async def _fetch_terminal(self, terminal: str) -> Terminal | None:
        partition, _, offset = terminal.partition("/")
        return await self._terminal_at(int(partition), int(offset))

    async def _terminal_at(self, partition: int, offset: int) -> Terminal | None:
        records = await self.log.fetch(self.names.events, partition, [offset])
        if not records or records[0].value is None:
            return None
        event = decode_event(records[0].value)
        return event if isinstance(event, Terminal) else None


def check_conflict(submitted: Submitted, state: JobState) -> None:
    """Raises ConflictingDuplicate when the id belongs to a job that asked for something else.

    The digest tells it as soon as an owner has spoken; the Duplicate event comes later, and after a long run of
    duplicates not at all.
    """
    other = state.owned and state.digest not in ("", submitted.digest)
    if other or any(d.body_differs and str(d.origin) == str(submitted.origin) for d in state.duplicates):
        raise ConflictingDuplicate(
            f"the id {submitted.id} belongs to a job that asked for something else; that job was left as it is"
        )


async def _each(jobs: Iterable[Job] | AsyncIterable[Job]) -> AsyncIterator[Job]:
    if isinstance(jobs, AsyncIterable):
        async for job in jobs:
            yield job
    else:
        for job in jobs:
            yield job
