"""Claims that are lost, doubted, frozen and shared, over both pairs."""

from __future__ import annotations

import signal

from fleet import Fleet, process, topics

from arriero.schemas.errors import LogUnavailable
from arriero.schemas.event import Completed, Event, Progressed, Started, Terminal
from arriero.schemas.job import Job, encode_job
from arriero.transports.embedded.claim import EmbeddedClaim
from arriero.transports.kafka.claim import KafkaClaim
from arriero.transports.log import Claim, Outgoing
from arriero.workers.worker import Worker

LONG = "all work and no play " * 40
SLOW = 0.02


def text(tokens: list[str]) -> str:
    return "".join(element.partition("|")[2] for element in tokens)


def fail(claim: Claim) -> None:
    """As if a call of the claim had failed."""
    error = LogUnavailable("cut off")
    if isinstance(claim, EmbeddedClaim):
        claim._fail(error)
    else:
        assert isinstance(claim, KafkaClaim)
        claim.void(error)
        claim._failed(claim, error)


def ends(fleet: Fleet, job_id: str) -> list[Event]:
    return [event for event in fleet.of(job_id) if isinstance(event, Terminal)]


async def test_after_kill_another_worker_goes_on_with_the_job_and_it_ends_once(fleet: Fleet) -> None:
    await fleet.submit(Job(id="a", prompt=LONG[:300]))
    async with process(fleet, "w1", step_s=SLOW):
        await fleet.wait_view("a", lambda view: len(view.tokens) > 3)
        await fleet.wait_events("a", Started)
    async with fleet.projecting(), fleet.running(fleet.make_worker("w2")):
        view = await fleet.wait_view("a", lambda view: view.status == "fin")
        end = await fleet.wait_end("a")
        state = await fleet.wait_state("a", lambda state: state.ended)
    assert isinstance(end, Completed)
    assert end.worker == "w2"
    assert end.output.text == LONG[:300]
    assert [token.on_bus() for token in end.output.tokens] == view.tokens
    assert ends(fleet, "a") == [end]
    assert state.late_terminals == 0


async def test_a_worker_that_was_frozen_records_nothing_that_another_has_taken(fleet: Fleet) -> None:
    await fleet.submit(Job(id="a", prompt=LONG[:300]))
    async with process(fleet, "w1", step_s=SLOW) as frozen, fleet.projecting():
        await fleet.wait_view("a", lambda view: len(view.tokens) > 3)
        await fleet.wait_events("a", Started)
        frozen.send_signal(signal.SIGSTOP)
        async with fleet.running(fleet.make_worker("w2", step_s=0.001)):
            end = await fleet.wait_end("a")
            frozen.send_signal(signal.SIGCONT)
            # It is one of two workers now: jobs on every partition reach both.
            await fleet.submit(*(Job(id=f"j{i}", prompt="x") for i in range(20)))
            for i in range(20):
                await fleet.wait_end(f"j{i}")
        view = await fleet.wait_view("a", lambda view: view.status == "fin")
    assert isinstance(end, Completed)
    assert end.worker == "w2"
    assert text(view.tokens) == LONG[:300]
    assert ends(fleet, "a") == [end]
    assert len({event.origin for event in fleet.settling()}) == len(fleet.settling()) == 21


async def test_a_doubted_claim_that_was_nobody_elses_goes_on_without_decoding_again(fleet: Fleet) -> None:
    worker = fleet.make_worker(step_s=SLOW)
    async with fleet.projecting(), fleet.running(worker):
        await fleet.submit(Job(id="a", prompt=LONG[:600]))
        await fleet.wait_view("a", lambda view: len(view.tokens) > 3)
        (started,) = await fleet.wait_events("a", Started)
        assert isinstance(started, Started)
        place = started.origin.topic, started.origin.partition
        claim = next(one.claim for one in worker._claims if (one.claim.topic, one.claim.partition) == place)
        fail(claim)
        end = await fleet.wait_end("a")
        view = await fleet.wait_view("a", lambda view: view.status == "fin")
    assert isinstance(end, Completed)
    assert end.fence > started.fence == claim.fence
    assert end.output.lineage == view.lineage == f"1.{claim.fence}@0"
    assert end.output.text == text(view.tokens) == LONG[:600]
    assert [type(event) for event in fleet.of("a") if not isinstance(event, Progressed)] == [Started, Completed]


async def test_workers_share_the_partitions_as_they_come_and_go(fleet: Fleet) -> None:
    first, second = fleet.make_worker("w1", step_s=0.005), fleet.make_worker("w2", step_s=0.005)
    jobs = [Job(id=f"j{i}", prompt=LONG[:60]) for i in range(90)]
    async with fleet.running(first):
        await fleet.submit(*jobs[:30])
        await fleet.wait_settled(1)
        async with fleet.running(second):
            await fleet.poll(lambda: bool(first.info.claims and second.info.claims))
            await fleet.submit(*jobs[30:60])
            await fleet.until(lambda: any(getattr(event, "worker", "") == "w2" for event in fleet.settling()))
            await fleet.wait_settled(40)
        await fleet.submit(*jobs[60:])
        await fleet.wait_settled(90)
    assert sorted(event.id for event in fleet.settling()) == sorted(job.id for job in jobs)
    assert all(isinstance(event, Completed) for event in fleet.settling())
    assert len({event.worker for event in fleet.settling() if isinstance(event, Completed)}) == 2


async def test_the_projector_finds_a_pool_that_was_made_later(fleet: Fleet) -> None:
    async with fleet.projecting() as projector:
        await fleet.log.ensure(topics(fleet.names, "later"))
        worker = Worker(
            fleet.log,
            fleet.bus,
            fleet.make_worker()._make_runner,
            names=fleet.names,
            pool="later",
            name="w9",
            model_names=["echo"],
            clock=fleet.clock,
            rng=fleet.rng,
        )
        async with fleet.running(worker):
            await fleet.poll(lambda: fleet.names.jobs("later", "batch") in projector._topics)
        job = Job(id="unread", prompt="x")
        await fleet.publish(Outgoing(fleet.names.jobs("later", "standard"), b"unread", encode_job(job)))
        state = await fleet.wait_state("unread", lambda state: state.status == "queued")
    assert state.record is not None
    assert state.record.topic == fleet.names.jobs("later", "standard")
