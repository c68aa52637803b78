"""The watch over one life of a child: does an operation not end, does the kernel kill for want of memory?

Both lead to blame, so both are judged narrowly. A child that was stopped (Ctrl-Z, a debugger), or that stood still
together with this process (a paused container, a machine that slept), is not stuck. A kill is the kernel's only when
its count has just risen: who sends SIGKILL an hour after a neighbour ran out of memory blames nobody.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from arriero.ops.crashes import oom_kills
from arriero.schemas.clock import Clock
from arriero.workers.flight import progress, stuck_lanes

WATCH_S: Final = 1.0
HELD_UP: Final = 3
"""Who looks so many times later than it meant to was itself held up, and judges nobody."""
OOM_WINDOW_S: Final = 10.0
"""Between the kernel's count and the end of the process lies the freeing of its memory."""


class Watch:
    """Made when the child is; `until_stuck` runs beside it."""

    def __init__(self, path: Path, patience_s: float, clock: Clock) -> None:
        """path: the child's flight recorder. patience_s: how long an operation may take."""
        self.stuck: frozenset[int] = frozenset()
        """The recorder's lanes that did not move on."""
        self._path = path
        self._patience_s = patience_s
        self._now = clock.monotonic
        self._oom_kills = oom_kills()
        self._oom_at = float("-inf")

    async def until_stuck(self, pid: int) -> float:
        """Returns for how long an operation has not moved on, once that is too long."""
        every_s = min(WATCH_S, self._patience_s / 4)
        seen = progress(self._path)
        since = last = self._now()
        while True:
            await asyncio.sleep(every_s)
            now, moment = progress(self._path), self._now()
            self._count(moment)
            lanes = stuck_lanes(seen, now)
            if not lanes or moment - last > HELD_UP * every_s or _is_stopped(pid):
                seen, since = now, moment
            elif moment - since >= self._patience_s:
                self.stuck = lanes
                return moment - since
            last = moment

    def out_of_memory(self) -> bool:
        """Whether the kernel has just killed something of this control group: asked when the child has ended."""
        moment = self._now()
        self._count(moment)
        return moment - self._oom_at <= OOM_WINDOW_S

    def _count(self, moment: float) -> None:
        count = oom_kills()
        if count > self._oom_kills:
            self._oom_at = moment
        self._oom_kills = count


def _is_stopped(pid: int) -> bool:
    """By a signal or a debugger; where nothing tells, no."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"  # the name before it may hold anything
