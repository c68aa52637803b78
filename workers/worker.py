"""A worker: one loaded model, one membership in its pool's group, and the life of what it holds.

    load the model ▸ join the group ▸ [ claims come and go; jobs run ] ▸ drain ▸ release ▸ leave

What runs meanwhile: for each partition an intake and a committer; the streams; the presence; the checkpoints. Any of
them ending with an error ends the worker, and so does its engine: the process should go, and be started anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Final, Protocol

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from arriero.schemas.clock import Clock, now_ms
from arriero.schemas.errors import EngineError, LogError
from arriero.schemas.event import DeadLettered, RetryScheduled, Terminal
from arriero.schemas.job import Job, PriorityClass
from arriero.schemas.names import MAX_ATTEMPTS, Names, parse_job_topic
from arriero.schemas.state import TERMINAL_STATUS, JobState
from arriero.schemas.worker import WorkerInfo
from arriero.transports.bus import TokenBus
from arriero.transports.log import Claim, JobLog, Membership
from arriero.workers.claims import Claims, Partition
from arriero.workers.commit import Committer, OwnersEvent
from arriero.workers.desk import Desk, Engine
from arriero.workers.engine.seam import Prepared, StepReport
from arriero.workers.flight import FlightRecorder
from arriero.workers.held import Held
from arriero.workers.intake import Intake
from arriero.workers.known import KnownJobs
from arriero.workers.metrics import WorkerMetrics
from arriero.workers.presence import announce
from arriero.workers.stream import Streams

log = structlog.get_logger(__name__)

READ_AHEAD_LEAST: Final = 16
"""Jobs of each class that are read and hold no slot: twice the slots, and never fewer than these."""
FLUSH_S: Final = 5.0
"""How long recording what a drained partition holds may take. What is not recorded by then is run again."""


def first_error(errors: BaseExceptionGroup) -> BaseException:
    """What has ended a group of tasks, out of the groups within groups that it comes wrapped in."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class Runner(Engine, Protocol):
    """What is used of `engine/runner.py`'s EngineRunner."""

    died: asyncio.Future[BaseException]

    async def prepare_all(self, jobs: Sequence[tuple[Job, str]]) -> list[Prepared]: ...


MakeRunner = Callable[[Callable[[StepReport], None]], AbstractAsyncContextManager[Runner]]
"""Makes the engine, not yet started, that reports its steps to this callback."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint_s: float = 5.0
    """How often running jobs are recorded as Progressed: what a loss of worker and bus together costs at most."""
    max_attempts: int = MAX_ATTEMPTS
    """Runs that a transient error may cost a job that does not say."""
    read_ahead: int = 0
    """Jobs of each class that are read and hold no slot yet; 0 lets it follow from the slots."""


def _in_hand(partition: Partition[Held]) -> list[Held]:
    """Jobs whose end is not on its way into the log yet."""
    return [held for held in partition.committer.pending.values() if held is not None and not held.over]


class Worker:
    """Enter it to load the model, then `run` it; `drain` ends that cleanly.

    model_names: what jobs may ask for; the first is what those get that ask for none. crashes: what this worker's
    forerunners have crashed with, as far as its supervisor knows.
    """

    def __init__(
        self,
        job_log: JobLog,
        bus: TokenBus,
        make_runner: MakeRunner,
        *,
        names: Names,
        pool: str,
        name: str,
        model_names: Sequence[str],
        clock: Clock,
        rng: random.Random,
        settings: WorkerSettings | None = None,
        recorder: FlightRecorder | None = None,
        crashes: Sequence[JobState] = (),
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._log = job_log
        self._bus = bus
        self._make_runner = make_runner
        self._names = names
        self._pool = pool
        self._name = name
        self._model_names = list(model_names)
        self._clock = clock
        self._rng = rng
        self._settings = settings or WorkerSettings()
        self._recorder = recorder or FlightRecorder(None)
        self._crashes = {state.id: state for state in crashes}
        self._metrics = WorkerMetrics(registry or CollectorRegistry())
        self._claims = Claims[Held](begin=self._begin, resumed=self._resumed, dropped=self._dropped)
        self._metrics.claims.set_function(lambda: len(self._claims))
        self._started_ms = 0
        self._grace_s = 0.0
        self._draining = asyncio.Event()
        self._aborting = asyncio.Event()
        self._over = asyncio.Event()
        self._over.set()

    async def __aenter__(self) -> Worker:
        """Raises ModelError."""
        async with AsyncExitStack() as stack:
            runner = await stack.enter_async_context(self._make_runner(self._on_step))
            self._runner = runner
            slots = runner.info.slots
            self._desk = Desk(
                engine=runner,
                names=self._names,
                pool=self._pool,
                clock=self._clock,
                metrics=self._metrics,
                max_attempts=self._settings.max_attempts,
                read_ahead=self._settings.read_ahead or max(READ_AHEAD_LEAST, 2 * slots),
            )
            self._streams = self._desk.streams = Streams(
                self._bus,
                digests=runner.info.digest,
                clock=self._clock,
                rng=self._rng,
                metrics=self._metrics,
                on_cancel=self._desk.cancel,
                save=self._desk.save,
            )
            self._started_ms = now_ms(self._clock)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def run(self) -> None:
        """Work until drained. Raises what has ended it: EngineError, LogUnavailable, TopicFault, or what a side task
        died of."""
        self._over.clear()
        group = self._names.workers_group(self._pool)
        topics = self._names.job_topics(self._pool)
        try:
            async with self._log.join(group, topics, self._name, self._names.events) as membership:
                log.info("worker_joined", worker=self._name, pool=self._pool)
                async with asyncio.TaskGroup() as tasks:
                    await self._work(membership, tasks)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            self._claims.clear()
            self._over.set()
            log.info("worker_left", worker=self._name, pool=self._pool)

    async def drain(self, grace_s: float) -> None:
        """Stop cleanly: read no more, let what runs end within `grace_s` seconds, record how far the rest has come,
        give everything up. Returns when `run` has returned. Called again, it aborts at once."""
        if self._draining.is_set():
            self._aborting.set()
        else:
            self._grace_s = grace_s
            self._draining.set()
        await self._over.wait()

    @property
    def info(self) -> WorkerInfo:
        engine = self._runner.info
        return WorkerInfo(
            worker=self._name,
            pool=self._pool,
            models=self._model_names,
            slots=engine.slots,
            n_ctx_sequence=engine.n_ctx_sequence,
            chat=engine.chat,
            device=engine.device,
            started_ms=self._started_ms,
            claims=len(self._claims),
            running=self._desk.running,
            waiting=self._desk.waiting,
        )

    async def _work(self, membership: Membership, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        presence = tasks.create_task(announce(self._bus, lambda: self.info), name="presence")
        side = [
            tasks.create_task(self._streams.run(), name="streams"),
            tasks.create_task(self._claims.follow(membership), name="claims"),
            tasks.create_task(self._keep_checkpoints(), name="checkpoints"),
            tasks.create_task(self._watch_engine(), name="engine watch"),
            presence,
        ]
        await self._draining.wait()
        presence.cancel()  # a worker that takes no new jobs is no worker for those who ask
        draining = tasks.create_task(self._wind_down(), name="wind down")
        aborting = tasks.create_task(self._aborting.wait(), name="abort")
        await asyncio.wait({draining, aborting}, return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            log.warning("worker_aborts", worker=self._name, running=self._desk.running)
        for partition in self._claims:
            partition.stop()
        for task in (*side, draining, aborting):
            task.cancel()

    # --- claims ---------------------------------------------------------------------------------------------

    async def _begin(self, claim: Claim) -> Partition[Held] | None:
        if self._draining.is_set():
            with contextlib.suppress(LogError):
                await claim.release()
            return None
        committer = Committer[Held](
            claim,
            names=self._names,
            worker=self._name,
            clock=self._clock,
            metrics=self._metrics,
            settled=partial(self._count, parse_job_topic(claim.topic).priority),
        )
        intake = Intake(
            committer,
            desk=self._desk,
            job_log=self._log,
            prepare=self._runner.prepare_all,
            recorder=self._recorder,
            known=KnownJobs(self._bus, self._crashes),
            digests=self._runner.info.digest,
            names=self._names,
            model_names=self._model_names,
            clock=self._clock,
        )
        place = f"{claim.topic}/{claim.partition}"
        return Partition(
            claim,
            committer,
            intake=self._tasks.create_task(intake.run(), name=f"intake {place}"),
            commits=self._tasks.create_task(committer.run(), name=f"commits {place}"),
        )

    def _count(self, priority: PriorityClass, event: OwnersEvent) -> None:
        outcome = TERMINAL_STATUS[type(event)] if isinstance(event, Terminal) else type(event).__name__.lower()
        self._metrics.ended(outcome, priority).inc()
        if isinstance(event, RetryScheduled):
            self._metrics.retries.labels(event.step).inc()
        elif isinstance(event, DeadLettered):
            self._metrics.dead_letters.labels(event.reason).inc()

    def _resumed(self, partition: Partition[Held]) -> None:
        for held in partition.committer.pending.values():
            if held is not None:
                self._streams.adopt(held.stream, partition.claim.fence)

    def _dropped(self, partition: Partition[Held]) -> None:
        self._desk.drop(list(partition.committer.pending.values()))

    # --- the end --------------------------------------------------------------------------------------------

    async def _wind_down(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._grace_s
        log.info("worker_drains", worker=self._name, running=self._desk.running, grace_s=self._grace_s)
        await asyncio.gather(*(self._wind_down_one(one, deadline) for one in self._claims))

    async def _wind_down_one(self, partition: Partition[Held], deadline: float) -> None:
        """Steps: 1. stop intake, and leave what has not begun to the next owner 2. let what runs end 3. record how far
        the rest has come 4. let everything be recorded 5. release."""
        committer = partition.committer
        # 1.
        partition.intake.cancel()
        await asyncio.wait([partition.intake])
        self._desk.drop([held for held in _in_hand(partition) if not held.started_ms])
        # 2.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await committer.until(lambda: not _in_hand(partition))
        # 3.
        self._desk.checkpoint(_in_hand(partition))
        self._desk.drop(_in_hand(partition))
        # 4.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await committer.flush()
        # 5.
        partition.stop()
        with contextlib.suppress(LogError):
            await partition.claim.release()

    # --- side tasks -----------------------------------------------------------------------------------------

    def _on_step(self, report: StepReport) -> None:
        self._desk.on_step(report)

    async def _keep_checkpoints(self) -> None:
        while True:
            await asyncio.sleep(self._settings.checkpoint_s)
            self._desk.checkpoint_all()

    async def _watch_engine(self) -> None:
        error = await asyncio.shield(self._runner.died)
        raise EngineError(f"the engine has died: {type(error).__name__}: {error}") from error
