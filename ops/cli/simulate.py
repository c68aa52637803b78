"""simulate."""

from __future__ import annotations

import os
import sys

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from arriero.ops.simulation.run import run_seeds
from arriero.ops.simulation.scenario import Outcome, SimulationOptions
from arriero.ops.simulation.scenario import simulate as simulate_one

EVENTS_SHOWN = 25
"""Of a failing seed."""


@click.command()
@click.option("--seeds", type=click.IntRange(1), default=100, show_default=True, help="How many.")
@click.option("--start", type=click.IntRange(0), default=0, show_default=True, help="The first.")
@click.option("--trace", "only", type=click.IntRange(0), metavar="SEED", help="Only this, and tell its last events.")
@click.option("--jobs", type=click.IntRange(1), default=50, show_default=True, help="Of a run.")
@click.option("--workers", type=click.IntRange(1, 20), default=3, show_default=True)
@click.option("--faults", type=click.IntRange(0), default=12, show_default=True, help="That strike while jobs come in.")
@click.option("--processes", type=click.IntRange(1), help="Seeds run side by side.  [default: one a core]")
@click.option("--keep-going", is_flag=True, help="Run all seeds, whatever fails.")
def simulate(
    seeds: int,
    start: int,
    only: int | None,
    processes: int | None,
    keep_going: bool,
    jobs: int,
    workers: int,
    faults: int,
) -> None:
    """Run the fleet's own code in virtual time, broken by faults that a seed draws. Exits with 1 when a promise breaks.

    A seed runs the same way each time and everywhere: what fails here can be looked at there.

    \b
        arriero simulate --seeds 1000
        arriero simulate --start 1000 --seeds 99000      the long form
        arriero simulate --trace 4711                    one run, told
    """
    options = SimulationOptions(seed=start if only is None else only, jobs=jobs, workers=workers, faults=faults)
    console = Console()
    if only is not None:
        outcome = simulate_one(options)
        _tell(outcome, options, console)
        sys.exit(bool(outcome.broken))
    failed, done, total_jobs, hours = 0, 0, 0, 0.0
    with _bar() as bar:
        task = bar.add_task("simulating", total=seeds)
        for outcome in run_seeds(options, range(start, start + seeds), processes or os.cpu_count() or 1):
            done, total_jobs, hours = done + 1, total_jobs + outcome.jobs, hours + outcome.virtual_s / 3600
            bar.update(task, completed=done)
            if outcome.broken:
                failed += 1
                _tell(outcome, options, console)
                if not keep_going:
                    break
    console.print(f"{done} seeds, {total_jobs:,} jobs, {hours:.1f} virtual hours: {failed or 'none'} failed")
    sys.exit(bool(failed))


def _tell(outcome: Outcome, options: SimulationOptions, console: Console) -> None:
    """What happened, and how to see it again."""
    for fault in outcome.faults:
        console.print(f"  {fault.at_s:7.3f} s  {fault.what}", markup=False, highlight=False)
    for line in outcome.trace[-EVENTS_SHOWN:]:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    verdict = outcome.broken or "everything held"
    console.print(
        f"seed {outcome.seed}: {verdict} ({outcome.jobs} jobs, {outcome.events} events, {outcome.callbacks} callbacks, "
        f"{outcome.virtual_s:.1f} virtual seconds, digest {outcome.digest})",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if outcome.broken:
        command = (
            f"arriero simulate --trace {outcome.seed} --jobs {options.jobs} "
            f"--workers {options.workers} --faults {options.faults}"
        )
        console.print(f"again: {command}", markup=False, highlight=False, soft_wrap=True)


def _bar() -> Progress:
    """On standard error, and only where somebody sees it."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
