"""The producers: one transactional producer for each claimed partition, one idempotent producer to publish with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.structs import OffsetAndMetadata

from arriero.schemas.clock import Clock, now_ms
from arriero.schemas.errors import LogUnavailable, RecordTooLarge
from arriero.transports.failpoints import reach
from arriero.transports.kafka.closing import close_producer
from arriero.transports.kafka.connection import Connection, Place, connect, translate
from arriero.transports.ledger import Ledger
from arriero.transports.log import RECORD_MAX_BYTES, Outgoing, Placed

TRANSACTION_TIMEOUT_S: Final = 10.0
"""A broker aborts a transaction that its owner has left open this long; readers wait behind it until then."""
COMMIT_S: Final = 8.0
"""One deadline over a whole transaction, below the broker's. A broker's restart fits in when it is quick."""
FENCE_S: Final = 15.0
"""Fencing waits until the former owner's transaction is decided; the broker looks for those every 10 s."""
PUBLISH_S: Final = 10.0
"""A record is sent again for this long. After that it may still be written: publish it anew under the same id."""
RETRY_MS: Final = 5
"""A transaction close behind another is told to come again; the default of 100 ms would be nearly all its tail."""
SLOW_AFTER_S: Final = 0.25
SLOW_RETRY_MS: Final = 100
"""A transaction that takes so long waits for a broker that is away, not for the markers of the one before; at 5 ms
all claims of a worker together would keep a core busy with connecting."""
BATCH_BYTES: Final = 256 << 10


def record_bytes(record: Outgoing) -> int:
    """The size that brokers compare with `max.message.bytes`, at worst."""
    return int(DefaultRecordBatchBuilder.estimate_size_in_bytes(record.key, record.value, list(record.headers)))


def check_size(record: Outgoing) -> None:
    """Raises RecordTooLarge."""
    if (size := record_bytes(record)) > RECORD_MAX_BYTES:
        raise RecordTooLarge(f"a record for {record.topic} takes {size} bytes, more than {RECORD_MAX_BYTES}")


class PartitionProducer:
    """The transactional producer of one partition in one group. Whoever opens it fences the one before.

    Its transactional id names the partition, not the worker: that is what makes two owners exclude each other.
    """

    def __init__(self, connection: Connection, group: str, place: Place, clock: Clock) -> None:
        self._connection = connection
        self._group = group
        self._place = place
        self._where = f"{place.topic}/{place.partition}"
        self._clock = clock
        self._producer: AIOKafkaProducer | None = None

    async def open(self) -> None:
        """Returns when every transaction of a former owner is decided. Raises LogUnavailable, Fenced."""
        assert self._producer is None
        producer = AIOKafkaProducer(
            bootstrap_servers=self._connection.bootstrap,
            client_id=self._connection.client_id,
            transactional_id=f"{self._group}.{self._place.topic}.{self._place.partition}",
            transaction_timeout_ms=int(TRANSACTION_TIMEOUT_S * 1000),
            retry_backoff_ms=RETRY_MS,
            max_request_size=RECORD_MAX_BYTES,
            max_batch_size=BATCH_BYTES,
        )
        producer.client._retry_backoff = SLOW_RETRY_MS / 1000  # the short one is meant for the sender only
        self._producer = producer
        try:
            await connect(producer.start, self._connection.bootstrap, FENCE_S)
        except BaseException:
            await self.close()
            raise

    async def transact(self, records: Sequence[Outgoing], ledger: Ledger) -> None:
        """Make records and ledger true at once.

        1. begin 2. send records and offset 3. wait for each record: a commit would succeed although one failed
        4. wait for the offset 5. commit

        Raises RecordTooLarge, with nothing written and this producer unusable, when the broker refuses a size. Any
        other error leaves open whether it happened.
        """
        producer, text = self._producer, ledger.encode()
        assert producer is not None
        offset: asyncio.Task[None] | None = None
        slow = asyncio.get_running_loop().call_later(SLOW_AFTER_S, _set_retry, producer, SLOW_RETRY_MS)
        try:
            async with asyncio.timeout(COMMIT_S):
                await producer.begin_transaction()  # 1
                reach("commit.begun")
                time_ms = now_ms(self._clock)
                sent: list[asyncio.Future[Any]] = []
                for record in records:  # 2
                    future = await producer.send(
                        record.topic, record.value, record.key, timestamp_ms=time_ms, headers=list(record.headers)
                    )
                    future.add_done_callback(_hear)
                    sent.append(future)
                offset = asyncio.create_task(
                    producer.send_offsets_to_transaction(
                        {self._place: OffsetAndMetadata(ledger.offset, text)}, self._group
                    ),
                    name="kafka-send-offset",
                )
                offset.add_done_callback(_hear)
                reach("commit.sent")
                for future in sent:  # 3
                    await future
                reach("commit.acknowledged")
                await offset  # 4
                reach("commit.offset")
                await producer.commit_transaction()  # 5
                reach("commit.committed")
        except TimeoutError as error:
            raise LogUnavailable(f"a commit of {self._where} took over {COMMIT_S:.0f} s") from error
        except Exception as error:
            failure = translate(error)
            if isinstance(failure, RecordTooLarge):
                await self._abort()
            raise failure from error
        finally:
            slow.cancel()
            _set_retry(producer, RETRY_MS)
            if offset is not None:
                offset.cancel()

    async def _abort(self) -> None:
        assert self._producer is not None
        try:
            async with asyncio.timeout(COMMIT_S):
                await self._producer.abort_transaction()
        except Exception as error:
            raise LogUnavailable(f"a refused commit of {self._where} could not be undone") from error

    async def close(self) -> None:
        if self._producer is not None:
            producer, self._producer = self._producer, None
            await close_producer(producer)


class Publisher:
    """The idempotent producer of a process, made when it is first needed and again when it has broken."""

    def __init__(self, connection: Connection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self._lock = asyncio.Lock()
        self._producer: AIOKafkaProducer | None = None

    async def publish(self, records: Sequence[Outgoing]) -> list[Placed | BaseException]:
        late = LogUnavailable(f"Kafka did not confirm a record in {PUBLISH_S:.0f} s; it may still be written")
        answers: list[Placed | BaseException] = [late] * len(records)
        sent: dict[int, asyncio.Future[Any]] = {}
        time_ms = now_ms(self._clock)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PUBLISH_S):
                for number, record in enumerate(records):
                    try:
                        check_size(record)
                        producer = await self._running()
                        await self._check_topic(producer, record.topic)
                        sent[number] = await producer.send(
                            record.topic, record.value, record.key, timestamp_ms=time_ms, headers=list(record.headers)
                        )
                    except Exception as error:
                        if isinstance(error, TimeoutError):
                            raise
                        answers[number] = translate(error)
                if sent:
                    await asyncio.wait(sent.values())
        for number, future in sent.items():
            if future.done():
                answers[number] = self._answer(future, time_ms)
            else:
                future.add_done_callback(_hear)
        return answers

    @staticmethod
    def _answer(future: asyncio.Future[Any], time_ms: int) -> Placed | BaseException:
        if (error := future.exception()) is not None:
            return translate(error)
        written = future.result()
        if written.offset < 0:  # a repeated send that the broker had written long ago
            return LogUnavailable("Kafka has the record but does not say where; publish it again under the same id")
        # A topic that keeps the client's time answers none of its own.
        time_ms = written.timestamp if written.timestamp_type == 1 else time_ms
        return Placed(written.topic, written.partition, written.offset, time_ms)

    async def _check_topic(self, producer: AIOKafkaProducer, topic: str) -> None:
        if producer.client.cluster.partitions_for_topic(topic) is None:
            await self._connection.partitions(topic)  # says at once when there is none; the producer would wait

    async def _running(self) -> AIOKafkaProducer:
        async with self._lock:
            if self._producer is not None and self._producer._sender.sender_task.done():
                await self._close()
            if self._producer is None:
                producer = AIOKafkaProducer(
                    bootstrap_servers=self._connection.bootstrap,
                    client_id=self._connection.client_id,
                    enable_idempotence=True,
                    max_request_size=RECORD_MAX_BYTES,
                    max_batch_size=BATCH_BYTES,
                )
                try:
                    await connect(producer.start, self._connection.bootstrap)
                except BaseException:
                    await close_producer(producer)
                    raise
                self._producer = producer
            return self._producer

    async def close(self) -> None:
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        if self._producer is not None:
            producer, self._producer = self._producer, None
            await close_producer(producer)


def _set_retry(producer: AIOKafkaProducer, retry_ms: int) -> None:
    producer._sender._retry_backoff = retry_ms / 1000


def _hear(future: asyncio.Future[Any]) -> None:
    """Take note of a failure that nobody may wait for."""
    if not future.cancelled():
        future.exception()
