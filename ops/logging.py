"""Where log entries go: for a person on a terminal, as JSON lines otherwise."""

from __future__ import annotations

import logging
import sys

import structlog

_CHATTY = ("aiokafka", "kafka", "asyncio", "aiohttp.access", "redis")
"""Libraries that report as errors what we handle and log ourselves."""


def configure(*, as_json: bool | None = None, debug: bool = False, quiet: bool = False) -> None:
    """Log to standard error. `as_json` None: JSON unless standard error is a terminal. `quiet`: only what is wrong."""
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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    if not debug:
        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.CRITICAL)
