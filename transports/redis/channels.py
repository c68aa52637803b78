"""One subscriber connection that all followers of a process share.

redis-py's own PubSub subscribes again by itself after a lost connection, and so hides that messages were missed.
Here a lost connection ends every subscription with BusUnavailable, and each reader starts over.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
import structlog
from redis.asyncio.connection import ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from arriero.schemas.codec import decode_message
from arriero.schemas.errors import BusUnavailable
from arriero.schemas.token import Look
from arriero.transports.inbox import Inbox

PING_EVERY_S: Final = 5.0
"""A connection silent for so long is asked; one that does not answer within the same time again is lost."""

log = structlog.get_logger(__name__)


class RedisSubscription(Inbox):
    """A follower's inbox, and whether the server has confirmed it."""

    def __init__(self) -> None:
        super().__init__()
        self.confirmed = asyncio.get_running_loop().create_future()

    def fail(self, error: BusUnavailable) -> None:
        if not self.confirmed.done():
            self.confirmed.set_exception(error)
            self.confirmed.exception()  # its follower may have gone
        self.lose()


class Channels:
    """Subscriptions by channel on one connection, which is made when the first follower comes."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # Protocol 2: messages come as plain arrays, and PING is allowed while subscribed.
        self._pool: Any = ConnectionPool.from_url(
            url, protocol=2, socket_timeout=None, socket_connect_timeout=timeout_s, decode_responses=True
        )
        self._followers: dict[str, set[RedisSubscription]] = {}
        self._connection: Any = None
        self._reading: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._unconfirmed: deque[RedisSubscription] = deque()
        """In the order of the SUBSCRIBE commands sent, which is that of the server's answers."""
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        async with self._writing:  # so that no connection is being made
            if self._reading is not None:
                self._reading.cancel()
                await asyncio.wait([self._reading])
            await self._lose("closed")

    @contextlib.asynccontextmanager
    async def follow(self, channel: str) -> AsyncIterator[RedisSubscription]:
        subscription = RedisSubscription()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._subscribe(channel, subscription)
                await subscription.confirmed
        except (RedisError, OSError, TimeoutError) as error:
            await self._leave(channel, subscription)
            raise BusUnavailable(f"Redis is out of reach: {error or 'no answer'}") from error
        except BaseException:
            await self._leave(channel, subscription)
            raise
        try:
            yield subscription
        finally:
            await self._leave(channel, subscription)

    async def _subscribe(self, channel: str, subscription: RedisSubscription) -> None:
        async with self._writing:
            if self._closed:
                raise BusUnavailable("the token bus is closed")
            if self._connection is None:
                connection = self._pool.make_connection()
                await connection.connect()
                self._connection = connection
                self._reading = asyncio.create_task(self._read(connection), name="redis channels")
            self._followers.setdefault(channel, set()).add(subscription)
            # Also when others follow the channel already: one of them may be leaving, and its UNSUBSCRIBE on the way.
            self._unconfirmed.append(subscription)
            await self._send("SUBSCRIBE", channel)

    async def _send(self, *command: str) -> None:
        """Under the lock."""
        if not self._connection.is_connected:
            # redis-py would connect again by itself, without the subscriptions.
            raise RedisConnectionError("the connection is closed")
        async with asyncio.timeout(self._timeout_s):  # for all who wait for the lock
            await self._connection.send_command(*command)

    async def _leave(self, channel: str, subscription: RedisSubscription) -> None:
        followers = self._followers.get(channel)
        if followers is None:
            return
        followers.discard(subscription)
        if followers:
            return
        del self._followers[channel]
        with contextlib.suppress(RedisError, OSError):
            async with self._writing:
                if self._connection is not None and channel not in self._followers:
                    await self._send("UNSUBSCRIBE", channel)

    async def _read(self, connection: Any) -> None:
        """Hand messages out until the connection is lost."""
        asked = False
        reason = "closed"
        try:
            while True:
                reply = await connection.read_response(timeout=PING_EVERY_S)
                if reply is None:
                    if asked:
                        raise TimeoutError("no answer to PING")
                    asked = True
                    async with self._writing:
                        await self._send("PING")
                    continue
                asked = False
                self._take(reply)
        except (RedisError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            log.warning("bus_connection_lost", error=reason)
        finally:
            await self._lose(reason)

    async def _lose(self, reason: str) -> None:
        """Every follower starts over."""
        connection, self._connection, self._reading = self._connection, None, None
        followers, self._followers = self._followers, {}
        self._unconfirmed.clear()
        for subscriptions in followers.values():
            for subscription in subscriptions:
                subscription.fail(BusUnavailable(f"the connection to Redis was lost: {reason}"))
        if connection is not None:
            await connection.disconnect()

    def _take(self, reply: list[Any]) -> None:
        kind, channel = reply[0], reply[1]
        if kind == "subscribe":
            confirmed = self._unconfirmed.popleft().confirmed
            if not confirmed.done():
                confirmed.set_result(None)
        elif kind == "message":
            try:
                message = decode_message(reply[2])
            except msgspec.MsgspecError:
                message = Look()  # of a later release, or nobody's: the stream itself tells
            for subscription in self._followers.get(channel, ()):
                subscription.put(message)
