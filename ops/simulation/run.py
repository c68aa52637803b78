"""Many seeds, on all cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from arriero.ops.simulation.scenario import Outcome, SimulationOptions, simulate

HASH_SEED: Final = "0"
"""Sets of words are walked in the order of their hashes, which Python draws anew for each process unless told."""


def is_reproducible() -> bool:
    """Whether this process, and those that it starts, run a seed the same way each time."""
    return os.environ.get("PYTHONHASHSEED") == HASH_SEED


def run_seeds(options: SimulationOptions, seeds: Sequence[int], processes: int) -> Iterator[Outcome]:
    """Each seed's outcome, as they come. Stop iterating to stop."""
    every = [msgspec.structs.replace(options, seed=seed) for seed in seeds]
    if processes == 1:
        yield from map(simulate, every)
        return
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=500) as pool:
        yield from pool.imap_unordered(simulate, every, chunksize=4)
