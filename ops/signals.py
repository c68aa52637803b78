"""Ctrl-C and SIGTERM as a request to stop. Handlers are restored on leaving."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator


class StopRequest:
    """`asked` is set by the first signal, `pressed` by a second: stop at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.pressed = asyncio.Event()

    def note(self) -> None:
        if self.asked.is_set():
            self.pressed.set()
        self.asked.set()


@contextlib.contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a StopRequest of the running loop."""
    loop = asyncio.get_running_loop()
    request = StopRequest()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, request.note)
    try:
        yield request
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
