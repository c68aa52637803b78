"""From records to prepared jobs. Whatever a record contains, it ends as an event, and the worker goes on.

    read ▸ decode and check ▸ the first of its id? ▸ tokenise ▸ open the stream ▸ submit
              │                  │                     │           │
              │ Undecodable      │ Duplicate           │ Rejected  │ Duplicate, Cancelled, Expired
              │ Rejected, DeadLettered

One task a partition. Records are taken in batches, so that one call to the bus serves many; the batch's jobs are
prepared side by side.

What another owner or an earlier attempt has begun goes on where it was: behind the tokens that the bus holds, or, when
the bus has forgotten them, behind those that the log has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import structlog

from arriero.schemas.clock import Clock, now_ms
from arriero.schemas.errors import ArrieroError, BadJob, LogError, Undecodable
from arriero.schemas.event import Error, Origin
from arriero.schemas.job import Job
from arriero.schemas.names import Names, parse_job_topic
from arriero.schemas.state import JobState
from arriero.schemas.token import FinishReason, Token
from arriero.transports.bus import Opened
from arriero.transports.failpoints import reach
from arriero.transports.log import JobLog, Record
from arriero.workers.blame import SUSPECT_IN_ROW, WORKER_CRASHED, conviction, verdict
from arriero.workers.checkpoints import Checkpoints, Found
from arriero.workers.commit import Committer
from arriero.workers.desk import Desk
from arriero.workers.door import check_record, duplicate_refused, origin_of, owner_elsewhere, refusal
from arriero.workers.engine.seam import Prepared
from arriero.workers.flight import FlightRecorder, label_of
from arriero.workers.held import Held
from arriero.workers.known import KnownJobs
from arriero.workers.retry import dead_letter
from arriero.workers.stream import TAKE_PATIENCE_S, Stream

log = structlog.get_logger(__name__)

READ_MOST: Final = 256
"""Records of one batch: enough to share a call to the bus, few enough that the first does not wait for the last."""
CHECKPOINTS_AGAIN_S: Final = 1.0
REPORTS_S: Final = 0.3
"""How long what a former owner had begun waits for a report of its crash: a takeover on one machine is quicker."""
SKEW_MS: Final = 60_000
"""Records carry their publishers' clocks. With one that is further ahead a job counts as new here: what this worker's
own forerunners remember, and what the bus says when the stream is opened, find it all the same."""


class Intake:
    """One partition's way in. `run` until the partition is dropped."""

    def __init__(
        self,
        committer: Committer[Held],
        *,
        desk: Desk,
        job_log: JobLog,
        prepare: Callable[[Sequence[tuple[Job, str]]], Awaitable[list[Prepared]]],
        recorder: FlightRecorder,
        known: KnownJobs,
        digests: str,
        names: Names,
        model_names: Sequence[str],
        clock: Clock,
    ) -> None:
        self._committer = committer
        self._priority = parse_job_topic(committer.topic).priority
        self._desk = desk
        self._prepare = prepare
        self._recorder = recorder
        self._known = known
        self._began_ms = now_ms(clock)
        """What has come later can have crashed nobody yet."""
        self._began = clock.monotonic()
        self._reports_due = committer.inherited.count > 0
        self._digests = digests
        self._checkpoints = Checkpoints(
            job_log, names.events, committer.topic, committer.partition, committer.inherited.since_ms
        )
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
            reach("intake.read")
            records = [record for record in records if record.offset not in self._committer.pending]
            self._committer.pending |= dict.fromkeys((record.offset for record in records), None)
            await self._admit(records)

    async def _admit(self, records: Sequence[Record]) -> None:
        """Steps: 1. decode and check what has crashed nobody 2. the first of its id 3. tokenise what has crashed nobody
        4. open the streams 5. ask the log for what the bus has forgotten 6. decide and submit."""
        jobs: list[Held] = []
        # 1.
        origins = {record.offset: origin_of(record) for record in records}
        roots = {offset: str(origin) for offset, origin in origins.items()}
        # A former owner can have had these in hand.
        old = {one.offset for one in records if self._is_old(one) or roots[one.offset] in self._known}
        if old and self._reports_due:
            self._reports_due = False
            await asyncio.sleep(REPORTS_S)
        suspects = await self._known.states(roots[offset] for offset in sorted(old))
        for record in records:
            origin, root = origins[record.offset], roots[record.offset]
            state = suspects.get(root)
            try:
                if state is not None and verdict(state) == "convicted":
                    raise Undecodable(conviction(state).message, code=WORKER_CRASHED)
                with self._recorder.reading(label_of(root, origin)):
                    job, digest = check_record(record, self._priority, self._model_names)
            except (BadJob, Undecodable) as error:
                await self._refuse(record, error)
                continue
            # 2.
            held = self._hold(record, origin, root, job, digest)
            first = self._desk.first_of(job.id, held.root, job.attempt)
            if first is None:
                self._desk.take(held)
                jobs.append(held)
            else:
                first_root, first_digest = first
                event = held.duplicate(self._now_ms(), first_root, first_digest != digest)
                self._committer.add(event, settles=record.offset)
        reach("intake.held")
        # 3.
        await self._judge(
            held for held in jobs if held.origin.offset in old or held.job.attempt > 1 or held.job.id in self._known
        )
        jobs = [held for held in jobs if not held.over]
        await self._tokenise([held for held in jobs if not self._is_late(held.job)])  # a late one is not worth it
        ready = [held for held in jobs if not held.over]
        if not ready:
            return
        # 4.
        answers = await self._desk.streams.open([held.stream for held in ready])
        reach("intake.opened")
        opened = list(zip(ready, answers, strict=True))
        await self._judge(held for held, answer in opened if answer is not None and answer.crashes >= SUSPECT_IN_ROW)
        opened = [(held, answer) for held, answer in opened if not held.over]
        ready, answers = [held for held, _ in opened], [answer for _, answer in opened]
        # 5.
        await self._recover(ready, answers)
        states = await self._known.states(
            held.job.id
            for held, answer in zip(ready, answers, strict=True)
            if answer is not None and answer.code in ("foreign", "finished")
        )
        # 6.
        for held, answer in zip(ready, answers, strict=True):
            self._decide(held, answer, states.get(held.job.id))
        reach("intake.submitted")

    def _is_old(self, record: Record) -> bool:
        return record.offset < self._committer.horizon and record.time_ms <= self._began_ms + SKEW_MS

    def _may_have_begun(self, record: Record) -> bool:
        """Whether a former owner may have begun it a moment before its end, and not got to record that."""
        return self._is_old(record) and self._clock.monotonic() - self._began < TAKE_PATIENCE_S

    async def _judge(self, doubtful: Iterable[Held]) -> None:
        """Of jobs that may have crashed workers: the convicted are dead-lettered, suspects are to run alone."""
        jobs = list(doubtful)
        states = await self._known.states(held.job.id for held in jobs)
        for held in jobs:
            state = states.get(held.job.id)
            if state is None or owner_elsewhere(state, held.root):  # then the crashes are another job's
                continue
            match verdict(state):
                case "convicted":
                    log.warning("job_convicted", job_id=held.job.id, crashes=state.crashes, alone=state.crashes_alone)
                    event, copies = dead_letter(
                        held, WORKER_CRASHED, conviction(state), names=self._names, time_ms=self._now_ms()
                    )
                    self._desk.settle(held, event, copies)
                case "suspect":
                    log.warning("job_suspected", job_id=held.job.id, crashes=state.crashes)
                    held.alone = True
                case "innocent":
                    pass

    async def _recover(self, ready: Sequence[Held], answers: list[Opened | None]) -> None:
        """Open once more, with what the log remembers, the streams of begun jobs that the bus does not have."""
        lost = [at for at, held in enumerate(ready) if held.stream.taken and _is_lost(answers[at])]
        if not lost:
            return
        found = await self._remembered([ready[at] for at in lost])
        for at in lost:
            held = ready[at]
            checkpoint = found.get((held.job.id, held.root))
            if checkpoint is None or checkpoint.digests != self._digests:
                held.stream.begin_anew()
            else:
                held.stream.go_on(checkpoint.lineage, checkpoint.tokens)
                held.checkpointed = len(held.tokens)
        again = await self._desk.streams.open([ready[at].stream for at in lost])
        for at, answer in zip(lost, again, strict=True):
            answers[at] = answer
            if answer is not None and answer.code == "have":
                ready[at].checkpointed = 0  # it was not lost after all, and goes further than the log

    async def _remembered(self, lost: Sequence[Held]) -> Found:
        """What the log has of these jobs."""
        retries = [held for held in lost if held.job.attempt > 1]
        while True:
            try:
                found: Found = {}
                if len(retries) < len(lost):
                    found = await self._checkpoints.of_claim()
                if retries:
                    since_ms = min(held.since_ms for held in retries)
                    roots = (held.root for held in retries)
                    found = {**found, **await self._checkpoints.of_retries(roots, since_ms)}
            except LogError as error:  # then the claim will end, too, or the log comes back
                log.info("checkpoints_unreadable", reason=error.code)
                await asyncio.sleep(CHECKPOINTS_AGAIN_S)
            else:
                return found

    def _decide(self, held: Held, answer: Opened | None, state: JobState | None) -> None:
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
            held.sealed = _sealed(answer)
            self._desk.submit(held)

    async def _tokenise(self, jobs: Sequence[Held]) -> None:
        """Turn the prompts into token ids; where that can't be done it is the job's end."""
        prepared = await self._prepare([(held.job, held.label) for held in jobs])
        refused: list[tuple[Held, BadJob]] = []
        for held, result in zip(jobs, prepared, strict=True):
            if not isinstance(result, Exception):
                held.prompt = result
            elif isinstance(result, BadJob):
                refused.append((held, result))
            else:
                log.error("prepare_failed", job_id=held.job.id, kind=type(result).__name__, exc_info=result)
                code = result.code if isinstance(result, ArrieroError) else "engine_error"
                reason = Error(code, f"the prompt could not be prepared: {type(result).__name__}")
                self._desk.settle(held, held.failed(self._now_ms(), reason))
        states = await self._known.states(held.job.id for held, _ in refused)
        for held, error in refused:
            state = states.get(held.job.id)
            if state is not None and owner_elsewhere(state, held.root):
                self._desk.settle(held, held.duplicate(self._now_ms(), state.root, state.digest != held.digest))
            else:
                self._desk.settle(held, held.rejected(self._now_ms(), Error(error.code, error.message, error.field)))

    async def _refuse(self, record: Record, error: BadJob | Undecodable) -> None:
        """A record that is no acceptable job. Under the id of another job it must not end that one."""
        log.info(
            "record_refused", topic=record.topic, partition=record.partition, offset=record.offset, code=error.code
        )
        if isinstance(error, BadJob) and error.job_id is not None:
            root = str(origin_of(record))
            first = self._desk.first_of(error.job_id, root, 1)
            first_root = first[0] if first is not None else ""
            if first is None:
                state = (await self._known.states([error.job_id])).get(error.job_id)
                if state is not None and owner_elsewhere(state, root):
                    first_root = state.root
            if first_root:
                event = duplicate_refused(record, self._priority, error.job_id, first_root, self._now_ms())
                self._committer.add(event, settles=record.offset)
                self._committer.inherited.read(record.offset)
                return
        ending, copies = refusal(self._names, record, self._priority, error, self._now_ms())
        self._committer.add(ending, settles=record.offset, records=copies)
        self._committer.inherited.read(record.offset)

    def _hold(self, record: Record, origin: Origin, root: str, job: Job, digest: str) -> Held:
        key = self._desk.next_key()
        tokens: list[Token] = []
        waited_s = max(0.0, self._clock.time() - record.time_ms / 1000)
        since_ms = self._committer.inherited.read(record.offset)
        if job.streamed:
            since_ms = job.started_ms
        stream = Stream.begin(
            key=key,
            job_id=job.id,
            root=job.root or root,
            attempt=job.attempt,
            fence=self._committer.fence,
            tokens=tokens,
            taken=since_ms > 0 or job.streamed > 0,
            patient=since_ms > 0 or job.streamed > 0 or self._may_have_begun(record),
            least=job.streamed,
        )
        return Held(
            key=key,
            job=job,
            origin=origin,
            priority=self._priority,
            digest=digest,
            digests=self._digests,
            model=job.model or self._model_names[0],
            arrived=self._clock.monotonic() - waited_s,
            size_bytes=len(record.value or b""),
            committer=self._committer,
            stream=stream,
            tokens=tokens,
            since_ms=since_ms,
        )

    def _is_late(self, job: Job) -> bool:
        return job.deadline is not None and job.deadline <= self._clock.time()

    def _now_ms(self) -> int:
        return now_ms(self._clock)


def _is_lost(answer: Opened | None) -> bool:
    """Whether the bus has nothing of a stream, or cannot be asked."""
    return answer is None or answer.code == "none"


def _sealed(answer: Opened | None) -> FinishReason | None:
    """Why the generation that was taken over had ended, when it had."""
    match answer.seal.partition("|")[2] if answer is not None else "":
        case "stop":
            return "stop"
        case "length":
            return "length"
        case _:
            return None
