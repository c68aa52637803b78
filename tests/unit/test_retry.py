"""What becomes of failed attempts: pure arithmetic."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.schemas.codec import decode_dead
from arriero.schemas.event import DeadLettered, Error, Failed, Origin, RetryScheduled
from arriero.schemas.job import Job, read_job
from arriero.schemas.names import DELAY_STEPS, MAX_ATTEMPTS, Names
from arriero.schemas.token import Token
from arriero.workers.held import Held
from arriero.workers.retry import after_failure
from arriero.workers.stream import Stream

NAMES = Names("test")
TOPIC = NAMES.jobs("default", "standard")
ERROR = Error("engine_error", "it failed")
NOW_MS = 1_000_000


def held(job: Job, tokens: int = 0) -> Held:
    decoded = [Token(number, "x") for number in range(tokens)]
    origin = Origin(TOPIC, 0, 5, 1)
    stream = Stream.begin(
        key=1, job_id=job.id, root=job.root or str(origin), attempt=job.attempt, fence=1, tokens=decoded
    )
    return Held(
        key=1,
        job=job,
        origin=origin,
        priority="standard",
        digest="d",
        model="m",
        digests="m",
        arrived=0.0,
        size_bytes=1,
        committer=None,  # type: ignore[arg-type]
        stream=stream,
        tokens=decoded,
        since_ms=500,
    )


def failed(job: Job, tokens: int = 0, max_attempts: int = MAX_ATTEMPTS) -> object:
    return after_failure(
        held(job, tokens), ERROR, names=NAMES, pool="default", max_attempts=max_attempts, time_ms=NOW_MS
    )


def test_the_record_of_a_retry_carries_all_that_the_next_attempt_needs() -> None:
    event, (record,) = failed(Job(id="a", prompt="p", affinity="k", metadata={"m": [1]}), tokens=3)  # type: ignore[misc]
    assert isinstance(event, RetryScheduled)
    assert (event.next_attempt, event.step, event.due_ms, event.streamed) == (2, "1s", NOW_MS + 1_000, 3)
    job = read_job(record.value)
    assert record.topic == NAMES.delay("default", "1s")
    assert record.key == b"k"
    assert (job.attempt, job.root, job.priority) == (2, f"{TOPIC}/0/5", "standard")
    assert (job.streamed, job.started_ms, job.metadata) == (3, 500, {"m": [1]})


def test_a_later_attempt_keeps_its_root() -> None:
    event, (record,) = failed(Job(id="a", prompt="p", attempt=2, root="t/0/1"))  # type: ignore[misc]
    assert event.root == "t/0/1"
    assert read_job(record.value).root == "t/0/1"


def test_the_last_attempt_ends_with_the_whole_job_among_the_dead() -> None:
    job = Job(id="a", prompt="p", attempt=MAX_ATTEMPTS, root="t/0/1")
    event, (copy,) = failed(job, tokens=2)  # type: ignore[misc]
    assert isinstance(event, DeadLettered)
    assert (event.reason, event.error, event.output.count) == ("attempts_exhausted", ERROR, 2)
    dead = decode_dead(copy.value)
    assert copy.topic == NAMES.dead
    assert (dead.reason, dead.error, dead.origin) == ("attempts_exhausted", ERROR, event.origin)
    assert dead.job == msgspec.to_builtins(job) | {"class": "standard"}


@pytest.mark.parametrize(("deadline_ms", "kind"), [(NOW_MS + 1_000, Failed), (NOW_MS + 1_001, RetryScheduled)])
def test_no_retry_is_begun_that_comes_too_late(deadline_ms: int, kind: type) -> None:
    event, _ = failed(Job(id="a", prompt="p", deadline=deadline_ms / 1000))  # type: ignore[misc]
    assert isinstance(event, kind)


@given(own=st.none() | st.integers(1, 100), fleets=st.integers(1, 100))
def test_attempts_never_exceed_the_cap_and_steps_never_shrink(own: int | None, fleets: int) -> None:
    job, attempts, delays = Job(id="a", prompt="p", max_attempts=own), 0, []
    while True:
        attempts += 1
        event, records = failed(job, max_attempts=fleets)  # type: ignore[misc]
        if isinstance(event, DeadLettered):
            break
        delays.append(dict(DELAY_STEPS)[event.step])
        job = read_job(records[0].value)
    assert attempts == (own or fleets)
    assert delays == sorted(delays)
