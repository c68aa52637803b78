"""The jobs in a worker's hands, between the claims they came from and the engine that decodes them.

intake ──▶ take ──▶ submit ──▶ engine ──step──▶ on_step ──▶ committer (events) and streams (tokens)
             │        │
             │        └── leaves the waiting room with its first slot
             └── by id: one job of an id at a time
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import structlog

from arriero.schemas.clock import Clock, now_ms
from arriero.schemas.errors import ERROR_TEXT_CHARS
from arriero.schemas.event import Completed, Error, RetryScheduled, Terminal
from arriero.schemas.job import CLASSES, PriorityClass, job_seed
from arriero.schemas.names import Names
from arriero.transports.log import Outgoing
from arriero.workers.commit import OwnersEvent
from arriero.workers.engine.seam import Ending, ModelInfo, StepReport, Update, Work
from arriero.workers.held import Held
from arriero.workers.metrics import WorkerMetrics
from arriero.workers.retry import after_failure
from arriero.workers.stream import Streams

log = structlog.get_logger(__name__)

RECENT_MAX: Final = 10_000
"""Jobs recorded last, remembered by id: until the projector has told the bus of one, nobody else could say that another
record under its id is a duplicate."""
WAITING_MAX_BYTES: Final = 32 << 20
"""Job records that wait for a slot, in each class. The largest are 1 MiB."""


class Engine(Protocol):
    """What is used of `engine/runner.py`."""

    @property
    def info(self) -> ModelInfo: ...

    def submit(self, work: Work) -> None: ...

    def cancel(self, key: int) -> None: ...


class WaitingRoom:
    """How far one class is read ahead of the engine: enough that no slot waits for the log, no more than memory
    allows. A few more may come in while several claims read at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = 0
        self._free = asyncio.Event()
        self._free.set()
        self.count = 0

    async def room(self) -> int:
        """Waits until there is some; how many records may come in."""
        while self._most <= self.count or self._bytes >= WAITING_MAX_BYTES:
            self._free.clear()
            await self._free.wait()
        return self._most - self.count

    def enter(self, size_bytes: int) -> None:
        self.count += 1
        self._bytes += size_bytes

    def leave(self, size_bytes: int) -> None:
        self.count -= 1
        self._bytes -= size_bytes
        self._free.set()


class Desk:
    """See above. `on_step` is the engine's callback."""

    def __init__(
        self,
        *,
        engine: Engine,
        names: Names,
        pool: str,
        clock: Clock,
        metrics: WorkerMetrics,
        read_ahead: int,
        max_attempts: int,
    ) -> None:
        self.rooms: dict[PriorityClass, WaitingRoom] = {name: WaitingRoom(read_ahead) for name in CLASSES}
        self.streams: Streams
        """Set once, before anything is taken: they call back here."""
        self._engine = engine
        self._names = names
        self._pool = pool
        self._max_attempts = max_attempts
        self._clock = clock
        self._metrics = metrics
        self._held: dict[int, Held] = {}
        self._by_id: dict[str, Held] = {}
        self._recent: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """Root and digest by id, in the order of recording."""
        self._last_key = 0

    def next_key(self) -> int:
        self._last_key += 1
        return self._last_key

    @property
    def running(self) -> int:
        """Jobs that have begun."""
        return sum(1 for held in self._held.values() if held.started_ms and not held.over)

    @property
    def waiting(self) -> int:
        return sum(room.count for room in self.rooms.values())

    def first_of(self, job_id: str, root: str, attempt: int) -> tuple[str, str] | None:
        """Root and digest of another record's job of this id: one in hand, or recorded a moment ago.

        A first attempt is none to a later one. Of the same root it was settled, or the later one would not be here,
        though its commit may still be in doubt; of another root it has come behind this job's first event, and to call
        each a duplicate of the other would lose both.
        """
        held = self._by_id.get(job_id)
        if held is not None and held.job.attempt >= attempt:
            return held.root, held.digest
        recent = self._recent.get(job_id)
        return recent if recent is not None and recent[0] != root else None

    def take(self, held: Held) -> None:
        """A job has come in."""
        self._held[held.key] = held
        self._by_id[held.job.id] = held
        held.committer.pending[held.origin.offset] = held
        self.rooms[held.priority].enter(held.size_bytes)

    def submit(self, held: Held) -> None:
        """Have it decoded, from where its tokens end."""
        held.prompt_tokens = len(held.prompt)
        deadline = held.job.deadline
        self._engine.submit(
            Work(
                key=held.key,
                prompt=held.prompt,
                sampling=held.job.sampling,
                seed=job_seed(held.job),
                max_tokens=held.job.max_tokens,
                stop=held.job.stop,
                priority=held.priority,
                tenant=held.job.tenant,
                arrived=held.arrived,
                deadline=None if deadline is None else self._clock.monotonic() + deadline - self._clock.time(),
                resume=tuple(held.tokens),
                sealed=held.sealed,
                label=held.label,
                alone=held.alone,
            )
        )

    def settle(self, held: Held, event: OwnersEvent, records: Sequence[Outgoing] = ()) -> None:
        """The job ends with this event; it stays in hand until that is recorded."""
        held.over = True
        self._leave_room(held)
        if isinstance(event, Completed):
            self.streams.close(held.stream, f"{len(held.tokens)}|{event.finish_reason}")
        else:
            self.streams.close(held.stream)
        ends = isinstance(event, Terminal)
        held.committer.add(
            event, settles=held.origin.offset, records=records, done=lambda: self._recorded(held, ends=ends)
        )

    def drop(self, held: Iterable[Held | None]) -> None:
        """Leave jobs to the next owner of their partition."""
        for one in held:
            if one is None:
                continue
            if not one.over:
                self._engine.cancel(one.key)
            self._leave_room(one)
            self.streams.drop(one.stream)
            self._forget(one)
            one.committer.forget(one.origin.offset)

    def cancel(self, key: int) -> None:
        """A cancel was requested. Said again with every answer of the bus, until the job has ended."""
        held = self._held.get(key)
        if held is not None and not held.over:
            self._engine.cancel(key)

    def checkpoint(self, held: Iterable[Held]) -> None:
        """Have what these jobs have decoded since the last time recorded as Progressed."""
        for one in held:
            if one.started_ms and not one.over:
                for event in one.progressed(now_ms(self._clock)):
                    one.committer.add(event)

    def checkpoint_all(self) -> None:
        self.checkpoint(self._held.values())

    async def save(self, key: int) -> None:
        """Returns when what this job has decoded is recorded, or the job is in hand no more."""
        held = self._held.get(key)
        if held is not None and not held.over:
            self.checkpoint([held])
            await held.committer.flush()

    # --- the engine's word ----------------------------------------------------------------------------------

    def on_step(self, report: StepReport) -> None:
        now = self._clock.monotonic()
        tokens = 0
        for update in report.updates:
            held = self._held.get(update.key)
            if held is not None and not held.over:  # else it was dropped while the step ran
                self._update(held, update, now)
                tokens += len(update.tokens)
        timings, metrics = report.timings, self._metrics
        metrics.decode_time.observe(timings.decode_s)
        metrics.sample_time.observe(timings.sample_s)
        metrics.rest_time.observe(timings.rest_s)
        metrics.batch_fill.observe(timings.sequences)
        metrics.running.set(timings.sequences)
        metrics.waiting.set(self.waiting)
        metrics.kv_used.set(timings.kv_used)
        metrics.kv_retained.set(timings.kv_retained)
        metrics.draft_tokens.inc(timings.draft_tokens)
        metrics.accepted_tokens.inc(timings.accepted_tokens)
        metrics.prompt_tokens.inc(timings.prefill_tokens)
        metrics.generation_tokens.inc(tokens)

    def _update(self, held: Held, update: Update, now: float) -> None:
        if update.admitted:
            self._admitted(held, now)
        if update.cached_tokens:
            held.cached_tokens += update.cached_tokens
            self._metrics.cached_tokens.inc(update.cached_tokens)
        if update.tokens:
            self._decoded(held, update, now)
        if update.preempted:
            self._metrics.preemptions.inc()
            held.committer.add(held.preempted(now_ms(self._clock)), lazy=True)
        if update.ending is not None:
            self._ended(held, update.ending)

    def _admitted(self, held: Held, now: float) -> None:
        time_ms = now_ms(self._clock)
        if held.started_ms:
            held.committer.add(held.resumed(time_ms), lazy=True)
            return
        held.started_ms, held.admitted = time_ms, now
        held.since_ms = held.since_ms or time_ms
        self._leave_room(held)
        if held.alone:
            self._metrics.suspects.inc()
        held.committer.add(held.started(time_ms), lazy=True)
        self._metrics.queue_time[held.priority].observe(max(0.0, now - held.arrived))

    def _decoded(self, held: Held, update: Update, now: float) -> None:
        if held.first_token:
            self._metrics.inter_token.observe((now - held.last_token) / len(update.tokens))
        else:
            held.first_token = now
            self._metrics.ttft[held.priority].observe(max(0.0, now - held.arrived))
        held.last_token = now
        held.tokens += update.tokens
        self.streams.feed(held.stream)

    def _ended(self, held: Held, ending: Ending) -> None:
        if ending.code == "resume_mismatch":
            log.warning("resume_refused", job_id=held.job.id, tokens=len(held.tokens), reason=ending.error)
            self._begin_anew(held)
            return
        log.debug(
            "job_decoded",
            job_id=held.job.id,
            ending=ending.kind,
            prompt_tokens=held.prompt_tokens,
            tokens=len(held.tokens),
            code=ending.code or None,
        )
        if ending.retriable:
            self._failed(held, Error(ending.code or "engine_error", ending.error[:ERROR_TEXT_CHARS]))
        else:
            self.settle(held, held.ended(ending, now_ms(self._clock)))

    def _failed(self, held: Held, error: Error) -> None:
        """An attempt has failed for a reason that may pass. What it has decoded is recorded with that."""
        time_ms = now_ms(self._clock)
        event, records = after_failure(
            held, error, names=self._names, pool=self._pool, max_attempts=self._max_attempts, time_ms=time_ms
        )
        if isinstance(event, RetryScheduled):
            for progressed in held.progressed(time_ms):
                held.committer.add(progressed, lazy=True)
        self.settle(held, event, records)

    def _begin_anew(self, held: Held) -> None:
        """What was adopted from an earlier owner is of no use."""
        held.sealed, held.checkpointed = None, 0
        self.streams.restart(held.stream)
        self.submit(held)

    def _leave_room(self, held: Held) -> None:
        if held.waiting:
            held.waiting = False
            self.rooms[held.priority].leave(held.size_bytes)

    def _recorded(self, held: Held, *, ends: bool) -> None:
        """Its event is recorded, or was given up with the partition."""
        self._forget(held)
        if ends and not held.committer.dropped:
            self._recent[held.job.id] = held.root, held.digest
            if len(self._recent) > RECENT_MAX:
                self._recent.popitem(last=False)

    def _forget(self, held: Held) -> None:
        self._held.pop(held.key, None)
        if self._by_id.get(held.job.id) is held:
            del self._by_id[held.job.id]
