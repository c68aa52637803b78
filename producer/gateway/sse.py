"""Server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import msgspec
from aiohttp import web

from arriero.producer.gateway.gate import GATE

KEEP_ALIVE_S: Final = 10.0
"""Between comments: proxies give up on connections that are silent for 30 to 60 s."""
DONE: Final = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def data(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def event(name: str, value: bytes, event_id: str = "") -> bytes:
    """An event with a name; `value` is JSON. Without an id, a reader that comes back names the last one."""
    head = f"id: {event_id}\nevent: {name}\n" if event_id else f"event: {name}\n"
    return head.encode() + b"data: " + value + b"\n\n"


@contextlib.asynccontextmanager
async def event_stream(request: web.Request, headers: Mapping[str, str]) -> AsyncIterator[web.StreamResponse]:
    """A response whose every `write` goes out at once, kept alive by comments, ended at exit."""
    response = web.StreamResponse(headers=headers)
    response.content_type = "text/event-stream"
    response.charset = "utf-8"
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"  # nginx would collect
    await response.prepare(request)
    keeping = asyncio.create_task(_keep_alive(response), name="sse keep-alive")
    try:
        with request.app[GATE].metrics.streams.track_inprogress():
            yield response
            await response.write_eof()
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


async def _keep_alive(response: web.StreamResponse) -> None:
    with contextlib.suppress(ConnectionError):  # the handler learns of it by itself
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            await response.write(b": keep-alive\n\n")
