"""`arriero bench engine --against llama-server`: the worker's engine beside llama.cpp's own server.

Both get the same token ids, the same sampling, threads, slots and KV cells. The sides take turns (ours, server, ours,
server ...), each run with a fresh engine and a fresh server whose caches are cold, so that a machine whose speed drifts
slows both; the median of the rounds' ratios is what counts.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from arriero.ops import models
from arriero.ops.bench import peer, sides, workloads
from arriero.ops.bench.engine import StepSplit, split_of, spread_of
from arriero.ops.bench.sides import Seen
from arriero.ops.bench.workloads import Workload
from arriero.workers.engine.llama.model import THREADS_MAX

MEASURES: Final = {
    "tokens_per_s": ("tokens/s", 1.0),
    "ttft_p50_s": ("first token p50, ms", 1000.0),
    "ttft_p95_s": ("first token p95, ms", 1000.0),
    "gap_p50_s": ("gap between tokens p50, ms", 1000.0),
    "gap_worst_s": ("gap between tokens worst, ms", 1000.0),
}
"""What the table calls a measure, and what it multiplies it by."""


class AgainstOptions(msgspec.Struct, frozen=True, kw_only=True):
    model: str = models.DEMO.name
    cache: Path
    workloads: tuple[Workload, ...] = workloads.WORKLOADS
    rounds: int = 3
    slots: int | None = None
    """None for each workload's own."""
    threads: int | None = None
    server_arguments: tuple[str, ...] = ()


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one side. First tokens are timed from sending."""

    tokens: int
    wall_s: float
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    gap_p50_s: float
    gap_worst_s: float
    steps: StepSplit | None = None
    """Where the time of our steps went."""


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """All rounds of one workload."""

    workload: str
    about: str
    ours: list[Measured] = []
    theirs: list[Measured] = []
    limit: list[float] = []
    """Tokens/s of llama-batched-bench, where it can do the same."""

    def ratios(self, name: str) -> list[float]:
        """Of each round, this measure of ours by the server's."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return [getattr(ours, name) / max(1e-9, getattr(theirs, name)) for ours, theirs in pairs]

    @property
    def of_limit(self) -> list[float]:
        return [ours.tokens_per_s / limit for ours, limit in zip(self.ours, self.limit, strict=True)]


def bench_against(options: AgainstOptions, names: str | None, *, as_json: bool) -> None:
    """Build what is missing, run, print. Raises what `build` and `run_against` raise."""
    if names is not None:
        options = msgspec.structs.replace(options, workloads=workloads.named(names))
    console = Console(stderr=as_json)
    models.resolve(options.model, options.cache)  # a model that is not there is told before the build
    with Progress(TextColumn("{task.description}"), BarColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        programs = peer.build(
            options.cache.parent / "peer",
            lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None),
        )
    results = run_against(options, programs, console)
    if as_json:
        click.echo(msgspec.json.encode(results))
    else:
        print_against(results, console)


def run_against(options: AgainstOptions, programs: Path, console: Console) -> list[Compared]:
    """Raises ModelError, SetupError, EngineError."""
    path = models.resolve(options.model, options.cache).path
    threads = options.threads or min(THREADS_MAX, len(os.sched_getaffinity(0)))
    results = []
    for workload in options.workloads:
        slots = options.slots or workload.slots
        shape = peer.Shape(model=path, slots=slots, n_ctx=workload.n_ctx(slots), threads=threads)
        prompts = asyncio.run(sides.make_prompts(path, workload))
        result = Compared(workload=workload.name, about=workload.about)
        results.append(result)
        for number in range(options.rounds):
            result.ours.append(measure(asyncio.run(sides.run_ours(shape, workload, prompts))))
            with peer.server(programs, shape, options.server_arguments) as url:
                result.theirs.append(measure(asyncio.run(sides.run_theirs(url, shape, workload, prompts))))
            if workload.limit:
                result.limit.append(_limit(programs, shape, workload))
            first = workload.measures[0]
            ours, theirs = (getattr(side[-1], first) * MEASURES[first][1] for side in (result.ours, result.theirs))
            console.print(
                f"{workload.name}, round {number + 1} of {options.rounds}: {MEASURES[first][0]} {ours:,.1f}, "
                f"llama-server {theirs:,.1f}, ratio {result.ratios(first)[-1]:.2f}"
            )
    return results


def print_against(results: Sequence[Compared], console: Console) -> None:
    shown = {workload.name: workload.measures for workload in workloads.WORKLOADS}
    table = Table("", "", "Arriero", "llama-server", "ratio")
    for result in results:
        for place, name in enumerate(shown[result.workload]):
            title, factor = MEASURES[name]
            values = [[getattr(run, name) * factor for run in side] for side in (result.ours, result.theirs)]
            table.add_row("" if place else result.workload, title, *map(_spread, values), _ratio(result.ratios(name)))
        if result.limit:
            table.add_row("", "of llama-batched-bench", "", _spread(result.limit), _ratio(result.of_limit))
    console.print(table)
    for result in results:
        steps = [run.steps for run in result.ours if run.steps is not None]
        shares = [(step.share(step.decode_s), step.share(step.sample_s), step.share(step.rest_s)) for step in steps]
        decode, sample, rest = (statistics.median(part) for part in zip(*shares, strict=True))
        console.print(f"{result.workload}: {result.about}")
        console.print(f"   our steps: {decode:.1%} in llama_decode, {sample:.1%} picking, {rest:.1%} the rest")


def measure(seen: Seen) -> Measured:
    """First tokens are those of the jobs that count; gaps those of the jobs that they disturb, where there are such."""
    counted = [trace for trace in seen.traces if not trace.ask.background]
    watched = [trace for trace in seen.traces if trace.ask.background] or counted
    since = min(trace.sent for trace in counted)
    gaps = [
        later - earlier
        for trace in watched
        for earlier, later in zip(trace.times, trace.times[1:], strict=False)
        if later > since
    ]
    first, gap = spread_of([trace.times[0] - trace.sent for trace in counted if trace.times]), spread_of(gaps)
    tokens, wall_s = sum(trace.tokens for trace in seen.traces), seen.ended - seen.began
    return Measured(
        tokens=tokens,
        wall_s=wall_s,
        tokens_per_s=tokens / wall_s,
        ttft_p50_s=first.p50,
        ttft_p95_s=first.p95,
        gap_p50_s=gap.p50,
        gap_worst_s=gap.highest,
        steps=split_of(seen.steps) if seen.steps else None,
    )


def _spread(values: list[float]) -> str:
    middle = f"{statistics.median(values):,.1f}"
    return f"{middle} ({min(values):,.1f} to {max(values):,.1f})" if len(values) > 1 else middle


def _ratio(values: list[float]) -> str:
    middle = f"[bold]{statistics.median(values):.2f}[/]"
    return f"{middle} ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else middle


def _limit(programs: Path, shape: peer.Shape, workload: Workload) -> float:
    one, sequences = workload.asks[0], min(shape.slots, len(workload.asks))
    return peer.batched(
        programs, shape, sequences=sequences, prompt_tokens=one.prompt_tokens, output_tokens=one.max_tokens
    )
