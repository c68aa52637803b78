"""One run: a load, a storm of faults, calm, and a verdict. Everything follows from the seed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import structlog

from arriero.ops.audit.audit import audit
from arriero.ops.crashes import CrashReport
from arriero.ops.simulation.faults import Drawn, storm
from arriero.ops.simulation.fleet import POOL, SimulatedFleet
from arriero.ops.simulation.judge import judge
from arriero.ops.simulation.load import MixedLoad
from arriero.ops.simulation.loop import Host, Stuck, VirtualLoop
from arriero.ops.simulation.watch import Watch
from arriero.producer.client import Client
from arriero.schemas.errors import LogError

MAX_ATTEMPTS: Final = 4
REST_MAX_S: Final = 2_000.0
"""Virtual seconds within which everything must have ended once the weather is clear: four attempts and their delays
take less."""
REST_POLL_S: Final = 0.5

Prepare = Callable[[SimulatedFleet], list[Drawn]]
"""Schedules what is to happen to a fleet."""


class SimulationOptions(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    jobs: int = 50
    workers: int = 3
    faults: int = 12
    storm_s: float = 5.0
    """About as long as the jobs take: faults that strike an idle fleet show little."""
    rate: float = 20.0
    """Jobs a second."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    broken: str
    """The first promise that did not hold; empty when all did."""
    jobs: int
    events: int
    callbacks: int
    """How often a simulated process could have been stopped."""
    virtual_s: float
    digest: str
    faults: list[Drawn]
    trace: list[str]


def simulate(options: SimulationOptions, prepare: Prepare | None = None) -> Outcome:
    """Run one seed. `prepare` schedules faults in place of a storm that is drawn."""
    with quiet():
        loop = VirtualLoop()
        try:
            return loop.run_until_complete(_Run(loop, options).run(prepare))
        finally:
            loop.dispose()


class _Run:
    def __init__(self, loop: VirtualLoop, options: SimulationOptions) -> None:
        self._loop = loop
        self._options = options
        self._rng = random.Random(f"arriero {options.seed}")
        self._fleet = SimulatedFleet(loop, self._rng)
        self._watch = Watch(self._fleet.names, MAX_ATTEMPTS)
        self._fleet.log_file.after_write = self._watch.look
        self._fleet.crashed = self._note_crash

    async def run(self, prepare: Prepare | None) -> Outcome:
        """Steps: 1. topics, processes, load 2. the storm 3. calm: wait until all is done 4. the verdict."""
        options, fleet = self._options, self._fleet
        host = Host(self._loop, "client")
        jobs, faults = 0, list[Drawn]()
        try:
            async with fleet.client(host) as client:
                # 1.
                await client.log.ensure(fleet.topics())
                for name in ("projector", "relay", *(f"w{number}" for number in range(options.workers))):
                    fleet.start(name)
                load = MixedLoad(client, self._rng, rate=options.rate, read_share=0.4, jobs=options.jobs)
                publishing = host.start(load.publish())
                # 2.
                faults = prepare(fleet) if prepare else storm(fleet, options.storm_s, options.faults)
                # 3.
                async with asyncio.timeout(REST_MAX_S):
                    await publishing
                    await asyncio.sleep(options.storm_s - self._loop.time())
                    await self._rest(client)
                await load.finish_reading(REST_MAX_S if not fleet.log_deleted else REST_POLL_S)
                # 4.
                jobs = len(load.asked)
                broken = self._watch.broken or await judge(client.log, fleet, self._watch, load)
                if not fleet.log_deleted:
                    broken = broken or await self._audit(client)
        except TimeoutError:
            broken = self._watch.broken or "not everything has ended"
        except Stuck as stuck:
            broken = self._watch.broken or str(stuck)
        finally:
            fleet.open = False
        return Outcome(
            seed=options.seed,
            broken=fleet.bug or broken,
            jobs=jobs,
            events=self._watch.events,
            callbacks=sum(one.callbacks for one in fleet.hosts.values()),
            virtual_s=self._loop.time(),
            digest=self._watch.digest,
            faults=faults,
            trace=self._watch.trace,
        )

    def _note_crash(self, report: CrashReport) -> None:
        self._watch.in_hand |= {(job.id, job.origin) for job in report.jobs}

    async def _audit(self, client: Client) -> str:
        """What the command `arriero audit` would say."""
        report = await audit(client.log, client.bus, names=self._fleet.names, pools=[POOL], clock=client.clock, shown=1)
        return "" if report.holds else f"audit: {report.breaches} {report.shown}"

    async def _rest(self, client: Client) -> None:
        """Until every record of job and delay topics is settled."""
        names = self._fleet.names
        groups = {
            names.workers_group(POOL): names.job_topics(POOL),
            names.relay_group(POOL): names.delay_topics(POOL),
        }
        while not self._watch.broken:
            with contextlib.suppress(LogError):
                left = [await client.log.backlog(group, topics) for group, topics in groups.items()]
                if not any(one.count for found in left for one in found.values()):
                    return
            await asyncio.sleep(REST_POLL_S)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without log entries: they would take most of the time."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
