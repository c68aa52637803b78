"""What both token buses promise beside streams (those: test_bus_histories.py), and what Redis may do meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from bus_model import Forget
from redis.asyncio import Redis

from arriero.ops.testbed import RedisServer, missing
from arriero.schemas.clock import SystemClock
from arriero.schemas.errors import BusUnavailable, SetupError
from arriero.schemas.names import Names
from arriero.schemas.token import Frame, Look
from arriero.transports.bus import Appended, AppendRequest, OpenRequest, Position, StateWrite, TokenBus
from arriero.transports.redis.bus import RedisBus

OpenBus = Callable[[], Awaitable[TokenBus]]


def opening(job_id: str = "j") -> OpenRequest:
    return OpenRequest(job_id=job_id, root="r", attempt=1, fence=5, epoch="1.5", mode="start", lineage="1.5@0")


def appending(first: int, *tokens: str, job_id: str = "j", seal: str = "") -> AppendRequest:
    return AppendRequest(
        job_id=job_id, root="r", attempt=1, fence=5, epoch="1.5", first=first, tokens=tokens, seal=seal
    )


# --- streams -----------------------------------------------------------------------------------------------


async def test_one_call_serves_many_jobs_in_order(bus: TokenBus) -> None:
    names = [f"j{number}" for number in range(50)]
    opened = await bus.open([opening(name) for name in names])
    assert {answer.code for answer in opened} == {"fresh"}
    requests = [appending(0, *["1|x"] * number, job_id=name) for number, name in enumerate(names)]
    assert [answer.next for answer in await bus.append(requests)] == list(range(50))
    assert await bus.append([]) == []


async def test_any_text_comes_back_as_it_was(bus: TokenBus) -> None:
    pieces = [
        "",
        " ",
        "|",
        '"',
        "\\",
        "\n",
        "\r\n",
        "\x00",
        "é",
        "漢",
        "🦙",
        "{}",
        "\ud7ff",
        "a|b|c",
        "'; DROP",
        "\u2028",
    ]
    tokens = [f"{number}|{piece}" for number, piece in enumerate(pieces)]
    await bus.open([opening()])
    async with bus.follow("j") as subscription:
        await bus.append([appending(0, *tokens)])
        message = await subscription.message()
    assert message == Frame("r", "1.5", 0, tokens)
    assert (await bus.read("j", Position())).tokens == tokens


async def test_a_stream_of_twenty_thousand_tokens_is_read_whole_and_from_any_index(bus: TokenBus) -> None:
    tokens = [f"{number}|t{number} " for number in range(20_000)]
    await bus.open([opening()])
    for first in range(0, len(tokens), 250):
        await bus.append([appending(first, *tokens[first : first + 250])])
    assert (await bus.read("j", Position())).tokens == tokens
    assert (await bus.read("j", Position("r", "1.5", 19_990))).tokens == tokens[19_990:]


async def test_a_frame_that_is_too_large_goes_out_as_a_look(bus: TokenBus) -> None:
    await bus.open([opening()])
    async with bus.follow("j") as subscription:
        await bus.append([appending(0, *[f"{number}|{'x' * 1_000}" for number in range(100)])])
        assert await subscription.message() == Look()


async def test_an_append_said_twice_changes_nothing_and_tells_where_to_go_on(bus: TokenBus) -> None:
    await bus.open([opening()])
    assert await bus.append([appending(0, "1|a", "2|b")]) == [Appended(code="ok", next=2)]
    assert await bus.append([appending(0, "1|a", "2|b")]) == [Appended(code="ok", next=2)]
    assert (await bus.read("j", Position())).tokens == ["1|a", "2|b"]


# --- following ---------------------------------------------------------------------------------------------


async def test_every_follower_of_every_connection_hears_everything_once(open_bus: OpenBus) -> None:
    here, there = await open_bus(), await open_bus()
    await here.open([opening()])
    async with here.follow("j") as one, here.follow("j") as two, there.follow("j") as three:
        for number in range(5):
            await there.append([appending(number, f"{number}|x")])
        for subscription in (one, two, three):
            heard = [await subscription.message() for _ in range(5)]
            assert [message.first for message in heard if isinstance(message, Frame)] == [0, 1, 2, 3, 4]


async def test_a_follower_hears_nothing_of_other_jobs_and_nothing_after_it_left(bus: TokenBus) -> None:
    await bus.open([opening("a"), opening("b")])
    async with bus.follow("a") as subscription:
        await bus.append([appending(0, "1|b", job_id="b")])
        await bus.append([appending(0, "1|a", job_id="a")])
        message = await subscription.message()
        assert isinstance(message, Frame)
        assert message.tokens == ["1|a"]
    await bus.append([appending(1, "2|a", job_id="a")])
    async with bus.follow("a") as subscription:
        await bus.append([appending(2, "3|a", job_id="a")])
        message = await subscription.message()
        assert isinstance(message, Frame)
        assert message.first == 2


async def test_a_follower_that_is_cancelled_while_waiting_leaves_the_others_alone(bus: TokenBus) -> None:
    await bus.open([opening()])

    async def follow() -> None:
        async with bus.follow("j") as subscription:
            await subscription.message()

    async with bus.follow("j") as other:
        task = asyncio.create_task(follow())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        await bus.append([appending(0, "1|a")])
        assert isinstance(await other.message(), Frame)


# --- states, positions, presence ---------------------------------------------------------------------------


async def test_a_state_only_goes_forward(bus: TokenBus) -> None:
    await bus.put_states([StateWrite(job_id="j", offset=5, state=b"five")])
    await bus.put_states(
        [StateWrite(job_id="j", offset=4, state=b"four"), StateWrite(job_id="j", offset=5, state=b"V")]
    )
    assert await bus.states(["j", "k"]) == [b"five", None]


async def test_a_state_is_written_again_over_one_of_its_own_offset_when_asked_for(bus: TokenBus) -> None:
    await bus.put_states(
        [StateWrite(job_id="j", offset=5, state=b"edited"), StateWrite(job_id="k", offset=6, state=b"k")]
    )
    await bus.put_states([StateWrite(job_id=job, offset=5, state=b"right", again=True) for job in "jk"])
    assert await bus.states(["j", "k"]) == [b"right", b"k"]


async def test_a_queued_state_never_hides_a_later_one(bus: TokenBus) -> None:
    await bus.note_queued([("j", b"queued"), ("k", b"queued")])
    await bus.put_states([StateWrite(job_id="j", offset=0, state=b"running")])
    await bus.note_queued([("j", b"queued")])
    assert await bus.states(["j", "k"]) == [b"running", b"queued"]


async def test_what_is_known_of_a_job_shows_in_the_answers_to_its_owner(bus: TokenBus) -> None:
    await bus.cancel("j")
    await bus.put_states([StateWrite(job_id="j", offset=0, state=b"s", crashes=2)])
    (answer,) = await bus.open([opening()])
    assert (answer.cancelled, answer.crashes) == (True, 2)
    assert (await bus.append([appending(0)]))[0].cancelled
    await bus.put_states([StateWrite(job_id="j", offset=1, state=b"s", terminal="0/1")])
    assert (await bus.read("j", Position())).terminal == "0/1"
    assert (await bus.open([opening()]))[0].code == "finished"


async def test_positions_tell_when_the_bus_has_forgotten(bus: TokenBus) -> None:
    assert await bus.positions() is None
    assert not await bus.put_positions(b"one", first=False)
    assert await bus.put_positions(b"one", first=True)
    assert await bus.put_positions(b"two", first=False)
    assert await bus.positions() == b"two"
    await bus.forget()
    assert await bus.positions() is None


async def test_a_worker_is_there_until_it_leaves_or_is_silent(bus: TokenBus) -> None:
    assert await bus.workers("p") == {}
    await bus.announce("p", "a", b"1", 30.0)
    await bus.announce("p", "b", b"2", 30.0)
    await bus.announce("q", "c", b"3", 0.05)
    assert await bus.workers("p") == {"a": b"1", "b": b"2"}
    assert set(await bus.pools()) >= {"p"}
    await bus.retire("p", "a")
    assert await bus.workers("p") == {"b": b"2"}
    async with asyncio.timeout(10):
        while await bus.workers("q"):  # noqa: ASYNC110 - no message tells of a silence
            await asyncio.sleep(0.01)


async def test_a_forgotten_job_is_gone_whole(bus: TokenBus, forget: Forget) -> None:
    await bus.open([opening()])
    await bus.put_states([StateWrite(job_id="j", offset=0, state=b"s")])
    await forget("j", "all")
    assert await bus.states(["j"]) == [None]
    assert (await bus.read("j", Position())).status == "none"
    assert (await bus.append([appending(0, "1|a")]))[0].code == "gone"


# --- Redis alone -------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of this test alone, to be ill-treated."""
    if missing() is not None:
        pytest.skip(str(missing()))
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def redis_bus(server: RedisServer, names: Names) -> RedisBus:
    return RedisBus(server.url, names=names, clock=SystemClock())


@pytest.mark.real
async def test_no_key_lives_for_ever_but_the_positions(redis_url: str, names: Names) -> None:
    async with RedisBus(redis_url, names=names, clock=SystemClock()) as bus:
        await bus.open([opening()])
        await bus.append([appending(0, "1|a")])
        await bus.put_states([StateWrite(job_id="j", offset=0, state=b"s")])
        await bus.note_queued([("k", b"s")])
        await bus.cancel("l")
        await bus.announce("p", "a", b"1", 5.0)
        await bus.put_positions(b"x", first=True)
    async with Redis.from_url(redis_url, decode_responses=True) as redis:
        immortal = [key async for key in redis.scan_iter(f"{names.namespace}:*") if await redis.ttl(key) < 0]
    assert immortal == [names.positions_key]


@pytest.mark.real
async def test_a_redis_restarted_empty_is_served_on_and_followers_are_told(
    server: RedisServer, redis_bus: RedisBus
) -> None:
    async with redis_bus as bus:
        await bus.check()
        await bus.open([opening()])
        async with bus.follow("j") as subscription:
            server.kill()
            server.start()
            async with asyncio.timeout(20):
                with pytest.raises(BusUnavailable):
                    await subscription.message()
        assert (await bus.append([appending(0, "1|a")]))[0].code == "gone"  # and the functions are there again
        assert (await bus.open([opening()]))[0].code == "fresh"
        async with bus.follow("j") as subscription:
            await bus.append([appending(0, "1|a")])
            assert isinstance(await subscription.message(), Frame)


@pytest.mark.real
async def test_a_redis_that_is_stopped_is_unavailable_in_time_and_back_when_it_goes_on(
    server: RedisServer, redis_bus: RedisBus
) -> None:
    async with redis_bus as bus:
        await bus.open([opening()])
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(8):
                with pytest.raises(BusUnavailable):
                    await bus.append([appending(0, "1|a")])
                with pytest.raises(BusUnavailable):
                    async with bus.follow("j"):
                        pass
        finally:
            os.kill(server.pid, signal.SIGCONT)
        (answer,) = await bus.append([appending(0, "1|a")])
        assert answer == Appended(code="ok", next=1)  # whether or not the first one came through


async def test_an_absent_redis_is_found_out_by_the_call_and_not_on_entering(names: Names, free_port: int) -> None:
    async with RedisBus(f"redis://127.0.0.1:{free_port}", names=names, clock=SystemClock()) as bus:
        with pytest.raises(BusUnavailable):
            await bus.check()
        with pytest.raises(BusUnavailable):
            await bus.open([opening()])
        with pytest.raises(BusUnavailable):
            async with bus.follow("j"):
                pass


async def test_an_address_that_is_none_is_refused_by_name(names: Names) -> None:
    with pytest.raises(SetupError, match="--redis nonsense"):
        async with RedisBus("nonsense", names=names, clock=SystemClock()):
            pass
