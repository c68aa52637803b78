"""Many seeds, on all cores."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from typing import Final

import msgspec

from arriero.ops.simulation.scenario import Outcome, SimulationOptions, simulate

BATCH_SEEDS: Final = 4
"""Given to a process at once. With more, a failure and Ctrl-C would wait for them."""
AHEAD: Final = 2
"""Batches that wait for each process, so that none is idle."""


def run_seeds(options: SimulationOptions, seeds: Sequence[int], processes: int) -> Iterator[Outcome]:
    """Each seed's outcome, as they come. Stop iterating to stop."""
    every = [msgspec.structs.replace(options, seed=seed) for seed in seeds]
    if processes == 1:
        yield from map(simulate, every)
        return
    batches = (every[at : at + BATCH_SEEDS] for at in range(0, len(every), BATCH_SEEDS))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_leave_interrupts) as pool:
        running: set[Future[list[Outcome]]] = set()
        try:
            while True:
                room = processes * AHEAD - len(running)
                running |= {pool.submit(_simulate_each, few) for few in islice(batches, room)}
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield from future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _simulate_each(few: Sequence[SimulationOptions]) -> list[Outcome]:
    return [simulate(options) for options in few]


def _leave_interrupts() -> None:
    """Ctrl-C is for the process that has started us: it ends us cleanly."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
