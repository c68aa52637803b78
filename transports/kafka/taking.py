"""How a partition is taken from whoever had it.

1. fence the former owner: our producer's start waits until its last transaction is decided
2. read offset and ledger; only now is what the broker answers the last word
3. if they are gone, or of another topic of this name, rebuild them from the settling events
4. commit the raised fence and the owner
5. go on from there (the membership seeks)
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

import structlog

from arriero.schemas.clock import Clock, now_ms
from arriero.schemas.errors import Unreadable
from arriero.transports.failpoints import reach
from arriero.transports.kafka.connection import EARLIEST, LATEST, Connection, Place
from arriero.transports.kafka.producing import PartitionProducer
from arriero.transports.kafka.rebuilding import Rebuilder
from arriero.transports.ledger import Ledger, LedgerError, Stamp

log = structlog.get_logger(__name__)

OPEN_AT_ONCE: Final = 8
"""Producers being started. While brokers are away each of them keeps trying to connect."""


class Taken(NamedTuple):
    producer: PartitionProducer
    ledger: Ledger
    former_owner: str


class Taker:
    """Takes partitions for one owner in one group."""

    def __init__(self, connection: Connection, group: str, owner: str, events: str, clock: Clock) -> None:
        self._connection = connection
        self._group = group
        self._owner = owner
        self._clock = clock
        self._rebuilder = Rebuilder(connection, events)
        self._opening = asyncio.Semaphore(OPEN_AT_ONCE)

    async def take(self, place: Place) -> Taken:
        """Raises LogError, Unreadable among them; nothing is held then."""
        producer = PartitionProducer(self._connection, self._group, place, self._clock)
        async with self._opening:
            await producer.open()  # 1
        reach("take.fenced")
        try:
            found = (await self._connection.committed(self._group, [place])).get(place)  # 2
            first = (await self._connection.offsets([place], EARLIEST, committed=False))[place]
            stop = (await self._connection.offsets([place], LATEST, committed=False))[place]
            ledger = await self._accept(place, found, first, stop)
            reach("take.read")
            seen_fence = 0
            if ledger is None:
                ledger, seen_fence = await self._rebuilder.rebuild(place, first, stop)  # 3
                reach("take.rebuilt")
            elif ledger.offset < first:
                ledger = self._cover_lost(place, ledger, first)
            raised = ledger.raised(now_ms(self._clock), self._owner, seen_fence)
            await producer.transact((), raised)  # 4
            reach("take.taken")
        except BaseException:
            await producer.close()
            raise
        return Taken(producer, raised, ledger.owner)

    async def is_same_topic(self, place: Place, stamp: Stamp | None) -> bool:
        """Whether the stamped record is still what lies at its offset; true when retention has removed it."""
        if stamp is None:
            return True
        first = (await self._connection.offsets([place], EARLIEST, committed=False))[place]
        stop = (await self._connection.offsets([place], LATEST, committed=False))[place]
        return await self._matches(place, stamp, first, stop)

    async def _accept(self, place: Place, found: tuple[int, str] | None, first: int, stop: int) -> Ledger | None:
        """The ledger as committed, or None when it cannot be believed."""
        if found is None:
            return None
        where = {"group": self._group, "topic": place.topic, "partition": place.partition, "offset": found[0]}
        try:
            ledger = Ledger.decode(*found)
        except LedgerError as error:
            if error.later:
                raise Unreadable(
                    f"{error}. Upgrade this worker; or stop all workers of the group and have the ledger rebuilt: "
                    f"kafka-consumer-groups.sh --bootstrap-server {self._connection.bootstrap} --group {self._group} "
                    f"--delete-offsets --topic {place.topic}:{place.partition}",
                    code="unknown_version",
                ) from error
            log.error("ledger_unreadable", **where, error=str(error), mended_by="a rebuild from the settling events")
            return None
        if ledger.offset > stop or (ledger.stamp and not await self._matches(place, ledger.stamp, first, stop)):
            log.warning("ledger_of_another_topic", **where, stamp=ledger.stamp, first=first, stop=stop)
            return None
        return ledger

    async def _matches(self, place: Place, stamp: Stamp, first: int, stop: int) -> bool:
        if stamp.offset < first:
            return True
        if stamp.offset >= stop:
            return False
        chunk = await self._connection.read(place, stamp.offset, most_bytes=1)
        return any((record.offset, record.time_ms) == (stamp.offset, stamp.time_ms) for record in chunk.records)

    def _cover_lost(self, place: Place, ledger: Ledger, first: int) -> Ledger:
        covered = ledger.cover([(ledger.offset, first)])
        lost = first - ledger.offset
        lost -= sum(min(stop, first) - start for start, stop in ledger.settled if start < first)
        if lost:
            log.error("records_lost", reason="retention", topic=place.topic, partition=place.partition, count=lost)
        return covered
