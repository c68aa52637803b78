"""Jobs by their id, whoever submitted them: state, stream, cancel."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from arriero.producer.follow import START, Ended, Reset, Tokens, format_position, parse_position
from arriero.producer.gateway import sse
from arriero.producer.gateway.gate import GATE, JOB_HEADER, job_id_of
from arriero.producer.openai import api_error
from arriero.schemas.codec import encode
from arriero.schemas.errors import ArrieroError, BadJob
from arriero.schemas.state import JobState
from arriero.transports.bus import Position

_SHOWN = (
    "tenant model root attempt worker queued_ms started_ms finished_ms crashes finish_reason error usage tokens batch"
).split()


async def state(request: web.Request) -> web.Response:
    return web.json_response(state_object(await request.app[GATE].client.status(job_id_of(request))))


async def cancel(request: web.Request) -> web.Response:
    """Ask for the job's end. 202: the owner decides, and a job that has ended stays as it is."""
    client = request.app[GATE].client
    job_id = job_id_of(request)
    before = await client.status(job_id)
    if before.ended:
        return web.json_response(state_object(before))
    await client.cancel(job_id, reason="asked for over HTTP")
    return web.json_response(state_object(msgspec.structs.replace(before, cancel_requested=True)), status=202)


def state_object(found: JobState) -> dict[str, Any]:
    shown = {name: msgspec.to_builtins(getattr(found, name)) for name in _SHOWN}
    return {"id": found.id, "object": "job", "status": found.status, "class": found.priority, **shown}


async def events(request: web.Request) -> web.StreamResponse:
    """The job's stream, from its start or from where a reader has come to.

    `tokens` events carry the position behind them as their id. `reset`: drop what was shown from index `count` on.
    `end`: the recorded outcome, nothing follows. A reset has no id of its own: a reader that is cut off before the
    tokens after it comes back with its old position, and is told again.
    """
    gate = request.app[GATE]
    job_id = job_id_of(request)
    position = position_of(request)
    await gate.client.status(job_id)  # an unknown job is 404, not an endless wait
    behind = position

    def moved(to: Position) -> None:
        nonlocal behind
        behind = to

    async with sse.event_stream(request, {JOB_HEADER: job_id}) as response:
        try:
            async with aclosing(gate.client.stream(job_id, position, moved=moved)) as items:
                async for item in items:
                    if isinstance(item, Tokens):
                        await response.write(sse.event("tokens", _tokens(item), format_position(behind)))
                    elif isinstance(item, Reset):
                        await response.write(sse.event("reset", msgspec.json.encode(item)))
                    elif isinstance(item, Ended):
                        await response.write(sse.event("end", encode(item.end)))
        except ArrieroError as error:
            await response.write(sse.event("error", msgspec.json.encode(api_error(error).body())))
    return response


def _tokens(item: Tokens) -> bytes:
    text = "".join(token.piece for token in item.tokens)
    return msgspec.json.encode({"first": item.first, "text": text, "tokens": item.tokens})


def position_of(request: web.Request) -> Position:
    """Where to go on: what a browser says by itself when it comes back, else `?from=`."""
    text = request.headers.get("Last-Event-ID") or request.query.get("from")
    if text is None:
        return START
    try:
        return parse_position(text)
    except ValueError as error:
        raise BadJob(str(error), field="from") from error
