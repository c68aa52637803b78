"""Single requests to brokers over one shared client, and the border where Kafka's errors become ours."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import aiokafka.errors as kafka_errors
from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.consumer.fetcher import READ_COMMITTED, READ_UNCOMMITTED, PartitionRecords
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.record.memory_records import MemoryRecords

from arriero.schemas.errors import Fenced, LogError, LogUnavailable, RecordTooLarge, TopicFault
from arriero.transports.kafka.closing import close_client
from arriero.transports.kafka.stable_offsets import UNSTABLE_CODE, StableOffsetFetchRequest, UnstableOffset
from arriero.transports.log import Record

CONNECT_S: Final = 8.0
"""Brokers that don't answer for this long are reported as out of reach; they are tried again all that time."""
REQUEST_S: Final = 15.0
"""One request with all its repetitions. A broker that is restarted answers again within 5 to 10 s."""
CONNECTED_S: Final = 1.0
"""How long a cancelled attempt to connect may go on: a broker that is there answers within milliseconds."""
RETRY_S: Final = 0.1
UNSTABLE_S: Final = 0.005
"""A transaction's markers are written some milliseconds after its end was answered."""
CHUNK_BYTES: Final = 1 << 20
EARLIEST: Final = -2
LATEST: Final = -1

if TYPE_CHECKING:

    class Place(NamedTuple):
        """One partition of a topic, as aiokafka names it."""

        topic: str
        partition: int
else:
    Place = TopicPartition

Result = TypeVar("Result")

_FENCED: Final = (
    kafka_errors.ProducerFenced,
    kafka_errors.InvalidProducerEpoch,
    kafka_errors.InvalidProducerIdMapping,
    kafka_errors.TransactionCoordinatorFenced,
)
_GONE: Final = 3
"""The protocol's error code for a topic that does not exist."""


class Chunk(NamedTuple):
    """What one read of a partition gave: committed records, and the offset behind all that it has seen, which
    counts offsets without records (transaction markers, aborted records) as seen."""

    records: list[Record]
    next_offset: int


class Connection:
    """A client of one cluster. Raises LogUnavailable when it doesn't answer in time."""

    def __init__(self, bootstrap: str, client: str) -> None:
        self.bootstrap = bootstrap
        self.client_id = client
        self._client: AIOKafkaClient | None = None

    async def start(self) -> None:
        # It logs each failed attempt; every failure that matters reaches our callers as an error.
        logger = logging.getLogger("aiokafka")
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.CRITICAL)
        client = AIOKafkaClient(bootstrap_servers=self.bootstrap, client_id=self.client_id)
        await connect(client.bootstrap, self.bootstrap)
        self._client = client

    async def close(self) -> None:
        if self._client is not None:
            await close_client(self._client)
            self._client = None

    async def partitions(self, topic: str) -> int:
        """How many partitions a topic has. Raises TopicFault when it does not exist."""

        async def ask() -> int:
            node = self._open.get_random_node()
            response = await self._open.send(node, MetadataRequest([topic], allow_auto_topic_creation=False))
            (description,) = response.to_object()["topics"]
            if description["error_code"] == _GONE:
                raise TopicFault(
                    f"topic {topic} does not exist; a worker makes it when it starts, or "
                    f"kafka-topics.sh --bootstrap-server {self.bootstrap} --create --topic {topic}"
                )
            _check(description["error_code"])
            return len(description["partitions"])

        return await self._insist(ask)

    async def places(self, topics: Iterable[str]) -> list[Place]:
        """Every partition of these topics."""
        return [Place(topic, number) for topic in topics for number in range(await self.partitions(topic))]

    async def offsets(self, places: Sequence[Place], at_ms: int, *, committed: bool) -> dict[Place, int]:
        """Offsets by time: EARLIEST, LATEST, or of the first record from then on (-1 when there is none).

        committed: LATEST is the first offset that is not decided yet, not the end of the partition.
        """
        isolation = READ_COMMITTED if committed else READ_UNCOMMITTED

        async def ask() -> dict[Place, int]:
            by_node: dict[int, dict[str, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
            for place in places:
                by_node[await self._leader(place)][place.topic].append((place.partition, at_ms))
            found: dict[Place, int] = {}
            for node, topics in by_node.items():
                response = await self._open.send(node, OffsetRequest(-1, isolation, list(topics.items())))
                for topic, partitions in response.topics:
                    for partition, code, _, offset in partitions:
                        _check(code)
                        found[Place(topic, partition)] = offset
            return found

        return await self._insist(ask) if places else {}

    async def committed(
        self, group: str, places: Sequence[Place], patience_s: float = REQUEST_S
    ) -> dict[Place, tuple[int, str]]:
        """Offset and the text beside it; partitions without are left out.

        While a transaction over one of them is being ended this waits for its end, at most `patience_s`; after that
        it answers what was committed before it.
        """
        if not places:
            return {}
        topics: dict[str, list[int]] = defaultdict(list)
        for place in places:
            topics[place.topic].append(place.partition)
        until = asyncio.get_running_loop().time() + patience_s

        async def ask() -> dict[Place, tuple[int, str]]:
            node = await self._open.coordinator_lookup(CoordinationType.GROUP, group)
            stable = asyncio.get_running_loop().time() < until
            response = await self._open.send(node, StableOffsetFetchRequest(group, topics, stable=stable))
            _check(response.error_code)
            found: dict[Place, tuple[int, str]] = {}
            for topic, partitions, _ in response.topics:
                for partition, offset, _, text, code, _ in partitions:
                    _check(code)
                    if offset >= 0:
                        found[Place(topic, partition)] = (offset, text or "")
            return found

        return await self._insist(ask)

    async def read(self, place: Place, offset: int, *, most_bytes: int = CHUNK_BYTES) -> Chunk:
        """Committed records from this offset on, without waiting for more. At least one when there is one."""

        async def ask() -> Chunk:
            node = await self._leader(place)
            wanted = [(place.topic, [(place.partition, offset, most_bytes)])]
            response = await self._open.send(node, FetchRequest(0, 1, most_bytes, READ_COMMITTED, wanted))
            ((_, ((_, code, _, *answer),)),) = response.topics
            _check(code)
            aborted = answer[2] if response.API_VERSION >= 11 else answer[-2]
            records = PartitionRecords(
                place, MemoryRecords(answer[-1]), aborted, offset, None, None, True, READ_COMMITTED
            )
            return Chunk([as_record(record) for record in records], records.next_fetch_offset)

        return await self._insist(ask)

    async def _leader(self, place: Place) -> int:
        leader = self._open.cluster.leader_for_partition(place)
        if leader is None or leader == -1:
            self._open.add_topic(place.topic)
            raise kafka_errors.LeaderNotAvailableError(f"{place.topic}/{place.partition}")
        return int(leader)

    @property
    def _open(self) -> AIOKafkaClient:
        assert self._client is not None, "not entered"
        return self._client

    async def _insist(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        """Ask again while the answer is one that passes."""
        reason: Exception | None = None
        try:
            async with asyncio.timeout(REQUEST_S):
                while True:
                    try:
                        return await ask()
                    except kafka_errors.KafkaError as error:
                        if not error.retriable:
                            raise
                        reason = error
                    if isinstance(reason, UnstableOffset):
                        await asyncio.sleep(UNSTABLE_S)
                        continue
                    await asyncio.wait({self._open.force_metadata_update()}, timeout=RETRY_S)
                    await asyncio.sleep(RETRY_S)
        except TimeoutError as error:
            raise LogUnavailable(
                f"Kafka at {self.bootstrap} did not answer in {REQUEST_S:.0f} s: {reason!r}"
            ) from error
        except kafka_errors.KafkaError as error:
            raise translate(error) from error


async def connect(attempt: Callable[[], Awaitable[None]], bootstrap: str, timeout_s: float = CONNECT_S) -> None:
    """Run a client's own start until it reaches a broker and is done. Raises LogUnavailable."""
    reason: Exception | None = None
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await _whole(attempt)
                except (kafka_errors.KafkaConnectionError, OSError) as error:
                    reason = error
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        raise LogUnavailable(f"Kafka at {bootstrap} does not answer (tried for {timeout_s:.0f} s)") from reason
    except kafka_errors.KafkaError as error:
        raise translate(error) from error


async def _whole(attempt: Callable[[], Awaitable[None]]) -> None:
    """An attempt that a cancellation does not cut off at once: aiokafka would leave the connection behind that it has
    just made."""
    task = asyncio.ensure_future(attempt())
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=CONNECTED_S)
        if not task.cancel() and not task.cancelled():
            task.exception()  # nobody waits for it any more
        raise


def translate(error: BaseException) -> LogError:
    """Ours for theirs. What is not known is LogUnavailable: the same may succeed later."""
    if isinstance(error, LogError):
        return error
    seen: BaseException | None = error
    while seen is not None:  # the sender wraps what it did not expect
        if isinstance(seen, _FENCED):
            return Fenced("another worker's producer has this partition now")
        if isinstance(seen, kafka_errors.MessageSizeTooLargeError | kafka_errors.RecordListTooLargeError):
            return RecordTooLarge(str(seen))
        if isinstance(seen, kafka_errors.UnknownTopicOrPartitionError):
            return TopicFault(f"a topic does not exist any more: {seen}")
        seen = seen.__cause__
    return LogUnavailable(f"Kafka: {error!r}")


def as_record(record: Any) -> Record:
    return Record(
        record.topic, record.partition, record.offset, record.timestamp, record.key, record.value, record.headers
    )


def _check(code: int) -> None:
    if code == UNSTABLE_CODE:
        raise UnstableOffset
    if code:
        raise kafka_errors.for_code(code)()
