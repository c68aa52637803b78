"""A worker and a projector whose bus is away, slow or forgetful."""

from __future__ import annotations

import asyncio

from fleet import WAIT_S, FaultyBus, Fleet, empty

from arriero.schemas.codec import decode_end
from arriero.schemas.event import Cancelled, Completed, Progressed, Started
from arriero.schemas.job import Job

LONG = "all work and no play " * 10


def text(tokens: list[str]) -> str:
    return "".join(element.partition("|")[2] for element in tokens)


async def test_without_a_bus_a_job_completes_and_its_stream_ends_when_the_bus_is_back(fleet: Fleet) -> None:
    bus = FaultyBus(fleet.bus)
    bus.away = True
    async with fleet.projecting(bus), fleet.running(fleet.make_worker(bus=bus)):  # type: ignore[arg-type]
        await fleet.submit(Job(id="a", prompt=LONG))
        assert isinstance(await fleet.wait_end("a"), Completed)
        assert await fleet.bus.states(["a"]) == [None]
        bus.away = False
        view = await fleet.wait_view("a", lambda view: view.status == "fin")
        await fleet.wait_state("a", lambda state: state.phase == "completed")
    assert text(view.tokens) == LONG
    assert decode_end(view.end).status == "completed"


async def test_a_bus_that_comes_back_in_mid_job_shows_all_of_it(fleet: Fleet) -> None:
    bus = FaultyBus(fleet.bus)
    bus.away = True
    async with fleet.running(fleet.make_worker(bus=bus, step_s=0.02)):  # type: ignore[arg-type]
        await fleet.submit(Job(id="a", prompt=LONG))
        await fleet.wait_events("a", Started)
        bus.away = False
        view = await fleet.wait_view("a", lambda view: len(view.tokens) > 5)
        assert LONG.startswith(text(view.tokens))
        await fleet.bus.cancel("a")  # and the worker listens again
        assert isinstance(await fleet.wait_end("a"), Cancelled)


async def test_a_slow_bus_does_not_slow_the_step(fleet: Fleet) -> None:
    bus = FaultyBus(fleet.bus)
    bus.delay_s = 0.4
    async with fleet.running(fleet.make_worker(bus=bus, step_s=0.001)):  # type: ignore[arg-type]
        await fleet.submit(*(Job(id=f"j{i}", prompt=LONG) for i in range(8)))
        ends = [await fleet.wait_end(f"j{i}") for i in range(8)]
    # 70 tokens each, with the bus in their way 28 s.
    assert all(end.output.count == 70 and end.usage.decode_s < 4 for end in ends)


async def test_a_bus_that_forgets_a_running_job_gets_it_back_after_a_checkpoint(fleet: Fleet) -> None:
    async with fleet.projecting(), fleet.running(fleet.make_worker(step_s=0.02)):
        await fleet.submit(Job(id="a", prompt=LONG))
        await fleet.wait_view("a", lambda view: len(view.tokens) > 5)
        await empty(fleet.bus, fleet.names)
        view = await fleet.wait_view("a", lambda view: view.status == "fin")
        end = await fleet.wait_end("a")
    assert text(view.tokens) == LONG
    (saved, *_) = [event for event in fleet.of("a") if isinstance(event, Progressed)]
    assert saved.first == 0
    assert len(saved.tokens) > 5
    assert end.output.lineage == view.lineage == saved.lineage


async def test_the_projector_rebuilds_what_the_bus_forgot(fleet: Fleet) -> None:
    async with fleet.projecting():
        async with fleet.running(fleet.make_worker()):
            await fleet.submit(*(Job(id=f"j{i}", prompt=f"{i}") for i in range(20)))
            for i in range(20):
                await fleet.wait_state(f"j{i}", lambda state: state.ended)
        await fleet.submit(Job(id="unread", prompt="x"))
        await fleet.wait_state("unread", lambda state: state.status == "queued")
        before = await fleet.bus.states([f"j{i}" for i in range(20)])
        await empty(fleet.bus, fleet.names)
        assert await fleet.bus.states(["j0"]) == [None]
        for i in range(20):
            await fleet.wait_state(f"j{i}", lambda state: state.ended)
        await fleet.wait_state("unread", lambda state: state.status == "queued")
        view = await fleet.wait_view("j7", lambda view: view.status == "fin")
    assert text(view.tokens) == "7"
    after = await fleet.bus.states([f"j{i}" for i in range(20)])
    assert after == before


async def test_replay_projects_from_the_beginning(fleet: Fleet) -> None:
    async with fleet.projecting() as projector:
        async with fleet.running(fleet.make_worker()):
            await fleet.submit(Job(id="a", prompt="x"))
            await fleet.wait_state("a", lambda state: state.ended)
        await projector.replay()
        async with asyncio.timeout(WAIT_S):
            while await fleet.bus.positions() is None:  # noqa: ASYNC110 - positions have no bell
                await asyncio.sleep(0.01)
        await fleet.wait_state("a", lambda state: state.ended)
        assert projector._metrics.rebuilds._value.get() == 2


async def test_a_second_projector_goes_on_where_the_first_was(fleet: Fleet) -> None:
    async with fleet.projecting(), fleet.running(fleet.make_worker()):
        await fleet.submit(Job(id="a", prompt="x"))
        await fleet.wait_state("a", lambda state: state.ended)
    async with fleet.projecting() as projector, fleet.running(fleet.make_worker()):
        await fleet.submit(Job(id="b", prompt="x"))
        await fleet.wait_view("b", lambda view: view.status == "fin")
        assert projector._metrics.rebuilds._value.get() == 0
