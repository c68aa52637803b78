"""Collects what an engine runner reports."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable

from arriero.schemas.token import Token
from arriero.workers.engine.seam import Ending, StepReport


class Listener:
    """Collects what the runner reports, and lets a test wait for it."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.tokens: dict[int, list[Token]] = {}
        self.endings: dict[int, Ending] = {}
        self.flags: dict[int, list[str]] = {}
        self.cached: Counter[int] = Counter()
        """By key: prompt tokens that needed no prefill."""
        self.threads: set[str] = set()
        self._changed = asyncio.Event()

    def __call__(self, report: StepReport) -> None:
        self.threads.add(threading.current_thread().name)
        self.reports.append(report)
        for update in report.updates:
            assert update.key not in self.endings, "nothing follows an ending"
            self.tokens.setdefault(update.key, []).extend(update.tokens)
            self.cached[update.key] += update.cached_tokens
            flags = self.flags.setdefault(update.key, [])
            flags += [name for name in ("admitted", "preempted", "first_token") if getattr(update, name)]
            if update.ending is not None:
                self.endings[update.key] = update.ending
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def end_of(self, *keys: int) -> None:
        await self.until(lambda: all(key in self.endings for key in keys))

    def text(self, key: int) -> str:
        ending = self.endings.get(key)
        return "".join(token.piece for token in self.tokens.get(key, [])) + (ending.tail if ending else "")
