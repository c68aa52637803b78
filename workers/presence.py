"""Saying on the bus that this worker lives, so that clients can tell a slow fleet from none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from arriero.schemas.codec import encode
from arriero.schemas.errors import BusUnavailable
from arriero.schemas.worker import WorkerInfo
from arriero.transports.bus import TokenBus

ANNOUNCE_S: Final = 0.5
PRESENT_S: Final = 1.75
"""How long an announcement counts: a dead worker is missed within two seconds, and three announcements in a row must
fail before a live one is."""


async def announce(bus: TokenBus, info: Callable[[], WorkerInfo]) -> None:
    """Announce until cancelled, then say goodbye. Without a bus nobody could hear it anyway."""
    try:
        while True:
            now = info()
            with contextlib.suppress(BusUnavailable, TimeoutError):
                async with asyncio.timeout(PRESENT_S):
                    await bus.announce(now.pool, now.worker, encode(now), PRESENT_S)
            await asyncio.sleep(ANNOUNCE_S)
    finally:
        now = info()
        with contextlib.suppress(BusUnavailable, TimeoutError):
            async with asyncio.timeout(ANNOUNCE_S):
                await bus.retire(now.pool, now.worker)
