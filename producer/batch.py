"""Offline generation over a file: each line answered once, however often the run is cut off.

    input ▸ refused? done? recorded? ▸ publish, a window at a time        results ▸ output, errors ▸ output.errors.jsonl
                                                 └──▸ fleet ──▸ events topic, one tail ──┘

A line's job id follows from the input's digest and the line's number, and the outputs tell what is done. So a run that
was stopped, killed, or left for a week goes on where it was:

    1. lock and scan the outputs 2. read the events from now on 3. where a former run may have published lines that are
    not answered, and the bus does not know one of them: look the log through, once 4. line by line: what has ended is
    taken from the log, what is published is waited for, the rest is published

The tail alone would miss what is recorded before it begins and projected after step 4 has asked. So jobs that this run
has not published itself are asked for again, now and then; all are, when nothing comes.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from arriero.producer.client import Client
from arriero.producer.lines import (
    Done,
    Line,
    Memory,
    Output,
    Source,
    custom_id_of,
    jobs_of,
    memory_path,
    open_source,
    read_line,
    recall,
    remember,
)
from arriero.producer.openai import Answer, Kind, outcome_error
from arriero.producer.recorded import Found, Place, event_of, search_log
from arriero.schemas.clock import now_ms
from arriero.schemas.codec import decode_state
from arriero.schemas.errors import ArrieroError, BadJob, BusUnavailable, SetupError
from arriero.schemas.event import Completed, Duplicate, Event, Started, Terminal
from arriero.schemas.job import Job, PriorityClass
from arriero.schemas.state import JobState, stream_end

WINDOW: Final = 2_000
"""Jobs in flight: enough to keep a fleet busy, few enough to be held in memory and soon found again."""
CHUNK: Final = 250
"""Lines asked for and published in one go."""
LOOK_S: Final = 2.0
"""How often what is written is synced, and jobs of earlier runs are asked for."""
TELL_S: Final = 0.1
"""Progress is told at most this often."""
PATIENCE_S: Final = 60.0
"""How long publishing is tried again while the log is away. Then the run ends; the next one goes on."""
PAUSE_S: Final = 0.5
CANCEL_AGAIN_S: Final = 1.0
CLOCKS_APART_S: Final = 60.0
"""How much clocks of machines may differ: so much earlier the log is searched."""

log = structlog.get_logger(__name__)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Lines: `total` = `skipped` + `done` + `failed` + what is left. All but `total` and `skipped` are of this run."""

    total: int
    skipped: int
    """Answered by earlier runs."""
    done: int
    failed: int
    """In the errors file."""
    running: int
    """Published and not answered."""
    tokens: int
    rate: float
    """Answers a second."""
    elapsed_s: float

    @property
    def left(self) -> int:
        return self.total - self.skipped - self.done - self.failed


class Summary(Progress, frozen=True, kw_only=True):
    target: Path
    errors: Path
    digest: str
    stopped: bool
    """Before its end: run it again to go on."""


class _Pending(msgspec.Struct):
    number: int
    custom_id: str
    kind: Kind
    model: str


async def run_batch(
    client: Client,
    source: Path,
    target: Path,
    *,
    errors: Path | None = None,
    priority: PriorityClass = "batch",
    window: int = WINDOW,
    progress: Callable[[Progress], None] = lambda progress: None,
    stop: asyncio.Event | None = None,
    force: bool = False,
) -> Summary:
    """Answer every line of `source` into `target`, refused and failed ones into `errors` (`<target>.errors.jsonl`).

    Once `stop` is set it returns soon; jobs in flight go on in the fleet, and another run finds their results.
    `force` begins an output anew that belongs to another input. Raises SetupError (bad_input, bad_output, output_busy,
    output_foreign), LogError, BusUnavailable never.
    """
    errors = errors if errors is not None else target.with_name(target.name + ".errors.jsonl")
    if errors == target:
        raise SetupError(f"{target} cannot hold answers and errors both; give another file for one", code="bad_output")
    read = await asyncio.to_thread(open_source, source)
    memory = recall(memory_path(target))
    if memory is not None and memory.digest != read.digest:
        if not force:
            raise SetupError(
                f"{target} belongs to another input (digest {memory.digest}, this input's is {read.digest}: was "
                f"{source} changed?); give another output, or --force to begin it anew",
                code="output_foreign",
            )
        memory = None
    done = Done(read.lines)
    with ExitStack() as stack:
        outputs = [Output(path, read, done, force=force) for path in (target, errors)]
        for output in outputs:  # 1.
            await asyncio.to_thread(stack.enter_context, output)
        run = _Run(client, read, done, outputs[0], outputs[1], priority, window, progress, memory)
        stopped = await run.run(stop or asyncio.Event())
    if not stopped:
        memory_path(target).unlink(missing_ok=True)
    told = msgspec.structs.asdict(run.progress())
    return Summary(**told, target=target, errors=errors, digest=read.digest, stopped=stopped)


class _Run:
    def __init__(
        self,
        client: Client,
        source: Source,
        done: Done,
        results: Output,
        errors: Output,
        priority: PriorityClass,
        window: int,
        tell: Callable[[Progress], None],
        memory: Memory | None,
    ) -> None:
        self._client = client
        self._source = source
        self._prefix = source.digest.encode()
        self._done = done
        self._results = results
        self._errors = errors
        self._priority = priority
        self._window = max(1, window)
        self._tell = tell
        self._memory = memory or Memory(source.digest, now_ms(client.clock))
        self._memory_path = memory_path(results.path)
        self._pending: dict[str, _Pending] = {}
        self._asked: set[str] = set()
        """Pending jobs whose end may lie before the tail's beginning."""
        self._found = Found()
        """What a former run has left in the log."""
        self._model = ""
        """What the fleet calls the model of jobs that name none."""
        self._news = asyncio.Event()
        """Set whenever a job leaves `_pending`."""
        self._skipped = done.count
        self._succeeded = self._failed = self._tokens = 0
        self._began_s = self._told_s = 0.0

    def progress(self) -> Progress:
        elapsed_s = self._now_s() - self._began_s
        answered = self._succeeded + self._failed
        return Progress(
            total=self._source.jobs,
            skipped=self._skipped,
            done=self._succeeded,
            failed=self._failed,
            running=len(self._pending),
            tokens=self._tokens,
            rate=answered / elapsed_s if elapsed_s > 0 else 0.0,
            elapsed_s=elapsed_s,
        )

    async def run(self, stop: asyncio.Event) -> bool:
        """Whether it was stopped before its end."""
        self._began_s = self._now_s()
        if self._skipped >= self._source.jobs:
            return False
        start = await self._client.log.ends([self._client.names.events])
        feed = asyncio.create_task(self._feed(), name="batch feed")
        helpers = [
            asyncio.create_task(self._follow(start), name="batch tail"),  # 2.
            asyncio.create_task(self._look(), name="batch look"),
            asyncio.create_task(stop.wait(), name="batch stop"),
        ]
        try:
            await asyncio.wait([feed, *helpers], return_when=asyncio.FIRST_COMPLETED)
            stopped = not feed.done()
        finally:
            await _end([feed, *helpers])
        for task in (feed, *helpers):
            if not task.cancelled():
                task.result()
        self._tell(self.progress())
        return stopped

    # --- the way in -----------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        await self._search_log()  # 3.
        waiting: list[tuple[_Pending, Job]] = []
        for line in jobs_of(self._source):
            if line.number % 1_000 == 0:
                await asyncio.sleep(0)  # a long way through what is done must not keep others waiting
            if line.number in self._done:
                continue
            try:
                custom_id, request = read_line(self._source, line)
            except BadJob as error:
                self._refuse(line, error)
                continue
            job = request.job
            waiting.append((_Pending(line.number, custom_id, request.kind, job.model or ""), job))
            if len(waiting) == min(CHUNK, self._window):
                await self._place(waiting)
                waiting = []
        await self._place(waiting)
        await self._until_fewer_than(1)

    async def _place(self, lines: Sequence[tuple[_Pending, Job]]) -> None:
        """4. One chunk: what has ended is written, what runs is waited for, the rest published."""
        if not lines:
            return
        await self._until_fewer_than(self._window - len(lines) + 1)
        states = await self._states([job.id for _, job in lines])
        fresh: list[tuple[_Pending, Job]] = []
        for (pending, job), state in zip(lines, states, strict=True):
            self._pending[job.id] = pending  # before it is published: its end may come before the answer
            if state is None and job.id not in self._found.published and job.id not in self._found.places:
                fresh.append((pending, job))
            else:
                self._asked.add(job.id)
        places = {job.id: self._found.places.pop(job.id) for _, job in lines if job.id in self._found.places}
        await self._take_recorded(places | _places(states))
        if fresh:
            self._remember(fresh[-1][0].number)
            await self._publish(fresh)

    async def _publish(self, lines: Sequence[tuple[_Pending, Job]]) -> None:
        """Publish; again while the log is away. Under these ids that does no harm."""
        deadline_s = self._now_s() + PATIENCE_S
        while lines:
            outcomes = [one async for one in self._client.submit_many([job for _, job in lines], self._priority)]
            again: list[tuple[_Pending, Job]] = []
            for (pending, job), outcome in zip(lines, outcomes, strict=True):
                if not isinstance(outcome, ArrieroError):
                    continue
                if outcome.retriable and self._now_s() < deadline_s:
                    again.append((pending, job))
                elif outcome.retriable:
                    raise outcome
                else:
                    self._fail(job.id, outcome.code, outcome.message, getattr(outcome, "field", None))
            if again:
                await asyncio.sleep(PAUSE_S)
            lines = again

    async def _until_fewer_than(self, count: int) -> None:
        while len(self._pending) >= max(1, count):
            self._news.clear()
            await self._news.wait()

    def _remember(self, number: int) -> None:
        if number > self._memory.submitted:
            self._memory = msgspec.structs.replace(self._memory, submitted=number)
            remember(self._memory_path, self._memory)

    # --- the way out ----------------------------------------------------------------------------------------

    async def _follow(self, start: dict[tuple[str, int], int]) -> None:
        async with aclosing(self._client.log.tail([self._client.names.events], start)) as batches:
            async for batch in batches:
                for record in batch:
                    event = event_of(record, self._prefix)
                    if event is not None:
                        self._take(event)
                self._flush()

    def _take(self, event: Event) -> None:
        pending = self._pending.get(event.id)
        if pending is None:
            return
        if isinstance(event, Started):
            self._model = event.model
        elif isinstance(event, Duplicate):
            self._asked.add(event.id)
        elif isinstance(event, Completed):
            answer = Answer(pending.kind, event.id, pending.model or self._model, event.time_ms // 1000)
            body = answer.whole(event.output.text, event.finish_reason, event.usage)
            response = {"status_code": 200, "request_id": event.id, "body": body}
            self._results.append({"id": event.id, "custom_id": pending.custom_id, "response": response, "error": None})
            self._tokens += event.output.count
            self._leave(event.id, succeeded=True)
        elif isinstance(event, Terminal):
            end = stream_end(event)
            fault = outcome_error(end.status, end.code, end.error)
            assert fault is not None
            self._tokens += event.output.count
            self._fail(event.id, fault.code, fault.message)

    def _refuse(self, line: Line, error: BadJob) -> None:
        """A line that is no job."""
        self._done.add(line.number)
        self._failed += 1
        job_id = self._source.job_id(line.number)
        self._errors.append(
            _error_line(job_id, custom_id_of(line), line.number, error.code, error.message, error.field)
        )
        self._flush()

    def _fail(self, job_id: str, code: str, message: str, param: str | None = None) -> None:
        pending = self._pending[job_id]
        self._errors.append(_error_line(job_id, pending.custom_id, pending.number, code, message, param))
        self._leave(job_id, succeeded=False)

    def _leave(self, job_id: str, *, succeeded: bool) -> None:
        self._done.add(self._pending.pop(job_id).number)
        self._asked.discard(job_id)
        self._succeeded += succeeded
        self._failed += not succeeded
        self._news.set()

    def _flush(self) -> None:
        now_s = self._now_s()
        if now_s - self._told_s >= TELL_S:
            self._results.flush()
            self._errors.flush()
            self._told_s = now_s
            self._tell(self.progress())

    # --- what was recorded without us -----------------------------------------------------------------------

    async def _look(self) -> None:
        """Sync what is written; ask for jobs whose end the tail may not see."""
        while True:
            before = self._done.count
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self._results.sync)
            await asyncio.to_thread(self._errors.sync)
            asked = list(self._asked if self._done.count != before else self._pending)
            for first in range(0, len(asked), CHUNK):
                await self._take_recorded(_places(await self._states(asked[first : first + CHUNK])))
            self._flush()

    async def _states(self, job_ids: Sequence[str]) -> list[JobState | None]:
        """What the bus knows; nothing, when it is away: then the log alone tells."""
        try:
            found = await self._client.bus.states(job_ids)
        except BusUnavailable:
            return [None] * len(job_ids)
        states = [None if state is None else decode_state(state) for state in found]
        self._model = next((state.model for state in states if state is not None and state.model), self._model)
        return states

    async def _take_recorded(self, places: dict[str, Place]) -> None:
        """Write results that lie at these places, of jobs that are still pending."""
        by_partition: dict[int, dict[int, str]] = defaultdict(dict)
        for job_id, (partition, offset) in places.items():
            by_partition[partition][offset] = job_id
        for partition, jobs in by_partition.items():
            missing = dict(jobs)
            for record in await self._client.log.fetch(self._client.names.events, partition, sorted(jobs)):
                event = event_of(record, self._prefix)
                if event is not None:
                    self._take(event)
                    missing.pop(record.offset, None)
            for job_id in missing.values():
                if job_id in self._pending:
                    self._fail(job_id, "result_expired", "the job has ended and its result has expired")
        self._flush()

    async def _search_log(self) -> None:
        """Find results of earlier runs that the bus has forgotten."""
        suspects = [number for number in range(1, self._memory.submitted + 1) if number not in self._done]
        if not suspects or not await self._forgotten(suspects):
            return
        log.info("batch_searches_log", lines=len(suspects))
        found = await search_log(
            self._client.log,
            self._client.names.events,
            self._client.names.job_topics(self._client.pool),
            {self._source.job_id(number) for number in suspects},
            prefix=self._source.digest.encode(),
            since_s=self._memory.started_ms / 1000 - CLOCKS_APART_S,
        )
        self._found, self._model = found, found.model or self._model

    async def _forgotten(self, numbers: Iterable[int]) -> bool:
        ids = [self._source.job_id(number) for number in numbers]
        for first in range(0, len(ids), CHUNK):
            if None in await self._states(ids[first : first + CHUNK]):
                return True
        return False

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel until all have ended: a cancellation that meets the very answer that was waited for may be lost on it."""
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_AGAIN_S)


def _places(states: Iterable[JobState | None]) -> dict[str, Place]:
    return {state.id: Place(state.partition, state.terminal) for state in states if state is not None and state.ended}


def _error_line(
    job_id: str, custom_id: str | None, number: int, code: str, message: str, param: str | None
) -> dict[str, Any]:
    error = {"code": code, "message": message, "param": param}
    return {"id": job_id, "custom_id": custom_id, "response": None, "error": error, "line": number}
