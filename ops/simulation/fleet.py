"""The simulated processes, built from the fleet's own parts."""

from __future__ import annotations

import asyncio
import random
import signal
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import msgspec

from arriero.ops.crashes import CrashLog, CrashReport, crash_report
from arriero.ops.simulation.files import NOWHERE, File, SimulatedDatabase, World
from arriero.ops.simulation.loop import Host, HostClock, VirtualLoop
from arriero.producer.client import Client
from arriero.schemas.codec import encode
from arriero.schemas.errors import BusUnavailable, LogUnavailable
from arriero.schemas.job import Job
from arriero.schemas.names import Names
from arriero.schemas.state import JobState
from arriero.transports.embedded import groups, records, streams
from arriero.transports.embedded.bus import EmbeddedBus
from arriero.transports.embedded.db import Database
from arriero.transports.embedded.log import EmbeddedLog
from arriero.transports.log import Outgoing, Placed, TopicSpec
from arriero.workers.engine.echo import EchoBackend
from arriero.workers.engine.runner import prepare_one
from arriero.workers.engine.seam import ModelInfo, Pick, Prepared, StepOutcome, StepPlan, StepReport, Work
from arriero.workers.engine.turns import Turns
from arriero.workers.flight import _SIZE as RECORDER_BYTES
from arriero.workers.flight import FlightRecorder
from arriero.workers.projector import Projector
from arriero.workers.relay import Relay
from arriero.workers.schedule import CHUNK_TOKENS
from arriero.workers.worker import Worker, WorkerSettings

EPOCH_S: Final = 1_760_000_000.0
POOL: Final = "default"
PARTITIONS: Final = 2
SLOTS: Final = 4
STEP_S: Final = 0.04
"""Of the engine."""
ACCENT_SHIFT: Final = 32
"""Echoed tokens are smaller."""
ACCENT_BITS: Final = 16
AT_TOKENISING: Final = "!"
AT_PREFILL: Final = "#"
AT_DECODING: Final = "$"
MARKERS: Final = (AT_TOKENISING, AT_PREFILL, AT_DECODING)
"""Prompts that begin with these crash the process that handles them, then."""
FATAL_TOKEN: Final = 4
AGAIN_S: Final = 0.2
"""After a process has ended by an error; its supervisor would start it anew."""


class SimulatedBackend(EchoBackend):
    """Echoes, and sometimes fails a token for a reason that passes. No two say the same: ids of their tokens differ, as
    sampled ones would, so that a text patched together from two runs does not look like one of them."""

    def __init__(self, rng: random.Random, failing: Callable[[], float], crash: Callable[[], None]) -> None:
        """crash: ends this process."""
        super().__init__(slots=SLOTS)
        self._rng = rng
        self._crash = crash
        self._fuses: dict[int, int] = {}
        """By slot: how many steps more this process survives."""
        self._failing = failing
        self._accent = rng.getrandbits(ACCENT_BITS) << ACCENT_SHIFT
        self._info = msgspec.structs.replace(self._info, n_vocab=1 << ACCENT_SHIFT + ACCENT_BITS)

    def prepare(self, job: Job) -> list[int]:
        if (job.prompt or "").startswith(AT_TOKENISING):
            self._die()
        return super().prepare(job)

    def begin(self, slot: int, work: Work) -> None:
        super().begin(slot, work)
        marker = super().piece(work.prompt[0])[:1].decode()
        if marker == AT_PREFILL:
            self._fuses[slot] = 0
        elif marker == AT_DECODING:
            self._fuses[slot] = max(0, FATAL_TOKEN - len(work.resume))

    def end(self, slot: int) -> None:
        super().end(slot)
        self._fuses.pop(slot, None)

    def step(self, plan: StepPlan) -> StepOutcome:
        for feed in plan.feeds:
            if feed.slot in self._fuses:
                if self._fuses[feed.slot] == 0:
                    self._die()
                self._fuses[feed.slot] -= 1
        outcome = super().step(plan)
        outcome.picks = [self._say(pick) for pick in outcome.picks]
        return outcome

    def piece(self, token: int) -> bytes:
        return super().piece(token & (1 << ACCENT_SHIFT) - 1)

    def _die(self) -> NoReturn:
        self._crash()
        raise AssertionError("nobody is there to hear this")

    def _say(self, pick: Pick) -> Pick:
        share = self._failing()
        if share and self._rng.random() < share:
            return Pick(pick.slot, 0, error="a passing fault")
        return pick if self.is_end(pick.token) else Pick(pick.slot, pick.token | self._accent)


class SimulatedRunner:
    """The engine's turns without its thread: one after the other, each taking virtual time."""

    def __init__(
        self,
        backend: SimulatedBackend,
        on_step: Callable[[StepReport], None],
        clock: HostClock,
        recorder: FlightRecorder,
    ) -> None:
        self._turns = Turns(backend, clock, CHUNK_TOKENS, recorder)
        self._recorder = recorder
        self._backend = backend
        self._on_step = on_step
        self._work = asyncio.Event()
        self._commands: list[Work | int] = []
        self.info: ModelInfo = backend.info

    async def __aenter__(self) -> SimulatedRunner:
        self.died: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="engine")
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def prepare_all(self, jobs: Sequence[tuple[Job, str]]) -> list[Prepared]:
        return [prepare_one(self._backend, self._recorder, job, label) for job, label in jobs]

    def submit(self, work: Work) -> None:
        self._commands.append(work)
        self._work.set()

    def cancel(self, key: int) -> None:
        self._commands.append(key)
        self._work.set()

    async def _run(self) -> None:
        while True:
            if self._turns.idle and not self._commands:
                self._work.clear()
                await self._work.wait()
                self._turns.wake()
            commands, self._commands = self._commands, []
            for command in commands:
                if isinstance(command, int):
                    self._turns.cancel(command)
                else:
                    self._turns.submit(command)
            report = self._turns.turn()
            await asyncio.sleep(STEP_S)
            if report is not None:
                self._on_step(report)


class SimulatedRecorder(FlightRecorder):
    """Outlives its process without a file. It is also the path that a supervisor reads it by."""

    def __init__(self) -> None:
        super().__init__(None)
        self._map = cast(Any, bytearray(RECORDER_BYTES))

    def read_bytes(self) -> bytes:
        return bytes(cast(Any, self._map))

    def with_name(self, name: str) -> Path:
        return NOWHERE / name

    name = "flight"


class SimulatedFleet:
    """Files, and processes on them. Processes that end or are killed are started again as long as it is `open`."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.names = Names("sim")
        self.world = World(loop, rng)
        self.log_file = File(self.world, records.SCHEMA + groups.SCHEMA)
        self.bus_file = File(self.world, streams.SCHEMA)
        self.hosts: dict[str, Host] = {}
        self.failing = 0.0
        """Share of tokens that the engine fails now."""
        self.skews: dict[str, float] = {}
        """How wrong a host's wall clock is, by its name."""
        self.open = True
        self.crashed: Callable[[CrashReport], None] = lambda report: None
        """Told of each crash report in the moment of the crash."""
        self.bus_forgot = False
        """Whether the bus has lost anything."""
        self.ledgers_forgot = False
        self.log_deleted = False
        """Whether somebody has deleted a topic with jobs that were not done."""
        self.script: asyncio.Task[None] | None = None
        """What else happens to it."""
        self._reports: dict[str, list[CrashReport]] = {}
        """By worker: those that are not published yet."""
        self._crash_logs: dict[str, CrashLog] = {}
        self.bug = ""
        """An exception that no process should end by."""

    # --- processes ------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """`w<n>`, `projector` or `relay`."""
        work = {"p": self._projector, "r": self._relay}.get(name[0], self._worker)
        host = self.hosts[name] = Host(self.loop, name, skew_s=self.skews.get(name, 0.0))
        host.died.append(lambda: self.world.died(host))
        host.died.append(lambda: self._again(name, host))
        host.start(self._live(host, work))

    def _again(self, name: str, host: Host) -> None:
        def again() -> None:
            if self.open and self.hosts[name] is host:
                self.start(name)

        self.loop.later(self.rng.uniform(0.1, 1.0), again)

    async def _live(self, host: Host, work: Callable[[Host], Any]) -> None:
        """As under a supervisor: what ends by an error begins anew, as another process."""
        try:
            await work(host)
        except (LogUnavailable, BusUnavailable):
            await asyncio.sleep(AGAIN_S)
        except Exception as error:
            self.bug = self.bug or "".join(traceback.format_exception(error))
        host.kill()

    async def _worker(self, host: Host) -> None:
        clock, rng, recorder = self._clock(host), self._rng(), SimulatedRecorder()
        backend = SimulatedBackend(rng, lambda: self.failing, lambda: self._crash(host, recorder))
        async with self._log(host) as job_log, self._bus(host) as bus:
            await self._report(host, job_log)
            crashes = self._crash_logs.get(host.name)
            worker = Worker(
                job_log,
                bus,
                lambda on_step: SimulatedRunner(backend, on_step, clock, recorder),
                recorder=recorder,
                crashes=msgspec.json.decode(crashes.to_json(), type=list[JobState]) if crashes else [],
                names=self.names,
                pool=POOL,
                name=host.name,
                model_names=["echo"],
                clock=clock,
                rng=rng,
                settings=WorkerSettings(checkpoint_s=0.5, max_attempts=4),
            )
            async with worker:
                await worker.run()

    def _crash(self, host: Host, recorder: SimulatedRecorder) -> None:
        """As its supervisor sees it."""
        report = crash_report(
            -signal.SIGSEGV, cast(Any, recorder), stuck=(), out_of_memory=False, clock=self._clock(host)
        )
        if report is not None:
            self.crashed(report)
            self._reports.setdefault(host.name, []).append(report)
            self._crash_logs.setdefault(host.name, CrashLog()).add(report)
        host.kill()

    async def _report(self, host: Host, job_log: EmbeddedLog) -> None:
        """Before a worker joins, what its forerunner has died of is recorded."""
        reports = self._reports.pop(host.name, [])
        records = [
            Outgoing(self.names.events, event.id.encode(), encode(event))
            for report in reports
            for event in report.events(host.name)
        ]
        while records:
            answers = await job_log.publish(records)
            records = [one for one, answer in zip(records, answers, strict=True) if not isinstance(answer, Placed)]

    async def _projector(self, host: Host) -> None:
        async with self._log(host) as job_log, self._bus(host) as bus:
            await Projector(
                job_log, bus, names=self.names, pools=[POOL], clock=self._clock(host), rng=self._rng()
            ).run()

    async def _relay(self, host: Host) -> None:
        async with self._log(host) as job_log:
            await Relay(job_log, names=self.names, pool=POOL, name="relay", clock=self._clock(host)).run()

    @asynccontextmanager
    async def client(self, host: Host) -> AsyncIterator[Client]:
        async with AsyncExitStack() as stack:
            job_log = await stack.enter_async_context(self._log(host))
            bus = await stack.enter_async_context(self._bus(host))
            client = Client(
                namespace=self.names.namespace,
                pool=POOL,
                log=job_log,
                bus=bus,
                clock=self._clock(host),
                rng=self._rng(),
            )
            yield await stack.enter_async_context(client)

    # --- what they are given --------------------------------------------------------------------------------

    def _log(self, host: Host) -> EmbeddedLog:
        job_log = EmbeddedLog(NOWHERE, names=self.names, clock=self._clock(host), rng=self._rng())
        job_log._db = cast(Database, SimulatedDatabase(self.log_file, host, LogUnavailable))
        return job_log

    def _bus(self, host: Host) -> EmbeddedBus:
        bus = EmbeddedBus(NOWHERE, names=self.names, clock=self._clock(host))
        bus._db = cast(Database, SimulatedDatabase(self.bus_file, host, BusUnavailable))
        return bus

    def _clock(self, host: Host) -> HostClock:
        return HostClock(self.loop, host, EPOCH_S)

    def _rng(self) -> random.Random:
        return random.Random(self.rng.getrandbits(64))

    def topics(self) -> list[TopicSpec]:
        names = self.names
        return [
            *(TopicSpec(topic, PARTITIONS) for topic in names.job_topics(POOL)),
            *(TopicSpec(topic, 1, append_time=True) for topic in names.delay_topics(POOL)),
            TopicSpec(names.events, PARTITIONS),
            TopicSpec(names.dead, 1),
        ]
