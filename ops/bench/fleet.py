"""`arriero bench fleet`: the same jobs once through the engine alone and once through log, worker, projector and bus,
as real processes; the ratio of the two is what the queue costs. Or, against a fleet whose worker streams nothing and
records only results: then it is what recovery costs.

The two runs of a pair follow each other (engine, fleet, engine, fleet ...), so that a machine whose speed drifts
slows both; the median of the pairs' ratios is what counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Final, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from arriero.ops import models, stack, wiring
from arriero.ops.bench.engine import EngineBenchOptions, Spread, bench_job, run_engine_bench, spread_of
from arriero.ops.settings import EngineSettings, Settings
from arriero.ops.signals import StopRequest
from arriero.ops.supervisor import Supervisor
from arriero.producer.client import Client
from arriero.producer.follow import Ended, Tokens
from arriero.schemas.clock import Clock, SystemClock
from arriero.schemas.codec import decode_state
from arriero.schemas.job import Job
from arriero.schemas.worker import WorkerInfo


class FleetRun(msgspec.Struct, kw_only=True):
    """What the readers of one run saw. Seconds; the first token counts from publishing."""

    tokens: int = 0
    failed: int = 0
    wall_s: float = 0.0
    ttft: Spread = Spread(0.0, 0.0, 0.0, 0.0)
    inter_token: Spread = Spread(0.0, 0.0, 0.0, 0.0)
    done: Spread = Spread(0.0, 0.0, 0.0, 0.0)
    """From the terminal event's time to the reader's end."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s if self.wall_s else 0.0


Base = Literal["engine", "bare"]
AGAINST: Final[dict[Base, str]] = {"engine": "the engine alone", "bare": "a fleet that could not recover"}


class PairedRun(msgspec.Struct, frozen=True):
    base_tokens_per_s: float
    fleet: FleetRun

    @property
    def ratio(self) -> float:
        return self.fleet.tokens_per_s / self.base_tokens_per_s if self.base_tokens_per_s else 0.0


def run_fleet_bench(
    options: EngineBenchOptions, *, against: Base, pairs: int, kafka: str | None, redis: str | None, console: Console
) -> list[PairedRun]:
    """Raises what the stack's parts raise."""
    runs: list[PairedRun] = []

    def run_fleet(worker: str, number: int) -> FleetRun:
        with _folder() as folder:
            settings = _settings(options, folder, kafka, redis, f"{number}-{worker}")
            return asyncio.run(_Run(options, settings, worker).run())

    for number in range(pairs):
        base = run_engine_bench(options) if against == "engine" else run_fleet("bare-worker", number)
        fleet = run_fleet("worker", number)
        runs.append(PairedRun(base.tokens_per_s, fleet))
        console.print(
            f"pair {number + 1} of {pairs}: {against} {base.tokens_per_s:,.1f} tokens/s, "
            f"fleet {fleet.tokens_per_s:,.1f}, ratio {runs[-1].ratio:.3f}"
        )
    return runs


def print_fleet_bench(runs: list[PairedRun], against: Base, console: Console) -> None:
    spreads = Table("fleet, ms", "p50", "p95", "p99", "highest")
    middle = sorted(runs, key=lambda run: run.ratio)[len(runs) // 2].fleet
    rows = (
        ("first token after publishing", middle.ttft),
        ("inter-token, at the reader", middle.inter_token),
        ("recorded to reader's end", middle.done),
    )
    for title, spread in rows:
        values = (spread.p50, spread.p95, spread.p99, spread.highest)
        spreads.add_row(title, *(f"{value * 1000:,.1f}" for value in values))
    console.print(spreads)
    ratios = [run.ratio for run in runs]
    console.print(
        f"fleet against {AGAINST[against]}: median ratio [bold]{statistics.median(ratios):.3f}[/] "
        f"({min(ratios):.3f} to {max(ratios):.3f} over {len(runs)} pairs)"
    )
    failed = sum(run.fleet.failed for run in runs)
    if failed:
        console.print(f"[red]{failed} jobs did not complete[/]")


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="arriero-bench-") as folder:
        yield Path(folder)


def _settings(options: EngineBenchOptions, folder: Path, kafka: str | None, redis: str | None, name: str) -> Settings:
    echo = options.model == "echo"
    return Settings(
        data=folder,
        cache=options.cache,
        kafka=kafka,
        redis=redis,
        namespace=f"bench-{SystemClock().time():.0f}-{name}",
        engine=EngineSettings(
            engine="echo" if echo else "llama",
            model=models.DEMO.name if echo else options.model,
            slots=options.slots,
            ctx=options.n_ctx,
            threads=options.threads,
            gpu_layers=options.gpu_layers,
            chunk=options.chunk_tokens,
        ),
        grace_s=0.0,
        log_json=True,
    )


class _Run:
    """One fleet, one set of jobs."""

    def __init__(self, options: EngineBenchOptions, settings: Settings, worker: str) -> None:
        self._options = options
        self._worker = worker
        self._settings = settings
        self._clock: Clock = SystemClock()
        self._result = FleetRun()
        self._firsts: list[float] = []
        self._gaps: list[float] = []
        self._done: list[float] = []

    async def run(self) -> FleetRun:
        task: asyncio.Task[None] | None = None

        def beside(supervisor: Supervisor, request: StopRequest) -> asyncio.Task[None]:
            nonlocal task
            task = asyncio.create_task(self._measure(supervisor, request), name="bench")
            return task

        await stack.run_roles(self._settings, ("projector", self._worker), log_folder=True, beside=beside)
        assert task is not None
        if task.cancelled():
            raise KeyboardInterrupt
        task.result()
        return self._result

    async def _measure(self, supervisor: Supervisor, request: StopRequest) -> None:
        try:
            for child in supervisor.children:
                await child.became_ready.wait()
            async with wiring.open_client(self._settings) as client:
                (info,) = await _workers(client)
                jobs = [bench_job(self._options, n, chat=info.chat) for n in range(self._options.jobs)]
                await self._warm_up(client, jobs[: info.slots])
                followers = [asyncio.create_task(self._follow(client, job.id)) for job in jobs]
                began = self._began = self._clock.monotonic()
                async for outcome in client.submit_many(jobs, "standard"):
                    if isinstance(outcome, Exception):
                        raise outcome
                await asyncio.gather(*followers)
                self._result.wall_s = self._clock.monotonic() - began
            self._result.ttft = spread_of(self._firsts)
            self._result.inter_token = spread_of(self._gaps)
            self._result.done = spread_of(self._done)
        finally:
            request.asked.set()

    async def _warm_up(self, client: Client, jobs: list[Job]) -> None:
        """A broker that has just started is several times slower; it is not what is measured."""
        short = [msgspec.structs.replace(job, id=f"warm-{job.id}", max_tokens=8) for job in jobs]
        async for outcome in client.submit_many(short, "standard"):
            if isinstance(outcome, Exception):
                raise outcome
        await asyncio.gather(*(client.result(job.id) for job in short))

    async def _follow(self, client: Client, job_id: str) -> None:
        last = 0.0
        async with aclosing(client.stream(job_id)) as items:
            async for item in items:
                now = self._clock.monotonic()
                if isinstance(item, Tokens):
                    self._result.tokens += len(item.tokens)
                    if last:
                        self._gaps.append(now - last)
                    else:
                        self._firsts.append(now - self._began)
                    last = now
                elif isinstance(item, Ended):
                    ended_ms = self._clock.time() * 1000
                    self._result.failed += item.end.status != "completed"
        await asyncio.sleep(0.05)  # the state follows the end; it is not waited for by readers
        (state,) = await client.bus.states([job_id])
        if state is not None and decode_state(state).finished_ms:
            self._done.append(max(0.0, ended_ms - decode_state(state).finished_ms) / 1000)


async def _workers(client: Client) -> list[WorkerInfo]:
    await client.require_worker(10.0)
    return await client.workers()
