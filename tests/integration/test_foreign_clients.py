"""Clients that are not ours: a job published by kcat, its tokens read by redis-cli."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fleet import POOL, Fleet

from arriero.transports.connect import Endpoints
from arriero.transports.partitioner import partition_of

pytestmark = pytest.mark.real
DOC = Path(__file__).parents[2] / "docs" / "contract.md"


@pytest.fixture
def tools() -> None:
    for tool in ("kcat", "redis-cli"):
        if shutil.which(tool) is None:
            message = f"{tool} is not here (Debian: apt-get install kcat redis-tools)"
            if os.environ.get("ARRIERO_DEMAND_REAL"):
                pytest.fail(message)
            pytest.skip(message)


@pytest.fixture
def pair(kafka_bootstrap: str, redis_url: str) -> Endpoints:
    return Endpoints(kafka=kafka_bootstrap, redis=redis_url)


async def redis_cli(url: str, *command: str) -> asyncio.subprocess.Process:
    address = urlsplit(url)
    return await asyncio.create_subprocess_exec(
        *("redis-cli", "-h", str(address.hostname), "-p", str(address.port), "-n", address.path.strip("/") or "0"),
        *command,
        stdout=asyncio.subprocess.PIPE,
    )


async def answer(url: str, *command: str) -> list[str]:
    output, _ = await (await redis_cli(url, *command)).communicate()
    return output.decode().splitlines()


async def kcat(bootstrap: str, topic: str, key: str, value: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *("kcat", "-P", "-b", bootstrap, "-t", topic, "-K", "\t", "-X", "partitioner=murmur2_random"),
        stdin=asyncio.subprocess.PIPE,
    )
    await process.communicate(f"{key}\t{value}\n".encode())
    assert process.returncode == 0


async def test_a_job_published_by_kcat_is_streamed_by_redis_cli(tools: None, fleet: Fleet, pair: Endpoints) -> None:
    assert pair.kafka is not None
    assert pair.redis is not None
    names, text = fleet.names, "¿Por qué siguen las mulas a la yegua? 🦙"
    job = json.dumps({"id": "mule-1", "prompt": text, "max_tokens": 64}, ensure_ascii=False)
    async with fleet.running(fleet.make_worker(step_s=0.01)), fleet.projecting():
        subscriber = await redis_cli(pair.redis, "SUBSCRIBE", names.channel("mule-1"))
        assert subscriber.stdout is not None
        lines = subscriber.stdout
        assert (await lines.readline()).strip() == b"subscribe"
        await kcat(pair.kafka, names.jobs(POOL, "standard"), "mule-1", job)

        messages: list[dict[str, Any]] = []
        async with asyncio.timeout(40):
            while not messages or messages[-1]["type"] != "end":
                line = (await lines.readline()).decode().strip()
                if line.startswith("{"):
                    messages.append(json.loads(line))
        subscriber.terminate()
        await subscriber.wait()

        shown: list[str] = []
        for message in messages:
            if message["type"] == "frame" and message["first"] == len(shown):
                shown += message["tokens"]
        end = json.loads(messages[-1]["end"])
        assert "".join(token.partition("|")[2] for token in shown) + end.get("tail", "") == text
        assert (end["status"], end["count"]) == ("completed", len(shown))
        assert await answer(pair.redis, "LRANGE", names.tokens_key("mule-1"), "0", "-1") == shown
        assert await answer(pair.redis, "HGET", names.head_key("mule-1"), "status") == ["fin"]

        await fleet.wait_state("mule-1", lambda state: state.status == "completed")
        state = json.loads((await answer(pair.redis, "HGET", names.job_key("mule-1"), "state"))[0])
        record = state["record"]
        assert record[1] == partition_of(b"mule-1", await fleet.log.partitions(record[0]))


async def test_the_commands_of_the_document_do_what_it_says(tools: None, fleet: Fleet, pair: Endpoints) -> None:
    """They run as they stand there, but for addresses and namespace."""
    blocks = "\n".join(re.findall(r"(?m)^ {4}(.*)$", DOC.read_text()))
    (publish,) = re.findall(r"echo .*\|\n.*\\\n.*", blocks)
    (tokens,) = re.findall(r"redis-cli LRANGE .*", blocks)
    (head,) = re.findall(r"redis-cli HGETALL .*", blocks)
    (state,) = re.findall(r"redis-cli HGET '.*?' state", blocks)
    (events,) = re.findall(r"kcat -C .* -K :", blocks)

    async def run(command: str) -> str:
        namespace = fleet.names.namespace
        for shown, here in {
            "localhost:9092": str(pair.kafka),
            "redis-cli": f"redis-cli -u {pair.redis}",
            " arriero.": f" {namespace}.",
            "'arriero:": f"'{namespace}:",
        }.items():
            command = command.replace(shown, here)
        process = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        assert process.returncode == 0
        return output.decode()

    async with fleet.running(fleet.make_worker()), fleet.projecting(), asyncio.timeout(60):
        await run(publish)
        await fleet.wait_state("mule-1", lambda state: state.status == "completed")
        await fleet.wait_view("mule-1", lambda view: view.end is not None)
        fields = iter((await run(head)).splitlines())
        shown = dict(zip(fields, fields, strict=True))
        text = "".join(line.partition("|")[2] for line in (await run(tokens)).splitlines())
        assert text + json.loads(shown["end"]).get("tail", "") == "Why do mules follow a mare?"
        assert shown["status"] == "fin"
        assert json.loads(await run(state))["phase"] == "completed"
        lines = (await run(f"{events} -e -q")).splitlines()
        assert {line.partition(":")[0] for line in lines} == {"mule-1"}
        assert json.loads(lines[-1].partition(":")[2])["type"] == "Completed"
