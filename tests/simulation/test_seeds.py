"""Storms that seeds draw. `arriero simulate` runs more of them."""

from __future__ import annotations

import pytest

from arriero.ops.simulation.scenario import SimulationOptions, simulate

SEEDS = 1_000
"""Of 50 jobs each: three minutes of two cores."""
CHUNK = 100


@pytest.mark.timeout(600)
@pytest.mark.parametrize("start", range(0, SEEDS, CHUNK))
def test_every_promise_holds_whatever_happens(start: int) -> None:
    for seed in range(start, start + CHUNK):
        outcome = simulate(SimulationOptions(seed=seed))
        assert not outcome.broken, f"arriero simulate --trace {seed}: {outcome.broken}"
        assert outcome.jobs == SimulationOptions(seed=0).jobs


def test_a_seed_runs_the_same_way_each_time() -> None:
    first, second = (simulate(SimulationOptions(seed=7)) for _ in range(2))
    assert (first.digest, first.callbacks, first.virtual_s) == (second.digest, second.callbacks, second.virtual_s)
    assert simulate(SimulationOptions(seed=8)).digest != first.digest
