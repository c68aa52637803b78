"""Fixtures for every tier of tests."""

from __future__ import annotations

import random
import socket

import pytest
from hypothesis import HealthCheck, settings

from arriero.schemas.clock import SystemClock
from arriero.schemas.names import Names

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
