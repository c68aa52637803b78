"""Things that happen in the same moment: cancels and ends, and one id in two places."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from fleet import Fleet

from arriero.producer.client import Client
from arriero.schemas.event import Cancelled, Completed, Duplicate, SettlingEvent, Started, Terminal
from arriero.schemas.job import CLASSES, Job

RACES = {"embedded": (1_000, 0.06), "real": (250, 0.4)}
"""How many, and the seconds within which a job comes to its end."""


async def test_a_cancel_that_races_the_end_leaves_one_result(fleet: Fleet) -> None:
    count, within_s = RACES["embedded" if fleet.endpoints.embedded else "real"]
    rng = random.Random(3)
    jobs = [Job(id=f"j{number}", prompt="abc" * rng.randint(1, 12)) for number in range(count)]
    async with Client(namespace=fleet.names.namespace, pool="default", log=fleet.log, bus=fleet.bus) as client:

        async def race(job: Job) -> None:
            """Cancelled as it is queued, prefilled, decoded, committed or recorded."""
            await fleet.submit(job)
            await asyncio.sleep(rng.uniform(0.0, within_s))
            await client.cancel(job.id)

        async with fleet.projecting(), fleet.running(fleet.make_worker(slots=32, step_s=0.001)):
            for start in range(0, count, 50):
                await asyncio.gather(*(race(job) for job in jobs[start : start + 50]))
            await fleet.wait_settled(count)
            results = [await client.result(job.id) for job in jobs]
    ends = Counter(event.id for event in fleet.events if isinstance(event, Terminal))
    kinds = Counter(type(event) for event in fleet.events if isinstance(event, Terminal))
    assert ends == dict.fromkeys((job.id for job in jobs), 1)
    assert set(kinds) == {Completed, Cancelled}, kinds
    for job, result in zip(jobs, results, strict=True):
        assert job.prompt is not None
        assert job.prompt.startswith(result.text)
        assert isinstance(result.event, Cancelled) or result.text == job.prompt


async def test_a_cancel_during_a_long_prefill_takes_effect_within_a_step(fleet: Fleet) -> None:
    worker = fleet.make_worker(n_batch=8, step_s=0.02)
    async with fleet.projecting(), fleet.running(worker):
        await fleet.submit(Job(id="a", prompt="x" * 3_000))  # 125 steps of prefill
        await fleet.wait_events("a", Started)
        await fleet.bus.cancel("a")
        end = await fleet.wait_end("a")
    assert isinstance(end, Cancelled)
    assert end.output.count == 0
    assert end.time_ms - next(event for event in fleet.of("a") if isinstance(event, Started)).time_ms < 2_000


async def test_one_id_in_every_class_and_two_workers_has_one_result_that_every_caller_sees(fleet: Fleet) -> None:
    async with Client(namespace=fleet.names.namespace, pool="default", log=fleet.log, bus=fleet.bus) as client:
        first, second = fleet.make_worker("w1", step_s=0.002), fleet.make_worker("w2", step_s=0.002)
        async with fleet.projecting(), fleet.running(first), fleet.running(second):
            await fleet.poll(lambda: bool(first.info.claims and second.info.claims))
            submitted = [
                await client.submit_job(
                    Job(id=f"j{number}", prompt="abc" * 20, affinity=f"{number}{priority}"), priority
                )
                for number in range(20)
                for priority in CLASSES
            ]
            await fleet.wait_settled(len(submitted))
            results = [await client.result(one.id) for one in submitted]
    settled = Counter(event.origin for event in fleet.events if isinstance(event, SettlingEvent))
    assert settled == dict.fromkeys((one.origin for one in submitted), 1)
    assert all(result.text == "abc" * 20 for result in results)
    for number in range(20):
        events = [event for event in fleet.of(f"j{number}") if isinstance(event, SettlingEvent)]
        of_job = [result.event for result in results if result.id == f"j{number}"]
        assert of_job == [next(event for event in events if isinstance(event, Terminal))] * 3
        assert all(isinstance(event, Completed | Duplicate) for event in events)
