"""A fleet of real processes around one pair of log and bus, and the handles to break it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, Literal

import apsw
import msgspec

from arriero.ops import wiring
from arriero.ops.chaos.processes import Process
from arriero.ops.chaos.proxy import Proxy
from arriero.ops.settings import EngineSettings, Settings
from arriero.ops.testbed.kafka import Broker, kafka_jars
from arriero.ops.testbed.pair import cache_folder
from arriero.ops.testbed.redis import RedisServer
from arriero.producer.client import Client
from arriero.schemas.clock import SystemClock
from arriero.schemas.errors import LogError
from arriero.transports.embedded.bus import EmbeddedBus

PairName = Literal["embedded", "real"]

STEP_S: Final = 0.004
"""Length of a decode step: a job takes up to a third of a second, so that every fault meets some."""
SLOTS: Final = 16
FAIL_EVERY: Final = 400
"""Tokens, so that one job of twenty goes through a delay topic."""
PARTITIONS: Final = 4
SETTLE_MAX_S: Final = 60.0
OWNERS_POLL_S: Final = 0.02


class Servers(msgspec.Struct, frozen=True):
    """What of the real pair can be broken; all None for the embedded one."""

    broker: Broker | None = None
    redis: RedisServer | None = None
    proxy: Proxy | None = None


@asynccontextmanager
async def open_servers(pair: PairName, folder: Path) -> AsyncIterator[Servers]:
    """A Kafka whose workers come through a proxy, and a Redis. Raises SetupError."""
    async with AsyncExitStack() as stack:
        if pair == "embedded":
            yield Servers()
            return
        redis = RedisServer(folder)
        stack.callback(redis.stop)
        redis.start()
        broker = Broker(folder / "kafka", kafka_jars(cache_folder()), proxied=True)
        stack.callback(broker.kill)
        broker.start()
        proxy = await stack.enter_async_context(Proxy(broker.proxy_port, broker.proxied_port))
        yield Servers(broker, redis, proxy)


class Arena:
    """One fleet: workers, a projector, a relay, and a client that nothing is done to. An async context manager."""

    def __init__(self, servers: Servers, folder: Path, namespace: str, workers: int, rng: random.Random) -> None:
        self.servers = servers
        self.rng = rng
        self.clock = SystemClock()
        self.folder = folder
        broker, redis, proxy = servers.broker, servers.redis, servers.proxy
        self.settings = Settings(
            data=folder,
            cache=folder,
            kafka=None if broker is None else broker.bootstrap,
            redis=None if redis is None else redis.url,
            namespace=namespace,
            partitions=PARTITIONS,
            engine=EngineSettings(engine="echo", slots=SLOTS, echo_step_s=STEP_S, echo_fail_every=FAIL_EVERY),
            log_json=True,
            grace_s=2.0,
        )
        of_workers = self.settings
        if proxy is not None:
            of_workers = msgspec.structs.replace(self.settings, kafka=f"127.0.0.1:{proxy.port}")
        self.workers = [
            Process("worker", name, msgspec.structs.replace(of_workers, worker=name), self._log(name))
            for name in (f"w{number}" for number in range(workers))
        ]
        self.projector = Process("projector", "projector", self.settings, self._log("projector"))
        self.relay = Process("relay", "relay", self.settings, self._log("relay"))
        self.client: Client
        self._stack = AsyncExitStack()

    @property
    def embedded(self) -> bool:
        return self.servers.broker is None

    @property
    def processes(self) -> list[Process]:
        return [self.projector, self.relay, *self.workers]

    async def __aenter__(self) -> Arena:
        async with AsyncExitStack() as stack:
            self.client = await stack.enter_async_context(wiring.open_client(self.settings))
            for process in self.processes:
                stack.push_async_callback(process.kill)
                await process.start()
            await self._shared()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def _shared(self) -> None:
        """Waits until every worker has its share: who is killed while it joins a group keeps Kafka's others waiting for
        two sessions, which would say nothing about takeovers."""
        names = self.settings.names
        places = len(names.job_topics(self.settings.pool)) * PARTITIONS
        async with asyncio.timeout(SETTLE_MAX_S):
            while True:
                owners = await self.owners()
                workers = {owner.partition("/")[0] for owner in owners.values()}
                if len(owners) == places and len(workers) == len(self.workers):
                    return
                await asyncio.sleep(OWNERS_POLL_S)

    async def owners(self) -> dict[tuple[str, int], str]:
        """Worker and incarnation of each partition of the job topics."""
        names, pool = self.settings.names, self.settings.pool
        ledgers = await self.client.log.ledgers(names.workers_group(pool), names.job_topics(pool))
        return {place: ledger.owner for place, ledger in ledgers.items()}

    async def taken_over(self, former: dict[tuple[str, int], str], timeout_s: float) -> float | None:
        """Waits until each of these partitions has another owner; the seconds that took, None when it is too long."""
        began = self.clock.monotonic()
        while self.clock.monotonic() - began < timeout_s:
            try:
                now = await self.owners()
                if all(now.get(place, owner) != owner for place, owner in former.items()):
                    return self.clock.monotonic() - began
            except LogError:
                pass
            await asyncio.sleep(OWNERS_POLL_S)
        return None

    async def empty_bus(self) -> None:
        """Everything on the bus is forgotten, as when Redis starts again without its memory."""
        if self.servers.redis is not None:
            self.servers.redis.kill()
            await asyncio.sleep(self.rng.uniform(0.0, 2.0))
            self.servers.redis.launch()
            await asyncio.to_thread(self.servers.redis.wait)
            return

        def clear(connection: apsw.Connection) -> None:
            for table in ("jobs", "heads", "tokens", "positions"):
                connection.execute(f"DELETE FROM {table}")  # noqa: S608

        assert isinstance(self.client.bus, EmbeddedBus)
        await self.client.bus._db.write(clear)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"
