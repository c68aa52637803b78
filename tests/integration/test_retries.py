"""Attempts that fail for a reason that may pass: delayed, tried again, given up, and run again by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from fleet import POOL, Fleet, _end

from arriero.ops.dead import Wanted, find, plan_replay, run_replay
from arriero.producer.client import Client
from arriero.schemas import names as naming
from arriero.schemas.codec import decode_dead
from arriero.schemas.errors import BadJob
from arriero.schemas.event import (
    Cancelled,
    Completed,
    DeadLettered,
    DeadRecord,
    Duplicate,
    Event,
    Expired,
    Failed,
    Requeued,
    RetryScheduled,
    SettlingEvent,
    Started,
    Undecodable,
)
from arriero.schemas.job import JOB_MAX_BYTES, Job, encode_job
from arriero.transports.log import Outgoing
from arriero.workers import relay as relaying
from arriero.workers import retry
from arriero.workers.engine.echo import EchoBackend
from arriero.workers.engine.seam import Pick, StepOutcome, StepPlan, Work
from arriero.workers.relay import Relay
from arriero.workers.worker import WorkerSettings

FAST = tuple((step, 0.05 * 2**number) for number, (step, _) in enumerate(naming.DELAY_STEPS))


class FlakyEcho(EchoBackend):
    """Fails the n-th token of a job whose prompt begins with `FAIL<times>@<n> `, in so many attempts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._work: dict[int, Work] = {}
        self.failures: dict[str, int] = {}

    def begin(self, slot: int, work: Work) -> None:
        super().begin(slot, work)
        self._work[slot] = work

    def step(self, plan: StepPlan) -> StepOutcome:
        outcome = super().step(plan)
        decoded = {feed.slot: feed.position + len(feed.tokens) for feed in plan.feeds}
        outcome.picks = [self._maybe_fail(pick, decoded[pick.slot]) for pick in outcome.picks]
        return outcome

    def _maybe_fail(self, pick: Pick, position: int) -> Pick:
        work = self._work[pick.slot]
        prompt = b"".join(map(self.piece, work.prompt)).decode()
        if not prompt.startswith("FAIL"):
            return pick
        times, _, at = prompt.removeprefix("FAIL").partition(" ")[0].partition("@")
        if position - len(work.prompt) != int(at) or self.failures.get(prompt, 0) >= int(times):
            return pick
        self.failures[prompt] = self.failures.get(prompt, 0) + 1
        return Pick(pick.slot, 0, error="a passing fault")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays of milliseconds."""
    monkeypatch.setattr(retry, "DELAY_STEPS", FAST)
    monkeypatch.setattr(relaying, "DELAY_STEPS", FAST)


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with Client(namespace=fleet.names.namespace, pool=POOL, log=fleet.log, bus=fleet.bus) as client:
        yield client


@asynccontextmanager
async def relaying_to(fleet: Fleet, name: str = "r1") -> AsyncIterator[Relay]:
    relay = Relay(fleet.log, names=fleet.names, pool=POOL, name=name, clock=fleet.clock)
    task = asyncio.create_task(relay.run(), name="test relay")
    try:
        yield relay
    finally:
        await _end(task)


@asynccontextmanager
async def flaky(fleet: Fleet, settings: WorkerSettings | None = None, **options: Any) -> AsyncIterator[None]:
    backend = FlakyEcho(**options)
    async with (
        fleet.projecting(),
        relaying_to(fleet),
        fleet.running(fleet.make_worker(load=lambda: backend, settings=settings)),
    ):
        yield


def kinds(fleet: Fleet, job_id: str) -> list[type[Event]]:
    return [type(event) for event in fleet.of(job_id)]


async def test_a_failed_attempt_is_tried_again_after_its_delay_and_goes_on_where_it_was(fleet: Fleet) -> None:
    prompt = "FAIL1@3 abcdefghijklmnopqrstuvwxyz"
    async with flaky(fleet):
        await fleet.submit(Job(id="a", prompt=prompt, tenant="ada"), priority="batch")
        end = await fleet.wait_end("a")
        view = await fleet.wait_view("a", lambda view: view.status == "fin")
    assert isinstance(end, Completed)
    assert (end.output.text, end.attempt, end.tenant, end.priority) == (prompt, 2, "ada", "batch")
    assert [token.on_bus() for token in end.output.tokens] == view.tokens
    settling = [event for event in fleet.of("a") if isinstance(event, SettlingEvent)]
    scheduled, requeued, completed = settling
    assert isinstance(scheduled, RetryScheduled)
    assert isinstance(requeued, Requeued)
    assert (scheduled.next_attempt, scheduled.step, scheduled.streamed, scheduled.error.code) == (
        2,
        "1s",
        3,
        "engine_error",
    )
    assert len({scheduled.origin, requeued.origin, completed.origin}) == 3
    assert completed.root == scheduled.root == requeued.root == str(scheduled.origin)
    second = [event for event in fleet.of("a") if isinstance(event, Started)][1]
    assert (second.attempt, second.from_token) == (2, 3)


async def test_the_steps_grow_and_attempts_are_capped_by_the_job_before_the_fleet(fleet: Fleet) -> None:
    async with flaky(fleet, WorkerSettings(max_attempts=4)):
        await fleet.submit(Job(id="fleets", prompt="FAIL9@0 x"), Job(id="own", prompt="FAIL9@1 x", max_attempts=2))
        ends = [await fleet.wait_end(job_id) for job_id in ("fleets", "own")]
        state = await fleet.wait_state("fleets", lambda state: state.ended)
    for end, attempts in zip(ends, (4, 2), strict=True):
        assert isinstance(end, DeadLettered)
        assert (end.reason, end.error.code, end.attempt) == ("attempts_exhausted", "engine_error", attempts)
        scheduled = [event for event in fleet.of(end.id) if isinstance(event, RetryScheduled)]
        assert [event.step for event in scheduled] == [step for step, _ in FAST[: attempts - 1]]
    assert (state.status, state.attempt) == ("dead_lettered", 4)


async def test_a_delayed_job_is_shown_as_such_and_then_as_queued(fleet: Fleet) -> None:
    async with fleet.projecting():
        async with fleet.running(fleet.make_worker(load=FlakyEcho)):
            await fleet.submit(Job(id="a", prompt="FAIL1@0 x"))
            await fleet.wait_state("a", lambda state: state.status == "delayed")
        async with relaying_to(fleet):
            state = await fleet.wait_state("a", lambda state: state.status == "queued")
    assert state.attempt == 2
    assert state.error is not None


async def test_a_job_cancelled_in_its_delay_ends_when_it_is_due(fleet: Fleet, client: Client) -> None:
    async with fleet.projecting(), fleet.running(fleet.make_worker(load=FlakyEcho)):
        await fleet.submit(Job(id="a", prompt="FAIL1@2 abcdefgh"))
        await fleet.wait_state("a", lambda state: state.status == "delayed")
        await client.cancel("a")
        await fleet.wait_state("a", lambda state: state.status == "cancelling")
        async with relaying_to(fleet):
            end = await fleet.wait_end("a")
    assert isinstance(end, Cancelled)
    assert end.output.count == 2


async def test_a_deadline_that_passes_in_the_delay_expires_the_job(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline = fleet.clock.time() + 2.0
    async with fleet.running(fleet.make_worker(load=FlakyEcho)):
        await fleet.submit(Job(id="a", prompt="FAIL1@0 x", deadline=deadline))
        await fleet.wait_events("a", RetryScheduled)
        await asyncio.sleep(deadline - fleet.clock.time())
        async with relaying_to(fleet):
            end = await fleet.wait_end("a")
    assert isinstance(end, Expired)


async def test_a_job_without_time_for_another_attempt_fails_at_once(fleet: Fleet) -> None:
    monkey = pytest.MonkeyPatch()
    monkey.setattr(retry, "DELAY_STEPS", naming.DELAY_STEPS)
    with monkey.context():
        async with fleet.running(fleet.make_worker(load=FlakyEcho)):
            await fleet.submit(Job(id="a", prompt="FAIL1@0 x", deadline=fleet.clock.time() + 0.9))
            end = await fleet.wait_end("a")
    monkey.undo()
    assert isinstance(end, Failed)
    assert end.error.code == "engine_error"


async def test_a_job_of_the_greatest_size_is_retried_dead_lettered_and_replayed(fleet: Fleet) -> None:
    job = Job(id="a", prompt="FAIL2@0 x", max_attempts=2, metadata={"fill": ""})
    job = msgspec.structs.replace(job, metadata={"fill": "x" * (JOB_MAX_BYTES - len(encode_job(job)))})
    assert len(encode_job(job)) == JOB_MAX_BYTES
    async with flaky(fleet):
        await fleet.submit(job)
        end = await fleet.wait_end("a")
    assert isinstance(end, DeadLettered)
    (dead,) = await dead_records(fleet, 1)
    assert dead.job["metadata"] == job.metadata


async def dead_records(fleet: Fleet, count: int) -> list[DeadRecord]:
    records = [record for offset in range(count + 4) for record in await fleet.log.fetch(fleet.names.dead, 0, [offset])]
    return [decode_dead(record.value or b"") for record in records]


async def test_what_was_given_up_is_run_again_under_a_new_id_once(fleet: Fleet, client: Client) -> None:
    async with flaky(fleet):
        job = Job(id="a", prompt="FAIL2@1 abcdefgh", max_attempts=2, tenant="ada", metadata={"k": 1})
        await fleet.submit(job, priority="interactive")
        await fleet.wait_end("a")
        (dead,) = [one async for one in find(client, Wanted(ids=["a"], reason="attempts_exhausted"))]
        first = await plan_replay(client, dead, again=False)
        await run_replay(client, first)
        end = await fleet.wait_end(first.new_id)
        state = await fleet.wait_state(first.new_id, lambda state: state.ended)
        again = await plan_replay(client, dead, again=False)
        yet_again = await plan_replay(client, dead, again=True)
        await run_replay(client, first)  # as if nobody had looked
        await fleet.wait_events(first.new_id, Duplicate)
    assert isinstance(end, Completed)
    assert (end.output.text, end.tenant, end.priority, end.attempt) == (job.prompt, "ada", "interactive", 1)
    assert (first.new_id, state.replay_of) == (f"a~{dead.number}", "a")
    assert (again.known, again.new_id) == (True, first.new_id)
    assert (yet_again.known, yet_again.new_id) == (False, f"a~{dead.number}.2")


async def test_what_was_no_job_is_shown_and_not_replayed(fleet: Fleet, client: Client) -> None:
    async with fleet.running(fleet.make_worker()):
        await fleet.publish_raw(b"{nonsense")
        await fleet.until(lambda: any(isinstance(event, Undecodable) for event in fleet.events))
    (dead,) = [one async for one in find(client, Wanted(reason="undecodable"))]
    assert dead.record.raw == b"{nonsense"
    with pytest.raises(BadJob, match="was no job"):
        await plan_replay(client, dead, again=False)


async def test_garbage_in_a_delay_topic_is_set_aside_and_the_others_go_on(fleet: Fleet) -> None:
    delay = fleet.names.delay(POOL, "1s")
    job = Job(id="a", prompt="abc", attempt=2, root="somewhere/0/1", priority="batch")
    async with fleet.running(fleet.make_worker()), relaying_to(fleet):
        await fleet.publish(Outgoing(delay, b"k", b"{nonsense"), Outgoing(delay, b"a", encode_job(job)))
        end = await fleet.wait_end("a")
        await fleet.until(lambda: any(isinstance(event, Undecodable) for event in fleet.events))
    assert isinstance(end, Completed)
    assert (end.priority, end.attempt) == ("batch", 2)


@pytest.mark.parametrize("field", [{"max_attempts": 0}, {"attempt": 0}, {"streamed": -1}, {"started_ms": -1}])
async def test_absurd_counts_are_refused_at_the_door(fleet: Fleet, field: dict[str, int]) -> None:
    async with fleet.running(fleet.make_worker()):
        await fleet.publish_raw(msgspec.json.encode({"id": "a", "prompt": "x", **field}))
        end = await fleet.wait_end("a")
    assert end.error.code == "bad_value"


async def test_a_hostile_record_that_says_it_was_streamed_far_does_no_harm(fleet: Fleet) -> None:
    job = Job(id="a", prompt="abcdef", attempt=7, root="nowhere/0/5", streamed=1_000_000, started_ms=1)
    async with fleet.running(fleet.make_worker()):
        await fleet.submit(job)
        end = await fleet.wait_end("a")
    assert isinstance(end, Completed)
    assert end.output.text == "abcdef"


async def test_two_relays_move_each_record_once(fleet: Fleet) -> None:
    count = 60
    async with relaying_to(fleet, "r1"), relaying_to(fleet, "r2"), fleet.running(fleet.make_worker(load=FlakyEcho)):
        await fleet.submit(*(Job(id=f"j{number}", prompt=f"FAIL1@0 {number}") for number in range(count)))
        for number in range(count):
            assert isinstance(await fleet.wait_end(f"j{number}"), Completed)
    requeued = [event for event in fleet.events if isinstance(event, Requeued)]
    assert len(requeued) == len({event.origin for event in requeued}) == count


async def test_a_failing_engine_makes_no_storm(fleet: Fleet) -> None:
    """Fifty jobs a second for five minutes, in a time that runs a hundred times as fast."""
    count, attempts = 300, 4
    async with flaky(fleet, WorkerSettings(max_attempts=attempts), slots=64):
        for number in range(count):
            await fleet.submit(Job(id=f"j{number}", prompt=f"FAIL99@0 {number}"))
        for number in range(count):
            assert isinstance(await fleet.wait_end(f"j{number}"), DeadLettered)
    started = [event.id for event in fleet.events if isinstance(event, Started)]
    assert max(map(started.count, set(started))) <= attempts
    assert len(started) <= count * attempts
    scheduled = [event for event in fleet.events if isinstance(event, RetryScheduled)]
    assert len(scheduled) == count * (attempts - 1)
