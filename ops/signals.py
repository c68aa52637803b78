"""Ctrl-C, SIGTERM and a closed terminal as a request to stop. Handlers are restored on leaving."""

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
def stop_signals(request: StopRequest | None = None) -> Iterator[StopRequest]:
    """Turn SIGINT, SIGTERM and SIGHUP into a StopRequest of the running loop. Under nohup SIGHUP stays ignored."""
    loop = asyncio.get_running_loop()
    request = request or StopRequest()
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, request.note)
    try:
        yield request
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
