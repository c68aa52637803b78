"""Fixtures for every tier of tests."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from arriero.ops import testbed
from arriero.schemas.clock import SystemClock
from arriero.schemas.names import Names
from arriero.transports.bus import TokenBus
from arriero.transports.connect import Endpoints, make_bus

OpenBus = Callable[[], Awaitable[TokenBus]]

# Whatever starts the tests (nohup, a shell's background) may ignore these, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A busy machine must not fail a property by being slow.
settings.register_profile("arriero", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("arriero")


@pytest.fixture
def clock() -> SystemClock:
    return SystemClock()


@pytest.fixture
def rng() -> random.Random:
    return random.Random(7)


@pytest.fixture
def names() -> Names:
    """A namespace of this test alone, so that tests share brokers without meeting."""
    return Names(f"t{random.SystemRandom().getrandbits(48):x}")


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def real_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> testbed.Pair:
    """One real Kafka and one real Redis for the whole run, whatever its number of processes.

    ARRIERO_TEST_KAFKA and ARRIERO_TEST_REDIS point at a pair that runs already (`python -m arriero.ops.testbed`
    starts one); ARRIERO_DEMAND_REAL=1 fails what would be skipped without one.
    """
    running = testbed.Pair(os.environ.get("ARRIERO_TEST_KAFKA", ""), os.environ.get("ARRIERO_TEST_REDIS", ""))
    if all(running):
        return running
    lacking = testbed.missing()
    if lacking is not None and os.environ.get("ARRIERO_DEMAND_REAL") == "1":
        pytest.fail(lacking)
    if lacking is not None:
        pytest.skip(lacking)
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "testbed"
    folder.mkdir(exist_ok=True)
    shared = ExitStack()
    # Leaving waits for the other processes' last test, which may take longer than the teardown of one of ours may.
    request.config.add_cleanup(shared.close)
    return shared.enter_context(testbed.share_pair(folder))


@pytest.fixture(scope="session")
def kafka_bootstrap(real_pair: testbed.Pair) -> str:
    """Brokers, `host:port`. Mark the test `real`."""
    return real_pair.bootstrap


@pytest.fixture(scope="session")
def redis_url(real_pair: testbed.Pair) -> str:
    """A Redis that other tests use at the same time. Mark the test `real`."""
    return real_pair.redis_url


@pytest.fixture(params=["embedded", pytest.param("redis", marks=pytest.mark.real)])
def bus_endpoints(request: pytest.FixtureRequest, tmp_path: Path) -> Endpoints:
    if request.param == "embedded":
        return Endpoints(data=tmp_path)
    return Endpoints(kafka="127.0.0.1:1", redis=request.getfixturevalue("redis_url"))


@pytest.fixture
async def open_bus(bus_endpoints: Endpoints, names: Names) -> AsyncIterator[OpenBus]:
    """Opens connections to one bus."""
    async with AsyncExitStack() as stack:

        async def open_one() -> TokenBus:
            return await stack.enter_async_context(make_bus(bus_endpoints, names=names, clock=SystemClock()))

        yield open_one


@pytest.fixture
async def bus(open_bus: OpenBus) -> TokenBus:
    return await open_bus()
