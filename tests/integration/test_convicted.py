"""What a worker does with jobs of which the log says that they crashed others. No process dies here."""

from __future__ import annotations

import pytest
from fleet import Fleet

from arriero.ops.audit.audit import audit
from arriero.schemas.clock import SystemClock
from arriero.schemas.codec import encode
from arriero.schemas.event import Completed, Crashed, DeadLettered, Duplicate, Origin, Undecodable
from arriero.schemas.job import Job, encode_job
from arriero.transports.connect import make_log
from arriero.transports.log import Outgoing, Placed


class FastClock(SystemClock):
    """Ten minutes ahead."""

    def time(self) -> float:
        return super().time() + 600


async def report(fleet: Fleet, job_id: str, placed: Placed, times: int = 2, *, alone: bool = True) -> None:
    """That many crashes with this job in hand, and their projection."""
    origin = Origin(placed.topic, placed.partition, placed.offset, placed.time_ms)
    crashes = (
        Crashed(id=job_id, time_ms=time, origin=origin, worker="w0", operation="decode", signal="SIGSEGV", alone=alone)
        for time in range(times)  # reports of one time are one report
    )
    await fleet.publish(*(Outgoing(fleet.names.events, job_id.encode(), encode(crash)) for crash in crashes))
    await fleet.wait_state(job_id, lambda state: state.crashes == times)


async def test_another_record_of_a_convicted_id_is_a_duplicate(fleet: Fleet) -> None:
    async with fleet.projecting():
        (placed,) = await fleet.submit(Job(id="a", prompt="abc"))
        await report(fleet, "a", placed)
        async with fleet.running(fleet.make_worker("w1")):
            assert isinstance(await fleet.wait_end("a"), DeadLettered)
        await fleet.wait_state("a", lambda state: state.ended)
        async with fleet.running(fleet.make_worker("w2")):
            await fleet.submit(Job(id="a", prompt="abc"))
            await fleet.wait_settled(2)
    assert [type(event) for event in fleet.settling()] == [DeadLettered, Duplicate]


async def test_a_publishers_clock_that_is_ahead_hides_no_convict(fleet: Fleet) -> None:
    if not fleet.endpoints.embedded:
        pytest.skip("Kafka's client reads the machine's clock")
    fast = make_log(fleet.endpoints, names=fleet.names, clock=FastClock(), rng=fleet.rng, client="fast")
    async with fast, fleet.projecting():
        job = Job(id="a", prompt="abc")
        topic = fleet.names.jobs("default", "standard")
        (placed,) = await fast.publish([Outgoing(topic, b"a", encode_job(job))])
        assert isinstance(placed, Placed)
        await report(fleet, "a", placed)
        async with fleet.running(fleet.make_worker()):
            assert isinstance(await fleet.wait_end("a"), DeadLettered)


async def test_who_crashed_workers_with_others_runs_alone_and_may_finish(fleet: Fleet) -> None:
    async with fleet.projecting():
        (placed,) = await fleet.submit(Job(id="a", prompt="abc"))
        await report(fleet, "a", placed, times=4, alone=False)
        async with fleet.running(fleet.make_worker()):
            assert isinstance(await fleet.wait_end("a"), Completed)


async def test_the_books_balance_after_convictions_and_after_blame_that_came_to_nothing(fleet: Fleet) -> None:
    """By id, by origin, and of a record that was blamed by its origin once and then read."""
    async with fleet.projecting() as projector:
        guilty, unread, cleared = await fleet.submit(*(Job(id=name, prompt="abc") for name in ("a", "b", "c")))
        await report(fleet, "a", guilty)
        await report(fleet, origin_text(unread), unread)
        await report(fleet, origin_text(cleared), cleared, times=1)
        async with fleet.running(fleet.make_worker()):
            await fleet.wait_settled(3)
        ends = await fleet.log.ends([fleet.names.events])
        await fleet.poll(lambda: all(projector._positions.get(place, 0) >= end for place, end in ends.items()))
    kinds = {event.id: type(event) for event in fleet.settling()}
    assert kinds == {"a": DeadLettered, origin_text(unread): Undecodable, "c": Completed}
    found = await audit(fleet.log, fleet.bus, names=fleet.names, pools=["default"], clock=fleet.clock, patience_s=0.3)
    assert found.breaches == {}
    assert all(account.unaccounted == 0 for account in found.accounts)
    assert sum(account.in_flight for account in found.accounts) == 0


def origin_text(placed: Placed) -> str:
    return str(Origin(placed.topic, placed.partition, placed.offset, placed.time_ms))
