"""Rare interleavings that are written down."""

from __future__ import annotations

import pytest
from simulation.schedules import SCHEDULES

from arriero.ops.simulation.scenario import SimulationOptions, simulate

SEEDS = 6


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_promise_holds_in_this_schedule(name: str) -> None:
    for seed in range(SEEDS):
        outcome = simulate(SimulationOptions(seed=seed), SCHEDULES[name])
        assert not outcome.broken, f"{name} with seed {seed}: {outcome.broken}"
