"""The embedded pair, or the real one, for tests of everything that stands on both seams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fleet import Fleet

from arriero.schemas.names import Names
from arriero.transports.connect import Endpoints


@pytest.fixture(params=["embedded", pytest.param("real", marks=pytest.mark.real)])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Endpoints:
    """Where log and bus are."""
    if request.param == "embedded":
        return Endpoints(data=tmp_path / "data")
    return Endpoints(kafka=request.getfixturevalue("kafka_bootstrap"), redis=request.getfixturevalue("redis_url"))


@pytest.fixture
async def fleet(pair: Endpoints, names: Names) -> AsyncIterator[Fleet]:
    """Log, bus and topics; no worker and no projector yet."""
    async with AsyncExitStack() as stack:
        fleet = Fleet(pair, names, stack)
        await fleet.open()
        yield fleet
