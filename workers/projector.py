"""From the log to what readers see: job states, cancel flags, and the end of each stream.

    job topics ──▶ queued                        states ──▶ bus
    events ──▶ fold ──▶ first terminal? finish the stream, then ──▶ states

A batch of the tail is projected in this order:

    1. say where we are: that also tells whether the bus has been emptied 2. the states as stored 3. fold 4. end the
    streams of jobs that have ended: first without tokens, then with those that the bus asks for 5. only then write the
    states: whoever reads `completed` finds the stream ended, and what a crash leaves undone is done again

Everything may be projected again: a state knows the last event in it, a stream that has ended stays so. The positions
that are stored lie a little behind, so that a bus that has failed over to an older copy, or another projector, sees
the last events once more. A bus without positions has forgotten: all is projected from the beginning, job topics first.

The log decides what a state says, not the order in which its topics come: what only the job's record tells is fetched
where its first event has overtaken it.

Positions, states and streams can't be written at once. A bus that is emptied between 1 and 5 keeps the state of a job
of that batch without its earlier events; its result is right all the same.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from typing import Final

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from arriero.schemas.clock import Clock
from arriero.schemas.codec import decode_event, decode_state, encode
from arriero.schemas.errors import ArrieroError, BusUnavailable, LogUnavailable, SetupError, TopicFault, Unreadable
from arriero.schemas.event import Crashed, Event, OwnerEvent, Terminal, Undecodable
from arriero.schemas.job import read_job
from arriero.schemas.names import Names, parse_job_topic
from arriero.schemas.state import JobState, fold, queued, stream_end
from arriero.transports.bus import FinishRequest, StateWrite, TokenBus
from arriero.transports.failpoints import reach
from arriero.transports.log import JobLog, Record
from arriero.transports.reading import until_now
from arriero.workers.door import origin_of
from arriero.workers.metrics import ProjectorMetrics

log = structlog.get_logger(__name__)

LOOK_S: Final = 1.0
"""How often an idle projector looks whether the bus was emptied, and whether there are new pools."""
REWIND_S: Final = 10.0
"""How far behind the stored positions lie: longer than a replica of the bus lags."""
STREAM_KEPT_S: Final = 900.0
"""Streams of jobs that ended longer ago are not made anew: readers take such an output from its event."""
BATCH_RECORDS: Final = 500
"""Records projected in one go: a call to the bus holds it up for everybody else."""
FINISH_MAX_TOKENS: Final = 20_000
"""Tokens in one call that ends streams."""
PAUSE_S: Final = 0.25
PAUSE_MAX_S: Final = 2.0

Places = dict[tuple[str, int], int]


class _Again(Exception):
    """Begin again from the stored positions."""


class Projector:
    """`run` it until it is cancelled. Several may run side by side."""

    def __init__(
        self,
        job_log: JobLog,
        bus: TokenBus,
        *,
        names: Names,
        pools: Sequence[str],
        clock: Clock,
        rng: random.Random,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`pools`: those known from the start. Pools that get a worker later are found by its presence."""
        self._log = job_log
        self._bus = bus
        self._names = names
        self._clock = clock
        self._rng = rng
        self._metrics = ProjectorMetrics(registry or CollectorRegistry())
        self._pools = list(pools)
        self._topics: list[str] = []
        self._positions: Places = {}
        self._trail: deque[tuple[float, Places]] = deque()
        """Positions of the last moments, oldest first: (monotonic time, positions)."""

    async def run(self) -> None:
        """Raises only what waiting will not mend: TopicFault when the events topic is missing."""
        await self._log.partitions(self._names.events)
        pause_s = PAUSE_S
        while True:
            try:
                await self._begin()
                pause_s = PAUSE_S
                await self._project()
            except _Again:
                continue
            except (BusUnavailable, LogUnavailable) as error:
                log.warning("projector_waits", code=error.code, error=error.message)
                await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def replay(self) -> None:
        """Have everything projected again from the log's beginning, by whichever projectors run."""
        await self._bus.forget()

    # --- where we are ---------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Take up the stored positions; without any, begin at the log's beginning."""
        await self._find_topics()
        stored = await self._bus.positions()
        self._positions = {}
        if stored is None:
            log.info("projector_rebuilds", topics=len(self._topics))
            self._metrics.rebuilds.inc()
            await self._bus.put_positions(_encode(self._positions), first=True)
            await self._note_jobs()
        else:
            self._positions = decode_positions(stored)
        self._trail.clear()
        self._leave_trail()

    async def _note_jobs(self) -> None:
        """Make the states of all jobs whose records are still there, before any event is folded into them."""
        topics = [topic for topic in self._topics if topic != self._names.events]
        start = {(topic, number): 0 for topic in topics for number in range(await self._log.partitions(topic))}
        async with aclosing(until_now(self._log, start)) as batches:
            async for batch in batches:
                for at in range(0, len(batch), BATCH_RECORDS):
                    await self._batch(batch[at : at + BATCH_RECORDS])
                self._positions |= {(record.topic, record.partition): record.offset + 1 for record in batch}

    async def _find_topics(self) -> bool:
        """Learn of pools' topics; whether there are new ones."""
        pools = {*self._pools, *await self._bus.pools()}
        topics = [self._names.events]
        for pool in sorted(pools):
            try:
                wanted = self._names.job_topics(pool)
                if all([await self._exists(topic) for topic in wanted]):
                    topics += wanted
            except SetupError:
                log.warning("pool_misnamed", pool=pool)
        new = set(topics) - set(self._topics)
        if new:
            self._topics += [topic for topic in topics if topic in new]
        return bool(new)

    async def _exists(self, topic: str) -> bool:
        if topic in self._topics:
            return True
        try:
            return await self._log.partitions(topic) > 0
        except TopicFault:
            return False

    def _leave_trail(self) -> Places:
        """Note the positions now and then; those of REWIND_S ago."""
        now = self._clock.monotonic()
        if not self._trail or now - self._trail[-1][0] >= LOOK_S:
            self._trail.append((now, dict(self._positions)))
        while len(self._trail) > 1 and self._trail[1][0] <= now - REWIND_S:
            self._trail.popleft()
        return self._trail[0][1]

    async def _say(self) -> None:
        """Store positions. Raises _Again when the bus has forgotten those before."""
        if not await self._bus.put_positions(_encode(self._leave_trail()), first=False):
            log.warning("bus_was_emptied")
            raise _Again

    # --- following ------------------------------------------------------------------------------------------

    async def _project(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(), name="projector tail")
                tasks.create_task(self._look_around(), name="projector look")
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _follow(self) -> None:
        async with aclosing(self._log.tail(list(self._topics), dict(self._positions))) as tail:
            async for records in tail:
                for start in range(0, len(records), BATCH_RECORDS):
                    batch = records[start : start + BATCH_RECORDS]
                    await self._batch(batch)
                    for record in batch:
                        self._positions[record.topic, record.partition] = record.offset + 1

    async def _look_around(self) -> None:
        last = dict(self._positions)
        while True:
            await asyncio.sleep(LOOK_S)
            if self._positions != last:
                last = dict(self._positions)
                await self._say()
            elif self._trail[0][1] != self._positions:
                await self._say()  # idle: what is stored catches up
            elif await self._bus.positions() is None:
                log.warning("bus_was_emptied")
                raise _Again
            if await self._find_topics():
                log.info("projector_found_topics", topics=len(self._topics))
                await self._bus.put_positions(_encode(self._positions), first=False)
                raise _Again

    async def _batch(self, records: Sequence[Record]) -> None:
        """The steps of the module's docstring."""
        events = [pair for pair in map(self._event, records) if pair is not None]
        jobs = [state for state in map(self._queued, records) if state is not None]
        if jobs:
            await self._bus.note_queued([(state.id, encode(state)) for state in jobs])
        if not events:
            return
        # 1. and 2., side by side: a reader waits for the end of all this
        ids = list({event.id: None for _, event in events})
        _, stored = await asyncio.gather(self._say(), self._bus.states(ids))
        states = {job_id: _state(state) for job_id, state in zip(ids, stored, strict=True)}
        await self._add_records(states, [event for _, event in events])
        # 3.
        ended: list[Terminal] = []
        for record, event in events:
            state = fold(states[event.id], event, record.partition, record.offset)
            states[event.id] = state
            if isinstance(event, Crashed):
                self._metrics.crashes.labels(event.operation, event.signal).inc()
            if isinstance(event, Terminal):
                if state.terminal == record.offset:
                    ended.append(event)
                elif state.offset == record.offset:
                    self._metrics.late_terminals.inc()
        # 4.
        await self._finish(ended)
        reach("projector.finished")
        # 5.
        await self._bus.put_states([state_write(state) for state in states.values() if state is not None])
        reach("projector.projected")
        now = self._clock.time()
        for record, _ in events:
            self._metrics.lag.observe(max(0.0, now - record.time_ms / 1000))
        self._metrics.events.inc(len(events))

    async def _add_records(self, states: dict[str, JobState | None], events: Iterable[Event]) -> None:
        """Give states that know nothing of their job's record what it says, where it is still there."""
        wanted: dict[tuple[str, int], dict[int, str]] = {}
        for event in events:
            state = states[event.id]
            if isinstance(event, OwnerEvent) and (state is None or state.record is None):
                origin = event.origin
                wanted.setdefault((origin.topic, origin.partition), {}).setdefault(origin.offset, event.id)
        for (topic, partition), offsets in wanted.items():
            if topic in self._topics:
                for record in await self._log.fetch(topic, partition, sorted(offsets)):
                    base, state = self._queued(record), states[offsets[record.offset]]
                    if base is not None and base.id == offsets[record.offset]:
                        states[base.id] = base if state is None else _with_record(state, base)

    async def _finish(self, ended: Iterable[Terminal]) -> None:
        kept_since_ms = (self._clock.time() - STREAM_KEPT_S) * 1000
        recent = [event for event in ended if event.time_ms >= kept_since_ms]
        if not recent:
            return
        answers = await self._bus.finish([_finish_request(event, event.output.count) for event in recent])
        wanting: list[FinishRequest] = []
        for event, answer in zip(recent, answers, strict=True):
            if answer.code == "need":
                wanting.append(_finish_request(event, answer.base))
                if sum(len(request.tokens) for request in wanting) > FINISH_MAX_TOKENS:
                    await self._bus.finish(wanting)
                    wanting = []
        if wanting:
            await self._bus.finish(wanting)

    # --- reading records ------------------------------------------------------------------------------------

    def _event(self, record: Record) -> tuple[Record, Event] | None:
        """An event that speaks of a job."""
        if record.topic != self._names.events:
            return None
        try:
            event = decode_event(record.value or b"")
        except Unreadable as error:  # its job's state stays behind, and all others go on
            log.error("event_unreadable", code=error.code, partition=record.partition, offset=record.offset)
            self._metrics.unreadable.labels(error.code).inc()
            return None
        return None if isinstance(event, Undecodable) else (record, event)

    def _queued(self, record: Record) -> JobState | None:
        """The state of a job that nobody has read yet. Records that are no jobs get theirs from the worker's word."""
        if record.topic == self._names.events:
            return None
        try:
            return queued(read_job(record.value), origin_of(record), parse_job_topic(record.topic).priority)
        except ArrieroError:
            return None
        except Exception:
            log.error("record_not_read", topic=record.topic, offset=record.offset, exc_info=True)
            return None


def _with_record(state: JobState, base: JobState) -> JobState:
    """What others have said of a job, on top of what its record says."""
    blank = JobState(id=state.id)
    said = {name: getattr(state, name) for name in JobState.__struct_fields__}
    return msgspec.structs.replace(
        base, **{name: value for name, value in said.items() if value != getattr(blank, name)}
    )


def _finish_request(event: Terminal, base: int) -> FinishRequest:
    return FinishRequest(
        job_id=event.id,
        root=event.root,
        lineage=event.output.lineage,
        count=event.output.count,
        end=encode(stream_end(event)).decode(),
        base=base,
        tokens=[token.on_bus() for token in event.output.tokens[base:]],
    )


def state_write(state: JobState) -> StateWrite:
    """A state as the bus takes it."""
    return StateWrite(
        job_id=state.id,
        offset=state.offset,
        state=encode(state),
        root=state.root if state.owned else "",
        cancelled=state.cancel_requested and not state.ended,
        crashes=state.crashes,
        terminal=f"{state.partition}/{state.terminal}" if state.ended else "",
    )


def _state(stored: bytes | None) -> JobState | None:
    if stored is None:
        return None
    try:
        return decode_state(stored)
    except msgspec.MsgspecError:
        log.warning("state_unreadable")
        return None


def _encode(positions: Places) -> bytes:
    return msgspec.json.encode([[topic, partition, offset] for (topic, partition), offset in positions.items()])


def decode_positions(stored: bytes) -> Places:
    """What is stored on the bus: all before these offsets has been projected. Nothing where it cannot be read."""
    try:
        rows = msgspec.json.decode(stored, type=list[tuple[str, int, int]])
    except msgspec.MsgspecError:
        return {}
    return {(topic, partition): offset for topic, partition, offset in rows}
