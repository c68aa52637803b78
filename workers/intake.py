"""From records to prepared jobs. Whatever a record contains, it ends as an event, and the worker goes on.

    read ▸ decode and check ▸ the first of its id? ▸ tokenise ▸ open the stream ▸ submit
              │                  │                     │           │
              │ Undecodable      │ Duplicate           │ Rejected  │ Duplicate, Cancelled, Expired
              │ Rejected, DeadLettered

One task a partition. Records are taken in batches, so that one call to the bus serves many; the batch's jobs are
prepared side by side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import msgspec
import structlog

from arriero.schemas.clock import Clock, now_ms
from arriero.schemas.codec import decode_state
from arriero.schemas.errors import ArrieroError, BadJob, BusUnavailable, LogError, Undecodable
from arriero.schemas.event import Error
from arriero.schemas.job import Job
from arriero.schemas.names import Names, parse_job_topic
from arriero.schemas.state import JobState
from arriero.schemas.token import Token
from arriero.transports.bus import Opened, TokenBus
from arriero.transports.log import Record
from arriero.workers.commit import Committer
from arriero.workers.desk import Desk
from arriero.workers.door import check_record, duplicate_refused, origin_of, owner_elsewhere, refusal
from arriero.workers.held import Held
from arriero.workers.stream import Stream

log = structlog.get_logger(__name__)

READ_MOST: Final = 64
"""Records of one batch: enough to share a call to the bus, few enough that the first does not wait for the last."""


class Intake:
    """One partition's way in. `run` until the partition is dropped."""

    def __init__(
        self,
        committer: Committer[Held],
        *,
        desk: Desk,
        bus: TokenBus,
        prepare: Callable[[Job], Awaitable[list[int]]],
        names: Names,
        model_names: Sequence[str],
        clock: Clock,
    ) -> None:
        self._committer = committer
        self._priority = parse_job_topic(committer.topic).priority
        self._desk = desk
        self._bus = bus
        self._prepare = prepare
        self._names = names
        self._model_names = model_names
        self._clock = clock

    async def run(self) -> None:
        room = self._desk.rooms[self._priority]
        while True:
            most = await room.room()
            claim = await self._committer.claim()
            try:
                records = await claim.read(min(most, READ_MOST))
            except LogError as error:
                log.info("claim_unreadable", topic=claim.topic, partition=claim.partition, reason=error.code)
                self._committer.doubt(claim)
                continue
            # After a doubt what is in hand is read again.
            records = [record for record in records if record.offset not in self._committer.pending]
            self._committer.pending |= dict.fromkeys((record.offset for record in records), None)
            await self._admit(records)

    async def _admit(self, records: Sequence[Record]) -> None:
        """Steps: 1. decode and check 2. the first of its id 3. tokenise 4. open the streams 5. decide and submit."""
        jobs: list[Held] = []
        for record in records:
            # 1.
            try:
                job, digest = check_record(record, self._priority, self._model_names)
            except (BadJob, Undecodable) as error:
                await self._refuse(record, error)
                continue
            # 2.
            held = self._hold(record, job, digest)
            first = self._desk.first_of(job.id, held.root)
            if first is None:
                self._desk.take(held)
                jobs.append(held)
            else:
                first_root, first_digest = first
                event = held.duplicate(self._now_ms(), first_root, first_digest != digest)
                self._committer.add(event, settles=record.offset)
        # 3.
        prompts = await asyncio.gather(*(self._tokenise(held) for held in jobs))
        ready = [(held, prompt) for held, prompt in zip(jobs, prompts, strict=True) if prompt is not None]
        if not ready:
            return
        # 4.
        answers = await self._desk.streams.open([held.stream for held, _ in ready])
        states = await self._states(
            held.job.id
            for (held, _), answer in zip(ready, answers, strict=True)
            if answer is not None and answer.code in ("foreign", "finished")
        )
        # 5.
        for (held, prompt), answer in zip(ready, answers, strict=True):
            self._decide(held, prompt, answer, states.get(held.job.id))

    def _decide(self, held: Held, prompt: Sequence[int], answer: Opened | None, state: JobState | None) -> None:
        ended = answer is not None and answer.code == "finished"
        if ended or owner_elsewhere(state, held.root):
            first_root, digest = (state.root, state.digest) if state is not None else ("", "")
            body_differs = digest not in ("", held.digest)
            self._desk.settle(held, held.duplicate(self._now_ms(), first_root, body_differs))
        elif answer is not None and answer.cancelled:
            self._desk.settle(held, held.cancelled(self._now_ms()))
        elif self._is_late(held.job):
            self._desk.settle(held, held.expired(self._now_ms(), "queue"))
        else:
            self._desk.submit(held, prompt)

    async def _tokenise(self, held: Held) -> list[int] | None:
        """The prompt as token ids; None when that was the job's end. A job that is too late is not worth it."""
        if self._is_late(held.job):
            return []
        try:
            return await self._prepare(held.job)
        except BadJob as error:
            reason = Error(error.code, error.message, error.field)
            state = (await self._states([held.job.id])).get(held.job.id)
            if state is not None and owner_elsewhere(state, held.root):
                self._desk.settle(held, held.duplicate(self._now_ms(), state.root, state.digest != held.digest))
            else:
                self._desk.settle(held, held.rejected(self._now_ms(), reason))
        except Exception as error:  # whatever this prompt does to the tokeniser, the others go on
            log.error("prepare_failed", job_id=held.job.id, kind=type(error).__name__, exc_info=True)
            code = error.code if isinstance(error, ArrieroError) else "engine_error"
            reason = Error(code, f"the prompt could not be prepared: {type(error).__name__}")
            self._desk.settle(held, held.failed(self._now_ms(), reason))
        return None

    async def _refuse(self, record: Record, error: BadJob | Undecodable) -> None:
        """A record that is no acceptable job. Under the id of another job it must not end that one."""
        log.info(
            "record_refused", topic=record.topic, partition=record.partition, offset=record.offset, code=error.code
        )
        if isinstance(error, BadJob) and error.job_id is not None:
            root = str(origin_of(record))
            first = self._desk.first_of(error.job_id, root)
            first_root = first[0] if first is not None else ""
            if first is None:
                state = (await self._states([error.job_id])).get(error.job_id)
                if state is not None and owner_elsewhere(state, root):
                    first_root = state.root
            if first_root:
                event = duplicate_refused(record, self._priority, error.job_id, first_root, self._now_ms())
                self._committer.add(event, settles=record.offset)
                return
        ending, copies = refusal(self._names, record, self._priority, error, self._now_ms())
        self._committer.add(ending, settles=record.offset, records=copies)

    async def _states(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        """What is known of these jobs; nothing while the bus is away: a duplicate is then decoded, not recorded."""
        wanted = list(job_ids)
        if not wanted:
            return {}
        try:
            found = await self._bus.states(wanted)
        except BusUnavailable:
            return {}
        known = {}
        for job_id, state in zip(wanted, found, strict=True):
            if state is not None:
                try:
                    known[job_id] = decode_state(state)
                except msgspec.MsgspecError:
                    log.warning("state_unreadable", job_id=job_id)
        return known

    def _hold(self, record: Record, job: Job, digest: str) -> Held:
        key, origin = self._desk.next_key(), origin_of(record)
        tokens: list[Token] = []
        waited_s = max(0.0, self._clock.time() - record.time_ms / 1000)
        stream = Stream.begin(
            key=key,
            job_id=job.id,
            root=job.root or str(origin),
            attempt=job.attempt,
            fence=self._committer.fence,
            tokens=tokens,
        )
        return Held(
            key=key,
            job=job,
            origin=origin,
            priority=self._priority,
            digest=digest,
            model=job.model or self._model_names[0],
            arrived=self._clock.monotonic() - waited_s,
            size_bytes=len(record.value or b""),
            committer=self._committer,
            stream=stream,
            tokens=tokens,
        )

    def _is_late(self, job: Job) -> bool:
        return job.deadline is not None and job.deadline <= self._clock.time()

    def _now_ms(self) -> int:
        return now_ms(self._clock)
