"""`arriero dead` beside a running stack."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminal import Terminal, terminal, until

from arriero.schemas.clock import SystemClock
from arriero.schemas.names import NAMESPACE_DEFAULT, Names
from arriero.transports.connect import Endpoints, make_log
from arriero.transports.log import Outgoing

NAMES = Names(NAMESPACE_DEFAULT)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Terminal]:
    """One in which a job of a later version and a record that is no job have died."""
    with terminal(tmp_path) as one:
        one.up()
        asyncio.run(publish(tmp_path / "data", b"{nonsense", b'{"id": "old", "v": 9, "prompt": "x", "deadline": 1}'))
        until(lambda: len(one.run("dead list", "--json").out.splitlines()) == 2)
        yield one


async def publish(data: Path, *values: bytes) -> None:
    log = make_log(Endpoints(data=data), names=NAMES, clock=SystemClock(), rng=random.Random(), client="test")
    async with log:
        await log.publish([Outgoing(NAMES.jobs("default", "standard"), b"k", value) for value in values])


def test_what_has_died_is_listed_by_reason_and_time(stack: Terminal) -> None:
    every = [json.loads(line) for line in stack.run("dead list", "--json").out.splitlines()]
    assert [one["record"]["reason"] for one in every] == ["undecodable", "unknown_version"]
    later = stack.run("dead list", "--json", "--reason", "unknown_version", "--since", "1h")
    assert [json.loads(line) for line in later.out.splitlines()] == every[1:]
    assert stack.run("dead list", "--json", "--until", "1h").out == ""
    assert "unknown_ver" in stack.run("dead list").out


def test_one_is_shown_whole_by_id_or_number(stack: Terminal) -> None:
    by_id, by_number = stack.run("dead show", "old"), stack.run("dead show", "1")
    assert by_id.out == by_number.out
    assert json.loads(by_id.out)["record"]["job"] == {"id": "old", "v": 9, "prompt": "x", "deadline": 1}
    missing = stack.run("dead show", "nobody")
    assert missing.process.returncode == 1
    assert "arriero dead list" in missing.err


def test_what_is_replayed_once_is_not_replayed_again_by_accident(stack: Terminal) -> None:
    vague = stack.run("dead replay")
    assert vague.process.returncode == 2
    assert "--all" in vague.err
    dry = stack.run("dead replay", "--all", "--dry-run")
    assert dry.out == "old\told~1\n"
    assert "no. 0 was no job" in dry.err
    assert stack.run("dead replay", "old").out == "old\told~1\n"
    until(lambda: stack.run("status", "old~1").process.returncode == 0)
    again = stack.run("dead replay", "old")
    assert (again.process.returncode, again.out) == (0, "")
    assert "replayed before" in again.err
    assert stack.run("dead replay", "old", "--again").out == "old\told~1.2\n"


@pytest.mark.parametrize("moment", ["yesterday", "2 hours", "2026-13-01"])
def test_a_time_that_is_none_is_said_so(stack: Terminal, moment: str) -> None:
    typed = stack.run("dead list", "--since", moment)
    assert typed.process.returncode == 2
    assert "is wanted" in typed.err
