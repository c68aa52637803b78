"""Each seam's adapters, opened by one fixture: one suite holds them all to the same behaviour."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import apsw
import pytest
from bus_model import Forget, What
from redis.asyncio import Redis

from arriero.schemas.clock import SystemClock
from arriero.schemas.names import Names
from arriero.transports.bus import TokenBus
from arriero.transports.connect import Endpoints, make_log
from arriero.transports.embedded.bus import EmbeddedBus
from arriero.transports.log import JobLog

OpenLog = Callable[[], Awaitable[JobLog]]


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.real)])
def log_endpoints(request: pytest.FixtureRequest, tmp_path: Path) -> Endpoints:
    if request.param == "embedded":
        return Endpoints(data=tmp_path)
    return Endpoints(kafka=request.getfixturevalue("kafka_bootstrap"), redis="redis://127.0.0.1:1")


@pytest.fixture
async def open_log(log_endpoints: Endpoints, names: Names) -> AsyncIterator[OpenLog]:
    """Opens connections to one log, as many as a test wants; they are closed behind it."""
    rng = random.Random()
    async with AsyncExitStack() as stack:

        async def open_one() -> JobLog:
            log = make_log(log_endpoints, names=names, clock=SystemClock(), rng=rng, client="test")
            return await stack.enter_async_context(log)

        yield open_one


@pytest.fixture
async def job_log(open_log: OpenLog) -> JobLog:
    return await open_log()


@pytest.fixture
async def forget(bus: TokenBus, bus_endpoints: Endpoints, names: Names) -> AsyncIterator[Forget]:
    if isinstance(bus, EmbeddedBus):

        async def forget_rows(job_id: str, what: What) -> None:
            job = names.channel(job_id)

            def delete(connection: apsw.Connection) -> None:
                if what == "tail":
                    last = "SELECT max(at) FROM tokens WHERE job = ?"
                    connection.execute(f"DELETE FROM tokens WHERE job = ? AND at = ({last})", (job, job))
                    return
                connection.execute("DELETE FROM tokens WHERE job = ?", (job,))
                if what != "tokens":
                    connection.execute("DELETE FROM heads WHERE job = ?", (job,))
                if what == "all":
                    connection.execute("DELETE FROM jobs WHERE job = ?", (job,))

            await bus._db.write(delete)

        yield forget_rows
        return

    assert bus_endpoints.redis is not None
    async with Redis.from_url(bus_endpoints.redis) as redis:

        async def forget_keys(job_id: str, what: What) -> None:
            if what == "tail":
                await redis.ltrim(names.tokens_key(job_id), 0, -2)
                return
            keys = [names.tokens_key(job_id)]
            if what != "tokens":
                keys.append(names.head_key(job_id))
            if what == "all":
                keys.append(names.job_key(job_id))
            await redis.delete(*keys)

        yield forget_keys
