"""The flight recorder: what this process is doing, and with which jobs, readable after it has died.

A small file, mapped into memory, so that what was written last is there whatever ends the process. Each thread that
handles jobs writes into a lane of its own before it begins an operation:

    lane 0       the event loop: read            a record is decoded
    lanes 1..    preparing threads: tokenise     a prompt becomes tokens
    the engine   load, prefill, decode           one step, with the slots that are in it

A job is named by its label (`Held.label`): its id and its record's origin. Labels of slots are written when a sequence
is seated; a step writes only its operation and which slots it holds. Nothing here is ordered between lanes, and a
reader takes a lane that was half written for what it says.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Literal

import msgspec
import structlog

from arriero.schemas.event import Origin

log = structlog.get_logger(__name__)

Operation = Literal["idle", "load", "read", "tokenise", "prefill", "decode"]
OPERATIONS: Final[tuple[Operation, ...]] = ("idle", "load", "read", "tokenise", "prefill", "decode")

LABEL_BYTES: Final = 640
"""An id of 200 characters, a topic of 250, and three numbers, as JSON. A longer one is not written."""
PREPARE_LANES: Final = 8
SLOTS_MAX: Final = 256
_HEAD: Final = struct.Struct("<BQH")
"""A lane: operation, how many operations were begun, length of its label."""
_LANE_BYTES: Final = _HEAD.size + LABEL_BYTES
_LANES: Final = 1 + PREPARE_LANES
ENGINE_LANE: Final = _LANES
_ENGINE: Final = _LANES * _LANE_BYTES
_MASK: Final = _ENGINE + _HEAD.size
_SLOTS: Final = _MASK + SLOTS_MAX // 8
_SIZE: Final = _SLOTS + SLOTS_MAX * (2 + LABEL_BYTES)


class Named(msgspec.Struct, frozen=True):
    """A job, or a record whose id is not known yet: then `id` is the origin's text."""

    id: str
    origin: Origin


class Flight(msgspec.Struct, frozen=True):
    """What a recorder says."""

    operation: Operation
    """The most telling of all lanes: what is under way in the engine, else elsewhere."""
    jobs: list[Named]


class FlightRecorder:
    """Writes to `path`, which it makes; to nothing without one, or where there is no room for it."""

    def __init__(self, path: Path | None) -> None:
        self._map: mmap.mmap | None = None
        self._path = path
        self._free = list(range(1, _LANES))
        self._lock = threading.Lock()
        self._counts = [0] * (_LANES + 1)

    def __enter__(self) -> FlightRecorder:
        if self._path is not None:
            try:
                with self._path.open("w+b") as file:
                    # Written out, not only made so long: on a full disk a page that is not there yet is a SIGBUS.
                    file.write(bytes(_SIZE))
                    file.flush()
                    self._map = mmap.mmap(file.fileno(), _SIZE)
            except OSError as error:
                log.warning("flight_recorder_unavailable", path=str(self._path), reason=error.strerror)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None

    def reading(self, label: str) -> AbstractContextManager[None]:
        """A record is decoded by the event loop."""
        return _Under(self, "read", label)

    def tokenising(self, label: str) -> AbstractContextManager[None]:
        """A prompt is prepared, in any thread."""
        return _Under(self, "tokenise", label)

    def seated(self, slot: int, label: str) -> None:
        """From now on this slot's steps are this job's."""
        if self._map is not None and slot < SLOTS_MAX:
            data = _cut(label)
            at = _SLOTS + slot * (2 + LABEL_BYTES)
            self._map[at : at + 2 + len(data)] = len(data).to_bytes(2, "little") + data

    def step(self, operation: Operation, slots: Iterable[int] = ()) -> None:
        """The engine begins this, with the jobs in these slots."""
        if self._map is not None:
            mask = 0
            for slot in slots:
                mask |= 1 << slot
            self._map[_MASK:_SLOTS] = mask.to_bytes(SLOTS_MAX // 8, "little")
            self._counts[-1] += 1
            _HEAD.pack_into(self._map, _ENGINE, OPERATIONS.index(operation), self._counts[-1], 0)

    def begin(self, operation: Operation, label: str) -> int:
        """An operation other than the engine's begins; the lane to `end` it in."""
        lane = 0
        if operation == "tokenise":
            with self._lock:
                lane = self._free.pop() if self._free else 0
        self._write(lane, operation, label)
        return lane

    def end(self, lane: int) -> None:
        self._write(lane, "idle", "")
        if lane:
            with self._lock:
                self._free.append(lane)

    def _write(self, lane: int, operation: Operation, label: str) -> None:
        if self._map is not None:
            data = _cut(label)
            at = lane * _LANE_BYTES
            self._map[at + _HEAD.size : at + _HEAD.size + len(data)] = data
            self._counts[lane] += 1
            _HEAD.pack_into(self._map, at, OPERATIONS.index(operation), self._counts[lane], len(data))


class _Under:
    """One operation; of every job there are two, and a generator in its place takes three times as long."""

    __slots__ = ("_label", "_lane", "_operation", "_recorder")

    def __init__(self, recorder: FlightRecorder, operation: Operation, label: str) -> None:
        self._recorder, self._operation, self._label = recorder, operation, label

    def __enter__(self) -> None:
        self._lane = self._recorder.begin(self._operation, self._label)

    def __exit__(self, *exc: object) -> None:
        self._recorder.end(self._lane)


def read_flight(path: Path, lanes: Collection[int] | None = None) -> Flight | None:
    """What the process was doing, in these lanes only when they are given; None when its recorder cannot be read."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < _SIZE:
        return None
    jobs: dict[str, Named] = {}
    elsewhere: Operation = "idle"
    for lane in range(_LANES):
        if lanes is not None and lane not in lanes:
            continue
        at = lane * _LANE_BYTES
        operation, _, length = _HEAD.unpack_from(data, at)
        named = _named(data[at + _HEAD.size : at + _HEAD.size + length])
        if 0 < operation < len(OPERATIONS) and named is not None:
            elsewhere = OPERATIONS[operation]
            jobs[named.id] = named
    operation, *_ = _HEAD.unpack_from(data, _ENGINE)
    engine = _operation(operation)
    if lanes is not None and ENGINE_LANE not in lanes:
        engine = "idle"
    if engine in ("prefill", "decode"):
        mask = int.from_bytes(data[_MASK:_SLOTS], "little")
        for slot in range(SLOTS_MAX):
            if mask >> slot & 1:
                at = _SLOTS + slot * (2 + LABEL_BYTES)
                length = int.from_bytes(data[at : at + 2], "little")
                named = _named(data[at + 2 : at + 2 + length])
                if named is not None:
                    jobs[named.id] = named
    return Flight(engine if engine != "idle" else elsewhere, list(jobs.values()))


def label_of(job_id: str, origin: Origin) -> str:
    """How a job is named; a record without an id by its origin's text."""
    return msgspec.json.encode([job_id, origin]).decode()


def _cut(label: str) -> bytes:
    data = label.encode()
    return data if len(data) <= LABEL_BYTES else b""


def _operation(number: int) -> Operation:
    return OPERATIONS[number] if number < len(OPERATIONS) else "idle"


def _named(label: bytes) -> Named | None:
    try:
        job_id, origin = msgspec.json.decode(label, type=tuple[str, Origin])
    except msgspec.MsgspecError:
        return None
    return Named(job_id, origin)


def progress(path: Path) -> tuple[tuple[int, int], ...]:
    """Operation and count of every lane, the engine's last. A lane that is not idle and says the same twice has not
    moved on meanwhile. Empty when the recorder cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(_MASK)
    except OSError:
        return ()
    if len(data) < _MASK:
        return ()
    return tuple(_HEAD.unpack_from(data, lane * _LANE_BYTES)[:2] for lane in range(_LANES + 1))


def lanes_of(path: Path, operations: Collection[Operation]) -> frozenset[int]:
    """Those in which one of these operations is under way."""
    return frozenset(lane for lane, (number, _) in enumerate(progress(path)) if _operation(number) in operations)


def stuck_lanes(before: tuple[tuple[int, int], ...], now: tuple[tuple[int, int], ...]) -> frozenset[int]:
    """Those in which one operation, other than loading, was under way all the time between these two."""
    waiting = (OPERATIONS.index("idle"), OPERATIONS.index("load"))
    pairs = enumerate(zip(before, now, strict=False))
    return frozenset(lane for lane, (old, new) in pairs if old == new and new[0] not in waiting)
