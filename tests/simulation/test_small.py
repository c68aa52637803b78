"""Small configurations, explored exhaustively: two workers, two jobs, one fault, at every place where it can strike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import pytest

from arriero.ops.simulation.faults import Drawn, forget_everything
from arriero.ops.simulation.files import File
from arriero.ops.simulation.fleet import SimulatedFleet
from arriero.ops.simulation.loop import Host
from arriero.ops.simulation.scenario import Outcome, SimulationOptions, simulate

SMALL: Final = SimulationOptions(seed=5, jobs=2, workers=2, rate=20.0, storm_s=0.3)
"""One of the jobs is published twice, one is cancelled while it runs."""
STOPPED_S: Final = 2.5
"""Longer than a lease: others take over, and it comes back."""
PARTS: Final = 2

Act = Callable[[SimulatedFleet, Host], object]


def kill(fleet: SimulatedFleet, host: Host) -> None:
    host.kill()


def stop(fleet: SimulatedFleet, host: Host) -> None:
    host.freeze()
    fleet.loop.later(STOPPED_S, host.thaw)


def kill_with_the_bus(fleet: SimulatedFleet, host: Host) -> None:
    host.kill()
    forget_everything(fleet)


def strike(act: Act, name: str, callback: int) -> tuple[Outcome, bool]:
    """One run in which this happens to a process before its nth callback; and whether that came at all."""
    struck = False

    def prepare(fleet: SimulatedFleet) -> list[Drawn]:
        host = fleet.hosts[name]

        def now() -> None:
            nonlocal struck
            struck = True
            act(fleet, host)

        host.before[callback] = now
        return [Drawn(0.0, f"{act.__name__} {name} before callback {callback}")]

    return simulate(SMALL, prepare), struck


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("act", [kill, stop, kill_with_the_bus])
@pytest.mark.parametrize("name", ["w0", "w1", "projector"])
def test_one_process_struck_between_any_two_awaits(name: str, act: Act, part: int) -> None:
    callback, reached = part, True
    while reached:
        outcome, reached = strike(act, name, callback)
        assert not outcome.broken, f"{outcome.faults[0].what}: {outcome.broken}"
        callback += PARTS
    assert callback > PARTS


Fate = Literal["request lost", "reply lost"]


def lose(which: Literal["log", "bus"], fate: Fate, number: int) -> tuple[Outcome, bool]:
    """One run in which this becomes of the nth write; and whether there was one."""
    files: list[File] = []

    def prepare(fleet: SimulatedFleet) -> list[Drawn]:
        file = fleet.log_file if which == "log" else fleet.bus_file
        files.append(file)
        file.fates[number] = fate
        return [Drawn(0.0, f"{which}: {fate} of write {number}")]

    return simulate(SMALL, prepare), files[0].writes > number


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fate", ["request lost", "reply lost"])
@pytest.mark.parametrize("which", ["log", "bus"])
def test_one_write_lost_anywhere(which: Literal["log", "bus"], fate: Fate) -> None:
    number, arrived = 1, True  # the first makes the topics, before anything else is there
    while arrived:
        outcome, arrived = lose(which, fate, number)
        assert not outcome.broken, f"{outcome.faults[0].what}: {outcome.broken}"
        number += 1
    assert number > 10
