"""One run: a fleet under steady load, one kind of fault again and again, then rest and a verdict."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog

from arriero.ops.audit.audit import audit
from arriero.ops.chaos.arena import Arena, PairName, Servers, open_servers
from arriero.ops.chaos.faults import FAULTS, Injected
from arriero.ops.chaos.load import Load
from arriero.ops.chaos.verdict import Verdict, judge
from arriero.schemas.errors import LogError

log = structlog.get_logger(__name__)

REST_MAX_S: Final = 180.0
"""How long a broken fleet may take to work off what was accepted, when nothing breaks it any more."""
AUDIT_S: Final = 10.0
"""How long verdict and audit wait for what is still on its way."""
REST_POLL_S: Final = 0.2


class ChaosOptions(msgspec.Struct, frozen=True, kw_only=True):
    pair: PairName = "embedded"
    faults: Sequence[str] = ()
    """Names in FAULTS; none stands for all that the pair knows."""
    workers: int = 3
    injections: int = 10
    """In one run; a run is one fault."""
    rate: float = 40.0
    """Jobs a second."""
    read_share: float = 0.4
    pause_s: float = 0.8
    """Between two injections, on average."""
    seed: int = 0

    @property
    def chosen(self) -> list[str]:
        return [
            name
            for name, fault in FAULTS.items()
            if self.pair in fault.pairs and (not self.faults or name in self.faults)
        ]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one run came to. Written as one line of a results file."""

    pair: PairName
    fault: str
    seed: int
    workers: int
    injections: int
    kills: int
    recovery_s: list[float]
    rest_s: float
    verdict: Verdict


async def run_chaos(options: ChaosOptions, told: Callable[[Result], None], folder: Path | None = None) -> None:
    """Each chosen fault once. `told` is given each result as it comes. Raises SetupError without brokers."""
    with tempfile.TemporaryDirectory(prefix="arriero-chaos-", dir=folder) as scratch:
        async with open_servers(options.pair, Path(scratch)) as servers:
            for number, fault in enumerate(options.chosen):
                of_run = Path(tempfile.mkdtemp(prefix=f"{fault}-", dir=scratch))
                told(await _run(options, fault, servers, of_run, number))


async def _run(options: ChaosOptions, fault: str, servers: Servers, folder: Path, number: int) -> Result:
    """Steps: 1. a fleet under load 2. faults 3. no more jobs; wait until all are done 4. the verdict."""
    rng = random.Random(f"{options.seed}/{fault}")
    total = Injected()
    async with Arena(servers, folder, f"chaos-{options.seed}-{number}", options.workers, rng) as arena:
        # 1.
        load = Load(arena.client, rng, rate=options.rate, read_share=options.read_share)
        publishing = asyncio.create_task(load.publish(), name="chaos load")
        try:
            # 2.
            for _ in range(options.injections):
                await asyncio.sleep(rng.expovariate(1 / options.pause_s))
                injected = await FAULTS[fault].inject(arena)
                total.kills += injected.kills
                total.recovery_s += injected.recovery_s
                if publishing.done():
                    publishing.result()
            # 3.
            began = arena.clock.monotonic()
            load.stop()
            await publishing
            await _rest(arena)
            await load.finish_reading(REST_MAX_S)
            rest_s = arena.clock.monotonic() - began
        finally:
            for task in (publishing, *load.readers):
                task.cancel()
            await asyncio.wait([publishing, *load.readers])
        # 4.
        client = arena.client
        verdict = await judge(client.log, client.names, client.pool, load.asked, load.transcripts)
        deadline = arena.clock.monotonic() + AUDIT_S
        while verdict.lost and arena.clock.monotonic() < deadline:
            # A transaction's offset may show a moment before its events do, which lie with other brokers.
            await asyncio.sleep(REST_POLL_S)
            verdict = await judge(client.log, client.names, client.pool, load.asked, load.transcripts)
        report = await audit(
            client.log, client.bus, names=client.names, pools=[client.pool], clock=arena.clock, patience_s=AUDIT_S
        )
        verdict.audit = sum(report.breaches.values())
        for breach in report.shown:
            verdict.breach(f"audit: {breach.code} {breach.where} {breach.detail}")
        if verdict.unexplained and not FAULTS[fault].resets:
            verdict.token_errors += verdict.unexplained
            verdict.breach(f"readers were reset {verdict.unexplained} times although bus or worker survived")
    return Result(
        pair=options.pair,
        fault=fault,
        seed=options.seed,
        workers=options.workers,
        injections=options.injections,
        kills=total.kills,
        recovery_s=[round(one, 3) for one in total.recovery_s],
        rest_s=round(rest_s, 1),
        verdict=verdict,
    )


async def _rest(arena: Arena) -> None:
    """Waits until every record is settled, for so long at most."""
    names, pool = arena.settings.names, arena.settings.pool
    deadline = arena.clock.monotonic() + REST_MAX_S
    while arena.clock.monotonic() < deadline:
        try:
            job_log = arena.client.log
            jobs = await job_log.backlog(names.workers_group(pool), names.job_topics(pool))
            delayed = await job_log.backlog(names.relay_group(pool), names.delay_topics(pool))
            if not any(topic.count for topic in [*jobs.values(), *delayed.values()]):
                return
        except LogError as error:
            log.info("backlog_unreadable", error=error.message)
        await asyncio.sleep(REST_POLL_S)
