"""`arriero bench engine`: many jobs through one engine, without brokers: what a worker can do at best.

All jobs are submitted at once, so the batch is full until the last of them run out. The time to the first token
counts from admission (waiting in the bench's own queue says nothing), the inter-token times are those that a reader
would see.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from arriero.ops import models
from arriero.schemas.clock import Clock, SystemClock
from arriero.schemas.job import Job, Message, Sampling
from arriero.workers.engine.echo import EchoBackend
from arriero.workers.engine.runner import EngineRunner
from arriero.workers.engine.seam import Backend, ModelInfo, StepReport, StepTimings, Work
from arriero.workers.schedule import CHUNK_TOKENS

TASKS: Final = (
    "Explain in a few sentences how {} works.",
    "Write a short story in which {} plays the main part.",
    "List five facts about {}.",
    "What would a child ask about {}? Answer as a teacher.",
    "Compare {} with something from the kitchen.",
)
SUBJECTS: Final = (
    "a mule train",
    "the tide",
    "a steam engine",
    "rain",
    "bread",
    "a lighthouse",
    "the moon",
    "a letter",
)
MIB: Final = 1 << 20


class EngineBenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    model: str = models.DEMO.name
    """A name of the catalogue, a path, or `echo`."""
    cache: Path
    jobs: int = 64
    max_tokens: int = 64
    padding_tokens: int = 0
    """Lengthens every prompt by about so many tokens."""
    slots: int | None = None
    n_ctx: int | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    chunk_tokens: int = CHUNK_TOKENS
    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 0


class Spread(msgspec.Struct, frozen=True):
    """Percentiles, in seconds."""

    p50: float
    p95: float
    p99: float
    highest: float


class StepSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a kind of step went. Seconds are means of one step."""

    steps: int
    mean_s: float
    decode_s: float
    sample_s: float
    rest_s: float
    sequences: float

    def share(self, part_s: float) -> float:
        return part_s / self.mean_s if self.mean_s else 0.0


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Resident memory of this process in bytes; 0 where the system does not tell."""

    total_bytes: int = 0
    file_bytes: int = 0
    """Pages of mapped files: the model's weights, and what the system may take back."""


class EngineBench(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelInfo
    jobs: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    wall_s: float
    ttft: Spread
    inter_token: Spread
    all_steps: StepSplit
    full_steps: StepSplit
    """Steps that only decoded, with every slot taken."""
    before: Memory
    loaded: Memory
    after: Memory

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s if self.wall_s else 0.0


def run_engine_bench(options: EngineBenchOptions, clock: Clock | None = None) -> EngineBench:
    """Load the model, run the jobs, measure. Raises ModelError, BadJob."""
    return asyncio.run(_run(options, clock or SystemClock()))


def print_engine_bench(bench: EngineBench, console: Console) -> None:
    info = bench.model
    console.print(
        f"[bold]{info.name}[/] on {info.device}: {info.offloaded} of {info.layers} layers offloaded, "
        f"{info.slots} slots, {info.n_ctx:,} cells, loaded in {info.load_s:.2f} s"
    )
    failed = f", [red]{bench.failed} failed[/]" if bench.failed else ""
    console.print(
        f"{bench.jobs} jobs{failed}, {bench.prompt_tokens:,} prompt and {bench.output_tokens:,} output tokens "
        f"in {bench.wall_s:.2f} s: [bold]{bench.tokens_per_s:,.1f} tokens/s[/]"
    )
    spreads = Table("ms", "p50", "p95", "p99", "highest")
    for title, spread in (("first token after admission", bench.ttft), ("inter-token", bench.inter_token)):
        values = (spread.p50, spread.p95, spread.p99, spread.highest)
        spreads.add_row(title, *(f"{value * 1000:,.1f}" for value in values))
    console.print(spreads)
    steps = Table("step", "count", "sequences", "ms", "decode", "sample", "rest")
    for title, split in (("all", bench.all_steps), ("full, decoding only", bench.full_steps)):
        parts = (split.decode_s, split.sample_s, split.rest_s)
        shown = (f"{part * 1000:.2f} ms ({split.share(part):.1%})" for part in parts)
        steps.add_row(title, f"{split.steps:,}", f"{split.sequences:.1f}", f"{split.mean_s * 1000:.2f}", *shown)
    console.print(steps)
    if bench.after.total_bytes:
        at = [f"{one.total_bytes / MIB:,.0f} MiB" for one in (bench.before, bench.loaded, bench.after)]
        console.print(
            f"memory: {at[0]} before, {at[1]} with the model, {at[2]} at the end, of which "
            f"{bench.after.file_bytes / MIB:,.0f} MiB are mapped files (the model's: {info.size_bytes / MIB:,.0f} MiB)"
        )


async def _run(options: EngineBenchOptions, clock: Clock) -> EngineBench:
    before = memory()
    gauge = _Gauge(clock, options.jobs)
    async with EngineRunner(_loader(options, clock), gauge.on_step, clock, chunk_tokens=options.chunk_tokens) as runner:
        loaded = memory()
        works = [await _work(runner, options, key) for key in range(options.jobs)]
        started = clock.monotonic()
        for work in works:
            runner.submit(work)
        died = asyncio.ensure_future(asyncio.shield(runner.died))
        finished = asyncio.create_task(gauge.finished.wait(), name="bench-finished")
        await asyncio.wait((died, finished), return_when=asyncio.FIRST_COMPLETED)
        wall_s = clock.monotonic() - started
        if not finished.done():
            finished.cancel()
            raise died.result()
        died.cancel()
        slots = runner.info.slots
        return EngineBench(
            model=runner.info,
            jobs=options.jobs,
            failed=gauge.failed,
            prompt_tokens=sum(len(work.prompt) for work in works),
            output_tokens=gauge.tokens,
            wall_s=wall_s,
            ttft=spread_of(gauge.firsts),
            inter_token=spread_of(gauge.gaps),
            all_steps=split_of(gauge.steps),
            full_steps=split_of([one for one in gauge.steps if one.decode_tokens == slots and not one.prefill_tokens]),
            before=before,
            loaded=loaded,
            after=memory(),
        )


def _loader(options: EngineBenchOptions, clock: Clock) -> Callable[[], Backend]:
    if options.model == "echo":
        return lambda: EchoBackend(slots=options.slots or 64)
    # Here, so that the echo engine and `--help` work without the worker's extra.
    from arriero.workers.engine.llama.backend import LlamaBackend
    from arriero.workers.engine.llama.model import LlamaSettings

    found = models.resolve(options.model, options.cache)
    settings = LlamaSettings(
        path=found.path,
        name=found.name,
        slots=options.slots,
        n_ctx=options.n_ctx,
        threads=options.threads,
        gpu_layers=options.gpu_layers,
    )
    return lambda: LlamaBackend(settings, clock)


def bench_job(options: EngineBenchOptions, number: int, *, chat: bool) -> Job:
    """The bench's job of this number: the same for every engine and every way to it."""
    text = TASKS[number % len(TASKS)].format(SUBJECTS[number // len(TASKS) % len(SUBJECTS)])
    if options.padding_tokens:
        text = f"{text}\n{'And then they went on their way. ' * (options.padding_tokens // 7)}"
    return Job(
        id=f"bench-{number}",
        prompt=None if chat else text,
        messages=[Message("user", text)] if chat else None,
        sampling=Sampling(temperature=options.temperature, top_p=options.top_p, top_k=options.top_k, seed=number),
        max_tokens=options.max_tokens,
    )


async def _work(runner: EngineRunner, options: EngineBenchOptions, key: int) -> Work:
    job = bench_job(options, key, chat=runner.info.chat and options.model != "echo")
    return Work(
        key=key,
        prompt=await runner.prepare(job),
        sampling=job.sampling,
        seed=key,
        max_tokens=options.max_tokens,
    )


class _Gauge:
    """Listens to the engine and notes times."""

    def __init__(self, clock: Clock, jobs: int) -> None:
        self._now = clock.monotonic
        self._left = jobs
        self._admitted: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self.finished = asyncio.Event()
        self.steps: list[StepTimings] = []
        self.firsts: list[float] = []
        self.gaps: list[float] = []
        self.tokens = 0
        self.failed = 0

    def on_step(self, report: StepReport) -> None:
        now = self._now()
        timings = report.timings
        self.steps.append(timings)
        for update in report.updates:
            if update.admitted:
                # Admission opened the step that is told of now.
                self._admitted.setdefault(update.key, now - timings.decode_s - timings.sample_s - timings.rest_s)
            if update.tokens:
                self.tokens += len(update.tokens)
                if update.first_token:
                    self.firsts.append(now - self._admitted[update.key])
                else:
                    self.gaps.append(now - self._last[update.key])
                self._last[update.key] = now
            if update.ending is not None:
                self.failed += update.ending.kind != "finished"
                self._left -= 1
        if self._left == 0:
            self.finished.set()


def spread_of(values: list[float]) -> Spread:
    if not values:
        return Spread(0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)
    return Spread(*(ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.95, 0.99, 1.0)))


def split_of(steps: Sequence[StepTimings]) -> StepSplit:
    count = max(1, len(steps))
    decode_s, sample_s, rest_s = (
        sum(getattr(step, part) for step in steps) / count for part in ("decode_s", "sample_s", "rest_s")
    )
    return StepSplit(
        steps=len(steps),
        mean_s=decode_s + sample_s + rest_s,
        decode_s=decode_s,
        sample_s=sample_s,
        rest_s=rest_s,
        sequences=sum(step.sequences for step in steps) / count,
    )


def memory() -> Memory:
    """This process's resident memory, from Linux's /proc."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("VmRSS", "RssFile"):
                sizes[name] = int(rest.split()[0]) * 1024
    return Memory(total_bytes=sizes.get("VmRSS", 0), file_bytes=sizes.get("RssFile", 0))
