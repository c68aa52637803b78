"""The job log on Kafka: see `JobLog`."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack

from arriero.schemas.clock import Clock
from arriero.schemas.names import Names
from arriero.transports.kafka import backlog, tailing, topics
from arriero.transports.kafka.connection import Connection, Place
from arriero.transports.kafka.membership import KafkaMembership
from arriero.transports.kafka.producing import Publisher
from arriero.transports.ledger import Ledger
from arriero.transports.log import Backlog, Outgoing, Placed, Positions, Record, TopicSpec


class KafkaLog:
    """One process's access to a cluster. `bootstrap`: brokers, `host:port,...`.

    Entering raises LogUnavailable when no broker answers.
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        names: Names,
        clock: Clock,
        rng: random.Random,
        client: str,
        create_topics: bool = True,
    ) -> None:
        self._create_topics = create_topics
        self._connection = Connection(bootstrap, client)
        self._publisher = Publisher(self._connection, clock)
        self._names = names
        self._clock = clock
        self._rng = rng
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> KafkaLog:
        await self._connection.start()
        self._exits.push_async_callback(self._connection.close)
        self._exits.push_async_callback(self._publisher.close)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._exits.aclose()

    async def ensure(self, topics_: Sequence[TopicSpec]) -> None:
        await topics.ensure(self._connection, topics_, may_make=self._create_topics)

    async def partitions(self, topic: str) -> int:
        return await self._connection.partitions(topic)

    async def publish(self, records: Sequence[Outgoing]) -> list[Placed | BaseException]:
        return await self._publisher.publish(records)

    def join(self, group: str, topics: Sequence[str], worker: str, events: str) -> KafkaMembership:
        return KafkaMembership(self._connection, group, topics, worker, events, self._clock, self._rng)

    def tail(self, topics: Sequence[str], start: Positions | float) -> AsyncGenerator[list[Record], None]:
        return tailing.tail(self._connection, topics, start)

    async def fetch(self, topic: str, partition: int, offsets: Sequence[int]) -> list[Record]:
        return await tailing.fetch(self._connection, Place(topic, partition), offsets)

    async def ends(self, topics: Sequence[str]) -> dict[tuple[str, int], int]:
        return await tailing.committed_ends(self._connection, topics)

    async def backlog(self, group: str, topics: Sequence[str]) -> dict[str, Backlog]:
        return await backlog.backlog(self._connection, self._clock, group, topics)

    async def ledgers(self, group: str, topics: Sequence[str]) -> dict[tuple[str, int], Ledger]:
        found = await backlog.ledgers(self._connection, group, topics)
        return {(place.topic, place.partition): ledger for place, ledger in found.items()}
