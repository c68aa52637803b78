"""A worker's membership in a consumer group of log.db.

There is no coordinator. Members watch each other (peers.py); whoever finds one dead strikes it off and deals the
group's partitions anew, and each then gives up and takes what is written down (groups.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import apsw
import structlog

from arriero.schemas.clock import Clock, now_ms
from arriero.schemas.errors import ArrieroError, Fenced, LogError, Revoked, TopicFault, Unreadable
from arriero.transports.embedded import groups, records
from arriero.transports.embedded.bells import Bell
from arriero.transports.embedded.claim import EmbeddedClaim
from arriero.transports.embedded.db import Database
from arriero.transports.embedded.groups import Taken
from arriero.transports.embedded.records import Catalog, Place
from arriero.transports.embedded.shared import boot_id
from arriero.transports.ledger import Ledger
from arriero.transports.log import Gained, Lost
from arriero.transports.rebuild import Rebuild, fold_events

RETRY_S: Final = 0.5
"""Pause after the log has failed."""
REFUSED_S: Final = 30.0
"""Pause before a partition is tried again whose ledger only a later release can read: a rebuild reads all events."""
REBUILD_RECORDS: Final = 200
"""Events folded between two turns of the loop."""

log = structlog.get_logger(__name__)


class _Arrivals(Bell):
    """One query for all claims of a topic, where each would look for itself."""

    def __init__(self, arrived: Callable[[], None]) -> None:
        super().__init__()
        self._arrived = arrived

    def strike(self) -> None:
        self._arrived()


class EmbeddedMembership:
    """See the seam's `Membership`. An async context manager."""

    def __init__(
        self,
        db: Database,
        catalog: Catalog,
        clock: Clock,
        rng: random.Random,
        *,
        group: str,
        topics: Sequence[str],
        worker: str,
        events: str,
    ) -> None:
        incarnation = f"{rng.getrandbits(64):016x}"
        self.owner = f"{worker}/{incarnation}"
        self._db = db
        self._catalog = catalog
        self._clock = clock
        self._group = group
        self._topics = topics
        self._events = events
        self._member = incarnation
        self._boot = boot_id()
        self._places: dict[int, Place] = {}
        self._claims: dict[int, EmbeddedClaim] = {}
        self._doubted: dict[int, EmbeddedClaim] = {}
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._released: set[int] = set()
        self._refused: dict[int, float] = {}
        """Partitions whose ledger only a later release can read, and when (monotonic) each is tried again."""
        self._changes: asyncio.Queue[Gained | Lost | BaseException] = asyncio.Queue()

    async def __aenter__(self) -> EmbeddedMembership:
        counts: dict[str, int] = {}
        for topic in self._topics:
            places = self._db.read(partial(self._catalog.places, topic=topic))
            counts[topic] = len(places)
            self._places |= {place.number: place for place in places}
        if len(set(counts.values())) > 1:
            raise TopicFault(f"topics of one group need equal partition counts: {counts}")
        self._db.read(partial(self._catalog.places, topic=self._events))  # or it could not be rebuilt from
        async with contextlib.AsyncExitStack() as stack:
            self._bell = stack.enter_context(self._db.bells.listen(self._group))
            self._peers = self._db.peers(self._member, self._clock, self._bell.strike)
            stack.enter_context(self._peers)
            for topic in self._topics:
                stack.enter_context(self._db.bells.listen(topic, bell=_Arrivals(partial(self._arrived, topic))))
            await self._join()
            stack.push_async_callback(self._leave)
            self._task = asyncio.create_task(self._run(), name=f"membership {self._group}")
            self._task.add_done_callback(self._died)
            stack.push_async_callback(self._stop)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def change(self) -> Gained | Lost:
        change = await self._changes.get()
        if isinstance(change, BaseException):
            raise change
        return change

    # joining, leaving

    async def _join(self) -> None:
        await self._db.write(
            partial(groups.join, group=self._group, member=self._member, topics=self._topics, boot=self._boot),
            rings=(self._group,),
        )

    async def _stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _leave(self) -> None:
        """Let the commits in flight end, then free everything in one transaction."""
        for claim in [*self._claims.values()]:
            await claim.settle_down()
            claim.end(Revoked("the worker has left the group"))
        if self._leaving:
            await asyncio.wait(self._leaving.values())
        try:
            await self._strike_off(self._member)
        except LogError as error:
            log.warning("leaving_failed", group=self._group, error=str(error))  # its end is seen all the same

    # the task

    async def _run(self) -> None:
        while True:
            seen = self._bell.count
            pause: float | None = None
            try:
                await self._step()
                pause = REFUSED_S if self._refused else None
            except LogError as error:
                log.warning("membership_failed", group=self._group, error=str(error))
                pause = RETRY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._bell.wait(seen)

    async def _step(self) -> None:
        """Steps: 1. strike off the dead 2. see what is to be ours 3. give up what is not 4. free what we hold in name
        only 5. take what is ours and free 6. rebuild what has no ledger."""
        # 1.
        others = self._db.read(partial(groups.others, group=self._group, member=self._member))
        dead = self._peers.dead(others.keys()) | {member for member, boot in others.items() if boot != self._boot}
        for member in sorted(dead):
            log.info("member_dead", group=self._group, member=member)
            await self._strike_off(member)
        # 2.
        dealt = self._db.read(partial(groups.dealt_to, group=self._group, member=self._member))
        if dealt is None:
            log.warning("membership_lost", group=self._group)
            for claim in [*self._claims.values()]:
                self._lose(claim, Fenced("the worker was taken for dead"))
            await self._join()
            dealt = self._db.read(partial(groups.dealt_to, group=self._group, member=self._member)) or set()
        # 3.
        for number in self._claims.keys() - dealt - self._leaving.keys():
            task = asyncio.create_task(self._hand_over(self._claims[number]), name=f"hand over {number}")
            self._leaving[number] = task
            task.add_done_callback(partial(self._left, number))
        for number in self._doubted.keys() - dealt:
            self._changes.put_nowait(Lost(self._doubted.pop(number), final=True, reason="rebalanced"))
        self._released &= dealt
        # 4.
        held = self._db.read(partial(groups.held_by, group=self._group, member=self._member))
        stale = held - dealt - self._claims.keys()
        if stale:
            await self._db.write(
                partial(groups.let_go, group=self._group, numbers=stale, member=self._member), rings=(self._group,)
            )
        # 5.
        now = self._clock.monotonic()
        self._refused = {number: until for number, until in self._refused.items() if number in dealt and until > now}
        wanted = dealt - self._claims.keys() - self._released - self._refused.keys()
        if wanted:
            wanted = self._db.read(partial(groups.free, group=self._group, numbers=wanted, member=self._member))
        if not wanted:
            return
        taken = await self._db.write(partial(self._take, sorted(wanted)))
        for one in taken:
            if one.lost:
                log.error(
                    "records_lost_to_retention", topic=one.place.topic, partition=one.place.partition, count=one.lost
                )
            if not one.gone:
                self._gain(one, one.ledger)
        # 6.
        gone = [one for one in taken if one.gone]
        if gone:
            await self._rebuild(gone)

    def _take(self, numbers: Sequence[int], connection: apsw.Connection) -> list[Taken]:
        clock_ms = now_ms(self._clock)
        taken: list[Taken] = []
        for place in (self._places[number] for number in numbers):
            try:
                one = groups.take(connection, self._group, place, self._member, self.owner, clock_ms)
            except Unreadable as error:
                self._refuse(place, error)
                continue
            if one is not None:
                taken.append(one)
        return taken

    def _refuse(self, place: Place, error: Unreadable) -> None:
        """Leave a partition alone, for a while."""
        self._refused[place.number] = self._clock.monotonic() + REFUSED_S
        log.error(
            "claim_refused",
            group=self._group,
            topic=place.topic,
            partition=place.partition,
            code=error.code,
            error=error.message,
        )

    async def _strike_off(self, member: str) -> None:
        await self._db.write(partial(groups.leave, group=self._group, member=member), rings=(self._group,))

    def _gain(self, taken: Taken, ledger: Ledger) -> None:
        number = taken.place.number
        claim = EmbeddedClaim(self._db, self._catalog, self._clock, self._group, taken.place, ledger, self._claim_ended)
        self._claims[number] = claim
        self._doubted.pop(number, None)
        self._changes.put_nowait(Gained(claim, continued=taken.before == self.owner))

    def _lose(self, claim: EmbeddedClaim, reason: ArrieroError) -> None:
        """Another has it, or will."""
        claim.end(reason)
        self._claims.pop(claim.place.number, None)
        self._changes.put_nowait(Lost(claim, final=True, reason=reason.message))

    def _claim_ended(self, claim: EmbeddedClaim) -> None:
        """A call of the claim has ended it."""
        number = claim.place.number
        self._claims.pop(number, None)
        if isinstance(claim.ended, Revoked):  # the worker has released it, and will not have it back
            self._released.add(number)
        elif isinstance(claim.ended, Fenced):
            self._lose(claim, claim.ended)
        else:
            self._doubted[number] = claim
            self._changes.put_nowait(Lost(claim, final=False, reason=str(claim.ended)))
        self._bell.strike()

    def _left(self, number: int, task: asyncio.Task[None]) -> None:
        del self._leaving[number]
        self._bell.strike()
        self._died(task)

    async def _hand_over(self, claim: EmbeddedClaim) -> None:
        """Bring a claim to rest and end it; the next step frees its partition."""
        with contextlib.suppress(TimeoutError):
            await claim.quiet()
        if claim.ended is None:
            self._lose(claim, Revoked("the partition goes to another worker"))

    async def _rebuild(self, taken: Sequence[Taken]) -> None:
        """Ledgers from the settling events. They lie fenced in our name already: nobody commits to them meanwhile."""
        rebuilds = {(one.place.topic, one.place.partition): Rebuild(one.ledger.offset) for one in taken}
        for place in self._db.read(partial(self._catalog.places, topic=self._events)):
            at, end = self._db.read(partial(records.bounds, numbers=[place.number]))[place.number]
            while at < end:
                events = self._db.read(partial(records.read, place=place, start=at, stop=end, most=REBUILD_RECORDS))
                if not events:
                    break
                fold_events(events, rebuilds)
                at = events[-1].offset + 1
                await asyncio.sleep(0)
        for one in taken:
            rebuild = rebuilds[one.place.topic, one.place.partition]
            _, end = self._db.read(partial(records.bounds, numbers=[one.place.number]))[one.place.number]
            rebuild.cut(end)
            times = self._db.read(
                partial(records.times, number=one.place.number, start=rebuild.first, stop=rebuild.stop)
            )
            try:
                found = rebuild.ledger(times)
            except Unreadable as error:
                self._refuse(one.place, error)
                continue
            ledger = found.raised(now_ms(self._clock), self.owner, max(rebuild.fence, one.ledger.fence))
            log.info(
                "ledger_rebuilt",
                topic=one.place.topic,
                partition=one.place.partition,
                settled=len(times) - ledger.pending(rebuild.stop),
            )
            put = partial(
                groups.put_ledger, group=self._group, number=one.place.number, ledger=ledger, fence=one.ledger.fence
            )
            if await self._db.write(put):
                self._gain(one, ledger)

    def _died(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._changes.put_nowait(error)

    def _arrived(self, topic: str) -> None:
        """A topic has new records: wake the claims on partitions that have."""
        claims = {number: claim for number, claim in self._claims.items() if claim.topic == topic}
        try:
            bounds = self._db.read(partial(records.bounds, numbers=claims))
        except LogError:
            bounds = {}
        for number, claim in claims.items():
            claim.arrived(bounds[number][1] if number in bounds else sys.maxsize)  # its read then meets the error
