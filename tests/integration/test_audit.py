"""The audit over both pairs: a log that is as it should be, logs that were doctored, and a fleet at work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from doctoring import edit_state, edit_stream
from fleet import PARTITIONS, POOL, WAIT_S, Fleet, empty

from arriero.ops.audit.audit import Auditor, audit
from arriero.ops.audit.report import Report
from arriero.schemas.codec import decode_state, encode
from arriero.schemas.event import Completed, Error, Event, Origin, OwnerEvent, RetryScheduled, Usage
from arriero.schemas.job import Job
from arriero.schemas.state import JobState
from arriero.transports.log import Commit, Gained, Outgoing
from arriero.workers import relay
from arriero.workers.engine.echo import EchoBackend
from arriero.workers.engine.seam import Pick, StepOutcome, StepPlan, Work

PATIENCE_S = 0.3
"""Nothing moves in these logs."""


async def look(fleet: Fleet, **options: Any) -> Report:
    options.setdefault("patience_s", PATIENCE_S)
    return await audit(fleet.log, fleet.bus, names=fleet.names, pools=[POOL], clock=fleet.clock, **options)


@asynccontextmanager
async def projecting(fleet: Fleet) -> AsyncIterator[None]:
    """A projector that has come to the end of the events when it is left, and says so at once."""
    async with fleet.projecting() as projector:
        yield
        ends = await fleet.log.ends([fleet.names.events])
        await fleet.poll(lambda: all(projector._positions.get(place, 0) >= end for place, end in ends.items()))
        places = [[topic, partition, offset] for (topic, partition), offset in ends.items()]
    await fleet.bus.put_positions(msgspec.json.encode(places), first=False)


async def work_off(fleet: Fleet) -> None:
    """A mixed load, done and projected: jobs of all classes, a duplicate, one that is refused, one that is no job."""
    async with projecting(fleet), fleet.running(fleet.make_worker()):
        for priority in ("interactive", "standard", "batch"):
            jobs = [Job(id=f"{priority}-{i}", prompt="all work", tenant=f"t{i % 2}") for i in range(6)]
            await fleet.submit(*jobs, priority=priority)
        await fleet.submit(Job(id="standard-0", prompt="something else"))
        await fleet.submit(Job(id="odd", prompt="x", model="of another pool"))
        await fleet.publish_raw(b"no job")
        await fleet.wait_settled(21)


async def write_event(fleet: Fleet, event: Event, **changes: object) -> None:
    value = msgspec.json.encode({**msgspec.json.decode(encode(event)), **changes})
    await fleet.publish(Outgoing(fleet.names.events, event.id.encode(), value))


async def doctor_ledger(fleet: Fleet, job: Job, settled: bool, event: Event | None = None) -> None:
    """A commit by a worker that records an event without settling, or settles without an event."""
    (placed,) = await fleet.submit(job)
    topic = fleet.names.jobs(POOL, "standard")
    group = fleet.names.workers_group(POOL)
    async with fleet.log.join(group, [topic], "doctor", fleet.names.events) as membership, asyncio.timeout(WAIT_S):
        for _ in range(PARTITIONS):
            change = await membership.change()
            assert isinstance(change, Gained)
            if change.claim.partition == placed.partition:
                await change.claim.commit(Commit(settled=[placed.offset] if settled else []))


def completed(origin: Origin, job_id: str, **fields: Any) -> Completed:
    return Completed(
        id=job_id,
        time_ms=origin.time_ms,
        attempt=1,
        root=str(origin),
        origin=origin,
        worker="w",
        fence=1,
        priority="standard",
        finish_reason="stop",
        **fields,
    )


async def test_a_log_as_it_should_be_holds_and_its_accounts_balance(fleet: Fleet) -> None:
    await work_off(fleet)
    await fleet.submit(Job(id="waits", prompt="x", tenant="t1"))
    report = await look(fleet)
    assert report.breaches == {}
    assert report.shown == []
    assert report.holds
    assert (report.records, report.settled, report.unconfirmed) == (22, 21, 0)
    accounts = {(account.priority, account.tenant): account for account in report.accounts}
    assert all(account.unaccounted == 0 for account in report.accounts)
    assert accounts["interactive", "t0"].outcomes == {"completed": 3}
    assert accounts["standard", "default"].outcomes == {"duplicate": 1, "rejected": 1}
    assert accounts["standard", ""].outcomes == {"undecodable": 1}
    assert (accounts["standard", "t1"].accepted, accounts["standard", "t1"].in_flight) == (4, 1)
    assert report.states == 19
    assert report.streams == 19
    assert report.tokens_recorded == report.tokens_streamed > 0


async def test_a_settled_record_without_an_event_is_reported(fleet: Fleet) -> None:
    await doctor_ledger(fleet, Job(id="a", prompt="x"), settled=True)
    report = await look(fleet)
    assert report.breaches == {"unrecorded": 1}


async def test_an_event_that_the_ledger_does_not_know_is_reported(fleet: Fleet) -> None:
    await doctor_ledger(fleet, Job(id="a", prompt="x"), settled=False)
    (placed,) = await fleet.submit(Job(id="b", prompt="x", affinity="a"))
    await write_event(fleet, completed(Origin(*_place(placed)), "b"))
    report = await look(fleet)
    assert report.breaches == {"beyond_ledger": 1}


async def test_a_record_that_is_settled_twice_is_reported(fleet: Fleet) -> None:
    await work_off(fleet)
    end = await fleet.wait_end("batch-0")
    await write_event(fleet, end)
    report = await look(fleet)
    assert report.breaches == {"settled_twice": 1}
    assert report.excused["late_terminals"] == 1
    assert report.shown[0].job_id == "batch-0"
    assert report.shown[0].where == str(end.origin)


async def test_an_event_about_a_record_that_was_never_there_is_reported(fleet: Fleet) -> None:
    await work_off(fleet)
    origin = (await fleet.wait_end("batch-0")).origin
    await write_event(fleet, completed(msgspec.structs.replace(origin, offset=10_000), "x1"))
    await write_event(fleet, completed(msgspec.structs.replace(origin, time_ms=origin.time_ms + 10_000), "x2"))
    await write_event(fleet, completed(msgspec.structs.replace(origin, topic="elsewhere"), "x3"))
    report = await look(fleet)
    assert report.breaches == {"no_record": 2}
    assert report.excused["other_topics"] == 1


async def test_a_retry_that_waits_nowhere_is_reported(fleet: Fleet) -> None:
    (placed,) = await fleet.submit(Job(id="a", prompt="x"))
    origin = Origin(*_place(placed))
    said = {name: getattr(completed(origin, "a"), name) for name in OwnerEvent.__struct_fields__}
    error = Error("engine_error", "it failed")
    await write_event(fleet, RetryScheduled(**said, error=error, next_attempt=2, step="1s", due_ms=1))
    report = await look(fleet)
    assert report.breaches == {"no_result": 1}
    assert [account.unaccounted for account in report.accounts] == [1]


class FailsOnce(EchoBackend):
    """Fails the first attempt of each prompt."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[int, ...]] = set()
        self._failing: set[int] = set()

    def begin(self, slot: int, work: Work) -> None:
        super().begin(slot, work)
        prompt = tuple(work.prompt)
        (self._failing.discard if prompt in self._seen else self._failing.add)(slot)
        self._seen.add(prompt)

    def step(self, plan: StepPlan) -> StepOutcome:
        outcome = super().step(plan)
        outcome.picks = [Pick(p.slot, 0, error="it failed") if p.slot in self._failing else p for p in outcome.picks]
        return outcome


async def test_a_retried_job_is_in_flight_in_its_delay_and_balances_at_its_end(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "DELAY_STEPS", [(step, 0.01) for step, _ in relay.DELAY_STEPS])
    backend = FailsOnce()
    async with projecting(fleet), fleet.running(fleet.make_worker(load=lambda: backend)):
        await fleet.submit(*(Job(id=f"j{i}", prompt=f"prompt {i}") for i in range(5)))
        for i in range(5):
            await fleet.wait_events(f"j{i}", RetryScheduled)
    report = await look(fleet)
    assert report.breaches == {}
    assert [(account.accepted, account.in_flight) for account in report.accounts] == [(5, 5)]
    carrier = relay.Relay(fleet.log, names=fleet.names, pool=POOL, name="r1", clock=fleet.clock)
    task = asyncio.create_task(carrier.run(), name="test relay")
    async with projecting(fleet), fleet.running(fleet.make_worker(load=lambda: backend)):
        for i in range(5):
            await fleet.wait_end(f"j{i}")
    task.cancel()
    await asyncio.wait([task])
    report = await look(fleet)
    assert report.breaches == {}
    assert [(account.accepted, account.outcomes) for account in report.accounts] == [(5, {"completed": 5})]
    assert (report.records, report.settled) == (15, 15)


async def test_events_that_cannot_be_read_are_reported(fleet: Fleet) -> None:
    await fleet.publish(Outgoing(fleet.names.events, b"k", b"no event"))
    await write_event(fleet, completed(Origin(fleet.names.jobs(POOL, "batch"), 0, 0, 1), "a"), v=2)
    report = await look(fleet)
    assert report.breaches == {"event_of_later_version": 1, "event_unreadable": 1}


async def test_a_result_that_counts_wrongly_or_for_another_tenant_is_reported(fleet: Fleet) -> None:
    (placed,) = await fleet.submit(Job(id="a", prompt="x", tenant="t1"))
    await write_event(fleet, completed(Origin(*_place(placed)), "a", tenant="t2", usage=Usage(completion_tokens=3)))
    report = await look(fleet)
    assert report.breaches == {"usage_differs": 1, "wrong_account": 1}


async def test_a_stream_edited_by_hand_is_reported(fleet: Fleet) -> None:
    await work_off(fleet)
    await edit_stream(fleet, "batch-1", 0, "7|forged")
    report = await look(fleet)
    assert report.breaches == {"stream_differs": 1}
    assert (report.shown[0].job_id, report.shown[0].detail) == ("batch-1", "from token 0 on")


async def test_a_stream_whose_end_the_bus_has_lost_is_excused(fleet: Fleet) -> None:
    await work_off(fleet)
    await edit_stream(fleet, "batch-1", -1, None)
    report = await look(fleet)
    assert report.breaches == {}
    assert report.excused["streams_short"] == 1


async def test_a_state_that_differs_is_reported_and_repaired(fleet: Fleet) -> None:
    await work_off(fleet)
    before = await state_of(fleet, "batch-1")
    await edit_state(fleet, encode(msgspec.structs.replace(before, phase="failed", tokens=99)), "batch-1")
    await edit_state(fleet, b"no state", "batch-2")
    report = await look(fleet)
    assert report.breaches == {"state_differs": 2}
    assert {breach.job_id for breach in report.shown} == {"batch-1", "batch-2"}
    report = await look(fleet, repair=True)
    assert (report.breaches, report.repaired) == ({}, 2)
    assert await state_of(fleet, "batch-1") == before
    assert (await look(fleet)).holds


async def test_a_state_that_is_missing_is_reported_and_repaired(fleet: Fleet) -> None:
    await work_off(fleet)
    before = await state_of(fleet, "batch-1")
    await edit_state(fleet, None, "batch-1")
    assert (await look(fleet)).breaches == {"state_missing": 1}
    assert (await look(fleet, repair=True)).holds
    assert await state_of(fleet, "batch-1") == before


async def test_nothing_is_demanded_of_a_bus_that_has_forgotten(fleet: Fleet) -> None:
    await work_off(fleet)
    await empty(fleet.bus, fleet.names)
    report = await look(fleet)
    assert report.holds
    assert report.excused["states_lagging"] == 19


async def test_a_patrol_reads_only_what_is_new_and_sees_a_late_duplicate(fleet: Fleet) -> None:
    await work_off(fleet)
    auditor = Auditor(fleet.log, fleet.bus, names=fleet.names, pools=[POOL], clock=fleet.clock, patience_s=0.0)
    assert (await auditor.look()).holds
    async with projecting(fleet), fleet.running(fleet.make_worker()):
        await fleet.submit(Job(id="batch-0", prompt="again"), priority="batch")
        await fleet.wait_settled(22)
    report = await auditor.look()
    assert report.breaches == {}
    assert (report.records, report.settled, report.states) == (22, 22, 20)


async def test_an_audit_among_workers_sees_no_breach_that_is_none(fleet: Fleet) -> None:
    auditor = Auditor(fleet.log, fleet.bus, names=fleet.names, pools=[POOL], clock=fleet.clock, patience_s=0.0)
    jobs = [Job(id=f"j{i}", prompt="all work and no play") for i in range(300)]
    suspicions: list[dict[str, int]] = []
    async with projecting(fleet), fleet.running(fleet.make_worker("w1")), fleet.running(fleet.make_worker("w2")):
        for start in range(0, len(jobs), 20):
            await fleet.submit(*jobs[start : start + 20])
            suspicions.append((await auditor.look()).breaches)
        await fleet.wait_settled(len(jobs))
    report = await auditor.look()
    if fleet.endpoints.embedded:  # a commit becomes true in one moment there: not even a suspicion arises
        assert suspicions == [{}] * len(suspicions)
    assert report.breaches == {}
    assert (report.settled, sum(account.accepted for account in report.accounts)) == (300, 300)


# --- doctoring ---------------------------------------------------------------------------------------------


def _place(placed: Any) -> tuple[str, int, int, int]:
    return placed.topic, placed.partition, placed.offset, placed.time_ms


async def state_of(fleet: Fleet, job_id: str) -> JobState:
    (stored,) = await fleet.bus.states([job_id])
    assert stored is not None
    return decode_state(stored)
