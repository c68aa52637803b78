"""The app: routes, limits, errors; and serving it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry

from arriero.producer.client import Client
from arriero.producer.gateway import completions, fleet, jobs
from arriero.producer.gateway.gate import GATE, Gate
from arriero.producer.openai import ApiError, api_error
from arriero.schemas.clock import Clock, SystemClock
from arriero.schemas.errors import ArrieroError, SetupError
from arriero.schemas.job import JOB_MAX_BYTES

BODY_MAX_BYTES: Final = JOB_MAX_BYTES + (64 << 10)
"""Largest request body. A body's JSON may be a little longer than its job's: escapes, blanks, nulls."""
RETRY_AFTER_S: Final = 2
"""What clients are told to wait while no worker, log or bus is there. A worker is back within seconds."""
STOP_S: Final = 1.0
"""How long open requests may go on while the gateway stops. Their jobs go on and are found by their ids."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = structlog.get_logger(__name__)


def make_app(
    client: Client, *, clock: Clock | None = None, registry: CollectorRegistry | None = None
) -> web.Application:
    """The gateway over a client, which stays the caller's."""
    app = web.Application(client_max_size=BODY_MAX_BYTES, middlewares=[_count, _answer_errors])
    app[GATE] = Gate(client, clock or SystemClock(), registry or CollectorRegistry())
    app.on_shutdown.append(_stop)
    app.on_cleanup.append(_close)
    app.add_routes(
        [
            web.post("/v1/chat/completions", completions.chat),
            web.post("/v1/completions", completions.completion),
            web.get("/v1/models", fleet.models),
            web.get("/v1/jobs/{job_id}", jobs.state),
            web.get("/v1/jobs/{job_id}/events", jobs.events),
            web.post("/v1/jobs/{job_id}/cancel", jobs.cancel),
            web.get("/healthz", fleet.healthz),
            web.get("/readyz", fleet.readyz),
            web.get("/metrics", fleet.metrics),
        ]
    )
    return app


@asynccontextmanager
async def serve(app: web.Application, host: str, port: int) -> AsyncIterator[int]:
    """Serve until the block ends; gives the port (of use when 0 was asked for). Raises SetupError(port_in_use)."""
    # Handlers are cancelled when their caller hangs up: a job nobody waits for is cancelled, too.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise SetupError(
                f"the gateway cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}; give another --port",
                code="port_in_use",
            ) from error
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def _stop(app: web.Application) -> None:
    app[GATE].stopping = True


async def _close(app: web.Application) -> None:
    await app[GATE].close()


# --- around every request ------------------------------------------------------------------------------------


@web.middleware
async def _count(request: web.Request, handler: Handler) -> web.StreamResponse:
    gate = request.app[GATE]
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "none"
    status = "hung_up"
    began_s = gate.clock.monotonic()
    try:
        response = await handler(request)
        status = str(response.status)
        return response
    finally:
        gate.metrics.requests.labels(route, status).inc()
        gate.metrics.request_time.labels(route).observe(gate.clock.monotonic() - began_s)


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever goes wrong before an answer has begun becomes an error body."""
    try:
        return await handler(request)
    except ArrieroError as error:
        return _error_response(api_error(error))
    except web.HTTPRequestEntityTooLarge:
        message = f"the body is too large: a job has at most {JOB_MAX_BYTES:,} bytes"
        return _error_response(ApiError(status=413, code="job_too_large", message=message))
    except web.HTTPException as error:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status, "bad_request")
        message = f"{request.method} {request.path[:200]}: {error.reason}"
        return _error_response(ApiError(status=error.status, code=code, message=message))
    except ConnectionError:
        raise
    except Exception:
        log.error("request_failed", route=request.path[:200], exc_info=True)
        return _error_response(ApiError(status=500, code="internal_error", message="the gateway failed; see its log"))


def _error_response(error: ApiError) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status == 503 else {}
    if not error.retriable:
        headers["x-should-retry"] = "false"
    return web.json_response(error.body(), status=error.status, headers=headers)
