"""The token bus on Redis 7 or later, by its function library `bus.lua`.

Channels are plain pub/sub; on a Redis Cluster the same names would serve sharded pub/sub (`SSUBSCRIBE`), which has
not been tried.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from arriero.schemas.clock import Clock
from arriero.schemas.errors import BusUnavailable, SetupError
from arriero.schemas.names import Names
from arriero.transports.bus import (
    Appended,
    AppendRequest,
    Finished,
    FinishRequest,
    Opened,
    OpenRequest,
    Position,
    StateWrite,
    View,
)
from arriero.transports.log import KEEP_RESULTS_S
from arriero.transports.redis import calls
from arriero.transports.redis.calls import LIBRARY, LIBRARY_CODE, Call, Calls
from arriero.transports.redis.channels import Channels, RedisSubscription

TIMEOUT_S: Final = 3.0
"""For any call. Appends take milliseconds: a server that needs longer is as good as away, and tokens wait."""
SET_LIFE_S: Final = 86_400
"""Life of the sets that list pools and workers; each announcement renews them."""

log = structlog.get_logger(__name__)


class RedisBus:
    """See the seam's `TokenBus`. Entering connects to nothing: each call finds out for itself."""

    def __init__(self, url: str, *, names: Names, clock: Clock, retention_s: float = KEEP_RESULTS_S) -> None:
        self._url = url
        self._names = names
        self._calls = Calls(names, retention_s)

    async def __aenter__(self) -> RedisBus:
        retry = Retry(ConstantBackoff(0.02), 1)  # a server that was restarted closed the connections in the pool
        try:
            self._redis: Any = Redis.from_url(
                self._url,
                decode_responses=True,
                # `_reaching` bounds every call; redis-py's own timeout goes through `asyncio.wait_for`, which before
                # Python 3.12 loses a cancellation that meets the end of what it waits for: a task would not stop.
                socket_timeout=None,
                socket_connect_timeout=TIMEOUT_S,
                retry=retry,
                retry_on_error=[RedisConnectionError],
            )
        except ValueError as error:
            raise SetupError(f"--redis {self._url}: {error}", code="bad_setting") from error
        self._channels = Channels(self._url, TIMEOUT_S)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channels.close()
        await self._redis.aclose()

    async def check(self) -> None:
        async with _reaching():
            server: dict[str, Any] = await self._redis.info("server")
            policy: dict[str, Any] = await self._redis.info("memory")
        version = str(server.get("redis_version", "0"))
        if int(version.partition(".")[0]) < 7:
            raise SetupError(f"Redis {version} is too old: the token bus needs 7 or later", code="bad_redis")
        if policy.get("maxmemory_policy") != "noeviction":
            # Not refused: an eviction loses a cancel at worst, and then only until the projector sets it again.
            log.warning(
                "redis_evicts", policy=policy.get("maxmemory_policy"), mend="CONFIG SET maxmemory-policy noeviction"
            )

    # --- the owner's ---------------------------------------------------------------------------------------

    async def open(self, requests: Sequence[OpenRequest]) -> list[Opened]:
        return [calls.opened(answer) for answer in await self._run([self._calls.open(r) for r in requests])]

    async def append(self, requests: Sequence[AppendRequest]) -> list[Appended]:
        return [calls.appended(answer) for answer in await self._run([self._calls.append(r) for r in requests])]

    # --- the reader's --------------------------------------------------------------------------------------

    async def read(self, job_id: str, position: Position) -> View:
        (answer,) = await self._run([self._calls.read(job_id, position)])
        return calls.view(answer)

    def follow(self, job_id: str) -> AbstractAsyncContextManager[RedisSubscription]:
        return self._channels.follow(self._names.channel(job_id))

    async def cancel(self, job_id: str) -> None:
        await self._run([self._calls.cancel(job_id)])

    async def states(self, job_ids: Sequence[str]) -> list[bytes | None]:
        if not job_ids:
            return []
        async with _reaching():
            pipeline = self._redis.pipeline(transaction=False)
            for job_id in job_ids:
                pipeline.hget(self._names.job_key(job_id), "state")
            return [None if state is None else state.encode() for state in await pipeline.execute()]

    # --- the projector's -----------------------------------------------------------------------------------

    async def finish(self, requests: Sequence[FinishRequest]) -> list[Finished]:
        return [calls.finished(answer) for answer in await self._run([self._calls.finish(r) for r in requests])]

    async def note_queued(self, states: Sequence[tuple[str, bytes]]) -> None:
        await self._run([self._calls.note_queued(job_id, state) for job_id, state in states])

    async def put_states(self, writes: Sequence[StateWrite]) -> None:
        await self._run([self._calls.put_state(write) for write in writes])

    async def positions(self) -> bytes | None:
        async with _reaching():
            value: str | None = await self._redis.get(self._names.positions_key)
            return None if value is None else value.encode()

    async def put_positions(self, positions: bytes, *, first: bool) -> bool:
        async with _reaching():
            return bool(await self._redis.set(self._names.positions_key, positions, xx=not first))

    async def forget(self) -> None:
        async with _reaching():
            await self._redis.delete(self._names.positions_key)

    # --- presence ------------------------------------------------------------------------------------------

    async def announce(self, pool: str, worker: str, info: bytes, ttl_s: float) -> None:
        names = self._names
        async with _reaching():
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.set(names.worker_key(pool, worker), info, px=int(ttl_s * 1000))
            pipeline.sadd(names.workers_key(pool), worker)
            pipeline.expire(names.workers_key(pool), SET_LIFE_S)
            pipeline.sadd(names.pools_key, pool)
            pipeline.expire(names.pools_key, SET_LIFE_S)
            await pipeline.execute()

    async def retire(self, pool: str, worker: str) -> None:
        async with _reaching():
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.delete(self._names.worker_key(pool, worker))
            pipeline.srem(self._names.workers_key(pool), worker)
            await pipeline.execute()

    async def pools(self) -> list[str]:
        async with _reaching():
            return sorted(await self._redis.smembers(self._names.pools_key))

    async def workers(self, pool: str) -> dict[str, bytes]:
        async with _reaching():
            listed = sorted(await self._redis.smembers(self._names.workers_key(pool)))
            if not listed:
                return {}
            found = await self._redis.mget([self._names.worker_key(pool, worker) for worker in listed])
            gone = [worker for worker, info in zip(listed, found, strict=True) if info is None]
            if gone:
                await self._redis.srem(self._names.workers_key(pool), *gone)
        return {worker: info.encode() for worker, info in zip(listed, found, strict=True) if info is not None}

    # --- inside --------------------------------------------------------------------------------------------

    async def _run(self, batch: Sequence[Call]) -> list[Any]:
        """One round trip. A server that has forgotten the library answers its calls with an error each; only those
        are sent again, once it has been loaded."""
        if not batch:
            return []
        async with _reaching():
            answers = await self._send(batch)
            lost = [index for index, answer in enumerate(answers) if _unknown_function(answer)]
            if lost:
                await self._redis.function_load(LIBRARY_CODE, replace=True)
                again = await self._send([batch[index] for index in lost])
                for index, answer in zip(lost, again, strict=True):
                    answers[index] = answer
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return answers

    async def _send(self, batch: Sequence[Call]) -> list[Any]:
        pipeline = self._redis.pipeline(transaction=False)
        for call in batch:
            command = "FCALL_RO" if call.function == "read" else "FCALL"
            name = f"{LIBRARY}_{call.function}"
            pipeline.execute_command(command, name, len(call.keys), *call.keys, *call.arguments)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers


def _unknown_function(answer: object) -> bool:
    return isinstance(answer, ResponseError) and "Function not found" in str(answer)


@contextlib.asynccontextmanager
async def _reaching() -> AsyncIterator[None]:
    """One deadline, and Redis's errors as ours."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield
    except (RedisError, OSError, TimeoutError) as error:
        raise BusUnavailable(f"Redis is out of reach: {error or 'no answer in time'}") from error
