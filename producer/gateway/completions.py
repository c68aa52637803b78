"""Completions in OpenAI's format: a request is one job, answered whole or as it comes.

    understand ▸ a worker? the model? ▸ publish ▸ answer

The job's id is the answer's id and stands in the header `x-arriero-job`. Whoever hangs up cancels the job, unless the
request has an Idempotency-Key: that says that the caller may come back for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from aiohttp import web

from arriero.producer.client import Submitted, check_conflict
from arriero.producer.follow import Ended, Item, Tokens
from arriero.producer.gateway import sse
from arriero.producer.gateway.gate import (
    GATE,
    JOB_HEADER,
    Gate,
    deadline_of,
    idempotency_key,
    priority_of,
)
from arriero.producer.openai import (
    Answer,
    Kind,
    Request,
    TextOnce,
    api_error,
    outcome_error,
    read_json,
    read_request,
)
from arriero.schemas.clock import now_ms
from arriero.schemas.errors import ArrieroError
from arriero.schemas.job import PriorityClass
from arriero.schemas.state import JobState
from arriero.schemas.token import StreamEnd

FIRST_WAIT_S: Final = 2.0
"""How long a stream's headers wait for its first item: what ends before it gets an HTTP status of its own."""
LAST_WAIT_S: Final = 10.0
"""How long a finished stream waits for its usage, which comes a moment after the end unless the bus has gone."""


async def chat(request: web.Request) -> web.StreamResponse:
    return await _complete(request, "chat")


async def completion(request: web.Request) -> web.StreamResponse:
    return await _complete(request, "completion")


async def _complete(request: web.Request, kind: Kind) -> web.StreamResponse:
    gate = request.app[GATE]
    key = idempotency_key(request)
    job_id = key if key is not None else gate.client.new_id()
    priority = priority_of(request)
    body = read_json(await request.read())
    asked = read_request(kind, body, job_id=job_id, deadline=deadline_of(request))
    model = await gate.serving_model(asked.job.model)
    answer = Answer(kind, job_id, model, now_ms(gate.clock) // 1000)
    try:
        submitted = await gate.client.submit_job(asked.job, priority)
        if asked.stream:
            return await _Stream(request, asked, answer, submitted, priority, keyed=key is not None).run()
        return await _whole(gate, answer, submitted)
    except (asyncio.CancelledError, ConnectionError):
        if key is None:
            gate.abandon(job_id)
        raise


async def _whole(gate: Gate, answer: Answer, submitted: Submitted) -> web.Response:
    result = await gate.client.result(submitted)
    error = result.error
    if error is None:
        fault = outcome_error(result.status, None, None)
    else:
        fault = outcome_error(result.status, error.code, error.message, error.field)
    headers = {JOB_HEADER: submitted.id}
    if fault is not None:
        return web.json_response(fault.body(), status=fault.status, headers=headers | {"x-should-retry": "false"})
    return web.json_response(answer.whole(result.text, result.finish_reason, result.usage), headers=headers)


class _Stream:
    """One streamed answer."""

    def __init__(
        self,
        request: web.Request,
        asked: Request,
        answer: Answer,
        submitted: Submitted,
        priority: PriorityClass,
        *,
        keyed: bool,
    ) -> None:
        self._request = request
        self._gate = request.app[GATE]
        self._asked = asked
        self._answer = answer
        self._submitted = submitted
        self._priority = priority
        self._keyed = keyed
        self._began_s = self._gate.clock.monotonic()
        self._text = TextOnce()
        self._said = False
        """Whether the first chunk is out: it names the role."""

    async def run(self) -> web.StreamResponse:
        if self._keyed:  # the id may be another job's
            state = await self._gate.client.peek(self._submitted.id)
            if state is not None:
                check_conflict(self._submitted, state)
        headers = {JOB_HEADER: self._submitted.id}
        async with aclosing(self._gate.client.stream(self._submitted.id)) as items:
            first = asyncio.create_task(anext(items, None), name="first item")
            try:
                await asyncio.wait([first], timeout=FIRST_WAIT_S)
                if first.done() and isinstance(item := first.result(), Ended):
                    end = item.end
                    if (fault := outcome_error(end.status, end.code, end.error)) is not None:
                        headers["x-should-retry"] = "false"
                        return web.json_response(fault.body(), status=fault.status, headers=headers)
                async with sse.event_stream(self._request, headers) as response:
                    await self._follow(response, first, items)
                    await response.write(sse.DONE)
                return response
            finally:
                first.cancel()
                await asyncio.wait([first])

    async def _follow(
        self, response: web.StreamResponse, first: asyncio.Task[Item | None], items: AsyncGenerator[Item, None]
    ) -> None:
        """Chunks until the end; what goes wrong after the headers is said in the stream."""
        try:
            item = await first
            while item is not None:
                if isinstance(item, Tokens) and (text := self._text.take(item)):
                    await response.write(self._chunk(text))
                elif isinstance(item, Ended):
                    await self._end(response, item.end)
                item = await anext(items, None)
        except ArrieroError as error:
            await response.write(sse.data(api_error(error).body()))

    def _chunk(self, text: str) -> bytes:
        first, self._said = not self._said, True
        if first:
            self._gate.metrics.ttft[self._priority].observe(self._gate.clock.monotonic() - self._began_s)
        return self._data(self._answer.chunk(text, first=first))

    def _data(self, chunk: dict[str, object]) -> bytes:
        if self._asked.include_usage:
            chunk.setdefault("usage", None)
        return sse.data(chunk)

    async def _end(self, response: web.StreamResponse, end: StreamEnd) -> None:
        self._text.check_end(end.count)
        if (fault := outcome_error(end.status, end.code, end.error)) is not None:
            await response.write(sse.data(fault.body()))
            return
        last = await self._state() if self._keyed else None  # raises ConflictingDuplicate before it is called done
        if end.tail or not self._said:
            await response.write(self._chunk(end.tail))
        await response.write(self._data(self._answer.chunk("", end.finish_reason)))
        if self._asked.include_usage:
            last = last or await self._state()
            if last is not None:
                await response.write(self._data(self._answer.usage_chunk(last.usage)))

    async def _state(self) -> JobState | None:
        """The ended job's state; None when the bus has gone away in this very moment."""
        try:
            async with asyncio.timeout(LAST_WAIT_S):
                return await self._gate.client.ended(self._submitted)
        except TimeoutError:
            return None
