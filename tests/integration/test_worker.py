"""Jobs through a worker with the echo engine, over both pairs."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from fleet import POOL, WAIT_S, Fleet

from arriero.schemas.codec import decode_dead, decode_end, decode_worker
from arriero.schemas.errors import EngineError
from arriero.schemas.event import (
    Cancelled,
    CancelRequested,
    Completed,
    DeadLettered,
    Duplicate,
    Expired,
    Preempted,
    Progressed,
    Rejected,
    Resumed,
    Started,
    Terminal,
    Undecodable,
)
from arriero.schemas.job import JOB_MAX_BYTES, Job
from arriero.transports.log import Outgoing
from arriero.workers.worker import WorkerSettings

LONG = "all work and no play " * 40
"""280 tokens for the echo engine."""
SLOW = 0.02
"""Seconds a step: LONG takes five seconds."""


async def test_a_job_goes_through_and_its_events_are_in_order(fleet: Fleet) -> None:
    async with fleet.running(fleet.make_worker()):
        await fleet.submit(Job(id="a", prompt="Grüße, Welt"))
        end = await fleet.wait_end("a")
    assert isinstance(end, Completed)
    assert [type(event) for event in fleet.of("a")] == [Started, Completed]
    assert end.output.text == "Grüße, Welt"
    assert end.finish_reason == "stop"
    assert end.usage.completion_tokens == end.output.count > 0
    assert end.usage.ttft_s >= end.usage.queue_s >= 0
    assert end.worker == "w1"
    assert end.fence > 0


async def test_the_reader_sees_the_tokens_and_then_the_recorded_end(fleet: Fleet) -> None:
    async with fleet.projecting(), fleet.running(fleet.make_worker()):
        await fleet.submit(Job(id="a", prompt="Grüße, Welt", max_tokens=3))
        view = await fleet.wait_view("a", lambda view: view.status == "fin")
        end = await fleet.wait_end("a")
    assert [token.on_bus() for token in end.output.tokens] == view.tokens
    ending = decode_end(view.end)
    assert (ending.status, ending.finish_reason, ending.count) == ("completed", "length", 3)
    assert "".join(element.partition("|")[2] for element in view.tokens) + ending.tail == end.output.text
    assert view.lineage == end.output.lineage == f"1.{end.fence}@0"


async def test_all_classes_and_many_jobs_are_settled_once_each(fleet: Fleet) -> None:
    async with fleet.running(fleet.make_worker(slots=4)):
        for priority in ("interactive", "standard", "batch"):
            await fleet.submit(
                *(Job(id=f"{priority}-{i}", prompt=f"{i} is a number") for i in range(100)), priority=priority
            )
        await fleet.wait_settled(300)
    settled = [event.origin for event in fleet.settling()]
    assert len(set(settled)) == len(settled) == 300
    assert all(isinstance(event, Completed) for event in fleet.settling())


# --- bad input ---------------------------------------------------------------------------------------------


def job(**fields: object) -> bytes:
    return msgspec.json.encode({"id": "bad", "prompt": "x"} | fields)


BAD = {
    "malformed": (b'{"id": "bad", "prompt"', Undecodable, "malformed_json"),
    "not an object": (b"[1, 2]", Undecodable, "malformed_json"),
    "too deep": (
        b'{"id": "bad", "prompt": "x", "metadata": {"a": ' + b"[" * 9_000 + b"]" * 9_000 + b"}}",
        Undecodable,
        "malformed_json",
    ),
    "an id of 10,000 characters": (job(id="x" * 10_000), Undecodable, "bad_id"),
    "no id": (b'{"prompt": "x"}', Undecodable, "missing_field"),
    "invalid utf-8": (b'{"id": "bad", "prompt": "\xff"}', Rejected, "invalid_utf8"),
    "unknown field": (job(promt="x"), Rejected, "unknown_field"),
    "unsupported option": (job(logprobs=5), Rejected, "unsupported_option"),
    "wrong type": (job(max_tokens="many"), Rejected, "bad_type"),
    "not a number": (b'{"id": "bad", "prompt": "x", "sampling": {"temperature": NaN}}', Rejected, "not_finite"),
    "absurd": (job(sampling={"temperature": -5}), Rejected, "bad_value"),
    "empty prompt": (job(prompt=""), Rejected, "empty_prompt"),
    "no prompt": (b'{"id": "bad"}', Rejected, "missing_field"),
    "too large": (job(prompt="x" * JOB_MAX_BYTES), Rejected, "job_too_large"),
    "wrong class": (job(**{"class": "batch"}), Rejected, "class_mismatch"),
    "unknown model": (job(model="gpt-17"), Rejected, "unknown_model"),
    "longer than the context": (job(prompt="x" * 2_000), Rejected, "prompt_too_long"),
    "unknown version": (job(v=9, spice="hot"), DeadLettered, "unknown_version"),
}


async def test_bad_input_ends_with_a_code_and_the_worker_goes_on(fleet: Fleet) -> None:
    places = {}
    async with fleet.running(fleet.make_worker(n_ctx_sequence=500)):
        for number, (name, (value, _, _)) in enumerate(BAD.items()):
            value = value.replace(b'"bad"', f'"bad-{number}"'.encode())
            places[name] = await fleet.publish_raw(value, key=f"k{number}".encode())
        await fleet.submit(Job(id="good", prompt="x"))
        await fleet.wait_settled(len(BAD) + 1)
        assert isinstance(await fleet.wait_end("good"), Completed)
    found = {(event.origin.partition, event.origin.offset): event for event in fleet.settling()}
    for name, (_, kind, code) in BAD.items():
        event = found[places[name].partition, places[name].offset]
        assert (type(event), event.error.code) == (kind, code), name


async def test_what_is_undecodable_is_copied_to_the_dead_letters(fleet: Fleet) -> None:
    async with fleet.running(fleet.make_worker()):
        placed = await fleet.publish_raw(b"\xff not a job")
        await fleet.wait_settled(1)
    (dead,) = [decode_dead(record.value or b"") for record in await fleet.log.fetch(fleet.names.dead, 0, [0, 1])]
    assert (dead.reason, dead.raw) == ("undecodable", b"\xff not a job")
    assert (dead.origin.partition, dead.origin.offset) == (placed.partition, placed.offset)


async def test_a_job_of_a_later_version_is_dead_lettered_whole(fleet: Fleet) -> None:
    async with fleet.running(fleet.make_worker()):
        await fleet.publish_raw(job(v=9, spice="hot"))
        await fleet.wait_end("bad")
    (dead,) = [decode_dead(record.value or b"") for record in await fleet.log.fetch(fleet.names.dead, 0, [0, 1])]
    assert (dead.reason, dead.job) == ("unknown_version", {"id": "bad", "prompt": "x", "v": 9, "spice": "hot"})


async def test_an_unknown_model_is_told_what_is_served(fleet: Fleet) -> None:
    async with fleet.running(fleet.make_worker()):
        await fleet.submit(Job(id="a", prompt="x", model="gpt-17"), Job(id="b", prompt="x", model="parrot"))
        end = await fleet.wait_end("a")
        other = await fleet.wait_events("b", Completed)
    assert isinstance(end, Rejected)
    assert "`echo`, `parrot`" in end.error.message
    assert isinstance(other[0], Started)
    assert other[0].model == "parrot"


# --- duplicates --------------------------------------------------------------------------------------------


async def test_the_later_of_two_records_in_hand_is_a_duplicate(fleet: Fleet) -> None:
    first, second = await fleet.submit(Job(id="a", prompt="x"), Job(id="a", prompt="x"))
    async with fleet.running(fleet.make_worker()):
        await fleet.wait_settled(2)
    kinds = {event.origin.offset: event for event in fleet.settling()}
    duplicate = kinds[second.offset]
    assert isinstance(kinds[first.offset], Completed)
    assert isinstance(duplicate, Duplicate)
    assert duplicate.first_root == str(kinds[first.offset].origin)
    assert not duplicate.body_differs


async def test_a_duplicate_is_known_after_the_first_has_ended(fleet: Fleet) -> None:
    async with fleet.projecting(), fleet.running(fleet.make_worker()):
        await fleet.submit(Job(id="a", prompt="x"))
        await fleet.wait_state("a", lambda state: state.ended)
        await fleet.submit(Job(id="a", prompt="y"))
        await fleet.wait_settled(2)
        state = await fleet.wait_state("a", lambda state: bool(state.duplicates))
    (end,) = [event for event in fleet.of("a") if isinstance(event, Completed)]
    (duplicate,) = [event for event in fleet.of("a") if isinstance(event, Duplicate)]
    assert duplicate.first_root == end.root
    assert duplicate.body_differs
    assert state.phase == "completed"
    assert state.root == end.root


async def test_a_bad_record_under_the_id_of_a_running_job_does_not_end_that(fleet: Fleet) -> None:
    async with fleet.running(fleet.make_worker(step_s=0.01)):
        await fleet.submit(Job(id="a", prompt=LONG[:100]))
        await fleet.wait_events("a", Started)
        await fleet.publish_raw(job(id="a", promt="y"), key=b"a")
        await fleet.wait_settled(2)
    assert [type(event) for event in fleet.of("a")] == [Started, Duplicate, Completed]


# --- cancel, deadlines -------------------------------------------------------------------------------------


async def test_a_job_cancelled_before_it_was_read_never_starts(fleet: Fleet) -> None:
    await fleet.submit(Job(id="a", prompt="x"))
    await fleet.bus.cancel("a")
    async with fleet.running(fleet.make_worker()):
        end = await fleet.wait_end("a")
    assert isinstance(end, Cancelled)
    assert fleet.of("a") == [end]


async def test_a_waiting_job_can_be_cancelled(fleet: Fleet) -> None:
    async with fleet.running(fleet.make_worker(step_s=SLOW, slots=1)):
        await fleet.submit(Job(id="a", prompt=LONG))
        await fleet.wait_events("a", Started)
        await fleet.submit(Job(id="b", prompt="x"))
        await fleet.wait_view("b", lambda view: view.status == "open")
        await fleet.bus.cancel("b")
        end = await fleet.wait_end("b")
    assert isinstance(end, Cancelled)
    assert end.output.count == 0
    assert not any(isinstance(event, Terminal) for event in fleet.of("a"))


async def test_a_running_job_is_cancelled_within_a_step_or_two(fleet: Fleet) -> None:
    async with fleet.projecting(), fleet.running(fleet.make_worker(step_s=SLOW)):
        await fleet.submit(Job(id="a", prompt=LONG))
        before = await fleet.wait_view("a", lambda view: len(view.tokens) > 3)
        await fleet.bus.cancel("a")
        view = await fleet.wait_view("a", lambda view: view.status == "fin")
        end = await fleet.wait_end("a")
    assert isinstance(end, Cancelled)
    assert len(before.tokens) <= end.output.count == len(view.tokens) < 60
    assert decode_end(view.end).status == "cancelled"


async def test_a_cancel_request_in_the_log_is_enough(fleet: Fleet) -> None:
    async with fleet.projecting(), fleet.running(fleet.make_worker(step_s=SLOW)):
        await fleet.submit(Job(id="a", prompt=LONG))
        await fleet.wait_events("a", Started)
        request = CancelRequested(id="a", time_ms=int(time.time() * 1000))
        await fleet.publish(Outgoing(fleet.names.events, b"a", msgspec.json.encode(request)))
        assert isinstance(await fleet.wait_end("a"), Cancelled)


async def test_a_deadline_that_passed_in_the_queue_is_named(fleet: Fleet) -> None:
    await fleet.submit(Job(id="a", prompt="x", deadline=time.time() - 1))
    async with fleet.running(fleet.make_worker()):
        end = await fleet.wait_end("a")
    assert isinstance(end, Expired)
    assert end.stage == "queue"
    assert fleet.of("a") == [end]


async def test_a_deadline_that_passes_while_decoding_keeps_what_there_is(fleet: Fleet) -> None:
    async with fleet.running(fleet.make_worker(step_s=SLOW)) as worker:
        await fleet.poll(lambda: bool(worker.info.claims))
        await fleet.submit(Job(id="a", prompt=LONG, deadline=time.time() + 1.0))
        end = await fleet.wait_end("a")
    assert isinstance(end, Expired)
    assert end.stage == "decode"
    assert 0 < end.output.count < 60


# --- checkpoints, preemption -------------------------------------------------------------------------------


async def test_a_running_job_is_checkpointed_without_gaps(fleet: Fleet) -> None:
    async with fleet.running(fleet.make_worker(step_s=0.005, settings=WorkerSettings(checkpoint_s=0.2))):
        await fleet.submit(Job(id="a", prompt=LONG[:400]))
        end = await fleet.wait_end("a")
    checkpoints = [event for event in fleet.of("a") if isinstance(event, Progressed)]
    tokens = [token for event in checkpoints for token in event.tokens]
    assert checkpoints
    assert [event.first for event in checkpoints] == [
        sum(len(event.tokens) for event in checkpoints[:i]) for i in range(len(checkpoints))
    ]
    assert end.output.tokens[: len(tokens)] == tokens
    assert {event.lineage for event in checkpoints} == {end.output.lineage}


async def test_an_urgent_job_preempts_and_both_say_so(fleet: Fleet) -> None:
    async with fleet.running(fleet.make_worker(step_s=SLOW, slots=1)):
        await fleet.submit(Job(id="slow", prompt=LONG[:150]), priority="batch")
        await fleet.wait_events("slow", Started)
        await fleet.submit(Job(id="fast", prompt="x"), priority="interactive")
        assert isinstance(await fleet.wait_end("fast"), Completed)
        end = await fleet.wait_end("slow")
    assert [type(event) for event in fleet.of("slow")] == [Started, Preempted, Resumed, Completed]
    assert end.output.text == LONG[:150]


# --- presence ----------------------------------------------------------------------------------------------


async def test_a_worker_is_present_while_it_works_and_not_after(fleet: Fleet) -> None:
    async with fleet.running(fleet.make_worker(slots=3)):
        await fleet.submit(Job(id="a", prompt="x"))
        await fleet.wait_end("a")  # it has been working for a while
        found = await fleet.bus.workers(POOL)
    info = decode_worker(found["w1"])
    assert (info.models, info.slots, info.pool) == (["echo", "parrot"], 3, POOL)
    assert await fleet.bus.workers(POOL) == {}


# --- ends --------------------------------------------------------------------------------------------------


async def test_drain_lets_what_runs_end(fleet: Fleet) -> None:
    worker = fleet.make_worker(step_s=0.01)
    async with worker:
        run = asyncio.create_task(worker.run())
        await fleet.submit(Job(id="a", prompt=LONG[:150]))
        await fleet.wait_events("a", Started)
        await worker.drain(WAIT_S)
        await run
        assert isinstance(await fleet.wait_end("a"), Completed)


async def test_drain_in_mid_job_loses_nothing(fleet: Fleet) -> None:
    worker = fleet.make_worker(step_s=SLOW, slots=2)
    async with fleet.projecting():
        async with worker:
            run = asyncio.create_task(worker.run())
            await fleet.submit(*(Job(id=f"j{i}", prompt=LONG[:200]) for i in range(6)))
            await fleet.until(lambda: sum(isinstance(event, Started) for event in fleet.events) == 2)
            await worker.drain(0.1)
            await run
        begun = {event.id for event in fleet.events if isinstance(event, Started)}
        assert not fleet.settling()
        await fleet.until(lambda: {event.id for event in fleet.events if isinstance(event, Progressed)} == begun)
        async with fleet.running(fleet.make_worker("w2")):
            await fleet.wait_settled(6)
            for i in range(6):
                view = await fleet.wait_view(f"j{i}", lambda view: view.status == "fin")
                assert "".join(element.partition("|")[2] for element in view.tokens) == LONG[:200]
    assert sorted(event.id for event in fleet.settling()) == [f"j{i}" for i in range(6)]
    assert all(isinstance(event, Completed) for event in fleet.settling())


async def test_a_second_stop_request_aborts_at_once(fleet: Fleet) -> None:
    worker = fleet.make_worker(step_s=SLOW)
    async with worker:
        run = asyncio.create_task(worker.run())
        await fleet.submit(Job(id="a", prompt=LONG))
        await fleet.wait_events("a", Started)
        first = asyncio.create_task(worker.drain(WAIT_S))
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await worker.drain(WAIT_S)
            await first
            await run
    assert not fleet.settling()


async def test_a_dead_engine_stops_the_worker(fleet: Fleet) -> None:
    worker = fleet.make_worker()
    async with worker:
        run = asyncio.create_task(worker.run())
        await fleet.submit(Job(id="a", prompt="x"))
        await fleet.wait_end("a")
        worker._runner.died.set_result(MemoryError("the card is gone"))
        with pytest.raises(EngineError, match="the card is gone"):
            async with asyncio.timeout(WAIT_S):
                await run


async def test_a_record_under_the_id_of_a_job_just_recorded_is_a_duplicate_before_any_projector_has_seen_that(
    fleet: Fleet,
) -> None:
    async with fleet.running(fleet.make_worker()):
        await fleet.submit(Job(id="a", prompt="hello"))
        await fleet.wait_end("a")
        await fleet.submit(Job(id="a", prompt="hello"))
        await fleet.submit(Job(id="a", prompt="something else"))
        await fleet.wait_settled(3)
    kinds = [type(event) for event in fleet.of("a")]
    assert kinds == [Started, Completed, Duplicate, Duplicate]
    assert [event.body_differs for event in fleet.of("a") if isinstance(event, Duplicate)] == [False, True]
