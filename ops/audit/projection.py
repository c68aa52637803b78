"""Semantic: what the bus shows, against the fold of the log's events.

A state is compared once its job has ended, and let go of when it is right: what is held at a time are the jobs in
flight. The bus is behind the log by nature. Only what its projector says it has projected is demanded of it, and a
state that is ahead of what was read is compared at the next look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from arriero.ops.audit.ids import IdSet
from arriero.ops.audit.report import Breach
from arriero.schemas.clock import Clock
from arriero.schemas.codec import decode_end, decode_event, decode_state
from arriero.schemas.errors import ArrieroError, Unreadable
from arriero.schemas.event import Event, Terminal
from arriero.schemas.job import read_job
from arriero.schemas.names import Names, parse_job_topic
from arriero.schemas.state import JobState, fold, queued, stream_end
from arriero.transports.bus import Position, TokenBus
from arriero.transports.log import KEEP_RESULTS_S, JobLog, Record
from arriero.workers.projector import decode_positions, state_write

HELD_MAX: Final = 50_000
"""Jobs that have ended and whose states are behind or wrong: of more than so many some are let go of unjudged."""
BATCH_JOBS: Final = 500
BATCH_TOKENS: Final = 20_000
"""Jobs, and tokens of theirs, that wait in memory to be compared."""
STREAM_SURE_S: Final = 600.0
"""Streams of jobs that ended longer ago may have gone: the bus keeps them for 900 s."""
STATE_SURE_S: Final = KEEP_RESULTS_S - 3_600.0
"""States of jobs of which nothing was heard for longer may have expired."""

_OF_RECORD: Final = frozenset("priority tenant model root digest record batch attempt queued_ms replay_of".split())
"""What a job's record says. States of jobs that no owner has spoken of have it from there alone."""


class _Result(NamedTuple):
    event: Terminal
    partition: int
    offset: int


class Projection:
    def __init__(self, job_log: JobLog, bus: TokenBus, names: Names, clock: Clock, ended: IdSet) -> None:
        """ended: ids with a terminal event, as far as the log was read."""
        self.every = 1
        """Of so many jobs one is compared."""
        self.states = self.streams = self.tokens_recorded = self.tokens_streamed = self.short = self.lagging = 0
        self._log, self._bus, self._names, self._clock = job_log, bus, names, clock
        self._ended = ended
        self._positions: Mapping[tuple[str, int], int] = {}
        """What the bus says has been projected; empty when it has forgotten everything."""
        self._ahead: dict[str, int] = {}
        """States that were ahead of what has been read: their offsets."""
        self._firsts: dict[int, int] = {}
        """The first event that was still there, by partition."""
        self._folded: dict[str, JobState] = {}
        self._fresh: dict[str, _Result | None] = {}
        """Ended since the last comparison, with the result where its stream may be there still."""
        self._fresh_tokens = 0
        self._again: dict[str, set[int]] = {}
        """Events of jobs whose state was right and was let go of: offsets by id."""
        self._behind: set[str] = set()
        """Jobs whose last events have not been projected yet."""
        self._wrong: dict[str, Breach] = {}
        self._wrong_streams: dict[str, tuple[Breach, int, int]] = {}
        """By id: the breach, partition and offset of the result."""
        self._opaque: set[str] = set()

    async def begin(self) -> None:
        """A look begins: what has been projected by now?"""
        stored = await self._bus.positions()
        self._positions = decode_positions(stored) if stored is not None else {}
        self.lagging = 0

    def chosen(self, job_id: str) -> bool:
        return self.every == 1 or hash(job_id) % self.every == 0

    async def add(self, event: Event, record: Record, *, first_end: bool) -> None:
        """An event of a chosen job. first_end: it is the first terminal event of its id."""
        job_id = event.id
        self._firsts.setdefault(record.partition, record.offset)
        state = self._folded.get(job_id)
        if state is None and not first_end and job_id in self._ended:
            self._again.setdefault(job_id, set()).add(record.offset)
            return
        self._folded[job_id] = fold(state, event, record.partition, record.offset)
        if isinstance(event, Terminal) and first_end:
            recent = event.time_ms / 1000 >= self._clock.time() - STREAM_SURE_S
            self._fresh[job_id] = _Result(event, record.partition, record.offset) if recent else None
            self._fresh_tokens += event.output.count if recent else 0
            if len(self._fresh) >= BATCH_JOBS or self._fresh_tokens >= BATCH_TOKENS:
                await self._compare_fresh()

    def cannot_read(self, record: Record) -> None:
        """An event that other releases can fold: the state of its job is theirs."""
        if record.key is not None:
            self._opaque.add(record.key.decode(errors="replace"))

    async def finish(self) -> list[Breach]:
        """A look ends: all that is wrong now."""
        await self._compare_fresh()
        await self._look_again_at_streams()
        await self._fold_again()
        for start in range(0, len(rest := list(self._folded)), BATCH_JOBS):
            await self._compare_states(rest[start : start + BATCH_JOBS])
        await self._judge_ahead()
        self.lagging += len(self._behind)
        return [*self._wrong.values(), *(breach for breach, _, _ in self._wrong_streams.values())]

    # --- states --------------------------------------------------------------------------------------------

    async def _compare_fresh(self) -> None:
        fresh, self._fresh, self._fresh_tokens = self._fresh, {}, 0
        await self._compare_streams([result for result in fresh.values() if result is not None])
        await self._compare_states(list(fresh))

    async def _compare_states(self, job_ids: Sequence[str]) -> None:
        """What is right and has ended is let go of; the rest is compared again at the end of the look.

        So is what a bus without a projection misses: all of a long log would else wait in memory.
        """
        for job_id, stored in zip(job_ids, await self._bus.states(job_ids), strict=True):
            folded = self._folded[job_id]
            problem = None if job_id in self._opaque else self._judge(folded, stored)
            if problem is not None and len(self._wrong) >= HELD_MAX and job_id not in self._wrong:
                del self._folded[job_id]
                continue
            if problem is not None:
                code, detail = problem
                where = f"{self._names.events}/{folded.partition}/{folded.offset}"
                self._wrong[job_id] = Breach(code, where, detail, job_id)
                continue
            self._wrong.pop(job_id, None)
            self._behind.discard(job_id)
            offset = _offset(stored)
            if folded.ended and (stored is None or offset == folded.offset or job_id in self._opaque):
                self.states += stored is not None
                self.lagging += stored is None
                del self._folded[job_id]
            elif folded.ended and len(self._behind) >= HELD_MAX:
                self.lagging += 1
                del self._folded[job_id]
            elif offset < folded.offset:
                self._behind.add(job_id)

    def _judge(self, folded: JobState, stored: bytes | None) -> tuple[str, str] | None:
        """What is wrong with a stored state: a breach's code and detail."""
        projected = folded.offset < self._positions.get((self._names.events, folded.partition), 0)
        if stored is None:
            heard_s = max(folded.finished_ms, folded.started_ms, folded.queued_ms) / 1000
            if projected and heard_s >= self._clock.time() - STATE_SURE_S:
                return "state_missing", f"{folded.status} in the log"
            return None
        try:
            state = decode_state(stored)
        except msgspec.MsgspecError as error:
            return "state_differs", f"it cannot be read: {error}"
        if state.offset < folded.offset:
            behind = f"{state.status} at {state.offset}, {folded.status} in the log"
            return ("state_behind", behind) if projected else None
        if state.offset > folded.offset:
            self._ahead[folded.id] = state.offset
            return None
        if state.history and state.history[0] < self._firsts.get(folded.partition, 0):
            return None  # its first events have expired
        names = differing(folded, state)
        return ("state_differs", f"in {', '.join(names)}") if names else None

    async def _judge_ahead(self) -> None:
        """States of later events than were read: the next look reads them, if they are there at all."""
        ahead, self._ahead = self._ahead, {}
        ends = await self._log.ends([self._names.events]) if ahead else {}
        for job_id, offset in ahead.items():
            folded = self._folded.get(job_id)
            if folded is not None and offset >= (end := ends[self._names.events, folded.partition]):
                where = f"{self._names.events}/{folded.partition}/{folded.offset}"
                detail = f"it is of offset {offset}, and the events end at {end}"
                self._wrong[job_id] = Breach("state_differs", where, detail, job_id)

    async def _fold_again(self) -> None:
        """Jobs of which something was heard after their state had been let go of."""
        again, self._again = self._again, {}
        for job_id, offsets in again.items():
            (stored,) = await self._bus.states([job_id])
            state = _state(stored)
            if state is None:
                continue
            wanted = sorted(offsets | set(state.history))
            for record in await self._log.fetch(self._names.events, state.partition, wanted):
                try:
                    event = decode_event(record.value)
                except Unreadable:
                    self.cannot_read(record)
                    break
                self._folded[job_id] = fold(self._folded.get(job_id), event, record.partition, record.offset)

    # --- streams -------------------------------------------------------------------------------------------

    async def _look_again_at_streams(self) -> None:
        for _, partition, offset in list(self._wrong_streams.values()):
            for record in await self._log.fetch(self._names.events, partition, [offset]):
                event = decode_event(record.value)
                assert isinstance(event, Terminal)
                await self._compare_streams([_Result(event, partition, offset)])

    async def _compare_streams(self, results: Iterable[_Result]) -> None:
        for event, partition, offset in results:
            view = await self._bus.read(event.id, Position())
            projected = offset < self._positions.get((self._names.events, partition), 0)
            if view.status in ("none", "stale") or (view.status == "open" and not projected):
                self._wrong_streams.pop(event.id, None)
                continue
            where = f"{self._names.events}/{partition}/{offset}"
            recorded = [token.on_bus() for token in event.output.tokens]
            problem = ""
            if view.status == "open":
                problem = "its end is recorded, and the stream has none"
            elif view.root != event.root or not _same_end(view.end, event):
                problem = "it ended otherwise"
            elif view.tokens != recorded:
                if view.tokens == recorded[: len(view.tokens)]:
                    self._wrong_streams.pop(event.id, None)
                    self.short += 1
                    continue
                at = next((i for i, pair in enumerate(zip(view.tokens, recorded)) if pair[0] != pair[1]), len(recorded))  # noqa: B905
                problem = f"from token {at} on"
            if problem:
                self._wrong_streams[event.id] = (Breach("stream_differs", where, problem, event.id), partition, offset)
                continue
            self._wrong_streams.pop(event.id, None)
            self.streams += 1
            self.tokens_recorded += len(recorded)
            self.tokens_streamed += len(view.tokens)

    # --- repair --------------------------------------------------------------------------------------------

    async def repair(self) -> int:
        """Write the states that are wrong once more, from the log; how many. A state that is newer stays."""
        writes = []
        for job_id in [job_id for job_id in self._wrong if job_id in self._folded]:
            folded = self._folded[job_id]
            writes.append(msgspec.structs.replace(state_write(await self._with_record(folded)), again=True))
            del self._folded[job_id], self._wrong[job_id]
        await self._bus.put_states(writes)
        return len(writes)

    async def _with_record(self, folded: JobState) -> JobState:
        """The state with what only the job's record says, as the projector would have made it."""
        origin = folded.record
        if origin is None:
            return folded
        for record in await self._log.fetch(origin.topic, origin.partition, [origin.offset]):
            try:
                base = queued(read_job(record.value), origin, parse_job_topic(origin.topic).priority)
            except (ArrieroError, ValueError):
                return folded
            lacking = [name for name in JobState.__struct_fields__ if name in _OF_RECORD and not getattr(folded, name)]
            return msgspec.structs.replace(folded, **{name: getattr(base, name) for name in lacking})
        return folded


def differing(folded: JobState, stored: JobState) -> list[str]:
    """Fields in which a stored state is not what the events make. What only a job's record says is left aside where
    the events do not say it."""
    return [
        name
        for name in JobState.__struct_fields__
        if getattr(folded, name) != getattr(stored, name)
        and not (name in _OF_RECORD and (not folded.owned or not getattr(folded, name)))
    ]


def _same_end(stored: str, event: Terminal) -> bool:
    try:
        return decode_end(stored) == stream_end(event)
    except msgspec.MsgspecError:
        return False


def _state(stored: bytes | None) -> JobState | None:
    try:
        return None if stored is None else decode_state(stored)
    except msgspec.MsgspecError:
        return None


def _offset(stored: bytes | None) -> int:
    state = _state(stored)
    return -1 if state is None else state.offset
