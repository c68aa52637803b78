"""A small fleet for tests: a log with topics, a bus, workers with the echo engine, a projector."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import apsw

from arriero.ops.settings import DEAD_RETENTION_S
from arriero.schemas.clock import SystemClock
from arriero.schemas.codec import decode_event, decode_state
from arriero.schemas.errors import BusUnavailable, Unreadable
from arriero.schemas.event import Event, SettlingEvent, Terminal
from arriero.schemas.job import Job, PriorityClass, encode_job
from arriero.schemas.names import Names
from arriero.schemas.state import JobState
from arriero.transports.bus import Position, TokenBus, View
from arriero.transports.connect import Endpoints, make_bus, make_log
from arriero.transports.embedded.bus import EmbeddedBus
from arriero.transports.log import JobLog, Outgoing, Placed, TopicSpec
from arriero.transports.redis.bus import RedisBus
from arriero.workers.engine.echo import EchoBackend
from arriero.workers.engine.runner import EngineRunner
from arriero.workers.engine.seam import Backend
from arriero.workers.projector import Projector
from arriero.workers.worker import Worker, WorkerSettings

WAIT_S = 40.0
"""For what surely comes. A Kafka group has to time out a killed member first."""
POOL = "default"
PARTITIONS = 2


def topics(names: Names, pool: str = POOL, partitions: int = PARTITIONS) -> list[TopicSpec]:
    return [
        *(TopicSpec(topic, partitions) for topic in names.job_topics(pool)),
        *(TopicSpec(topic, 1, append_time=True) for topic in names.delay_topics(pool)),
        TopicSpec(names.events, partitions),
        TopicSpec(names.dead, 1, retention_s=DEAD_RETENTION_S),
    ]


class Fleet:
    """What a test does with a fleet. Events are collected as they come."""

    def __init__(self, endpoints: Endpoints, names: Names, stack: AsyncExitStack) -> None:
        self.endpoints = endpoints
        self.names = names
        self.clock = SystemClock()
        self.rng = random.Random()
        self.events: list[Event] = []
        self._stack = stack
        self._news = asyncio.Condition()

    log: JobLog
    bus: TokenBus

    async def open(self, partitions: int = PARTITIONS) -> None:
        self.log = await self.open_log()
        self.bus = await self.open_bus()
        await self.log.ensure(topics(self.names, partitions=partitions))
        self._stack.push_async_callback(_end, asyncio.create_task(self._collect(), name="test events"))

    async def open_log(self) -> JobLog:
        log = make_log(self.endpoints, names=self.names, clock=self.clock, rng=self.rng, client="test")
        return await self._stack.enter_async_context(log)

    async def open_bus(self) -> TokenBus:
        return await self._stack.enter_async_context(make_bus(self.endpoints, names=self.names, clock=self.clock))

    async def _collect(self) -> None:
        async with aclosing(self.log.tail([self.names.events], {})) as tail:
            async for records in tail:
                async with self._news:
                    for record in records:
                        with suppress(Unreadable):  # tests may write anything into the topic
                            self.events.append(decode_event(record.value))
                    self._news.notify_all()

    # --- parts ----------------------------------------------------------------------------------------------

    def make_worker(
        self,
        name: str = "w1",
        *,
        bus: TokenBus | None = None,
        log: JobLog | None = None,
        settings: WorkerSettings | None = None,
        load: Callable[[], Backend] | None = None,
        **echo: float,
    ) -> Worker:
        backend = EchoBackend(**echo)  # type: ignore[arg-type]
        return Worker(
            log or self.log,
            bus or self.bus,
            lambda on_step: EngineRunner(load or (lambda: backend), on_step, self.clock, prepare_threads=0),
            names=self.names,
            pool=POOL,
            name=name,
            model_names=["echo", "parrot"],
            clock=self.clock,
            rng=self.rng,
            settings=settings,
        )

    @asynccontextmanager
    async def running(self, worker: Worker) -> AsyncIterator[Worker]:
        """It works; it is drained at the end."""
        async with worker:
            task = asyncio.create_task(worker.run(), name="test worker")
            try:
                yield worker
            finally:
                await worker.drain(0.0)
                await task

    @asynccontextmanager
    async def projecting(self, bus: TokenBus | None = None) -> AsyncIterator[Projector]:
        projector = Projector(self.log, bus or self.bus, names=self.names, pools=[POOL], clock=self.clock, rng=self.rng)
        task = asyncio.create_task(projector.run(), name="test projector")
        try:
            yield projector
        finally:
            await _end(task)

    # --- the client's side ----------------------------------------------------------------------------------

    async def submit(self, *jobs: Job, priority: PriorityClass = "standard") -> list[Placed]:
        return await self.publish(
            *(Outgoing(self.names.jobs(POOL, priority), job.key.encode(), encode_job(job)) for job in jobs)
        )

    async def publish_raw(self, value: bytes, key: bytes = b"k", priority: PriorityClass = "standard") -> Placed:
        return (await self.publish(Outgoing(self.names.jobs(POOL, priority), key, value)))[0]

    async def publish(self, *records: Outgoing) -> list[Placed]:
        answers = await self.log.publish(records)
        for answer in answers:
            assert isinstance(answer, Placed), answer
        return answers  # type: ignore[return-value]

    # --- waiting --------------------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until the events make it true."""
        async with asyncio.timeout(WAIT_S), self._news:
            await self._news.wait_for(condition)

    async def wait_events(self, job_id: str, kind: type[Event] | Sequence[type[Event]]) -> list[Event]:
        """All events of a job, once one of this kind is there."""
        kinds = tuple(kind) if isinstance(kind, Sequence) else kind
        await self.until(lambda: any(isinstance(event, kinds) for event in self.of(job_id)))
        return self.of(job_id)

    async def poll(self, condition: Callable[[], bool]) -> None:
        """Waits for something within a part, which has no bell for tests."""
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def wait_settled(self, count: int) -> None:
        await self.until(lambda: len(self.settling()) >= count)

    async def wait_end(self, job_id: str) -> Terminal:
        await self.wait_events(job_id, Terminal)  # type: ignore[arg-type]
        return next(event for event in self.of(job_id) if isinstance(event, Terminal))

    def of(self, job_id: str) -> list[Event]:
        return [event for event in self.events if event.id == job_id]

    def settling(self) -> list[Event]:
        return [event for event in self.events if isinstance(event, SettlingEvent)]

    async def wait_view(self, job_id: str, condition: Callable[[View], bool]) -> View:
        """Follows a stream until it looks like this."""
        async with asyncio.timeout(WAIT_S), self.bus.follow(job_id) as subscription:
            while True:
                view = await self.bus.read(job_id, Position())
                if condition(view):
                    return view
                await subscription.message()

    async def wait_state(self, job_id: str, condition: Callable[[JobState], bool]) -> JobState:
        async with asyncio.timeout(WAIT_S):
            while True:  # states have no bell: clients ask
                (found,) = await self.bus.states([job_id])
                if found is not None and condition(state := decode_state(found)):
                    return state
                await asyncio.sleep(0.005)


class FaultyBus:
    """A bus between which and its user things can go wrong."""

    def __init__(self, bus: TokenBus) -> None:
        self._bus = bus
        self.away = False
        self.delay_s = 0.0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._bus, name)

        async def faulty(*args: Any, **kwargs: Any) -> Any:
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self.away:
                raise BusUnavailable("unplugged")
            return await call(*args, **kwargs)

        return faulty


async def empty(bus: TokenBus, names: Names) -> None:
    """Make a bus forget all of a namespace."""
    if isinstance(bus, EmbeddedBus):

        def clear(connection: apsw.Connection) -> None:
            for table in ("jobs", "heads", "tokens", "positions"):
                connection.execute(f"DELETE FROM {table}")

        await bus._db.write(clear)
    else:
        assert isinstance(bus, RedisBus)
        found = [key async for key in bus._redis.scan_iter(f"{names.namespace}:*")]
        if found:
            await bus._redis.delete(*found)


@asynccontextmanager
async def process(
    fleet: Fleet, name: str, *, step_s: float, model: str = "echo"
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker in a process of its own; killed at the end."""
    where = fleet.endpoints
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("fleet_process.py")),
        fleet.names.namespace,
        name,
        str(step_s),
        model,
        *([str(where.data)] if where.embedded else [str(where.kafka), str(where.redis)]),
    )
    try:
        yield started
    finally:
        with suppress(ProcessLookupError):
            started.kill()
        await started.wait()


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task; raises what it died of before."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
