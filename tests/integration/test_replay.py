"""The log is the truth: states and histories made anew from it are the same as before, over both pairs."""

from __future__ import annotations

import asyncio

from fleet import POOL, WAIT_S, Fleet, empty

from arriero.producer.client import Client
from arriero.schemas.codec import decode_event, decode_state, encode
from arriero.schemas.event import CancelRequested, Event
from arriero.schemas.job import BatchRef, Job
from arriero.schemas.state import JobState
from arriero.transports.log import Outgoing
from arriero.transports.reading import until_now

LONG = "all work and no play " * 20


async def mixed_load(fleet: Fleet) -> set[str]:
    """Jobs that end in many ways, and some that have not ended; their ids."""
    jobs = [
        *(Job(id=f"done-{i}", prompt="all work", tenant=f"t{i % 3}", batch=BatchRef("b", i)) for i in range(30)),
        Job(id="refused", prompt="x", model="of another pool", tenant="t9"),
        Job(id="expired", prompt="x", deadline=1.0),
        Job(id="cancelled-1", prompt=LONG),
        Job(id="cancelled-2", prompt=LONG, batch=BatchRef("b", 99)),
    ]
    async with fleet.projecting(), fleet.running(fleet.make_worker(step_s=0.005)):
        await fleet.submit(*jobs)
        await fleet.submit(Job(id="done-0", prompt="something else"), Job(id="done-1", prompt="all work"))
        for job_id in ("cancelled-1", "cancelled-2"):
            await fleet.publish(
                Outgoing(fleet.names.events, job_id.encode(), encode(CancelRequested(id=job_id, time_ms=1)))
            )
            await fleet.bus.cancel(job_id)
        await fleet.publish_raw(b"no job")
        await fleet.wait_settled(len(jobs) + 3)
    waiting = [Job(id=f"waits-{i}", prompt="x", batch=BatchRef("c", i)) for i in range(3)]
    await fleet.submit(*waiting, priority="batch")
    await fleet.publish(
        Outgoing(fleet.names.events, b"waits-1", encode(CancelRequested(id="waits-1", time_ms=1))),
        Outgoing(fleet.names.events, b"nobody", encode(CancelRequested(id="nobody", time_ms=1))),
    )
    return {"nobody", *(job.id for job in [*jobs, *waiting])}


async def all_states(fleet: Fleet, ids: set[str]) -> dict[str, JobState]:
    """Once everything has been projected."""
    topics = [fleet.names.events, *fleet.names.job_topics(POOL)]
    async with fleet.projecting() as projector:
        ends = await fleet.log.ends(topics)
        await fleet.poll(lambda: all(projector._positions.get(place, 0) >= end for place, end in ends.items()))
    wanted = sorted(ids)
    stored = await fleet.bus.states(wanted)
    return {job_id: decode_state(state) for job_id, state in zip(wanted, stored, strict=True) if state is not None}


async def histories(fleet: Fleet, ids: set[str]) -> dict[str, list[Event]]:
    """All events by job, read from the log by brute force."""
    found: dict[str, list[Event]] = {job_id: [] for job_id in ids}
    start = {(fleet.names.events, number): 0 for number in range(await fleet.log.partitions(fleet.names.events))}
    async for batch in until_now(fleet.log, start):
        for record in batch:
            event = decode_event(record.value)
            if event.id in found:
                found[event.id].append(event)
    return found


async def test_a_bus_that_was_emptied_gets_the_same_states_again(fleet: Fleet) -> None:
    ids = await mixed_load(fleet)
    before = await all_states(fleet, ids)
    assert before.keys() == ids
    assert len({state.status for state in before.values()}) >= 6
    await empty(fleet.bus, fleet.names)
    assert await all_states(fleet, ids) == before


async def test_a_replay_over_what_is_there_changes_nothing(fleet: Fleet) -> None:
    ids = await mixed_load(fleet)
    before = await all_states(fleet, ids)
    await fleet.bus.forget()
    assert await all_states(fleet, ids) == before


async def test_every_history_and_status_comes_from_the_log_alone(fleet: Fleet) -> None:
    ids = await mixed_load(fleet)
    before = await all_states(fleet, ids)
    expected = await histories(fleet, ids)
    await empty(fleet.bus, fleet.names)
    client = Client(namespace=fleet.names.namespace, pool=POOL, log=fleet.log, bus=fleet.bus)
    async with client, asyncio.timeout(WAIT_S):
        for job_id in sorted(ids):
            assert await client.history(job_id) == expected[job_id]
            assert (await client.status(job_id)).status == before[job_id].status
