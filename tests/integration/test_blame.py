"""Jobs that crash their workers are found and set aside; nobody else is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import deadly_child
import msgspec
import pytest
import structlog
from fleet import Fleet

from arriero.ops import child, crashes, supervisor, watchdog
from arriero.ops.settings import EngineSettings, Settings
from arriero.ops.signals import StopRequest
from arriero.ops.supervisor import ChildSpec, Supervisor
from arriero.schemas.clock import SystemClock
from arriero.schemas.codec import decode_dead
from arriero.schemas.event import Completed, Crashed, DeadLettered, Error, Started, Terminal, Undecodable
from arriero.schemas.job import Job

log = structlog.get_logger(__name__)

WATCHDOG_S = 1.5
ROUNDS = int(os.environ.get("ARRIERO_TEST_KILLS", "20"))
"""Of kills, freezes, deploys and fencings. 200 in the long form, which needs `--timeout 1500`."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short pauses between two lives, and a kernel that counts in a file."""
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST_S", 0.05)
    monkeypatch.setattr(supervisor, "BACKOFF_MAX_S", 0.1)
    monkeypatch.setattr("fleet.WAIT_S", 100.0)  # each crash costs a Kafka group its session timeout
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 0\n")
    monkeypatch.setenv(deadly_child.OOM_VARIABLE, str(counter))
    monkeypatch.setattr(watchdog, "oom_kills", lambda: int(counter.read_text().split()[1]))


@asynccontextmanager
async def supervised(fleet: Fleet, data: Path, name: str = "w1", step_s: float = 0.002) -> AsyncIterator[Supervisor]:
    """A worker with the deadly engine, and its supervisor."""
    where = fleet.endpoints
    settings = Settings(
        data=where.data or data,
        cache=data,
        kafka=where.kafka,
        redis=where.redis,
        namespace=fleet.names.namespace,
        worker=name,
        engine=EngineSettings(engine="echo", echo_step_s=step_s),
        watchdog_s=WATCHDOG_S,
        grace_s=5.0,
    )
    spec = msgspec.structs.replace(
        child.spec("worker", settings, log_folder=False), arguments=(deadly_child.__file__, "worker")
    )
    request = StopRequest()
    running = Supervisor(
        [spec], clock=SystemClock(), rng=random.Random(1), crashed=partial(crashes.publish, settings, name)
    )
    task = asyncio.create_task(running.run(request), name="test supervisor")
    try:
        yield running
    finally:
        request.asked.set()
        request.pressed.set()
        await task


def reported(fleet: Fleet, job_id: str) -> list[Crashed]:
    return [event for event in fleet.events if isinstance(event, Crashed) and event.id == job_id]


WAYS = [
    ("KILL tokenise", {"tokenise"}, "SIGSEGV"),
    ("KILL prefill", {"prefill"}, "SIGSEGV"),
    # Beside a prompt, and when it is resumed, what decodes is in a step of prefill.
    ("KILL token", {"prefill", "decode"}, "SIGSEGV"),
    ("KILL loop", {"prefill", "decode"}, "watchdog"),
    ("KILL memory", {"prefill", "decode"}, "out_of_memory"),
    ("KILL hunger", {"prefill", "decode"}, "SIGABRT"),
    ("KILL raise", {"prefill", "decode"}, "exception"),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("pair", "marker", "operations", "cause"),
    [*(("embedded", *way) for way in WAYS), pytest.param("real", *WAYS[2], marks=pytest.mark.real)],
    indirect=["pair"],
)
async def test_the_guilty_are_dead_lettered_and_their_neighbours_finish(
    fleet: Fleet, tmp_path: Path, marker: str, operations: set[str], cause: str
) -> None:
    guilty = [Job(id=f"guilty{number}", prompt=f"{marker} {number} " + "x" * 60) for number in range(2)]
    innocent = [Job(id=f"innocent{number}", prompt="abc" * (5 + number)) for number in range(20)]
    jobs = [*innocent[:10], guilty[0], *innocent[10:], guilty[1]]
    async with fleet.projecting(), supervised(fleet, tmp_path):
        await fleet.submit(*jobs)
        for job in innocent:
            end = await fleet.wait_end(job.id)
            assert isinstance(end, Completed), end
            assert end.output.text == job.prompt
        for job in guilty:
            end = await fleet.wait_end(job.id)
            assert isinstance(end, DeadLettered)
            assert (end.reason, end.error.code) == ("worker_crashed", "worker_crashed")
            found = reported(fleet, job.id)
            assert 2 <= len(found) <= 5
            assert {event.signal for event in found} == {cause}
            assert {event.operation for event in found} <= operations
    ends = Counter(event.id for event in fleet.events if isinstance(event, Terminal))
    assert ends == dict.fromkeys((job.id for job in jobs), 1)


@pytest.mark.timeout(240)
async def test_a_record_that_cannot_be_read_without_a_crash_is_set_aside(fleet: Fleet, tmp_path: Path) -> None:
    async with fleet.projecting(), supervised(fleet, tmp_path):
        placed = await fleet.publish_raw(b'{"id": "a", "prompt": "KILL read"}')
        await fleet.submit(Job(id="b", prompt="abc"))
        await fleet.until(lambda: any(isinstance(event, Undecodable) for event in fleet.events))
        assert isinstance(await fleet.wait_end("b"), Completed)
    (event,) = [event for event in fleet.events if isinstance(event, Undecodable)]
    assert event.origin.offset == placed.offset
    assert event.error.code == "worker_crashed"
    found = reported(fleet, str(event.origin))
    assert 2 <= len(found) <= 5
    assert {one.operation for one in found} == {"read"}
    (copy,) = await fleet.log.fetch(fleet.names.dead, 0, [0])
    assert decode_dead(copy.value or b"").error == Error("worker_crashed", event.error.message)


@pytest.mark.timeout(240)
async def test_with_two_workers_the_guilty_are_found_no_later(fleet: Fleet, tmp_path: Path) -> None:
    jobs = [Job(id=f"j{number}", prompt="abc" * 10) for number in range(20)]
    async with fleet.projecting(), supervised(fleet, tmp_path, "w1"), supervised(fleet, tmp_path, "w2"):
        await fleet.submit(Job(id="guilty", prompt="KILL token " + "x" * 60), *jobs)
        end = await fleet.wait_end("guilty")
        for job in jobs:
            assert isinstance(await fleet.wait_end(job.id), Completed)
    assert isinstance(end, DeadLettered)
    assert len(reported(fleet, "guilty")) <= 5


@pytest.mark.timeout(900)
async def test_who_decodes_beside_a_prompt_that_crashes_the_tokeniser_is_not_blamed(
    fleet: Fleet, tmp_path: Path
) -> None:
    async with fleet.projecting(), supervised(fleet, tmp_path, step_s=0.01):
        await fleet.submit(Job(id="long", prompt="abc" * 400))
        await fleet.wait_events("long", Started)
        await fleet.submit(Job(id="guilty", prompt="KILL tokenise"), priority="batch")
        assert isinstance(await fleet.wait_end("guilty"), DeadLettered)
        assert isinstance(await fleet.wait_end("long"), Completed)
    assert {event.operation for event in reported(fleet, "guilty")} == {"tokenise"}
    assert reported(fleet, "long") == []


async def test_kills_freezes_deploys_and_fencings_blame_nobody(fleet: Fleet, tmp_path: Path) -> None:
    """Every round there is work in hand; the long freezes outlast the watchdog, and the other worker takes over."""
    rng = random.Random(5)
    rounds = ROUNDS if fleet.endpoints.embedded else max(2, ROUNDS // 10)
    done: Counter[str] = Counter()
    ids: list[str] = []
    async with (
        fleet.projecting(),
        supervised(fleet, tmp_path, "w1", step_s=0.01) as first,
        supervised(fleet, tmp_path, "w2", step_s=0.01) as second,
    ):
        for number in range(rounds):
            jobs = [Job(id=f"r{number}-{one}", prompt="abc" * 100) for one in range(4)]
            ids += [job.id for job in jobs]
            await fleet.submit(*jobs)
            victim = rng.choice([*first.children, *second.children])
            await fleet.poll(lambda child=victim: child.state == "ready")
            await asyncio.sleep(rng.uniform(0.0, 0.5))
            if victim.pid is None:
                continue  # the deploy before has come to its end
            what = rng.choice(["kill", "kill", "freeze", "long freeze", "deploy"])
            done[what] += 1
            pid = victim.pid
            with contextlib.suppress(ProcessLookupError):  # it has ended this moment
                match what:
                    case "kill":
                        os.kill(pid, signal.SIGKILL)
                    case "deploy":
                        os.kill(pid, signal.SIGTERM)
                    case _:
                        os.kill(pid, signal.SIGSTOP)
                        await asyncio.sleep(rng.uniform(0.1, 0.5) if what == "freeze" else 2 * WATCHDOG_S)
                        os.kill(pid, signal.SIGCONT)
        for job_id in ids:
            assert isinstance(await fleet.wait_end(job_id), Completed)
        resumed = sum(1 for event in fleet.events if isinstance(event, Started) and event.from_token)
    assert not [event for event in fleet.events if isinstance(event, Crashed)]
    assert Counter(event.id for event in fleet.events if isinstance(event, Terminal)) == dict.fromkeys(ids, 1)
    log.info(
        "broken",
        rounds=rounds,
        jobs=len(ids),
        resumed=resumed,
        **{what.replace(" ", "_"): count for what, count in done.items()},
    )


def test_the_specs_of_other_roles_keep_no_recorder(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path, cache=tmp_path)
    found: dict[str, ChildSpec] = {role: child.spec(role, settings, log_folder=False) for role in child.ROLES}
    assert {role for role, spec in found.items() if spec.watchdog_s} == {"worker"}
