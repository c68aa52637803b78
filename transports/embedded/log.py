"""The job log in one SQLite file of a data folder."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

import apsw
import structlog

from arriero.schemas.clock import Clock, now_ms
from arriero.schemas.errors import LogError, LogUnavailable
from arriero.schemas.names import Names
from arriero.transports.embedded import groups, records
from arriero.transports.embedded.db import Database
from arriero.transports.embedded.member import EmbeddedMembership
from arriero.transports.embedded.records import Catalog, Place
from arriero.transports.ledger import Ledger
from arriero.transports.log import Backlog, Outgoing, Placed, Positions, Record, TopicSpec

LAYOUT: Final = 1
"""The tables' version. Another release with another layout refuses the file."""
TAIL_RECORDS: Final = 1_000
RETENTION_EVERY_S: Final = 60.0
EXPIRE_RECORDS: Final = 500
"""Records deleted in one transaction: others wait for it."""

log = structlog.get_logger(__name__)


class EmbeddedLog:
    """See the seam's `JobLog`. Callers name every topic and group, so `names` has nothing to add here."""

    def __init__(self, folder: Path, *, names: Names, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._catalog = Catalog()
        self._db = Database(
            folder / "log.db",
            schema=records.SCHEMA + groups.SCHEMA,
            version=LAYOUT,
            durable=True,
            unavailable=LogUnavailable,
        )

    async def __aenter__(self) -> EmbeddedLog:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._db)
            retention = asyncio.create_task(self._keep_retention(), name="log retention")
            stack.push_async_callback(_end, retention)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def ensure(self, topics: Sequence[TopicSpec]) -> None:
        def ensure(connection: apsw.Connection) -> None:
            for spec in topics:
                records.ensure_topic(connection, spec)

        await self._db.write(ensure)

    async def partitions(self, topic: str) -> int:
        return len(self._places([topic]))

    async def publish(self, records_: Sequence[Outgoing]) -> list[Placed | BaseException]:
        """One transaction. What is not durable then is answered by its error."""

        def publish(connection: apsw.Connection) -> list[Placed | LogError]:
            return records.append(connection, self._catalog, records_, now_ms(self._clock))

        try:
            return list(await self._db.write(publish, rings=tuple(dict.fromkeys(record.topic for record in records_))))
        except LogError as error:
            return [error for _ in records_]

    def join(self, group: str, topics: Sequence[str], worker: str, events: str) -> EmbeddedMembership:
        return EmbeddedMembership(
            self._db, self._catalog, self._clock, self._rng, group=group, topics=topics, worker=worker, events=events
        )

    async def tail(self, topics: Sequence[str], start: Positions | float) -> AsyncGenerator[list[Record], None]:
        places = {place.number: place for place in self._places(topics)}
        with self._db.bells.listen(*topics) as bell:
            positions = self._positions(places.values(), start)
            while True:
                seen = bell.count
                batch = self._db.read(partial(self._behind, places=places, positions=positions))
                if batch:
                    yield batch
                else:
                    await bell.wait(seen)

    async def fetch(self, topic: str, partition: int, offsets: Sequence[int]) -> list[Record]:
        places = self._places([topic])
        if not 0 <= partition < len(places):
            return []

        def fetch(connection: apsw.Connection) -> list[Record]:
            place = places[partition]
            return [record for offset in offsets for record in records.read(connection, place, offset, offset + 1, 1)]

        return self._db.read(fetch)

    async def ends(self, topics: Sequence[str]) -> dict[tuple[str, int], int]:
        places = self._places(topics)
        bounds = self._db.read(partial(records.bounds, numbers=[place.number for place in places]))
        return {(place.topic, place.partition): bounds[place.number][1] for place in places}

    async def backlog(self, group: str, topics: Sequence[str]) -> dict[str, Backlog]:
        now = now_ms(self._clock)
        answer: dict[str, Backlog] = {}
        for topic in topics:
            count, oldest = 0, now
            for place in self._places([topic]):
                unsettled, since_ms = self._db.read(partial(groups.unsettled, group=group, number=place.number))
                count += unsettled
                oldest = min(oldest, since_ms if since_ms is not None else now)
            answer[topic] = Backlog(count, (now - oldest) / 1000)
        return answer

    async def ledgers(self, group: str, topics: Sequence[str]) -> dict[tuple[str, int], Ledger]:
        found = (
            (place, self._db.read(partial(groups.ledger_of, group=group, number=place.number)))
            for place in self._places(topics)
        )
        return {(place.topic, place.partition): ledger for place, ledger in found if ledger is not None}

    def _places(self, topics: Sequence[str]) -> list[Place]:
        return [place for topic in topics for place in self._db.read(partial(self._catalog.places, topic=topic))]

    def _positions(self, places: Iterable[Place], start: Positions | float) -> dict[int, int]:
        if isinstance(start, Mapping):
            return {place.number: start.get((place.topic, place.partition), 0) for place in places}
        time_ms = int(start * 1000)
        return {
            place.number: self._db.read(partial(records.offset_at, number=place.number, time_ms=time_ms))
            for place in places
        }

    @staticmethod
    def _behind(connection: apsw.Connection, places: Mapping[int, Place], positions: dict[int, int]) -> list[Record]:
        """Records at or beyond the positions, which move on."""
        batch: list[Record] = []
        bytes_left = records.BATCH_MAX_BYTES
        for number, (_, end) in records.bounds(connection, places).items():
            if positions[number] >= end or len(batch) >= TAIL_RECORDS or bytes_left <= 0:
                continue
            found = records.read(connection, places[number], positions[number], end, TAIL_RECORDS - len(batch))
            bytes_left -= sum(len(record.value or b"") for record in found)
            positions[number] = found[-1].offset + 1 if found else end
            batch += found
        return batch

    async def _keep_retention(self) -> None:
        """Delete what has outlived its retention, now and then, whoever has the log open."""
        while True:
            try:
                await self._expire()
            except LogError as error:
                log.warning("retention_failed", error=str(error))
            await asyncio.sleep(RETENTION_EVERY_S)

    async def _expire(self) -> None:
        for place, before_ms in self._db.read(partial(records.expirable, now_ms=now_ms(self._clock))):
            first, stop = 0, EXPIRE_RECORDS
            while stop - first == EXPIRE_RECORDS:
                work = partial(records.expire, place=place, before_ms=before_ms, most=EXPIRE_RECORDS)
                first, stop = await self._db.write(work, urgent=True)
            log.info("records_expired", topic=place.topic, partition=place.partition, first=stop)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
