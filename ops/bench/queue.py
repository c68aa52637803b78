"""`arriero bench queue`: what the queue can do when the work is nothing, against Celery doing the same nothing.

A side publishes all jobs, then one worker process works them off; Arriero's on Kafka and on the embedded files,
Celery's on the same Redis, acknowledging late. The sides take turns, so that a machine whose speed drifts slows all;
the median of the rounds' ratios is what counts.

    published   from the first call to the last acknowledgement: both are durable as their brokers are set
    done        from the first recorded result to the last

Then jobs come at a steady rate, and each is timed from the engine's last word to the moment at which somebody who reads
the log sees its event: `done to recorded`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from arriero.ops import stack, wiring
from arriero.ops.bench.engine import Spread, spread_of
from arriero.ops.settings import EngineSettings, Settings
from arriero.ops.signals import StopRequest
from arriero.ops.supervisor import Supervisor
from arriero.producer.client import Client
from arriero.schemas.clock import SystemClock
from arriero.schemas.codec import decode_event
from arriero.schemas.errors import SetupError
from arriero.schemas.event import Event, SettlingEvent, Terminal
from arriero.schemas.job import Job
from arriero.transports.log import Positions

PROMPT: Final = "hay"
"""One token of the echo engine."""
POLL_S: Final = 0.02
"""Celery tells nobody that all is done; its results are counted this often."""
WARM_UP: Final = 5_000
"""Jobs before a steady run is timed: what has just started, a JVM above all, is several times slower."""


class QueueBenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    jobs: int = 20_000
    celery_jobs: int = 2_000
    rounds: int = 3
    rate: int = 100
    """Jobs a second of the steady run."""
    steady_s: float = 20.0


class Rates(msgspec.Struct, frozen=True):
    """Jobs a second."""

    published: float
    done: float


class QueueBench(msgspec.Struct, kw_only=True):
    """By side, `kafka`, `embedded` and `celery`: the rounds. Seconds by side of Arriero: done to recorded."""

    rounds: dict[str, list[Rates]] = {}
    recorded: dict[str, Spread] = {}

    def ratio(self, side: str, what: Callable[[Rates], float]) -> list[float]:
        """Of each round, this side against Celery."""
        pairs = zip(self.rounds[side], self.rounds["celery"], strict=True)
        return [what(ours) / what(theirs) for ours, theirs in pairs]


def run_queue_bench(options: QueueBenchOptions, *, kafka: str, redis: str, console: Console) -> QueueBench:
    """Raises SetupError(missing_extra) without Celery, and what the stack's parts raise."""
    wiring.need("bench", "celery")
    result = QueueBench(rounds={"kafka": [], "embedded": [], "celery": []})
    for number in range(options.rounds):
        for side, rounds in result.rounds.items():
            with tempfile.TemporaryDirectory(prefix="arriero-bench-") as folder:
                if side == "celery":
                    rates = asyncio.run(_celery(options.celery_jobs, redis, Path(folder)))
                else:
                    settings = _settings(Path(folder), side, kafka, redis, number)
                    rates = asyncio.run(_burst(settings, options.jobs))
            rounds.append(rates)
            console.print(
                f"round {number + 1} of {options.rounds}, {side}: "
                f"{rates.published:,.0f} published/s, {rates.done:,.0f} done/s"
            )
    for side in ("kafka", "embedded"):
        with tempfile.TemporaryDirectory(prefix="arriero-bench-") as folder:
            settings = _settings(Path(folder), side, kafka, redis, options.rounds)
            result.recorded[side] = asyncio.run(_steady(settings, options))
    return result


def print_queue_bench(result: QueueBench, console: Console) -> None:
    table = Table("", "published/s", "done/s", "published, ratio", "done, ratio")
    for side, rounds in result.rounds.items():
        ratios = []
        for what in (_published, _done):
            values = result.ratio(side, what)
            ratios.append(f"{statistics.median(values):,.1f} ({min(values):,.1f} to {max(values):,.1f})")
        published, done = (statistics.median(map(what, rounds)) for what in (_published, _done))
        table.add_row(side, f"{published:,.0f}", f"{done:,.0f}", *(ratios if side != "celery" else ("1", "1")))
    console.print(table)
    steady = Table("done to recorded, ms", "p50", "p95", "p99", "highest")
    for side, spread in result.recorded.items():
        moments = (spread.p50, spread.p95, spread.p99, spread.highest)
        steady.add_row(side, *(f"{moment * 1000:,.1f}" for moment in moments))
    console.print(steady)


def _published(rates: Rates) -> float:
    return rates.published


def _done(rates: Rates) -> float:
    return rates.done


# --- Arriero ------------------------------------------------------------------------------------------------


def _settings(folder: Path, side: str, kafka: str, redis: str, number: int) -> Settings:
    return Settings(
        data=folder,
        cache=folder,
        kafka=kafka if side == "kafka" else None,
        redis=redis if side == "kafka" else None,
        namespace=f"bench-{SystemClock().time():.0f}-{number}",
        partitions=4,
        engine=EngineSettings(engine="echo", slots=255),
        grace_s=0.0,
        log_json=True,
    )


class _Recorded:
    """Follows the events: when how many jobs were recorded."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.count = 0
        self.first = self.last = 0.0
        self.waits: list[float] = []
        """Seconds from the engine's last word to being readable, by job."""
        self._news = asyncio.Condition()

    async def follow(self, client: Client, start: Positions) -> None:
        async with aclosing(client.log.tail([client.names.events], start)) as batches:
            async for batch in batches:
                now, now_s = self.clock.monotonic(), self.clock.time()
                async with self._news:
                    for record in batch:
                        self._note(decode_event(record.value or b""), now, now_s)
                    self._news.notify_all()

    def _note(self, event: Event, now: float, now_s: float) -> None:
        if isinstance(event, SettlingEvent):
            self.count += 1
            self.first, self.last = self.first or now, now
        if isinstance(event, Terminal):
            self.waits.append(now_s - event.time_ms / 1000)

    async def until(self, count: int) -> None:
        async with self._news:
            await self._news.wait_for(lambda: self.count >= count)


@asynccontextmanager
async def _recording(client: Client) -> AsyncIterator[_Recorded]:
    recorded = _Recorded()
    ends = await client.log.ends([client.names.events])
    task = asyncio.create_task(recorded.follow(client, ends), name="bench tail")
    try:
        yield recorded
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


@asynccontextmanager
async def _worker(settings: Settings) -> AsyncIterator[None]:
    """One worker process; entered when it is ready."""
    ready: asyncio.Future[StopRequest] = asyncio.get_running_loop().create_future()

    def beside(supervisor: Supervisor, request: StopRequest) -> asyncio.Task[None]:
        async def tell() -> None:
            await supervisor.children[0].became_ready.wait()
            ready.set_result(request)

        return asyncio.create_task(tell(), name="bench ready")

    running = asyncio.create_task(
        stack.run_roles(settings, ("worker",), log_folder=True, beside=beside), name="bench worker"
    )
    waits: list[asyncio.Future[Any]] = [running, ready]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
        raise KeyboardInterrupt
    try:
        yield
    finally:
        ready.result().asked.set()
        await running


async def _burst(settings: Settings, count: int) -> Rates:
    async with wiring.open_client(settings) as client, _recording(client) as recorded:
        began = recorded.clock.monotonic()
        await _publish(client, count, "job")
        published = count / (recorded.clock.monotonic() - began)
        async with _worker(settings):
            await recorded.until(count)
        return Rates(published, count / max(1e-9, recorded.last - recorded.first))


async def _steady(settings: Settings, options: QueueBenchOptions) -> Spread:
    loop = asyncio.get_running_loop()
    async with wiring.open_client(settings) as client, _worker(settings), _recording(client) as recorded:
        await _publish(client, WARM_UP, "warm")
        await recorded.until(WARM_UP)
        recorded.waits.clear()
        count, began = int(options.rate * options.steady_s), loop.time()
        for number in range(count):
            await asyncio.sleep(began + number / options.rate - loop.time())
            await client.submit_job(Job(id=f"steady-{number}", prompt=PROMPT))
        await recorded.until(WARM_UP + count)
        return spread_of(recorded.waits)


async def _publish(client: Client, count: int, prefix: str) -> None:
    jobs = (Job(id=f"{prefix}-{number}", prompt=PROMPT) for number in range(count))
    async for outcome in client.submit_many(jobs, "standard"):
        if isinstance(outcome, Exception):
            raise outcome


# --- Celery -------------------------------------------------------------------------------------------------


async def _celery(count: int, redis_url: str, folder: Path) -> Rates:
    """One worker process of one task at a time, with a result backend: a result is recorded."""
    base = redis_url.rpartition("/")[0]
    broker, results = f"{base}/14", f"{base}/15"
    async with Redis.from_url(broker) as queue, Redis.from_url(results) as recorded:
        for database in (queue, recorded):
            if await database.dbsize():
                raise SetupError(f"{redis_url}: databases 14 and 15 must be empty for Celery", code="bad_setting")
        environment = {**os.environ, "REDIS_BROKER": broker, "REDIS_RESULTS": results}
        try:
            published = await _celery_publish(count, environment)
            async with _celery_worker(environment, folder):
                done = await _celery_done(recorded, count)
        finally:
            await queue.flushdb()
            await recorded.flushdb()
    return Rates(published, done)


async def _celery_publish(count: int, environment: dict[str, str]) -> float:
    """In a process of its own, which says how many a second it has published."""
    code = (
        "import sys, time; from arriero.ops.bench.celery_peer import echo; n = int(sys.argv[1]); t = time.monotonic()\n"
        f"for _ in range(n): echo.delay({PROMPT!r})\n"
        "print(n / (time.monotonic() - t))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(count), env=environment, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise SetupError(f"Celery's publisher ended with status {process.returncode}", code="child_failed")
    return float(said)


@asynccontextmanager
async def _celery_worker(environment: dict[str, str], folder: Path) -> AsyncIterator[None]:
    arguments = "-m celery -A arriero.ops.bench.celery_peer worker -c 1 --loglevel WARNING --without-gossip"
    with (folder / "celery.log").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments.split(), env=environment, cwd=folder, stdout=output, stderr=output
        )
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _celery_done(recorded: Redis, count: int) -> float:
    clock = SystemClock()
    first, at_first = 0.0, 0
    while (found := await recorded.dbsize()) < count:
        if found and not first:
            first, at_first = clock.monotonic(), found
        await asyncio.sleep(POLL_S)
    return (count - at_first) / (clock.monotonic() - first)
