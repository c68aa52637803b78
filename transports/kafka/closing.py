"""Ends aiokafka's clients in bounded time.

Their own `stop()` waits for what it can no longer send: with the broker gone it may never return, and giving up on
it leaves connections and tasks behind. What is reached into here has no public way (aiokafka 0.14).
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.client import AIOKafkaClient

PRODUCER_STOP_S: Final = 1.0
"""Callers have waited for what they sent; the rest is lost by intention."""
CONSUMER_STOP_S: Final = 8.0
"""Leaving a group in the middle of a rebalance waits for its end, at most one session timeout."""
_FORCE_S: Final = 0.2


async def close_producer(producer: AIOKafkaProducer) -> None:
    """What is still in its buffers is not sent; an open transaction stays open until its next owner ends it."""
    stopping = asyncio.create_task(producer.stop(), name="kafka-producer-stop")
    await _wait(stopping, PRODUCER_STOP_S)
    if not stopping.done() or stopping.cancelled():
        sender = producer._sender.sender_task
        if sender is not None:
            await _cancel(sender)
        stopping.cancel()
        await _wait(stopping, _FORCE_S)
        await close_client(producer.client)
    _hear_out(producer)


async def close_consumer(consumer: AIOKafkaConsumer) -> None:
    """Leaves the group as the last thing."""
    stopping = asyncio.create_task(consumer.stop(), name="kafka-consumer-stop")
    await _wait(stopping, CONSUMER_STOP_S)
    coordinator, fetcher = consumer._coordinator, consumer._fetcher
    for owner, name in (
        (coordinator, "_coordination_task"),
        (coordinator, "_heartbeat_task"),
        (coordinator, "_commit_refresh_task"),
        (fetcher, "_fetch_task"),
    ):
        task = getattr(owner, name, None)
        if task is not None and not task.done():
            await _cancel(task)
    if not stopping.done():
        stopping.cancel()
        await _wait(stopping, _FORCE_S)
    await close_client(consumer._client)


async def close_client(client: AIOKafkaClient) -> None:
    closing = asyncio.create_task(client.close(), name="kafka-client-close")
    await _wait(closing, PRODUCER_STOP_S)
    if not closing.done():
        await _cancel(closing)


async def _wait(task: asyncio.Task[Any], timeout_s: float) -> None:
    """Waits for its end, however it ends."""
    await asyncio.wait({task}, timeout=timeout_s)
    if task.done() and not task.cancelled():
        task.exception()


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancels until it ends: cancelled once, aiokafka's loops first wait for the requests that they have begun."""
    for _ in range(10):
        if task.done():
            break
        task.cancel()
        await _wait(task, _FORCE_S)


def _hear_out(producer: AIOKafkaProducer) -> None:
    """Take note of failures that nobody waits for, or asyncio reports each of them as never retrieved."""
    futures: list[asyncio.Future[Any] | None] = []
    if producer._txn_manager is not None:
        futures.append(producer._txn_manager.wait_for_transaction_end())
    accumulator = producer._message_accumulator
    for batch in [*accumulator._pending_batches, *(b for batches in accumulator._batches.values() for b in batches)]:
        futures += [batch.future, batch._drain_waiter]
    for future in futures:
        if future is not None and future.done() and not future.cancelled():
            future.exception()
