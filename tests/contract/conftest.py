"""Each seam's adapters, opened by one fixture: one suite holds them all to the same behaviour."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from arriero.schemas.clock import SystemClock
from arriero.schemas.names import Names
from arriero.transports.connect import Endpoints, make_log
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
