"""Ledgers made anew from events."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.schemas.codec import encode
from arriero.schemas.errors import Unreadable
from arriero.schemas.event import Completed, Crashed, Error, Event, Origin, Started, Undecodable
from arriero.transports.ledger import PENDING_MAX, Stamp
from arriero.transports.log import Record
from arriero.transports.rebuild import Rebuild, fold_events

TOPIC = "ns.jobs.default.standard"


def time_of(offset: int) -> int:
    return 1_000 + offset


def origin(offset: int, time_ms: int | None = None, topic: str = TOPIC, partition: int = 0) -> Origin:
    return Origin(topic, partition, offset, time_of(offset) if time_ms is None else time_ms)


def completed(at: Origin, fence: int = 5) -> Completed:
    return Completed(id="j", time_ms=0, attempt=1, root="r", worker="w", fence=fence, origin=at, finish_reason="stop")


def started(at: Origin, fence: int = 5) -> Started:
    return Started(id="j", time_ms=0, attempt=1, root="r", worker="w", fence=fence, origin=at)


def fold(first: int, *events: Event) -> Rebuild:
    rebuild = Rebuild(first)
    fold_events(
        (Record("ns.events", 0, number, 50_000 + number, b"j", encode(event)) for number, event in enumerate(events)),
        {(TOPIC, 0): rebuild},
    )
    return rebuild


def times(first: int, stop: int) -> dict[int, int]:
    return {offset: time_of(offset) for offset in range(first, stop)}


@given(st.integers(0, 20), st.sets(st.integers(0, 40)))
def test_what_has_an_event_is_settled_and_nothing_else_that_is_there(first: int, done: set[int]) -> None:
    rebuild = fold(first, *(completed(origin(offset)) for offset in done))
    ledger = rebuild.ledger(times(first, rebuild.stop))
    assert {offset for offset in range(60) if ledger.is_settled(offset)} == set(range(first)) | done


def test_an_event_of_another_time_or_place_settles_nothing() -> None:
    rebuild = fold(
        0,
        completed(origin(0, time_ms=7)),
        completed(origin(1, topic="ns.jobs.other.standard")),
        completed(origin(1, partition=1)),
        completed(origin(2)),
    )
    assert rebuild.ledger(times(0, 3)).settled == ((2, 3),)


def test_of_two_events_for_one_offset_the_one_of_this_record_counts() -> None:
    assert fold(0, completed(origin(0, time_ms=7)), completed(origin(0))).ledger(times(0, 1)).offset == 1


def test_offsets_without_a_record_count_as_settled_up_to_the_last_event() -> None:
    rebuild = fold(0, completed(origin(0)), completed(origin(2)))
    assert rebuild.stop == 3
    assert rebuild.ledger({0: time_of(0), 2: time_of(2)}).offset == 3


def test_events_beyond_the_end_settle_nothing_that_is_still_to_come() -> None:
    rebuild = fold(0, *(completed(origin(offset, time_ms=7)) for offset in range(9)))
    rebuild.cut(2)
    ledger = rebuild.ledger(times(0, 2))
    assert not any(ledger.is_settled(offset) for offset in range(9))


def test_an_undecodable_record_is_settled_by_its_event() -> None:
    event = Undecodable(
        id="x", time_ms=0, origin=origin(0), worker="w", fence=3, error=Error(code="bad_id", message="no")
    )
    assert fold(0, event).ledger(times(0, 1)).offset == 1


def test_a_crash_settles_nothing() -> None:
    event = Crashed(id="j", time_ms=0, origin=origin(0), worker="w", operation="decode", signal="SIGSEGV")
    rebuild = fold(0, event)
    assert rebuild.stop == 0


def test_the_fence_is_the_highest_of_this_partition() -> None:
    rebuild = fold(0, completed(origin(0), 9), started(origin(1), 12), completed(origin(1, partition=3), 99))
    assert rebuild.fence == 12


def test_the_oldest_start_is_that_of_what_still_runs() -> None:
    rebuild = fold(0, started(origin(0)), started(origin(1)), started(origin(2)), completed(origin(0)))
    assert rebuild.ledger(times(0, 3)).oldest_start_ms == 50_001


def test_the_stamp_is_the_last_record_looked_at() -> None:
    assert fold(0, completed(origin(1))).ledger(times(0, 2)).stamp == Stamp(1, time_of(1))
    assert fold(4).ledger({}).stamp is None


def test_more_gaps_than_fit_are_cut_and_run_again() -> None:
    rebuild = fold(0, *(completed(origin(offset)) for offset in range(1, 2 * PENDING_MAX + 40, 2)))
    ledger = rebuild.ledger(times(0, rebuild.stop))
    assert len(ledger.settled) == PENDING_MAX
    assert ledger.encode()


def fold_raw(*values: bytes | None) -> Rebuild:
    rebuild = Rebuild(0)
    fold_events((Record("ns.events", 0, at, 1, b"j", value) for at, value in enumerate(values)), {(TOPIC, 0): rebuild})
    return rebuild


def spoilt(event: Event, **changes: object) -> bytes:
    return msgspec.json.encode({**msgspec.json.decode(encode(event)), **changes})


def test_what_no_release_has_written_is_passed_over() -> None:
    rebuild = fold_raw(b"{", None, b"{}", spoilt(completed(origin(0)), type="Paused"), encode(completed(origin(1))))
    assert rebuild.ledger(times(0, 2)).settled == ((1, 2),)


@pytest.mark.parametrize("changes", [{}, {"type": "Paused"}, {"origin": "somewhere"}])
def test_an_event_of_a_later_version_stops_the_rebuild(changes: dict[str, object]) -> None:
    rebuild = fold_raw(spoilt(completed(origin(0)), v=2, **changes))
    with pytest.raises(Unreadable, match=r"ns\.events/0/0 .*upgrade") as refused:
        rebuild.ledger(times(0, 1))
    assert refused.value.code == "unknown_version"


@pytest.mark.parametrize(
    "value",
    [
        spoilt(completed(origin(0, topic="ns.jobs.other.standard")), v=2),
        spoilt(started(origin(0)), v=2),
        b'{"v":2,"type":"CancelRequested","id":"j"}',
    ],
)
def test_an_event_of_a_later_version_that_settles_nothing_here_stops_nothing(value: bytes) -> None:
    assert fold_raw(value).ledger(times(0, 1)).offset == 0


def test_a_damaged_event_settles_the_record_that_it_names() -> None:
    rebuild = fold_raw(spoilt(completed(origin(0)), output=3))
    assert rebuild.fence == 5
    assert rebuild.ledger(times(0, 1)).offset == 1
