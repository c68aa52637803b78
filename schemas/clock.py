"""The one door to time and chance.

Everything below `ops` is handed a `Clock` and a `random.Random`; this module and `ops` are the only
places that read the machine's own. A simulation hands in others and runs the same code in virtual time.
(Waiting is asyncio's business: `asyncio.sleep` and `asyncio.timeout` follow the event loop's clock, which a
simulation replaces together with this one.)
"""

from __future__ import annotations

import random
import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks: one that all machines share, one that never jumps."""

    def time(self) -> float:
        """Wall-clock time, Unix seconds."""
        ...

    def monotonic(self) -> float:
        """Seconds since some fixed moment of this boot; comparable between processes of one machine."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


def now_ms(clock: Clock) -> int:
    """Wall-clock time in whole milliseconds, as records carry it."""
    return int(clock.time() * 1000)


def system_random() -> random.Random:
    """A generator seeded by the operating system."""
    return random.Random(random.SystemRandom().getrandbits(128))
