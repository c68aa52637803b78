"""From crash reports to a verdict."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.schemas.event import Crashed, Event, Origin, Started
from arriero.schemas.state import JobState, fold
from arriero.workers.blame import conviction, verdict

ORIGIN = Origin("t", 0, 1, 1)


def crashed(alone: bool = False) -> Crashed:
    return Crashed(id="a", time_ms=1, origin=ORIGIN, worker="w", operation="decode", signal="SIGSEGV", alone=alone)


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
        ((crashed(alone=True), started(5), crashed(alone=True)), "innocent"),
        (tuple(event for n in range(5) for event in (crashed(), started(n + 1))), "convicted"),
    ],
)
def test_verdicts(events: tuple[Event, ...], expected: str) -> None:
    assert verdict(after(*events)) == expected


def test_nothing_known_is_innocence() -> None:
    assert verdict(None) == "innocent"


@given(st.lists(st.booleans() | st.integers(0, 50), max_size=30))
def test_nobody_crashes_workers_more_than_five_times_and_goes_free(history: list[bool | int]) -> None:
    """Booleans are crashes, alone or not; numbers are starts from so many tokens."""
    state = JobState(id="a")
    for offset, one in enumerate(history):
        if verdict(state) == "convicted":
            break
        state = fold(state, crashed(one) if isinstance(one, bool) else started(one), 0, offset)
    assert state.crashes <= 5
    assert (verdict(state) == "convicted") == (state.crashes == 5 or state.crashes_alone >= 2)


def test_a_conviction_says_how_often() -> None:
    error = conviction(after(crashed(), crashed(), crashed(alone=True), crashed(alone=True)))
    assert error.code == "worker_crashed"
    assert "4 times" in error.message
