"""The client against a worker with the echo engine, over both pairs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fleet import POOL, WAIT_S, Fleet, empty

from arriero.producer.client import Client, Submitted
from arriero.producer.follow import Ended, Tokens
from arriero.schemas.errors import ArrieroError, BadJob, ConflictingDuplicate, JobNotFound, NoLiveWorker, Undecodable
from arriero.schemas.event import Cancelled, CancelRequested, Completed, Started
from arriero.schemas.job import JOB_MAX_BYTES, Job, Message, Sampling

LONG = "all work and no play " * 40
SLOW = 0.02


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with Client(namespace=fleet.names.namespace, pool=POOL, log=fleet.log, bus=fleet.bus) as client:
        yield client


async def test_a_job_is_submitted_streamed_and_its_result_read(fleet: Fleet, client: Client) -> None:
    async with fleet.projecting(), fleet.running(fleet.make_worker()):
        job = await client.submit("Grüße, Welt", sampling=Sampling(seed=1), metadata={"a": 1}, ttl_s=60)
        async with asyncio.timeout(WAIT_S):
            items = [item async for item in client.stream(job.id)]
            text = "".join([piece async for piece in client.text(job.id)])
        result = await client.result(job, timeout_s=WAIT_S)
    shown = [token for item in items if isinstance(item, Tokens) for token in item.tokens]
    assert isinstance(items[-1], Ended)
    assert text == result.text == "Grüße, Welt"
    assert shown == result.tokens
    assert result.ok
    assert (result.status, result.finish_reason, result.error) == ("completed", "stop", None)
    assert result.usage.completion_tokens == len(shown)


async def test_a_stream_goes_on_from_an_index(fleet: Fleet, client: Client) -> None:
    async with fleet.projecting(), fleet.running(fleet.make_worker()):
        job = await client.submit(messages=[Message("user", "abcdefghijkl")])
        result = await client.result(job, timeout_s=WAIT_S)
        async with asyncio.timeout(WAIT_S):
            items = [item async for item in client.stream(job.id, 2)]
    assert items[0] == Tokens(2, result.tokens[2:])
    assert isinstance(items[-1], Ended)


async def test_status_and_history_tell_what_happened(fleet: Fleet, client: Client) -> None:
    job = await client.submit("hi", priority="batch")
    async with fleet.projecting():
        queued = await client.status(job.id)
        assert (queued.status, queued.priority, queued.record) == ("queued", "batch", job.origin)
        async with fleet.running(fleet.make_worker()):
            await client.result(job.id, timeout_s=WAIT_S)
    assert (await client.status(job.id)).status == "completed"
    assert [type(event) for event in await client.history(job.id)] == [Started, Completed]


async def test_status_and_history_come_from_the_log_when_the_bus_was_emptied(fleet: Fleet, client: Client) -> None:
    async with fleet.projecting(), fleet.running(fleet.make_worker()):
        job = await client.submit("hi")
        await client.result(job, timeout_s=WAIT_S)
    await empty(fleet.bus, fleet.names)
    state = await client.status(job.id)
    assert (state.status, state.tokens) == ("completed", 1)
    assert [type(event) for event in await client.history(job.id)] == [Started, Completed]


async def test_an_unknown_job_is_said_to_be_unknown(fleet: Fleet, client: Client) -> None:
    with pytest.raises(JobNotFound):
        await client.status("nobody")
    with pytest.raises(JobNotFound):
        await client.history("nobody")


async def test_a_running_job_is_cancelled(fleet: Fleet, client: Client) -> None:
    async with fleet.projecting(), fleet.running(fleet.make_worker(step_s=SLOW)):
        job = await client.submit(LONG)
        async with asyncio.timeout(WAIT_S):
            async for item in client.stream(job.id):
                if isinstance(item, Tokens) and item.first == 0:
                    await client.cancel(job.id, "enough")
        result = await client.result(job, timeout_s=WAIT_S)
        history = await client.history(job.id)
    assert (result.status, result.ok) == ("cancelled", False)
    assert LONG.startswith(result.text)
    assert [event.reason for event in history if isinstance(event, CancelRequested)] == ["enough"]
    assert isinstance(history[-1], Cancelled | CancelRequested)


async def test_many_jobs_are_submitted_in_order_with_an_answer_each(fleet: Fleet, client: Client) -> None:
    jobs = [Job(id=f"j{n}", prompt=str(n)) for n in range(1_200)]
    jobs[700] = Job(id="bad id", prompt="x")
    jobs[701] = Job(id="j701", prompt="")
    outcomes = [outcome async for outcome in client.submit_many(jobs)]
    assert len(outcomes) == len(jobs)
    assert isinstance(outcomes[700], Undecodable)
    assert isinstance(outcomes[701], BadJob)
    for job, outcome in zip(jobs, outcomes, strict=True):
        assert isinstance(outcome, ArrieroError) or outcome.id == job.id
    assert sum(isinstance(outcome, Submitted) for outcome in outcomes) == len(jobs) - 2


async def test_a_bad_job_is_refused_before_it_is_published(fleet: Fleet, client: Client) -> None:
    for wrong in ({"prompt": ""}, {"prompt": "x" * JOB_MAX_BYTES}, {"prompt": "x", "max_tokens": 0}):
        with pytest.raises(BadJob):
            await client.submit(**wrong)  # type: ignore[arg-type]
    ends = await fleet.log.ends(fleet.names.job_topics(POOL))
    assert set(ends.values()) == {0}


async def test_the_same_job_twice_is_one_job(fleet: Fleet, client: Client) -> None:
    async with fleet.projecting(), fleet.running(fleet.make_worker()):
        first = await client.submit("hi", id="same")
        await client.result(first, timeout_s=WAIT_S)
        second = await client.submit("hi", id="same")
        assert (await client.result(second, timeout_s=WAIT_S)).text == "hi"
        await fleet.wait_settled(2)
    assert len([event for event in fleet.of("same") if isinstance(event, Completed)]) == 1


async def test_another_job_under_the_same_id_is_a_conflict(fleet: Fleet, client: Client) -> None:
    async with fleet.projecting(), fleet.running(fleet.make_worker()):
        await client.result(await client.submit("hi", id="same"), timeout_s=WAIT_S)
        other = await client.submit("ho", id="same")
        with pytest.raises(ConflictingDuplicate):
            await client.result(other, timeout_s=WAIT_S)
        assert (await client.result("same", timeout_s=WAIT_S)).text == "hi"


async def test_no_worker_is_said_within_two_seconds(fleet: Fleet, client: Client) -> None:
    async with asyncio.timeout(2.5):
        with pytest.raises(NoLiveWorker):
            await client.require_worker()
    async with fleet.running(fleet.make_worker()):
        await client.require_worker()
        assert [worker.models for worker in await client.workers()] == [["echo", "parrot"]]


async def test_a_result_is_waited_for_no_longer_than_asked(fleet: Fleet, client: Client) -> None:
    job = await client.submit("hi")
    with pytest.raises(TimeoutError):
        await client.result(job, timeout_s=0.05)


async def test_a_question_that_is_cancelled_at_any_moment_stays_cancelled(fleet: Fleet, client: Client) -> None:
    """Or a task that ends by cancellation would not end."""

    async def ask() -> None:
        await client.peek("nobody")
        await asyncio.Event().wait()

    await client.peek("nobody")
    for turn in range(300):
        task = asyncio.create_task(ask())
        for _ in range(turn % 12):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=5.0)
        assert task.cancelled()


async def test_a_job_that_nobody_has_read_is_found_in_the_log_without_a_projector(client: Client) -> None:
    job = await client.submit("hello", affinity="elsewhere", priority="batch")
    state = await client.status(job.id)
    assert (state.status, state.priority, state.record) == ("queued", "batch", job.origin)
    assert await client.history(job.id) == []


async def test_a_stream_of_another_jobs_id_is_refused_before_anything_is_shown(client: Client, fleet: Fleet) -> None:
    async with fleet.running(fleet.make_worker()), fleet.projecting():
        first = await client.submit("hello", id="taken")
        await client.result(first)
        second = await client.submit("something else", id="taken")
        with pytest.raises(ConflictingDuplicate):
            await anext(client.stream(second))
        again = await client.submit("hello", id="taken")
        assert [type(item) async for item in client.stream(again)][-1] is Ended


async def test_what_can_be_no_id_is_refused_everywhere(client: Client) -> None:
    for answer in (client.status("{a}"), client.history("{a}"), client.cancel("{a}"), anext(client.stream("{a}"))):
        with pytest.raises(BadJob, match="a job's id is"):
            await answer
