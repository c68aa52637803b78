"""Each rule of the protocol that is taken out is noticed, in a storm or in a schedule that aims at it."""

from __future__ import annotations

from typing import Final

import pytest
from simulation.mutants import MUTANTS
from simulation.schedules import SCHEDULES

from arriero.ops.simulation.scenario import SimulationOptions, simulate

SEEDS_MAX: Final = 40
"""Most are caught by the first few."""
AIMED: Final = {
    "anothers_continuation_kept": "standing_still_in_doubt",
    "checkpoints_of_another_job": "topics_made_anew",
    "ledger_read_before_fencing": "dying_with_commits_under_way",
    "lineage_ignored": "taking_over_without_the_bus",
    "rebuild_unchecked": "topics_made_anew",
    "rebuild_beyond_the_end": "topics_made_anew",
    "rebuild_left_out": "ledgers_lost_again_and_again",
    "stamp_unchecked": "topics_made_anew_under_their_ledgers",
    "streams_fence_unchecked": "waking_up_as_nobody",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_rule_left_out_is_noticed(name: str) -> None:
    prepare = SCHEDULES[AIMED[name]] if name in AIMED else None
    for seed in range(SEEDS_MAX):
        with MUTANTS[name]():
            outcome = simulate(SimulationOptions(seed=seed), prepare)
        if outcome.broken:
            return
    pytest.fail(f"{SEEDS_MAX} seeds have not noticed that {name}")
