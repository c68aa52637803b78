"""From crash reports to a verdict."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.schemas.event import Crashed, Event, Origin, Started
from arriero.schemas.state import JobState, fold
from arriero.workers.blame import conviction, verdict

ORIGIN = Origin("t", 0, 1, 1)


times = count(1)


def crashed(alone: bool = False) -> Crashed:
    return Crashed(
        id="a", time_ms=next(times), origin=ORIGIN, worker="w", operation="decode", signal="SIGSEGV", alone=alone
    )


def started(tokens: int) -> Started:
    return Started(
        id="a", time_ms=1, attempt=1, root=str(ORIGIN), origin=ORIGIN, worker="w", fence=1, from_token=tokens
    )


def after(*events: Event) -> JobState:
    state = JobState(id="a")
    for offset, event in enumerate(events):
        state = fold(state, event, 0, offset)
    return state


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((), "innocent"),
        ((crashed(),), "innocent"),
        ((crashed(alone=True),), "innocent"),
        ((crashed(), crashed()), "suspect"),
        ((crashed(), crashed(), crashed(alone=True)), "suspect"),
        ((crashed(), crashed(), crashed(alone=True), crashed(alone=True)), "convicted"),
        ((crashed(alone=True), crashed(alone=True)), "convicted"),
        ((crashed(), started(5), crashed()), "innocent"),
        ((crashed(), started(5), crashed(), started(5), crashed()), "suspect"),
        ((crashed(alone=True), started(5), crashed(alone=True)), "convicted"),
        (tuple(event for n in range(2) for event in (crashed(), started(n + 1))), "innocent"),
        (tuple(event for n in range(3) for event in (crashed(), started(n + 1))), "suspect"),
        (tuple(event for n in range(7) for event in (crashed(), started(n + 1))), "suspect"),
        (tuple(event for n in range(8) for event in (crashed(), started(n + 1))), "convicted"),
    ],
)
def test_verdicts(events: tuple[Event, ...], expected: str) -> None:
    assert verdict(after(*events)) == expected


def test_nothing_known_is_innocence() -> None:
    assert verdict(None) == "innocent"


@given(st.lists(st.integers(0, 50), max_size=30))
def test_whoever_crashes_each_time_is_convicted_by_the_fifth(history: list[int]) -> None:
    """Started from so many tokens each time; alone as soon as it is suspected."""
    state, offset = JobState(id="a"), 0
    for tokens in history:
        if verdict(state) == "convicted":
            break
        state = fold(state, started(tokens), 0, offset)
        state = fold(state, crashed(alone=verdict(state) == "suspect"), 0, offset + 1)
        offset += 2
    assert state.crashes <= 5
    assert verdict(state) == "convicted" or len(history) < 5


def test_a_conviction_says_how_often() -> None:
    error = conviction(after(crashed(), crashed(), crashed(alone=True), crashed(alone=True)))
    assert error.code == "worker_crashed"
    assert "4 times" in error.message


def test_a_report_that_lies_in_the_log_twice_counts_once() -> None:
    first, second = crashed(), crashed(alone=True)
    state = after(first, second, first, second, second)
    assert (state.crashes, state.crashes_alone) == (2, 1)
