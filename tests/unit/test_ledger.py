"""The ledger against the plainest model of it: a set of settled offsets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from arriero.transports.ledger import LEDGER_MAX_CHARS, PENDING_MAX, Ledger, LedgerError, Stamp

OFFSETS = st.integers(0, 60)
RANGES = st.lists(st.tuples(OFFSETS, st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=12)
OWNERS = st.text(st.characters(codec="utf-8", exclude_characters=";"), max_size=40)


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    ledger = Ledger(
        offset=draw(st.integers(0, 2**40)),
        fence=draw(st.integers(0, 2**53)),
        owner=draw(OWNERS),
        oldest_start_ms=draw(st.integers(0, 2**45)),
        stamp=draw(st.none() | st.builds(Stamp, st.integers(0, 2**40), st.integers(0, 2**45))),
    )
    return ledger.cover((ledger.offset + start, ledger.offset + stop) for start, stop in draw(RANGES))


def members(ledger: Ledger, limit: int) -> set[int]:
    return {offset for offset in range(limit) if ledger.is_settled(offset)}


@given(ledgers())
def test_a_ledger_survives_its_text(ledger: Ledger) -> None:
    assert Ledger.decode(ledger.offset, ledger.encode()) == ledger


@given(st.integers(0, 30), RANGES)
def test_covering_is_the_union(offset: int, ranges: list[tuple[int, int]]) -> None:
    ledger = Ledger(offset=offset).cover(ranges)
    expected = set(range(offset)).union(*(range(start, stop) for start, stop in ranges))
    assert members(ledger, 100) == expected


@given(st.permutations(range(12)), st.integers(0, 12), st.integers(1, 5))
def test_the_order_of_settling_does_not_matter(order: list[int], count: int, size: int) -> None:
    settled = order[:count]
    at_once = Ledger(offset=0).settle(settled)
    in_steps = Ledger(offset=0)
    for start in range(0, count, size):
        in_steps = in_steps.settle(settled[start : start + size])
    assert in_steps == at_once


@given(st.integers(0, 30), RANGES)
def test_ranges_are_ascending_apart_and_beyond_the_offset(offset: int, ranges: list[tuple[int, int]]) -> None:
    ledger = Ledger(offset=offset).cover(ranges)
    at = ledger.offset
    for start, stop in ledger.settled:
        assert at < start < stop
        at = stop


@given(st.integers(0, 30), RANGES, st.integers(0, 80))
def test_unsettled_ranges_are_the_complement(offset: int, ranges: list[tuple[int, int]], start: int) -> None:
    ledger = Ledger(offset=offset).cover(ranges)
    left = {each for first, stop in ledger.unsettled(start) for each in range(first, 100 if stop is None else stop)}
    assert left == set(range(start, 100)) - members(ledger, 100)


@given(st.integers(0, 30), RANGES, st.integers(0, 80))
def test_pending_counts_what_is_open_before_a_position(
    offset: int, ranges: list[tuple[int, int]], position: int
) -> None:
    ledger = Ledger(offset=offset).cover(ranges)
    assert ledger.pending(position) == len(set(range(position)) - members(ledger, position))


@settings(max_examples=20)
@given(st.lists(st.integers(1, 36**4 - 1), min_size=PENDING_MAX, max_size=PENDING_MAX))
def test_a_full_window_fits_beside_an_offset(lengths: list[int]) -> None:
    # Each pending record alone between settled ones. Ranges of up to 1.6 million records leave room.
    at = 10**12
    ledger = Ledger(offset=at, fence=2**43, owner="w" * 61 + "/" + "f" * 16, stamp=Stamp(2**40, 2**43))
    ranges = []
    for length in lengths:
        ranges.append((at + 1, at + 1 + length))
        at += 1 + length
    assert len(ledger.cover(ranges).encode()) <= LEDGER_MAX_CHARS


def test_a_text_too_long_is_refused() -> None:
    ledger = Ledger(offset=0).cover((number * 10**9, number * 10**9 + 10**8) for number in range(1, 513))
    with pytest.raises(LedgerError, match="512 ranges"):
        ledger.encode()


def test_an_owner_that_would_break_the_text_is_refused() -> None:
    with pytest.raises(LedgerError, match="semicolon"):
        Ledger(offset=0, owner="a;b").encode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "2;1;w;0;;",
        "1;1;w;0;",
        "1;x;w;0;;",
        "1;1;w;0;9;",
        "1;1;w;0;;1",
        "1;1;w;0;;0,1",
        "1;1;w;0;;2,-1",
        "1;1;w;0;;!,1",
    ],
)
def test_a_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(LedgerError):
        Ledger.decode(0, text)


@given(st.text(max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        ledger = Ledger.decode(7, text)
    except LedgerError:
        return
    assert Ledger.decode(7, ledger.encode()) == ledger


@given(ledgers(), st.integers(0, 2**53), st.integers(0, 2**53))
def test_a_raised_fence_exceeds_all_that_were_seen(ledger: Ledger, clock_ms: int, seen: int) -> None:
    raised = ledger.raised(clock_ms, "w/2", seen)
    assert raised.fence > max(ledger.fence, seen)
    assert raised.fence >= clock_ms
    assert (raised.offset, raised.settled) == (ledger.offset, ledger.settled)


class Claims(RuleBasedStateMachine):
    """Owners that follow each other on one partition, each reading from the text that the last one committed. No
    record is lost or read by an owner that finds it settled."""

    @initialize()
    def start(self) -> None:
        self.end = 0
        self.settled: set[int] = set()
        self.take()

    @rule()
    def take(self) -> None:
        text = getattr(self, "text", "1;0;;0;;")
        self.ledger = Ledger.decode(getattr(self, "offset", 0), text).raised(0, "w")
        self.position = self.ledger.offset
        self.holding: set[int] = set()
        self.store()

    def store(self) -> None:
        self.offset, self.text = self.ledger.offset, self.ledger.encode()

    @rule(count=st.integers(1, 20))
    def publish(self, count: int) -> None:
        self.end += count

    @rule(most=st.integers(1, 15))
    def read(self, most: int) -> None:
        for start, stop in self.ledger.unsettled(self.position):
            for offset in range(start, min(self.end, self.end if stop is None else stop)):
                if most == 0:
                    return
                assert offset not in self.settled
                self.holding.add(offset)
                self.position = offset + 1
                most -= 1

    @precondition(lambda self: self.holding)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        done = data.draw(st.sets(st.sampled_from(sorted(self.holding)), min_size=1, max_size=6))
        self.ledger = self.ledger.settle(done)
        self.holding -= done
        self.settled |= done
        self.store()

    @invariant()
    def the_ledger_lists_what_is_settled(self) -> None:
        assert members(self.ledger, self.end + 1) == self.settled
        assert self.ledger.pending(self.position) == len(self.holding)


TestClaims = Claims.TestCase


def test_a_ledger_of_a_later_release_is_told_from_garbage() -> None:
    for text, later in (("2;1;w;0;;", True), ("17", True), ("", False), ("x;1;w;0;;", False), ("1;1;w", False)):
        with pytest.raises(LedgerError) as refused:
            Ledger.decode(5, text)
        assert refused.value.later is later
