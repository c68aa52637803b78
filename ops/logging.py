"""Where log entries go: for a person on a terminal, as JSON lines otherwise."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from pathlib import Path
from typing import TextIO

import structlog

_CHATTY = ("aiokafka", "kafka", "asyncio", "aiohttp.access", "redis")
"""Libraries that report as errors what we handle and log ourselves."""


class _Patient(io.StringIO):
    """A stream that loses what cannot be written: a closed terminal or a full disk must not stop what is logged."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def configure(
    *, as_json: bool | None = None, debug: bool = False, quiet: bool = False, file: Path | None = None
) -> None:
    """Log to standard error, or append to a file. `as_json` None: JSON unless standard error is a terminal. `quiet`:
    only what is wrong."""
    stream = _Patient(sys.stderr if file is None else file.open("a", buffering=1, encoding="utf-8"))
    level = logging.DEBUG if debug else logging.ERROR if quiet else logging.INFO
    plain = sys.stderr.isatty() if as_json is None else not as_json
    renderer: structlog.typing.Processor
    if plain:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    else:
        renderer = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([] if plain else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(stream=stream, level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    if not debug:
        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.CRITICAL)
