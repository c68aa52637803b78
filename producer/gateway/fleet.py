"""What the gateway says of the fleet and of itself."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from arriero.producer.gateway.gate import GATE
from arriero.schemas.errors import ArrieroError, NoLiveWorker

READY_S: Final = 2.0
"""How long log and bus have to answer a probe. Orchestrators give up soon after."""


async def models(request: web.Request) -> web.Response:
    found = sorted((await request.app[GATE].models()).items())
    listed = [{"id": name, "object": "model", "created": since // 1000, "owned_by": "arriero"} for name, since in found]
    return web.json_response({"object": "list", "data": listed})


async def healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """200 when a request would be served now; else 503 with the reasons."""
    reasons = [reason for reason in await asyncio.gather(_log(request), _bus(request)) if reason is not None]
    return web.json_response({"ready": not reasons, "reasons": reasons}, status=503 if reasons else 200)


async def _log(request: web.Request) -> str | None:
    client = request.app[GATE].client
    try:
        async with asyncio.timeout(READY_S):
            await client.log.partitions(client.names.events)
    except TimeoutError:
        return f"log_unavailable: no answer within {READY_S:g} s"
    except ArrieroError as error:
        return f"{error.code}: {error.message}"
    return None


async def _bus(request: web.Request) -> str | None:
    client = request.app[GATE].client
    try:
        async with asyncio.timeout(READY_S):
            if await client.workers():
                return None
    except TimeoutError:
        return f"bus_unavailable: no answer within {READY_S:g} s"
    except ArrieroError as error:
        return f"{error.code}: {error.message}"
    return f"{NoLiveWorker.code}: no worker of the pool {client.pool} is alive"


async def metrics(request: web.Request) -> web.Response:
    body = generate_latest(request.app[GATE].registry)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
