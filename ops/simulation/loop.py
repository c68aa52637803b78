"""An event loop on virtual time, and the hosts that simulated processes run on.

A callback belongs to the host in whose context it was scheduled. A host that is killed runs none of its callbacks
any more: nothing is cleaned up, as after SIGKILL. One that is frozen gets them all when it is thawed. Time moves only
when nothing is left to do at the present moment, to the next timer; so hours take seconds, and a run depends on nothing
but its seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import heapq
import itertools
import sys
from collections.abc import Callable, Coroutine
from typing import Any, cast

_HOST: contextvars.ContextVar[Host] = contextvars.ContextVar("host")


class Stuck(Exception):
    """Nothing will ever happen again."""


class Host:
    """One simulated process. It is not started again: its successor is another host of this name."""

    def __init__(self, loop: VirtualLoop, name: str, *, skew_s: float = 0.0) -> None:
        self.name = name
        self.skew_s = skew_s
        self.dead = False
        self.frozen_since: float | None = None
        self.callbacks = 0
        """How many have run."""
        self.before: dict[int, Callable[[], object]] = {}
        """What happens before which callback, between two awaits."""
        self.died: list[Callable[[], None]] = []
        """Told of its end, as whoever watches processes would be."""
        self.thawed: list[Callable[[], None]] = []
        """What happens to it as soon as it is thawed."""
        self._loop = loop
        self._held: list[asyncio.Handle] = []
        self._context = contextvars.copy_context()
        self._context.run(_HOST.set, self)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run this in the process."""
        return self._loop.create_task(work, name=self.name, context=self._context)

    def kill(self) -> None:
        if not self.dead:
            self.dead = True
            self._held.clear()
            for told in self.died:
                told()

    def freeze(self) -> None:
        if self.frozen_since is None:
            self.frozen_since = self._loop.time()

    def thaw(self) -> None:
        self.frozen_since = None
        held, self._held = self._held, []
        self._loop.run_soon(held)
        thawed, self.thawed = self.thawed, []
        for happens in thawed:
            happens()

    def takes(self, handle: asyncio.Handle) -> bool:
        """Whether its callback may run now."""
        if self.dead:
            return False
        if self.frozen_since is not None:
            self._held.append(handle)
            return False
        if self.callbacks in self.before:
            self.before.pop(self.callbacks)()
            return self.takes(handle)
        self.callbacks += 1
        return True


class _Future(asyncio.Future[Any]):
    """Hashes by its number, so that sets of futures are walked in an order that depends on no address."""

    def __init__(self, number: int, loop: VirtualLoop) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class _Task(asyncio.Task[Any]):
    """Likewise."""

    def __init__(self, number: int, work: Coroutine[Any, Any, Any], loop: VirtualLoop, **options: Any) -> None:
        self._number = number
        super().__init__(work, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """`run_until_complete` it. Raises Stuck when the work waits for what can't come."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._numbers = itertools.count()
        self._ready: Any
        self._timers: list[tuple[float, int, Any]] = []
        """In place of the base's heap of handles: numbers are quicker to compare, and tell which of two was first."""
        self.outside = contextvars.copy_context()
        """The context of what belongs to no host: the world itself."""
        self._tasks: list[asyncio.Task[Any]] = []
        """All of them. What the dead leave behind must not be collected while others live: that would clean up."""
        self.set_task_factory(cast(Any, self._make_task))
        self.set_exception_handler(lambda loop, context: None)  # futures of the dead, which nobody will ever ask

    def time(self) -> float:
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(next(self._numbers), self)

    def later(self, delay_s: float, callback: Callable[..., object], *arguments: Any) -> None:
        """The world does this, whoever is dead by then."""
        self.call_later(delay_s, callback, *arguments, context=self.outside)

    def run_soon(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def _run_once(self) -> None:
        """One round: what is ready, or else what is due next."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not self._ready:
            if not timers:
                raise Stuck("nothing is ready and no timer runs")
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            handle = heapq.heappop(timers)[2]
            if not handle._cancelled:
                self._ready.append(handle)
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle._cancelled:
                host = handle._context.get(_HOST)
                if host is None or host.takes(handle):
                    handle._run()

    def dispose(self) -> None:
        """Drop what was never finished, without a word, and close the loop. Its clean-up reaches nobody any more."""
        before, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
        try:
            for task in self._tasks:
                if not task.done():
                    with contextlib.suppress(BaseException):
                        cast(Any, task.get_coro()).close()
            self._tasks.clear()
            self._ready.clear()
            self._timers.clear()
            self.close()
            gc.collect()
        finally:
            sys.unraisablehook = before

    def _make_task(self, loop: VirtualLoop, work: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        task = _Task(next(self._numbers), work, loop, **options)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.append(task)
        return task

    def _process_events(self, events: object) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector."""


class HostClock:
    """A host's clocks: the wall clock may be wrong, and may jump."""

    def __init__(self, loop: VirtualLoop, host: Host, epoch_s: float) -> None:
        self._loop = loop
        self._host = host
        self._epoch_s = epoch_s

    def time(self) -> float:
        return self._epoch_s + self._loop.time() + self._host.skew_s

    def monotonic(self) -> float:
        return self._loop.time()
