"""What a committer puts into its commits, and what it makes of commits that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from arriero.schemas.clock import SystemClock
from arriero.schemas.codec import decode_event
from arriero.schemas.errors import LogUnavailable, RecordTooLarge
from arriero.schemas.event import (
    Completed,
    Error,
    Event,
    Failed,
    Origin,
    Output,
    Progressed,
    RetryScheduled,
    Started,
)
from arriero.schemas.names import Names
from arriero.schemas.token import Token
from arriero.transports.ledger import Ledger
from arriero.transports.log import Commit, Outgoing, Record
from arriero.workers.commit import Committer
from arriero.workers.metrics import CommitMetrics

NAMES = Names("test")
TOPIC = NAMES.jobs("default", "standard")


class ScriptedClaim:
    """A claim whose commits end as the test says. It notes what was committed."""

    topic = TOPIC
    partition = 0
    capacity = 512

    def __init__(self, fence: int = 7, ledger: Ledger | None = None) -> None:
        self.fence = fence
        self.ledger = ledger or Ledger(offset=0, fence=fence)
        self.commits: list[Commit] = []
        self.failures: list[Exception] = []
        self.limit_bytes = 1 << 62
        self.gate = asyncio.Event()
        self.gate.set()
        self.tried = asyncio.Event()

    async def read(self, most: int) -> list[Record]:
        raise NotImplementedError

    async def release(self) -> None:
        raise NotImplementedError

    async def commit(self, commit: Commit) -> None:
        self.tried.set()
        await self.gate.wait()
        if any(len(record.value) > self.limit_bytes for record in commit.records):
            raise RecordTooLarge("too large")
        if self.failures:
            raise self.failures.pop(0)
        self.commits.append(commit)
        self.ledger = self.ledger.settle(commit.settled)

    def events(self) -> list[list[Event]]:
        return [[decode_event(record.value) for record in commit.records] for commit in self.commits]


def about(offset: int) -> dict[str, object]:
    origin = Origin(TOPIC, 0, offset, 1)
    return {
        "id": f"j{offset}",
        "time_ms": 1,
        "attempt": 1,
        "root": str(origin),
        "origin": origin,
        "worker": "",
        "fence": 0,
    }


def started(offset: int) -> Started:
    return msgspec.convert({"type": "Started"} | about(offset), Started)


def completed(offset: int, tokens: int = 0) -> Completed:
    output = Output(tokens=[Token(1, "x")] * tokens)
    return Completed(**about(offset), finish_reason="stop", output=output)  # type: ignore[arg-type]


@pytest.fixture
def claim() -> ScriptedClaim:
    return ScriptedClaim()


@pytest.fixture
async def committer(claim: ScriptedClaim) -> AsyncIterator[Committer]:
    committer = Committer(
        claim,
        names=NAMES,
        worker="w",
        clock=SystemClock(),
        metrics=CommitMetrics(CollectorRegistry()),
        settled=lambda event: None,
    )
    task = asyncio.create_task(committer.run())
    yield committer
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled(), task.exception()


async def flushed(committer: Committer) -> None:
    async with asyncio.timeout(5):
        await committer.flush()


async def test_an_event_is_committed_under_the_claims_fence_with_what_it_settles(
    committer: Committer, claim: ScriptedClaim
) -> None:
    committer.pending[3] = None
    committer.add(completed(3), settles=3)
    await flushed(committer)
    ((event,),) = claim.events()
    assert isinstance(event, Completed)
    assert (event.fence, event.worker) == (7, "w")
    assert claim.commits[0].settled == [3]
    assert claim.commits[0].records[0].key == b"j3"
    assert claim.commits[0].records[0].topic == NAMES.events
    assert committer.pending == {}


async def test_what_comes_while_a_commit_is_in_flight_goes_with_the_next(
    committer: Committer, claim: ScriptedClaim
) -> None:
    claim.gate.clear()
    committer.add(completed(0), settles=0)
    await claim.tried.wait()
    for offset in range(1, 20):
        committer.add(started(offset), lazy=True)
        committer.add(completed(offset), settles=offset)
    claim.gate.set()
    await flushed(committer)
    assert [len(commit.settled) for commit in claim.commits] == [1, 19]
    assert [type(event) for event in claim.events()[1][:4]] == [Started, Completed, Started, Completed]


async def test_what_nobody_waits_for_rides_along(committer: Committer, claim: ScriptedClaim) -> None:
    committer.add(started(0), lazy=True)
    await asyncio.sleep(0)
    committer.add(completed(0), settles=0)
    await flushed(committer)
    assert [[type(event) for event in events] for events in claim.events()] == [[Started, Completed]]


async def test_what_nobody_waits_for_is_committed_alone_when_nothing_comes(
    committer: Committer, claim: ScriptedClaim
) -> None:
    committer.add(started(0), lazy=True)
    await flushed(committer)
    assert [[type(event) for event in events] for events in claim.events()] == [[Started]]


async def test_other_records_come_after_the_events(committer: Committer, claim: ScriptedClaim) -> None:
    letter = Outgoing(NAMES.dead, b"k", b"v")
    committer.add(completed(0), settles=0, records=[letter])
    committer.add(completed(1), settles=1)
    await flushed(committer)
    assert [record.topic for record in claim.commits[0].records] == [NAMES.events, NAMES.events, NAMES.dead]


async def test_a_commit_in_doubt_that_did_not_happen_is_repeated_under_the_new_fence(
    committer: Committer, claim: ScriptedClaim
) -> None:
    claim.failures.append(LogUnavailable("no reply"))
    committer.add(started(0), lazy=True)
    committer.add(completed(0), settles=0)
    await claim.tried.wait()
    again = ScriptedClaim(fence=8)
    committer.resume(again)
    await flushed(committer)
    assert claim.commits == []
    (events,) = again.events()
    assert [type(event) for event in events] == [Started, Completed]
    assert {event.fence for event in events if isinstance(event, Started | Completed)} == {8}


async def test_a_commit_in_doubt_that_happened_is_not_repeated(committer: Committer, claim: ScriptedClaim) -> None:
    claim.failures.append(LogUnavailable("no reply"))
    committer.pending = {0: None, 1: None}
    committer.add(completed(0), settles=0)
    await claim.tried.wait()
    committer.add(completed(1), settles=1)
    again = ScriptedClaim(fence=8, ledger=Ledger(offset=1, fence=8))
    committer.resume(again)
    await flushed(committer)
    assert [commit.settled for commit in again.commits] == [[1]]
    assert committer.pending == {}


async def test_nothing_is_committed_while_in_doubt(committer: Committer, claim: ScriptedClaim) -> None:
    committer.doubt(claim)
    committer.add(completed(0), settles=0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not claim.tried.is_set()


async def test_what_is_dropped_is_not_recorded_and_nobody_waits_for_it(
    committer: Committer, claim: ScriptedClaim
) -> None:
    done: list[str] = []
    committer.doubt(claim)
    committer.add(completed(0), settles=0, done=lambda: done.append("queued"))
    committer.drop()
    committer.add(completed(1), settles=1, done=lambda: done.append("late"))
    await flushed(committer)
    assert done == ["queued", "late"]
    assert claim.commits == []


async def test_an_output_that_the_log_refuses_becomes_a_small_failure(
    committer: Committer, claim: ScriptedClaim
) -> None:
    claim.limit_bytes = 2_000
    committer.add(completed(0, tokens=10), settles=0)
    committer.add(completed(1, tokens=1_000), settles=1)
    committer.add(completed(2, tokens=10), settles=2)
    await flushed(committer)
    events = {event.id: event for events in claim.events() for event in events}
    assert isinstance(events["j0"], Completed)
    assert isinstance(events["j2"], Completed)
    failed = events["j1"]
    assert isinstance(failed, Failed)
    assert failed.error.code == "output_too_large"
    assert failed.output.count == 0
    assert sorted(offset for commit in claim.commits for offset in commit.settled) == [0, 1, 2]


async def test_a_checkpoint_that_the_log_refuses_is_left_out(committer: Committer, claim: ScriptedClaim) -> None:
    claim.limit_bytes = 2_000
    event = Progressed(**about(0), lineage="1.7@0", first=0, tokens=[Token(1, "x")] * 1_000)  # type: ignore[arg-type]
    committer.add(event)
    await flushed(committer)
    ((left,),) = claim.events()
    assert isinstance(left, Progressed)
    assert left.tokens == []


async def test_the_ledger_is_told_the_oldest_start_of_what_goes_on(committer: Committer, claim: ScriptedClaim) -> None:
    class Running:
        def __init__(self, since_ms: int) -> None:
            self.since_ms = since_ms

    committer.pending = {0: Running(50), 1: Running(70), 2: Running(0), 3: None}  # type: ignore[dict-item]
    committer.add(started(1))
    await flushed(committer)
    committer.add(completed(0), settles=0)
    await flushed(committer)
    committer.add(completed(1), settles=1)
    await flushed(committer)
    assert [commit.oldest_start_ms for commit in claim.commits] == [50, 70, 0]


async def test_a_retry_that_the_log_refuses_ends_the_job_instead_of_losing_it(
    committer: Committer, claim: ScriptedClaim
) -> None:
    claim.limit_bytes = 2_000
    event = RetryScheduled(**about(0), error=Error("engine_error", "x"), next_attempt=2, step="1s", due_ms=1)  # type: ignore[arg-type]
    committer.add(event, settles=0, records=[Outgoing(NAMES.delay("default", "1s"), b"k", b"x" * 3_000)])
    await flushed(committer)
    ((failed,),) = claim.events()
    assert isinstance(failed, Failed)
    assert failed.error.code == "engine_error"
    assert claim.commits[-1].settled == [0]
    assert len(claim.commits[-1].records) == 1
