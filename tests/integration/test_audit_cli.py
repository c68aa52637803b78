"""`arriero audit` beside a running stack."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from random import SystemRandom

import pytest
from terminal import Terminal, terminal, until

from arriero.schemas.clock import SystemClock
from arriero.schemas.names import NAMESPACE_DEFAULT, Names
from arriero.transports.connect import Endpoints, make_log
from arriero.transports.log import Outgoing


@pytest.fixture(params=["embedded", pytest.param("real", marks=pytest.mark.real)])
def space(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Endpoints, Names, list[str]]:
    """Where log and bus are, in which namespace, and the flags that say so."""
    if request.param == "embedded":
        return Endpoints(data=tmp_path / "data"), Names(NAMESPACE_DEFAULT), []
    pair = request.getfixturevalue("real_pair")
    names = Names(f"t{SystemRandom().getrandbits(48):x}")
    flags = ["--kafka", pair.bootstrap, "--redis", pair.redis_url, "--namespace", names.namespace]
    return Endpoints(kafka=pair.bootstrap, redis=pair.redis_url), names, flags


@pytest.fixture
def stack(space: tuple[Endpoints, Names, list[str]], tmp_path: Path) -> Iterator[Terminal]:
    with terminal(tmp_path, *space[2]) as one:
        one.up()
        for prompt in ("why", "do mules", "follow a mare"):
            assert one.run("submit", "--tenant", "mules", prompt).process.returncode == 0
        yield one


def spoil(endpoints: Endpoints, names: Names) -> None:
    """Write a record into the events topic that is no event."""

    async def publish() -> None:
        log = make_log(endpoints, names=names, clock=SystemClock(), rng=random.Random(), client="test")
        async with log:
            await log.publish([Outgoing(names.events, b"k", b"no event")])

    asyncio.run(publish())


def test_it_holds_beside_workers_and_tells_of_a_breach(
    stack: Terminal, space: tuple[Endpoints, Names, list[str]]
) -> None:
    typed = stack.run("audit")
    assert (typed.process.returncode, typed.err) == (0, "")
    assert "every promise holds: 3 records" in typed.out
    spoil(*space[:2])
    typed = stack.run("audit")
    assert typed.process.returncode == 1
    assert "a record of the events topic is no event" in typed.out
    typed = stack.run("audit", "--json", "--limit", "5")
    report = json.loads(typed.out)
    assert typed.process.returncode == 1
    assert (report["v"], report["holds"], report["breaches"]) == (1, False, {"event_unreadable": 1})
    assert report["shown"][0]["code"] == "event_unreadable"
    assert report["accounts"] == [
        {"class": "interactive", "tenant": "mules", "accepted": 3, "outcomes": {"completed": 3}, "in_flight": 0}
    ]


def test_a_patrol_looks_again_and_serves_what_it_sees(
    stack: Terminal, space: tuple[Endpoints, Names, list[str]], free_port: int
) -> None:
    def metrics() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics") as answer:
            return str(answer.read().decode())

    patrol = stack.start("audit", "--watch", "0.2", "--metrics-port", str(free_port))
    patrol.wait_for("every promise holds")
    assert 'arriero_audit_jobs{class="interactive",outcome="completed"} 3.0' in metrics()
    spoil(*space[:2])
    patrol.wait_for("1 breach:")
    until(lambda: 'arriero_audit_breaches{breach="event_unreadable"} 1.0' in metrics())
    patrol.signal(signal.SIGINT)
    assert patrol.wait() == 1


def test_without_a_stack_it_says_what_is_missing(tmp_path: Path) -> None:
    with terminal(tmp_path) as one:
        typed = one.run("audit")
    assert typed.process.returncode == 1
    assert typed.err.startswith("arriero: there is no topic arriero.jobs.default.interactive")
