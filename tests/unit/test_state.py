"""The fold from events to a job's state."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from arriero.schemas.codec import decode_event, decode_state, encode
from arriero.schemas.event import (
    Cancelled,
    CancelRequested,
    Completed,
    Duplicate,
    Error,
    Event,
    Expired,
    Failed,
    Origin,
    Output,
    Progressed,
    Requeued,
    RetryScheduled,
    Started,
    Terminal,
)
from arriero.schemas.job import Job
from arriero.schemas.state import JobState, fold, queued, stream_end
from arriero.schemas.token import Token

ORIGIN = Origin("ns.jobs.default.standard", 0, 4, 1_000)
OUTPUT = Output([Token(5, "a"), Token(6, "")], "é", "1.9@0")


def owned(kind: type[Any], **fields: Any) -> Any:
    base: dict[str, Any] = {"id": "a", "time_ms": 2_000, "attempt": 1, "worker": "w", "fence": 9}
    base |= {"root": str(ORIGIN), "origin": ORIGIN}
    return kind(**(base | fields))


EVENTS: list[Event] = [
    owned(Started, model="m", digest="d"),
    owned(Progressed, lineage="1.9@0", first=0, tokens=[Token(5, "a")]),
    owned(RetryScheduled, error=Error("engine_error", "x"), next_attempt=2, step="1s", due_ms=5),
    owned(Requeued),
    owned(Duplicate, first_root="t/0/1", body_differs=True),
    owned(Completed, output=OUTPUT, finish_reason="stop"),
    owned(Failed, error=Error("engine_error", "x")),
    owned(Cancelled),
    owned(Expired, stage="queue"),
    CancelRequested(id="a", time_ms=3_000),
]


def run(events: list[Event], state: JobState | None = None, start: int = 0) -> JobState:
    for offset, event in enumerate(events, start):
        state = fold(state, event, 3, offset)
    assert state is not None
    return state


def test_a_job_is_queued_then_running_then_completed() -> None:
    state = queued(Job(id="a", prompt="x"), ORIGIN, "standard")
    assert state.status == "queued"
    state = run(EVENTS[:1], state)
    assert (state.status, state.started_ms, state.model) == ("running", 2_000, "m")
    state = run([EVENTS[5]], state, start=1)
    assert (state.status, state.tokens, state.finish_reason) == ("completed", 2, "stop")
    assert (state.partition, state.terminal, state.history) == (3, 1, [0, 1])


@given(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=12))
def test_the_first_terminal_event_is_the_result(events: list[Event]) -> None:
    state = run(events)
    terminals = [offset for offset, event in enumerate(events) if isinstance(event, Terminal)]
    assert state.terminal == (terminals[0] if terminals else -1)
    assert state.late_terminals == max(0, len(terminals) - 1)
    assert state.ended == bool(terminals)


@given(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=12), st.data())
def test_folding_again_from_any_earlier_event_changes_nothing(events: list[Event], data: st.DataObject) -> None:
    state = run(events)
    again = data.draw(st.integers(0, len(events) - 1))
    assert run(events[again:], state, start=again) == state


@given(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=12))
def test_states_and_events_survive_the_round_trip(events: list[Event]) -> None:
    state = run(events)
    assert decode_state(encode(state)) == state
    assert [decode_event(encode(event)) for event in events] == events


def test_a_cancel_request_shows_until_the_owner_has_answered() -> None:
    state = run([EVENTS[0], EVENTS[9]])
    assert state.status == "cancelling"
    assert run([EVENTS[7]], state, start=2).status == "cancelled"


def test_a_cancel_request_after_the_end_has_no_effect() -> None:
    assert run([EVENTS[5], EVENTS[9]]).status == "completed"


def test_the_first_owners_event_decides_the_root() -> None:
    guess = queued(Job(id="a", prompt="x"), Origin(ORIGIN.topic, 1, 99, 5), "standard")
    state = run([EVENTS[9], EVENTS[4], EVENTS[0]], guess)
    assert (state.root, state.record, state.digest) == (str(ORIGIN), ORIGIN, "d")


def test_a_duplicate_is_noted_and_leaves_the_first_job_alone() -> None:
    state = run([EVENTS[0], EVENTS[4]])
    assert state.status == "running"
    assert state.duplicates[0].body_differs


def test_unknown_fields_of_an_event_are_ignored() -> None:
    assert decode_event(b'{"type":"CancelRequested","id":"a","time_ms":1,"v":1,"of_tomorrow":{}}') == CancelRequested(
        id="a", time_ms=1
    )


def test_the_end_of_a_stream_tells_the_outcome_without_the_tokens() -> None:
    assert stream_end(owned(Completed, output=OUTPUT, finish_reason="length")).tail == "é"
    assert stream_end(owned(Expired, stage="prefill")).code == "expired"
    assert stream_end(owned(Failed, error=Error("engine_error", "boom"))).error == "boom"
