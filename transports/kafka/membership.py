"""One worker in one consumer group: which partitions are ours, and records for their claims.

A partition that is assigned to us goes through

    taking -> claimed -> (a call fails) in doubt -> taking ...      until it leaves us

Rebalances are eager: all partitions are revoked before each assignment. Claims are suspended meanwhile; those that
are assigned again go on with their producer and what they hold, those that left are over, new ones are taken.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final

import aiokafka.errors as kafka_errors
import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka.coordinator.assignors.range import RangePartitionAssignor

from arriero.schemas.clock import Clock
from arriero.schemas.errors import LogError, LogUnavailable, Revoked, TopicFault, Unreadable
from arriero.transports.kafka.claim import KafkaClaim
from arriero.transports.kafka.closing import close_consumer
from arriero.transports.kafka.connection import Connection, Place, as_record, connect
from arriero.transports.kafka.taking import Taken, Taker
from arriero.transports.log import Gained, Lost

log = structlog.get_logger(__name__)

SESSION_S: Final = 6.0
"""A member that is silent this long is dead: the larger part of a takeover. The least that brokers allow."""
HEARTBEAT_S: Final = 1.0
RETAKE_S: Final = 2 * HEARTBEAT_S
"""After a failed call nothing is taken for two heartbeats: a worker that was frozen must first learn that it was
expelled, or it would fence the rightful owner."""
STAMP_S: Final = 60.0
"""How often it is checked that a topic is still the one whose records were settled."""
POLL_S: Final = 3_600.0
"""The consumer is asked again this often when nothing comes; it wakes up by itself before."""
FETCH_BYTES: Final = 512 << 10
"""Fetched ahead for each partition. A larger record comes alone."""
FETCH_WAIT_MS: Final = 250
"""How long a broker holds a fetch that finds nothing. A partition that was full waits for it before its next one."""
RESTART_S: Final = 1.0
REFUSED_S: Final = 30.0
"""Pause before a partition is tried again whose ledger only a later release can read: a rebuild reads all events."""

_FATAL: Final = (
    kafka_errors.GroupAuthorizationFailedError,
    kafka_errors.TopicAuthorizationFailedError,
    kafka_errors.InconsistentGroupProtocolError,
    kafka_errors.InvalidGroupIdError,
    kafka_errors.InvalidSessionTimeoutError,
)


class _Held:
    """A partition that is assigned to us."""

    def __init__(self) -> None:
        self.claim: KafkaClaim | None = None
        self.doubtful: KafkaClaim | None = None
        """A claim whose last commit may or may not have happened; its holder keeps what it has in memory."""
        self.taking: asyncio.Task[None] | None = None


class KafkaMembership(ConsumerRebalanceListener):  # type: ignore[misc]
    """See `Membership`; an async context manager."""

    def __init__(
        self,
        connection: Connection,
        group: str,
        topics: Sequence[str],
        worker: str,
        events: str,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._connection = connection
        self._group = group
        self._topics = list(topics)
        self.owner = f"{re.sub(r'[^A-Za-z0-9._:-]', '-', worker)[:100]}/{rng.getrandbits(40):010x}"
        self._taker = Taker(connection, group, self.owner, events, clock)
        self._held: dict[Place, _Held] = {}
        self._changes: asyncio.Queue[Gained | Lost | LogError] = asyncio.Queue()
        self._consumer: AIOKafkaConsumer | None = None
        self._steady = asyncio.Event()
        self._assignment = asyncio.Event()
        self._wake = asyncio.Event()
        self._broken: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = False

    async def __aenter__(self) -> KafkaMembership:
        counts = {topic: await self._connection.partitions(topic) for topic in self._topics}
        if len(set(counts.values())) > 1:
            raise TopicFault(f"the topics of one group need equal partition counts: {counts}")
        await self._start_consumer()
        self._spawn(self._run(), "membership")
        self._spawn(self._check_stamps(), "membership-stamps")
        return self

    async def __aexit__(self, *exc: object) -> None:
        """1. stop intake and takings 2. release the claims, which closes their producers 3. leave the group."""
        self._leaving = True
        takings = [held.taking for held in self._held.values() if held.taking is not None]
        tasks = [*self._tasks, *takings]
        for task in tasks:  # 1
            if not task.get_name().startswith("close-"):
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        claims = [held.claim for held in self._held.values() if held.claim is not None]
        self._held.clear()
        await asyncio.gather(*(claim.release() for claim in claims))  # 2
        await self._stop_consumer()  # 3

    async def change(self) -> Gained | Lost:
        change = await self._changes.get()
        if isinstance(change, LogError):
            self._changes.put_nowait(change)
            raise change
        return change

    # The consumer

    async def _start_consumer(self) -> None:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._connection.bootstrap,
            client_id=self._connection.client_id,
            group_id=self._group,
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="none",
            partition_assignment_strategy=(RangePartitionAssignor,),
            session_timeout_ms=int(SESSION_S * 1000),
            heartbeat_interval_ms=int(HEARTBEAT_S * 1000),
            # Full claims are not polled for as long as their jobs run; that must not look like a dead worker.
            max_poll_interval_ms=2**31 - 1,
            request_timeout_ms=15_000,
            fetch_max_wait_ms=FETCH_WAIT_MS,
            max_partition_fetch_bytes=FETCH_BYTES,
        )
        self._consumer = consumer
        self._broken = None
        try:
            await connect(consumer.start, self._connection.bootstrap)
        except BaseException:
            await self._stop_consumer()
            raise
        consumer.subscribe(self._topics, listener=self)

    async def _stop_consumer(self) -> None:
        if self._consumer is not None:
            consumer, self._consumer = self._consumer, None
            await close_consumer(consumer)

    async def _run(self) -> None:
        """Feeds the claims; begins anew with another consumer when aiokafka's has broken."""
        while True:
            try:
                if self._consumer is None:
                    await self._start_consumer()
                await self._pump()
            except _FATAL as error:
                self._changes.put_nowait(LogUnavailable(f"Kafka will not have this worker: {error!r}"))
                return
            except Exception as error:
                log.warning("membership_restarts", group=self._group, error=repr(error))
                self._steady.clear()
                for place in list(self._held):
                    self._drop(place, "the consumer has broken")
                await self._stop_consumer()
                await asyncio.sleep(RESTART_S)

    async def _pump(self) -> None:
        """Moves records from the consumer into the claims that want more."""
        assert self._consumer is not None
        consumer, fetcher = self._consumer, self._consumer._fetcher.error_future
        while True:
            self._wake.clear()
            if self._broken is not None:
                raise self._broken
            wanted = self._wanted()
            wake = asyncio.create_task(self._wake.wait(), name="membership-wake")
            waits: set[asyncio.Future[Any]] = {fetcher, wake}
            fetch: asyncio.Task[Mapping[Place, list[Any]]] | None = None
            if wanted:
                # Only these: pausing the others would throw away what is fetched of them.
                fetch = asyncio.create_task(consumer.getmany(*wanted, timeout_ms=int(POLL_S * 1000)), name="getmany")
                waits.add(fetch)
            else:
                consumer._coordinator.check_errors()  # as getmany would
            try:
                await asyncio.wait(waits, timeout=HEARTBEAT_S if fetch is None else None, return_when="FIRST_COMPLETED")
            finally:
                for task in waits - {fetcher}:
                    task.cancel()
            if fetcher.done():
                raise LogUnavailable("aiokafka's fetcher has ended")
            if fetch is not None:
                await asyncio.wait({fetch})
                if not fetch.cancelled():
                    self._feed(fetch, wanted)

    def _wanted(self) -> dict[Place, tuple[KafkaClaim, int]]:
        if not self._steady.is_set():
            return {}
        claims = ((place, held.claim) for place, held in self._held.items())
        return {place: (claim, claim.seeks) for place, claim in claims if claim is not None and claim.wants_more}

    def _feed(
        self, fetch: asyncio.Task[Mapping[Place, list[Any]]], wanted: Mapping[Place, tuple[KafkaClaim, int]]
    ) -> None:
        try:
            found = fetch.result()
        except kafka_errors.OffsetOutOfRangeError as error:
            for place in error.args[0]:
                held = self._held.get(place)
                if held is not None and held.claim is not None:
                    log.warning("offset_out_of_range", topic=place.topic, partition=place.partition)
                    reason = LogUnavailable("the partition does not hold the next offset any more")
                    held.claim.void(reason)
                    self._in_doubt(held.claim, reason)
            return
        except kafka_errors.NoOffsetForPartitionError:
            return  # of a partition that is being taken: we seek when we have it
        for place, records in found.items():
            claim, seeks = wanted[place]
            # Records from before a seek would make the claim believe that offsets in between are empty.
            if claim.seeks == seeks and not claim.is_over and self._steady.is_set():
                claim.feed([as_record(record) for record in records])

    # Rebalances. Exceptions in these two callbacks would be swallowed, and heartbeats stop during the second.

    async def on_partitions_revoked(self, revoked: Iterable[Place]) -> None:
        try:
            self._steady.clear()
            self._wake.set()
            claims = [held.claim for held in self._held.values() if held.claim is not None]
            await asyncio.gather(*(claim.suspend() for claim in claims))
        except Exception as error:
            self._break(error)

    async def on_partitions_assigned(self, assigned: Iterable[Place]) -> None:
        try:
            self._assign({Place(*place) for place in assigned})
        except Exception as error:
            self._break(error)

    def _assign(self, assigned: set[Place]) -> None:
        if self._leaving:
            return
        log.info("partitions_assigned", group=self._group, count=len(assigned))
        for place in self._held.keys() - assigned:
            self._drop(place, "the group gave it to another worker")
        self._steady.set()
        for place in sorted(assigned):
            held = self._held.setdefault(place, _Held())
            if held.claim is not None and not held.claim.is_over:
                self._seek(place, held.claim)
                held.claim.resume()
            elif held.taking is None and held.claim is None:  # a claim that was released stays so
                self._retake(place, held, at_once=True)
        self._assignment.set()  # those that wait to take again need not wait on
        self._assignment = asyncio.Event()
        self._wake.set()

    def _drop(self, place: Place, why: str) -> None:
        held = self._held.pop(place)
        if held.taking is not None:
            held.taking.cancel()
        for claim in (held.claim, held.doubtful):
            if claim is None or (claim is held.claim and claim.is_over):
                continue
            reason = Revoked(f"{place.topic}/{place.partition}: {why}")
            claim.void(reason)
            self._spawn(claim.end(reason), f"close-{place.topic}-{place.partition}")
            self._changes.put_nowait(Lost(claim, final=True, reason=why))
            log.info("claim_lost", topic=place.topic, partition=place.partition, reason=why, fence=claim.fence)

    def _break(self, error: Exception) -> None:
        self._broken = error
        self._wake.set()

    # Taking

    def _retake(self, place: Place, held: _Held, *, at_once: bool) -> None:
        held.taking = asyncio.create_task(
            self._take(place, held, at_once=at_once), name=f"take-{place.topic}-{place.partition}"
        )

    async def _take(self, place: Place, held: _Held, *, at_once: bool) -> None:
        taken: Taken | None = None
        try:
            while taken is None:
                if not at_once:
                    await self._two_heartbeats()
                at_once = False
                try:
                    taken = await self._taker.take(place)
                except Unreadable as error:
                    log.error(
                        "claim_refused",
                        group=self._group,
                        topic=place.topic,
                        partition=place.partition,
                        code=error.code,
                        error=str(error),
                    )
                    await asyncio.sleep(REFUSED_S)
                except LogError as error:
                    log.warning("claim_not_taken", topic=place.topic, partition=place.partition, error=str(error))
            await self._steady.wait()
        except BaseException:
            if taken is not None:
                await taken.producer.close()
            raise
        # From here on nothing waits: a rebalance either saw this partition taking or sees it claimed.
        continued = held.doubtful is not None and taken.former_owner == self.owner
        claim = KafkaClaim(
            place,
            self._group,
            taken.ledger,
            taken.producer,
            self._connection,
            failed=self._in_doubt,
            hungry=self._wake.set,
        )
        held.claim, held.doubtful, held.taking = claim, None, None
        self._seek(place, claim)
        claim.resume()
        self._changes.put_nowait(Gained(claim, continued))
        self._wake.set()
        log.info(
            "claim_gained",
            topic=place.topic,
            partition=place.partition,
            fence=claim.fence,
            offset=taken.ledger.offset,
            continued=continued,
        )

    async def _two_heartbeats(self) -> None:
        assignment = self._assignment
        try:
            async with asyncio.timeout(RETAKE_S):
                await assignment.wait()
        except TimeoutError:
            await self._steady.wait()

    def _seek(self, place: Place, claim: KafkaClaim) -> None:
        assert self._consumer is not None
        self._consumer.seek(place, claim.position)
        claim.seeks += 1

    def _in_doubt(self, claim: KafkaClaim, error: LogError) -> None:
        """A call of this claim has failed: say so, and take the partition anew."""
        place = Place(claim.topic, claim.partition)
        held = self._held.get(place)
        if held is None or held.claim is not claim or self._leaving:
            return
        log.warning("claim_in_doubt", topic=place.topic, partition=place.partition, error=repr(error))
        held.claim, held.doubtful = None, claim
        self._spawn(claim.end(error), f"close-{place.topic}-{place.partition}")
        self._changes.put_nowait(Lost(claim, final=False, reason=error.code))
        self._retake(place, held, at_once=False)

    async def _check_stamps(self) -> None:
        while True:
            await asyncio.sleep(STAMP_S)
            for place, held in list(self._held.items()):
                claim = held.claim
                if claim is None or claim.is_over:
                    continue
                try:
                    same = await self._taker.is_same_topic(place, claim.ledger.stamp)
                except LogError as error:
                    log.info("stamp_not_checked", topic=place.topic, partition=place.partition, error=str(error))
                    continue
                if not same:
                    reason = LogUnavailable(f"topic {place.topic} was deleted and made anew")
                    claim.void(reason)
                    self._in_doubt(claim, reason)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
