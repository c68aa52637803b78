"""A ledger that is gone, from the events topic.

1. the former owner is fenced (by the caller)
2. the end of every events partition is noted; what the former owner wrote lies before it
3. wait until all before these ends is decided: another claim's open transaction may hide ours
4. fold the committed events before these ends
5. read the times of the records that they name
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from arriero.schemas.errors import LogUnavailable
from arriero.transports.kafka.connection import EARLIEST, LATEST, Connection, Place
from arriero.transports.ledger import Ledger
from arriero.transports.rebuild import Rebuild, fold_events

log = structlog.get_logger(__name__)

DECIDED_S: Final = 60.0
"""Longest wait for open transactions: brokers abort one after 10 s and look for such every 10 s."""
POLL_S: Final = 0.05


class Rebuilder:
    """Rebuilds ledgers from one events topic. Those asked for while a scan is under way share the next one."""

    def __init__(self, connection: Connection, events: str) -> None:
        self._connection = connection
        self._events = events
        self._waiting: dict[Place, tuple[Rebuild, asyncio.Future[None]]] = {}
        self._scanning = asyncio.Lock()

    async def rebuild(self, place: Place, first: int, stop: int) -> tuple[Ledger, int]:
        """The ledger, without owner and fence, and the highest fence in it.

        first, stop: the offsets that the partition holds. Raises LogUnavailable.
        """
        fold = Rebuild(first)
        if stop > first:
            await self._fold(place, fold)
        fold.cut(stop)
        times: dict[int, int] = {}
        offset = first
        while offset < fold.stop:  # 5
            chunk = await self._connection.read(place, offset)
            times.update((record.offset, record.time_ms) for record in chunk.records if record.offset < fold.stop)
            if chunk.next_offset <= offset:
                break
            offset = chunk.next_offset
        ledger = fold.ledger(times)
        log.info(
            "ledger_rebuilt",
            topic=place.topic,
            partition=place.partition,
            first=first,
            offset=ledger.offset,
            ranges=len(ledger.settled),
        )
        return ledger, fold.fence

    async def _fold(self, place: Place, fold: Rebuild) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_hear)
        self._waiting[place] = (fold, done)
        async with self._scanning:
            if not done.done():
                folds, self._waiting = self._waiting, {}
                try:
                    await self._scan({(place.topic, place.partition): fold for place, (fold, _) in folds.items()})
                except BaseException:
                    for _, other in folds.values():
                        other.set_exception(LogUnavailable("the scan of the events has failed"))
                    raise
                for _, other in folds.values():
                    other.set_result(None)
        await done

    async def _scan(self, folds: dict[tuple[str, int], Rebuild]) -> None:
        places = await self._connection.places([self._events])
        ends = await self._connection.offsets(places, LATEST, committed=False)  # 2
        try:
            async with asyncio.timeout(DECIDED_S):  # 3
                while True:
                    decided = await self._connection.offsets(places, LATEST, committed=True)
                    if all(decided[place] >= ends[place] for place in places):
                        break
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise LogUnavailable(f"a transaction on {self._events} stays open; no ledger can be rebuilt") from error
        starts = await self._connection.offsets(places, EARLIEST, committed=True)
        for place in places:  # 4
            offset = starts[place]
            while offset < ends[place]:
                chunk = await self._connection.read(place, offset)
                if chunk.next_offset <= offset:
                    break
                offset = chunk.next_offset
                fold_events((record for record in chunk.records if record.offset < ends[place]), folds)
                await asyncio.sleep(0)  # a long fold must not keep heartbeats waiting


def _hear(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()
