"""Events of a later release and records that are no events, met by those who fold: over both pairs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from doctoring import edit_state
from fleet import POOL, WAIT_S, Fleet, empty
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from arriero.producer.client import Client
from arriero.schemas.codec import encode
from arriero.schemas.errors import Unreadable
from arriero.schemas.event import CancelRequested, Completed
from arriero.schemas.job import Job
from arriero.transports.log import Outgoing
from arriero.workers.projector import Projector


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with Client(namespace=fleet.names.namespace, pool=POOL, log=fleet.log, bus=fleet.bus) as client:
        yield client


async def done(fleet: Fleet) -> Completed:
    """A job `a` that has completed."""
    async with fleet.projecting(), fleet.running(fleet.make_worker()):
        await fleet.submit(Job(id="a", prompt="hi"))
        end = await fleet.wait_end("a")
        await fleet.wait_state("a", lambda state: state.ended)
    assert isinstance(end, Completed)
    return end


def of_tomorrow(fleet: Fleet, event: Any) -> Outgoing:
    value = msgspec.json.encode({**msgspec.json.decode(encode(event)), "v": 2})
    return Outgoing(fleet.names.events, event.id.encode(), value)


async def test_the_projector_goes_on_and_counts_what_it_cannot_read(fleet: Fleet) -> None:
    registry = CollectorRegistry()
    projector = Projector(
        fleet.log, fleet.bus, names=fleet.names, pools=[POOL], clock=fleet.clock, rng=fleet.rng, registry=registry
    )
    await fleet.publish(
        of_tomorrow(fleet, CancelRequested(id="a", time_ms=1)),
        Outgoing(fleet.names.events, b"a", b"no event"),
        Outgoing(fleet.names.events, b"a", encode(CancelRequested(id="a", time_ms=1))),
    )
    with capture_logs() as entries:
        task = asyncio.create_task(projector.run(), name="test projector")
        await fleet.wait_state("a", lambda state: state.cancel_requested)
        task.cancel()
        await asyncio.wait([task])
    assert {entry["code"] for entry in entries if entry["event"] == "event_unreadable"} == {
        "unknown_version",
        "unreadable",
    }
    for code in ("unknown_version", "unreadable"):
        assert registry.get_sample_value("arriero_unreadable_events_total", {"code": code}) == 1


async def test_a_client_is_told_that_a_later_release_has_written_the_end(fleet: Fleet, client: Client) -> None:
    end = await done(fleet)
    await fleet.publish(of_tomorrow(fleet, end))
    await empty(fleet.bus, fleet.names)
    for ask in (client.status, client.history):
        with pytest.raises(Unreadable, match="upgrade") as refused:
            await ask("a")
        assert refused.value.code == "unknown_version"


async def test_what_is_no_event_does_not_hide_a_jobs_state(fleet: Fleet, client: Client) -> None:
    await done(fleet)
    await fleet.publish(Outgoing(fleet.names.events, b"a", b"no event"))
    await empty(fleet.bus, fleet.names)
    assert (await client.status("a")).status == "completed"


async def test_a_state_that_cannot_be_read_is_taken_from_the_log(fleet: Fleet, client: Client) -> None:
    await done(fleet)
    await edit_state(fleet, b"no state", "a")
    async with asyncio.timeout(WAIT_S):
        assert (await client.status("a")).status == "completed"
