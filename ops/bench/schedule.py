"""`arriero bench schedule`: an arrival trace through the scheduler in virtual time, once with its classes and once
without (every job standard, as a server with one line has it), and what share of each class kept its promise.

There is no model: a step takes `StepCost`, and every sequence decodes to its length. So a day's traffic replays in
seconds, and the same trace gives the same numbers on any machine; only what planning costs is measured on this one.

A trace is JSON lines: {"at": seconds, "class", "tenant", "prompt": tokens, "output": tokens, "prefix": tokens of the
prompt shared with jobs of the same tenant (0)}. Without one it is drawn from a seed: interactive work in bursts,
standard work steadily, a batch dropped in at once now and then; lengths heavy-tailed (log-normal), as they are in
published traces of such services.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from arriero.schemas.errors import SetupError
from arriero.schemas.job import CLASSES, PriorityClass, Sampling
from arriero.workers.engine.seam import Pick, StepOutcome, Work
from arriero.workers.schedule import Limits, Plan, Scheduler

SLO: Final[dict[PriorityClass, tuple[float, float]]] = {
    "interactive": (2.0, 1.0),
    "standard": (30.0, 2.0),
    "batch": (3_600.0, float("inf")),
}
"""By class: seconds to the first token, and the longest wait for any later one."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    at: float
    priority: PriorityClass = msgspec.field(name="class", default="standard")
    tenant: str = "default"
    prompt: int = 128
    output: int = 64
    prefix: int = 0


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step: for reading the weights, and for each token. The defaults are a small model on two cores."""

    step_s: float = 0.040
    token_s: float = 0.003


class ScheduleBenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    trace: Path | None = None
    seed: int = 1
    minutes: float = 30.0
    load: float = 0.9
    """Work that arrives, as a share of what the machine could do at best."""
    slots: int = 16
    n_ctx: int = 16_384
    cost: StepCost = StepCost()


class ClassResult(msgspec.Struct, kw_only=True):
    jobs: int
    ttft_p50_s: float
    ttft_p95_s: float
    gap_p95_s: float
    """Of each job its longest wait between two tokens."""
    kept: float
    """Share of jobs that kept the class's promise."""


class Replay(msgspec.Struct, kw_only=True):
    classes: dict[str, ClassResult]
    wall_s: float
    """Virtual."""
    tokens: int
    steps: int
    preemptions: int
    cached_tokens: int
    plan_us: float
    """Microseconds of this machine that planning one step took; the median."""


class _Life(msgspec.Struct, kw_only=True):
    arrival: Arrival
    first: float = 0.0
    last: float = 0.0
    gap: float = 0.0


def read_trace(path: Path) -> list[Arrival]:
    """Raises SetupError for what is no trace."""
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
        trace = [msgspec.json.decode(line, type=Arrival) for line in lines]
    except (OSError, msgspec.MsgspecError) as error:
        raise SetupError(f"{path} is no trace: {error}", code="bad_setting") from error
    if not trace or any(not (one.prompt > one.prefix >= 0 < one.output and one.at >= 0) for one in trace):
        raise SetupError(f"{path} is no trace: lengths and times must be positive", code="bad_setting")
    return sorted(trace, key=lambda one: one.at)


def draw_trace(options: ScheduleBenchOptions) -> list[Arrival]:
    """Bursts, a steady stream and batches, scaled to the load."""
    rng = random.Random(options.seed)
    horizon = options.minutes * 60

    def length(median: float, spread: float, most: int) -> int:
        return max(4, min(most, int(rng.lognormvariate(0.0, spread) * median)))

    def job(at: float, priority: PriorityClass, tenant: str, prefix: int = 0) -> Arrival:
        prompt = prefix + length(120 if priority == "batch" else 60, 1.0, 2_000)
        return Arrival(
            at=at, priority=priority, tenant=tenant, prompt=prompt, output=length(60, 0.8, 512), prefix=prefix
        )

    cost = options.cost
    per_token_s = cost.token_s + cost.step_s / options.slots
    budget_s = horizon * options.load
    trace: list[Arrival] = []

    def fill(share: float, make: str) -> None:
        spent = 0.0
        while spent < budget_s * share:
            at = rng.uniform(0, horizon)
            if make == "burst":
                new = [
                    job(at + rng.uniform(0, 3), "interactive", rng.choice("ab"), 200) for _ in range(rng.randint(1, 12))
                ]
            elif make == "steady":
                new = [job(at, "standard", rng.choice("cde"))]
            else:
                new = [job(at, "batch", "f", 300) for _ in range(rng.randint(20, 120))]
            trace.extend(new)
            spent += sum(one.output * per_token_s + (one.prompt - one.prefix) * cost.token_s for one in new)

    fill(0.2, "burst")
    fill(0.3, "steady")
    fill(0.5, "batch")
    return sorted(trace, key=lambda one: one.at)


def replay(trace: Sequence[Arrival], options: ScheduleBenchOptions, *, classes: bool = True) -> Replay:
    """Run the trace; without `classes` every job is standard and all are one tenant's."""
    limits = Limits(
        slots=options.slots,
        n_ctx=options.n_ctx,
        n_ctx_sequence=options.n_ctx,
        n_batch=512,
        holders=256 - options.slots,
        retained=options.n_ctx // 4,
    )
    scheduler = Scheduler(limits)
    lives: dict[int, _Life] = {}
    now = 0.0
    coming = 0
    steps = tokens = preemptions = cached = 0
    planned_s: list[float] = []
    while coming < len(trace) or not scheduler.idle:
        if scheduler.idle:
            now = max(now, trace[coming].at)
        while coming < len(trace) and trace[coming].at <= now:
            arrival = trace[coming]
            lives[coming] = _Life(arrival=arrival)
            scheduler.add(_work(coming, arrival, classes=classes))
            coming += 1
        began = time.perf_counter()
        plan = scheduler.plan(now)
        planned_s.append(time.perf_counter() - began)
        took_s = options.cost.step_s + options.cost.token_s * (plan.decode_tokens + plan.prefill_tokens)
        now += took_s
        steps += 1
        preemptions += len(plan.preempted)
        cached += sum(count for _, count in plan.shared)
        tokens += _decode(scheduler, plan, took_s, now, lives)
    return Replay(
        classes={
            name: _summary([one for one in lives.values() if one.arrival.priority == name], name) for name in CLASSES
        },
        wall_s=now,
        tokens=tokens,
        steps=steps,
        preemptions=preemptions,
        cached_tokens=cached,
        plan_us=statistics.median(planned_s) * 1e6,
    )


def run_schedule_bench(options: ScheduleBenchOptions, console: Console) -> tuple[Replay, Replay]:
    """With classes and without. Raises SetupError."""
    trace = read_trace(options.trace) if options.trace else draw_trace(options)
    longest = max(one.prompt + one.output for one in trace)
    if longest > options.n_ctx:
        raise SetupError(f"a job of {longest:,} tokens does not fit --n-ctx {options.n_ctx:,}", code="bad_setting")
    with console.status(f"{len(trace):,} jobs ..."):
        return replay(trace, options), replay(trace, options, classes=False)


def print_schedule_bench(ours: Replay, line: Replay, console: Console) -> None:
    for title, run in (("by class, tenant and deadline", ours), ("one line", line)):
        table = Table("class", "jobs", "TTFT p50", "p95", "longest gap p95", "kept its promise", title=title)
        for name, result in run.classes.items():
            table.add_row(
                name,
                f"{result.jobs:,}",
                f"{result.ttft_p50_s:,.2f} s",
                f"{result.ttft_p95_s:,.2f} s",
                f"{result.gap_p95_s:,.2f} s",
                f"{result.kept:.1%}",
            )
        console.print(table)
        console.print(
            f"{run.tokens:,} tokens in {run.wall_s:,.0f} s ({run.tokens / run.wall_s:,.1f} tokens/s), "
            f"{run.steps:,} steps, {run.preemptions:,} preemptions, {run.cached_tokens:,} prompt tokens shared; "
            f"planning took {run.plan_us:,.0f} us a step"
        )


def _work(key: int, arrival: Arrival, *, classes: bool) -> Work:
    # The shared beginning is the tenant's own; what follows is nobody else's.
    shared = _shared(arrival.tenant, arrival.prefix)
    return Work(
        key=key,
        prompt=[*shared, *range(1_000_000 + key * 10_000, 1_000_000 + key * 10_000 + arrival.prompt - arrival.prefix)],
        sampling=Sampling(),
        seed=0,
        max_tokens=arrival.output,
        priority=arrival.priority if classes else "standard",
        tenant=arrival.tenant if classes else "all",
        arrived=arrival.at,
    )


def _shared(tenant: str, count: int) -> list[int]:
    start = sum(ord(character) for character in tenant) * 4_000
    return list(range(start, start + count))


def _decode(scheduler: Scheduler, plan: Plan, took_s: float, now: float, lives: dict[int, _Life]) -> int:
    picks = [Pick(feed.slot, 1) for feed in plan.step.feeds if feed.pick]
    for picked in scheduler.apply(StepOutcome(picks, decode_s=took_s)):
        life = lives[picked.key]
        if life.first:
            life.gap = max(life.gap, now - life.last)
        else:
            life.first = now
        life.last = now
        if picked.full:
            scheduler.finish(picked.key)
    return len(picks)


def _summary(lives: list[_Life], name: PriorityClass) -> ClassResult:
    ttft = sorted(life.first - life.arrival.at for life in lives)
    gaps = sorted(life.gap for life in lives)
    first_s, gap_s = SLO[name]
    kept = sum(life.first - life.arrival.at <= first_s and life.gap <= gap_s for life in lives)

    def at(values: list[float], share: float) -> float:
        return values[min(len(values) - 1, int(len(values) * share))] if values else 0.0

    return ClassResult(
        jobs=len(lives),
        ttft_p50_s=at(ttft, 0.5),
        ttft_p95_s=at(ttft, 0.95),
        gap_p95_s=at(gaps, 0.95),
        kept=kept / len(lives) if lives else 1.0,
    )
