"""Interleavings that storms rarely draw, each written down: what happens to a simulated fleet, and when."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from arriero.ops.simulation.faults import Drawn, forget_everything, forget_ledgers, recreate
from arriero.ops.simulation.fleet import POOL, SimulatedFleet
from arriero.ops.simulation.scenario import Prepare
from arriero.workers.stream import TAKE_PATIENCE_S

Script = Callable[[SimulatedFleet], Coroutine[Any, Any, None]]
SCHEDULES: dict[str, Prepare] = {}


def schedule(script: Script) -> Script:
    def prepare(fleet: SimulatedFleet) -> list[Drawn]:
        fleet.script = fleet.loop.create_task(script(fleet), name=script.__name__, context=fleet.loop.outside.copy())
        return [Drawn(0.0, script.__name__)]

    SCHEDULES[script.__name__] = prepare
    return script


async def asleep(fleet: SimulatedFleet, seconds: float) -> None:
    """Of the world's time."""
    woken = fleet.loop.create_future()
    fleet.loop.later(seconds, woken.set_result, None)
    await woken


def _recreate_all(fleet: SimulatedFleet, *, ledgers_too: bool) -> None:
    for topic in fleet.names.job_topics(POOL):
        recreate(fleet, topic, ledgers_too=ledgers_too)


@schedule
async def topics_made_anew(fleet: SimulatedFleet) -> None:
    """Events tell of records at offsets where others lie now."""
    await asleep(fleet, 1.5)
    _recreate_all(fleet, ledgers_too=True)


@schedule
async def topics_made_anew_under_their_ledgers(fleet: SimulatedFleet) -> None:
    """Ledgers list records as settled that nobody has seen yet. Workers come back when there are a few."""
    await asleep(fleet, 1.0)
    _recreate_all(fleet, ledgers_too=False)


@schedule
async def standing_still_in_doubt(fleet: SimulatedFleet) -> None:
    """A worker's commit is in doubt and the worker stands still; others take its partitions, work, and die before it
    goes on."""
    await asleep(fleet, 0.5)
    host = fleet.hosts["w0"]
    fleet.log_file.cut_off.add("w0")
    await asleep(fleet, 0.03)
    host.freeze()
    fleet.log_file.cut_off.clear()
    await asleep(fleet, 3.0)
    for name in ("w1", "w2"):
        fleet.hosts[name].kill()
    host.thaw()


@schedule
async def dying_with_commits_under_way(fleet: SimulatedFleet) -> None:
    """Requests of the dead arrive while their successors take over."""
    fleet.log_file.weather.latency_s = 0.2
    for _ in range(6):
        await asleep(fleet, 0.7)
        fleet.hosts[fleet.rng.choice(["w0", "w1", "w2"])].kill()
    fleet.log_file.weather.latency_s = 0.002


@schedule
async def waking_up_as_nobody(fleet: SimulatedFleet) -> None:
    """Workers stand still for longer than their lease, one after the other, in the middle of what they decode. Back
    again, they hear nothing from the log for a while, and go on streaming."""
    for name in ("w0", "w1", "w2"):
        host = fleet.hosts[name]
        host.freeze()
        await asleep(fleet, 2.1)
        fleet.log_file.cut_off.add(name)
        host.thaw()
        await asleep(fleet, 0.7)
        fleet.log_file.cut_off.clear()


@schedule
async def taking_over_without_the_bus(fleet: SimulatedFleet) -> None:
    """Jobs go on from their checkpoints, and there is a longer text of another run when the bus is back."""
    await asleep(fleet, 1.0)
    fleet.bus_forgot = True  # as good as that: readers are reset to the checkpoints
    fleet.bus_file.weather.away = True
    for name, host in list(fleet.hosts.items()):
        if name.startswith("w"):
            host.kill()
    await asleep(fleet, TAKE_PATIENCE_S + 2.0)
    fleet.bus_file.weather.away = False


@schedule
async def everything_lost_but_the_log(fleet: SimulatedFleet) -> None:
    """Workers and bus are gone in one moment, again and again: jobs go on from their checkpoints."""
    for _ in range(4):
        await asleep(fleet, 1.0)
        for name, host in list(fleet.hosts.items()):
            if name.startswith("w"):
                host.kill()
        forget_everything(fleet)


@schedule
async def ledgers_lost_again_and_again(fleet: SimulatedFleet) -> None:
    for _ in range(5):
        await asleep(fleet, 0.9)
        forget_ledgers(fleet)
