"""The HTTP door with real clients, over both pairs."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import aiohttp
import openai
import pytest
from fleet import POOL, WAIT_S, FaultyBus, Fleet

from arriero.producer.client import Client
from arriero.producer.follow import parse_position
from arriero.producer.gateway import make_app, serve, sse
from arriero.schemas.codec import encode
from arriero.schemas.errors import SetupError
from arriero.schemas.event import Cancelled, Completed, Duplicate, Started
from arriero.schemas.job import JOB_MAX_BYTES
from arriero.schemas.worker import WorkerInfo
from arriero.transports.bus import AppendRequest, OpenRequest, TokenBus

LONG = "all work and no play " * 40
"""280 tokens for the echo engine."""
SLOW = 0.02


class Door:
    """A served app, and a plain HTTP client of it."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.http = http

    async def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        async with self.http.post(self.url + path, data=data, headers=_headers(headers)) as response:
            return response.status, await response.json(), response.headers

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()

    async def events(self, path: str, **headers: str) -> AsyncGenerator[dict[str, str], None]:
        """Server-sent events, read as a browser reads them."""
        async with self.http.get(self.url + path, headers=_headers(headers)) as response:
            assert response.status == 200, await response.text()
            async for event in parse(response):
                yield event

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def _headers(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


async def parse(response: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, str], None]:
    event: dict[str, str] = {}
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if not line and event:
            yield event
            event = {}
        name, _, value = line.partition(": ")
        if name:
            event[name] = value


@asynccontextmanager
async def door_of(fleet: Fleet, bus: TokenBus | None = None) -> AsyncIterator[Door]:
    async with (
        asyncio.timeout(2 * WAIT_S),
        aiohttp.ClientSession() as http,  # outside: when the door closes, its callers are still there
        Client(namespace=fleet.names.namespace, pool=POOL, log=fleet.log, bus=bus or fleet.bus) as client,
        serve(make_app(client), "127.0.0.1", 0) as port,
    ):
        yield Door(f"http://127.0.0.1:{port}", http)


async def until_ready(door: Door) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await door.get("/readyz"))[0] != 200:  # noqa: ASYNC110 - presence has no bell: probes ask
            await asyncio.sleep(0.02)


@pytest.fixture
async def door(fleet: Fleet) -> AsyncIterator[Door]:
    async with door_of(fleet) as door:
        yield door


@pytest.fixture
async def served(fleet: Fleet, door: Door) -> AsyncIterator[Door]:
    """With a worker and a projector behind it."""
    async with fleet.projecting(), fleet.running(fleet.make_worker()):
        await until_ready(door)
        yield door


@pytest.fixture
async def slow(fleet: Fleet, door: Door) -> AsyncIterator[Door]:
    async with fleet.projecting(), fleet.running(fleet.make_worker(step_s=SLOW)):
        yield door


# --- OpenAI's own client -------------------------------------------------------------------------------------


async def test_the_official_client_chats(served: Door, fleet: Fleet) -> None:
    async with served.openai() as client:
        answer = await client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "Grüße, Welt"}], temperature=0, user="me"
        )
    assert answer.choices[0].message.content == "Grüße, Welt"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0
    end = await fleet.wait_end(answer.id)
    assert (end.priority, end.origin.topic) == ("interactive", fleet.names.jobs(POOL, "interactive"))


async def test_the_official_client_streams_a_chat_with_its_usage(served: Door) -> None:
    async with served.openai() as client:
        stream = await client.chat.completions.create(
            model="parrot",
            messages=[{"role": "user", "content": "Grüße, Welt"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Grüße, Welt"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.model for chunk in chunks} == {"parrot"}


async def test_the_official_client_completes_whole_and_streamed(served: Door) -> None:
    async with served.openai() as client:
        whole = await client.completions.create(model="echo", prompt="abcdefghi", max_tokens=2)
        stream = await client.completions.create(model="echo", prompt="abcdefghi", max_tokens=2, stream=True)
        chunks = [chunk async for chunk in stream]
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("abcdef", "length")
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abcdef"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_the_official_client_lists_models_and_understands_errors(served: Door) -> None:
    async with served.openai() as client:
        assert [model.id async for model in client.models.list()] == ["echo", "parrot"]
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="gpt-17", prompt="x")
        assert unknown.value.code == "unknown_model"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="echo", prompt="x", temperature=-5)
        assert (refused.value.code, refused.value.param) == ("bad_value", "temperature")


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "malformed_json"),
        (b'{"prompt": "\xff"}', 400, "invalid_utf8"),
        (b'{"prompt": "x", "temperature": NaN}', 400, "not_finite"),
        (b'{"promt": "x"}', 400, "unknown_field"),
        (b'{"prompt": "x", "logprobs": 1}', 400, "unsupported_option"),
        (b'{"prompt": ""}', 400, "empty_prompt"),
        (json.dumps({"prompt": "x" * (JOB_MAX_BYTES + 1)}).encode(), 413, "job_too_large"),
        (json.dumps({"prompt": "x" * (2 * JOB_MAX_BYTES)}).encode(), 413, "job_too_large"),
    ],
)
async def test_a_bad_body_is_refused_as_openai_would(served: Door, body: bytes, status: int, code: str) -> None:
    got, answer, _ = await served.post("/v1/completions", body)
    assert (got, answer["error"]["code"]) == (status, code)
    assert set(answer["error"]) == {"message", "type", "code", "param"}


async def test_what_a_worker_rejects_has_a_status_even_when_streamed(fleet: Fleet, door: Door) -> None:
    async with fleet.projecting(), fleet.running(fleet.make_worker(n_ctx_sequence=100)):
        for stream in (False, True):
            status, answer, headers = await door.post("/v1/completions", {"prompt": "x" * 900, "stream": stream})
            assert (status, answer["error"]["code"]) == (400, "prompt_too_long")
            assert headers["x-arriero-job"]


async def test_bad_headers_are_refused(served: Door) -> None:
    body = {"prompt": "x"}
    for headers, param in (
        ({"x_arriero_class": "urgent"}, "x-arriero-class"),
        ({"Idempotency_Key": "a b"}, "Idempotency-Key"),
        ({"x_arriero_deadline": "soon"}, "x-arriero-deadline"),
    ):
        status, answer, _ = await served.post("/v1/completions", body, **headers)
        assert (status, answer["error"]["param"]) == (400, param)
    status, answer, _ = await served.post("/v1/completions", body, x_arriero_deadline="nan")
    assert (status, answer["error"]["code"]) == (400, "not_finite")


async def test_unknown_routes_and_methods_have_error_bodies(served: Door) -> None:
    status, answer = await served.get("/v2/nothing")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    status, answer = await served.get("/v1/completions")
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")


async def test_without_a_worker_nothing_is_published(fleet: Fleet, door: Door) -> None:
    status, answer, headers = await door.post("/v1/completions", {"prompt": "x"})
    assert (status, answer["error"]["code"]) == (503, "no_live_worker")
    assert int(headers["Retry-After"]) > 0
    assert set((await fleet.log.ends(fleet.names.job_topics(POOL))).values()) == {0}


async def test_a_job_that_is_too_late_is_a_timeout(served: Door) -> None:
    for stream in (False, True):
        status, answer, _ = await served.post(
            "/v1/completions", {"prompt": "x", "stream": stream}, x_arriero_deadline="5"
        )
        assert (status, answer["error"]["code"]) == (504, "expired")


# --- classes and ids -----------------------------------------------------------------------------------------


async def test_the_class_is_the_header_s(served: Door, fleet: Fleet) -> None:
    _, answer, headers = await served.post("/v1/completions", {"prompt": "x"}, x_arriero_class="batch")
    assert headers["x-arriero-job"] == answer["id"]
    assert (await fleet.wait_end(answer["id"])).priority == "batch"


async def test_one_idempotency_key_is_one_job(served: Door, fleet: Fleet) -> None:
    body = {"prompt": "hi"}
    for stream in (False, False, True):
        async with served.http.post(
            served.url + "/v1/completions", json=body | {"stream": stream}, headers={"Idempotency-Key": "k-1"}
        ) as response:
            assert response.status == 200
            assert '"hi"' in await response.text()
    await fleet.wait_settled(3)
    kinds = [type(event) for event in fleet.of("k-1")]
    assert (kinds.count(Started), kinds.count(Completed), kinds.count(Duplicate)) == (1, 1, 2)


async def test_an_idempotency_key_of_another_request_is_a_conflict(served: Door) -> None:
    await served.post("/v1/completions", {"prompt": "hi"}, Idempotency_Key="k-1")
    for stream in (False, True):
        status, answer, headers = await served.post(
            "/v1/completions", {"prompt": "ho", "stream": stream}, Idempotency_Key="k-1"
        )
        assert (status, answer["error"]["code"]) == (409, "duplicate_conflict")
        assert headers["x-should-retry"] == "false"


# --- hanging up ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_hanging_up_cancels_the_job(slow: Door, fleet: Fleet, stream: bool) -> None:
    request = asyncio.create_task(slow.post("/v1/completions", {"prompt": LONG, "stream": stream}))
    await fleet.until(lambda: any(isinstance(event, Started) for event in fleet.events))
    request.cancel()
    await asyncio.wait([request])
    end = await fleet.wait_end(fleet.events[0].id)
    assert isinstance(end, Cancelled)
    assert end.output.count < 280


async def test_hanging_up_with_an_idempotency_key_lets_the_job_go_on(slow: Door, fleet: Fleet) -> None:
    request = asyncio.create_task(slow.post("/v1/completions", {"prompt": LONG[:100]}, Idempotency_Key="mine"))
    await fleet.until(lambda: any(isinstance(event, Started) for event in fleet.events))
    request.cancel()
    await asyncio.wait([request])
    assert isinstance(await fleet.wait_end("mine"), Completed)
    status, answer, _ = await slow.post("/v1/completions", {"prompt": LONG[:100]}, Idempotency_Key="mine")
    assert (status, answer["choices"][0]["text"]) == (200, LONG[:100])


async def test_a_gateway_that_stops_leaves_its_jobs_to_the_fleet(fleet: Fleet) -> None:
    async with fleet.projecting(), fleet.running(fleet.make_worker(step_s=SLOW)):
        async with door_of(fleet) as door:
            request = asyncio.create_task(door.post("/v1/completions", {"prompt": LONG}))
            await fleet.until(lambda: any(isinstance(event, Started) for event in fleet.events))
        await asyncio.wait([request])
        assert isinstance(await fleet.wait_end(fleet.events[0].id), Completed)


# --- streams as they come ------------------------------------------------------------------------------------


async def test_a_raw_stream_has_a_frame_a_chunk_and_ends_with_done(slow: Door) -> None:
    loop = asyncio.get_running_loop()
    came: list[float] = []
    frames: list[str] = []
    body = {"messages": [{"role": "user", "content": "x" * 60}], "stream": True}
    async with slow.http.post(slow.url + "/v1/chat/completions", json=body) as response:
        assert response.content_type == "text/event-stream"
        async for event in parse(response):
            came.append(loop.time())
            frames.append(event["data"])
    assert frames[-1] == "[DONE]"
    assert len(frames) > 10
    assert came[-1] - came[0] > 5 * SLOW  # as they were decoded, not all at the end


async def test_many_streams_at_once_are_each_whole(slow: Door) -> None:
    async def one(number: int) -> str:
        text = ""
        body = {"prompt": f"stream {number} " * 5, "stream": True}
        async with slow.http.post(slow.url + "/v1/completions", json=body) as response:
            async for event in parse(response):
                if event["data"] != "[DONE]":
                    text += json.loads(event["data"])["choices"][0]["text"]
        return text

    texts = await asyncio.gather(*(one(number) for number in range(60)))
    assert texts == [f"stream {number} " * 5 for number in range(60)]


async def test_a_silent_stream_is_kept_alive_by_comments(
    fleet: Fleet, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.05)
    async with (
        fleet.projecting(),
        Client(namespace=fleet.names.namespace, pool=POOL, log=fleet.log, bus=fleet.bus) as client,
    ):
        job = await client.submit("nobody runs it")
        async with door.http.get(f"{door.url}/v1/jobs/{job.id}/events") as response:
            assert [await response.content.readuntil(b"\n\n") for _ in range(2)] == [b": keep-alive\n\n"] * 2


# --- a generation that begins again --------------------------------------------------------------------------


class Owner:
    """A worker's calls to the bus, for one job."""

    def __init__(self, fleet: Fleet, job_id: str, root: str) -> None:
        self._bus = fleet.bus
        self._who = {"job_id": job_id, "root": root, "attempt": 1}

    async def open(self, fence: int, mode: Literal["start", "restart"]) -> None:
        epoch = f"1.{fence}"
        request = OpenRequest(**self._who, fence=fence, epoch=epoch, mode=mode, lineage=f"{epoch}@0")  # type: ignore[arg-type]
        (opened,) = await self._bus.open([request])
        assert opened.code in ("fresh", "have")

    async def append(self, fence: int, first: int, *pieces: str) -> None:
        tokens = [f"1|{piece}" for piece in pieces]
        request = AppendRequest(**self._who, fence=fence, epoch=f"1.{fence}", first=first, tokens=tokens)  # type: ignore[arg-type]
        (appended,) = await self._bus.append([request])
        assert appended.code == "ok"


async def test_a_reader_is_told_what_to_drop_when_a_generation_begins_again(fleet: Fleet, door: Door) -> None:
    async with fleet.projecting():
        async with Client(namespace=fleet.names.namespace, pool=POOL, log=fleet.log, bus=fleet.bus) as client:
            job = await client.submit("x")
        owner = Owner(fleet, job.id, str(job.origin))
        await owner.open(1, "start")
        await owner.append(1, 0, "a", "b")
        events = door.events(f"/v1/jobs/{job.id}/events")
        shown = await anext(events)
        await owner.open(2, "restart")
        reset = await anext(events)
        assert (reset["event"], json.loads(reset["data"]), "id" in reset) == ("reset", {"count": 0}, False)
        await owner.append(2, 0, "x")
        after = await anext(events)
        assert json.loads(after["data"])["text"] == "x"
        # One that was away meanwhile is told when it comes back with its old position.
        back = door.events(f"/v1/jobs/{job.id}/events", Last_Event_ID=shown["id"])
        assert [(await anext(back))["event"], (await anext(back))["event"]] == ["reset", "tokens"]
        await events.aclose()
        await back.aclose()


async def test_a_completion_that_begins_again_never_shows_two_texts_as_one(fleet: Fleet, door: Door) -> None:
    info = WorkerInfo(worker="w", pool=POOL, models=["m"], slots=1, n_ctx_sequence=1)
    await fleet.bus.announce(POOL, "w", encode(info), 60.0)
    async with fleet.projecting():
        body = {"prompt": "x", "stream": True}
        request = asyncio.create_task(
            door.http.post(door.url + "/v1/completions", json=body, headers={"Idempotency-Key": "k"}).__aenter__()
        )
        state = await fleet.wait_state("k", lambda state: state.record is not None)
        owner = Owner(fleet, "k", state.root)
        await owner.open(1, "start")
        await owner.append(1, 0, "a", "b")
        async with await request as response:
            frames = parse(response)
            assert '"ab"' in (await anext(frames))["data"]
            await owner.open(2, "restart")
            await owner.append(2, 0, "a", "b", "c")  # the same again, and more
            assert '"c"' in (await anext(frames))["data"]
            await owner.open(3, "restart")
            await owner.append(3, 0, "a", "other")
            assert json.loads((await anext(frames))["data"])["error"]["code"] == "stream_reset"
            assert (await anext(frames))["data"] == "[DONE]"


# --- jobs by their id ----------------------------------------------------------------------------------------


async def test_a_job_tells_its_state(served: Door) -> None:
    _, answer, _ = await served.post("/v1/completions", {"prompt": "hi"})
    status, state = await served.get(f"/v1/jobs/{answer['id']}")
    assert status == 200
    assert (state["id"], state["status"], state["class"], state["finish_reason"]) == (
        answer["id"],
        "completed",
        "interactive",
        "stop",
    )
    assert state["usage"]["completion_tokens"] == 1
    for unknown in ("nobody", "a%20b", "x" * 201):
        for path in (f"/v1/jobs/{unknown}", f"/v1/jobs/{unknown}/events"):
            status, answer = await served.get(path)
            assert (status, answer["error"]["code"]) == (404, "job_not_found")


async def test_a_reader_that_comes_back_sees_each_index_once(slow: Door, fleet: Fleet) -> None:
    async with Client(namespace=fleet.names.namespace, pool=POOL, log=fleet.log, bus=fleet.bus) as client:
        job = await client.submit(LONG[:200])
    seen: list[tuple[int, str]] = []
    last_id, end = "", {}
    while not end:
        headers = {"Last_Event_ID": last_id} if last_id else {}
        taken = 0
        async for event in slow.events(f"/v1/jobs/{job.id}/events", **headers):
            data = json.loads(event["data"])
            if event["event"] == "end":
                end = data
                break
            assert event["event"] == "tokens"
            last_id = event["id"]
            seen += [(data["first"] + n, piece) for n, (_, piece) in enumerate(data["tokens"])]
            assert parse_position(last_id).count == len(seen)
            taken += 1
            if taken == 7:
                break  # hang up
    assert [index for index, _ in seen] == list(range(end["count"]))
    assert "".join(piece for _, piece in seen) + end.get("tail", "") == LONG[:200]


async def test_a_late_reader_sees_all_and_a_bare_index_goes_on_from_there(served: Door) -> None:
    _, answer, _ = await served.post("/v1/completions", {"prompt": "abcdefghi"})
    path = f"/v1/jobs/{answer['id']}/events"
    whole = [event async for event in served.events(path)]
    assert "".join(json.loads(event["data"]).get("text", "") for event in whole) == "abcdefghi"
    assert json.loads(whole[-1]["data"])["status"] == "completed"
    rest = [event async for event in served.events(path + "?from=2")]
    assert json.loads(rest[0]["data"])["text"] == "ghi"
    behind = [event async for event in served.events(path, Last_Event_ID=whole[-2]["id"])]
    assert [event["event"] for event in behind] == ["end"]
    status, refused = await served.get(path + "?from=yesterday")
    assert (status, refused["error"]["param"]) == (400, "from")


async def test_hanging_up_on_a_job_s_events_leaves_the_job_alone(slow: Door, fleet: Fleet) -> None:
    async with Client(namespace=fleet.names.namespace, pool=POOL, log=fleet.log, bus=fleet.bus) as client:
        job = await client.submit(LONG[:90])
    async for _ in slow.events(f"/v1/jobs/{job.id}/events"):
        break
    assert isinstance(await fleet.wait_end(job.id), Completed)


async def test_a_job_is_cancelled_over_http(slow: Door, fleet: Fleet) -> None:
    async with Client(namespace=fleet.names.namespace, pool=POOL, log=fleet.log, bus=fleet.bus) as client:
        job = await client.submit(LONG)
    status, answer, _ = await slow.post(f"/v1/jobs/{job.id}/cancel")
    assert (status, answer["status"]) == (202, "cancelling")
    assert isinstance(await fleet.wait_end(job.id), Cancelled)
    await fleet.wait_state(job.id, lambda state: state.ended)
    status, answer, _ = await slow.post(f"/v1/jobs/{job.id}/cancel")
    assert (status, answer["status"]) == (200, "cancelled")
    status, answer, _ = await slow.post("/v1/jobs/nobody/cancel")
    assert (status, answer["error"]["code"]) == (404, "job_not_found")


async def test_a_cancelled_stream_says_so(slow: Door, fleet: Fleet) -> None:
    frames = []
    body = {"prompt": LONG, "stream": True}
    async with slow.http.post(slow.url + "/v1/completions", json=body) as response:
        async for event in parse(response):
            if not frames:
                await slow.post(f"/v1/jobs/{response.headers['x-arriero-job']}/cancel")
            frames.append(event["data"])
    assert json.loads(frames[-2])["error"]["code"] == "cancelled"
    assert frames[-1] == "[DONE]"


# --- operations ----------------------------------------------------------------------------------------------


async def test_readiness_needs_a_worker_a_bus_and_a_log(fleet: Fleet) -> None:
    bus = FaultyBus(fleet.bus)
    async with door_of(fleet, bus) as door:  # type: ignore[arg-type]
        assert (await door.get("/healthz"))[0] == 200
        status, answer = await door.get("/readyz")
        assert status == 503
        assert answer["reasons"][0].startswith("no_live_worker")
        async with fleet.running(fleet.make_worker()):
            await until_ready(door)
            bus.away = True
            status, answer = await door.get("/readyz")
            assert status == 503
            assert answer["reasons"][0].startswith("bus_unavailable")
            status, answer, headers = await door.post("/v1/completions", {"prompt": "x"})
            assert (status, answer["error"]["code"]) == (503, "bus_unavailable")
            assert "Retry-After" in headers


async def test_metrics_count_requests_by_route(served: Door) -> None:
    await served.post("/v1/completions", {"prompt": "x"})
    await served.get("/v1/jobs/nobody")
    await served.get("/v1/none")
    async with served.http.get(served.url + "/metrics") as response:
        text = await response.text()
    assert 'arriero_http_requests_total{route="/v1/completions",status="200"} 1.0' in text
    assert 'route="/v1/jobs/{job_id}",status="404"} 1.0' in text
    assert "nobody" not in text


async def test_a_port_in_use_is_one_sentence(fleet: Fleet, door: Door) -> None:
    port = int(door.url.rpartition(":")[2])
    async with Client(namespace=fleet.names.namespace, pool=POOL, log=fleet.log, bus=fleet.bus) as client:
        with pytest.raises(SetupError) as caught:
            async with serve(make_app(client), "127.0.0.1", port):
                pass
    assert caught.value.code == "port_in_use"
    assert str(port) in caught.value.message
