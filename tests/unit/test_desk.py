"""One job of an id at a time, and never none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from arriero.schemas.clock import SystemClock
from arriero.schemas.event import Origin
from arriero.schemas.job import Job
from arriero.schemas.names import Names
from arriero.workers.desk import Desk
from arriero.workers.held import Held
from arriero.workers.metrics import WorkerMetrics
from arriero.workers.stream import Stream


@pytest.fixture
def desk() -> Desk:
    return Desk(
        engine=cast(Any, None),
        names=Names("test"),
        pool="default",
        clock=SystemClock(),
        metrics=WorkerMetrics(CollectorRegistry()),
        read_ahead=16,
        max_attempts=5,
    )


def held(offset: int, attempt: int = 1, root: str | None = None) -> Held:
    origin = Origin("test.jobs.default.standard", 0, offset, 1)
    job = Job(id="a", prompt="x", attempt=attempt, root=root)
    stream = Stream.begin(key=offset, job_id="a", root=root or str(origin), attempt=attempt, fence=1, tokens=[])
    return Held(
        key=offset,
        job=job,
        origin=origin,
        priority="standard",
        digest=f"d{offset}",
        model="m",
        digests="m",
        arrived=0.0,
        size_bytes=1,
        committer=cast(Any, SimpleNamespace(pending={})),
        stream=stream,
        tokens=[],
    )


def test_a_second_record_of_an_id_in_hand_is_a_duplicate(desk: Desk) -> None:
    first, second = held(0), held(1)
    desk.take(first)
    assert desk.first_of("a", second.root, 1) == (first.root, "d0")


def test_a_record_that_waits_to_be_known_as_a_duplicate_does_not_make_one_of_the_job_itself(desk: Desk) -> None:
    """Both would be lost: the later attempt to this record, this record to the job's first event."""
    desk.take(held(7))
    assert desk.first_of("a", "test.jobs.default.standard/0/0", 2) is None


def test_an_attempt_whose_commit_is_in_doubt_does_not_stand_in_the_way_of_the_next(desk: Desk) -> None:
    first = held(0)
    desk.take(first)
    assert desk.first_of("a", first.root, 2) is None


def test_a_first_attempt_does_not_push_aside_a_later_one_in_hand(desk: Desk) -> None:
    later = held(5, attempt=2, root="test.jobs.default.standard/0/0")
    desk.take(later)
    assert desk.first_of("a", held(7).root, 1) == (later.root, "d5")
