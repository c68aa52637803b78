"""What every job log does. The embedded one runs always, Kafka's with `-m real` or wherever a broker is to be had."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import apsw
import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.structs import OffsetAndMetadata, TopicPartition
from structlog.testing import capture_logs

from arriero.schemas.codec import decode_event, encode
from arriero.schemas.errors import Fenced, RecordTooLarge, Revoked, TopicFault
from arriero.schemas.event import Completed, Origin, Started
from arriero.schemas.job import CLASSES
from arriero.schemas.names import Names
from arriero.transports.connect import Endpoints
from arriero.transports.ledger import LEDGER_MAX_CHARS, PENDING_MAX
from arriero.transports.log import (
    RECORD_MAX_BYTES,
    Claim,
    Commit,
    Gained,
    JobLog,
    Membership,
    Outgoing,
    Placed,
    Record,
    TopicSpec,
)
from arriero.transports.partitioner import partition_of

OpenLog = Callable[[], Awaitable[JobLog]]
Held = dict[tuple[str, int], Gained]

WAIT_S = 40.0
"""For what surely comes. A Kafka group has to time out a killed member first."""
QUIET_S = 0.15
"""For what must not come."""
PARTITIONS = 4
POOL = "default"


@pytest.fixture
async def fleet(job_log: JobLog, names: Names) -> JobLog:
    """A log with a pool's topics of four partitions each, and events in two."""
    await job_log.ensure(
        [*(TopicSpec(topic, PARTITIONS) for topic in names.job_topics(POOL)), TopicSpec(names.events, 2)]
    )
    return job_log


@pytest.fixture
async def single(job_log: JobLog, names: Names) -> JobLog:
    """A log with one job topic of one partition."""
    await job_log.ensure([TopicSpec(names.jobs(POOL, "standard"), 1), TopicSpec(names.events, 1)])
    return job_log


@pytest.fixture
def topic(names: Names) -> str:
    return names.jobs(POOL, "standard")


@pytest.fixture
def group(names: Names) -> str:
    return names.workers_group(POOL)


def jobs(topic: str, *keys: str) -> list[Outgoing]:
    return [Outgoing(topic, key.encode(), f"body of {key}".encode()) for key in keys]


async def place(log: JobLog, records: Sequence[Outgoing]) -> list[Placed]:
    answers = await log.publish(records)
    for answer in answers:
        assert isinstance(answer, Placed), answer
    return answers  # type: ignore[return-value]


async def tailed(log: JobLog, topics: Sequence[str], count: int, start: object = None) -> list[Record]:
    """The first `count` records of a tail."""
    found: list[Record] = []
    async with asyncio.timeout(WAIT_S), aclosing(log.tail(topics, {} if start is None else start)) as tail:  # type: ignore[arg-type]
        async for batch in tail:
            found += batch
            if len(found) >= count:
                return found
    raise AssertionError


async def hold(membership: Membership, held: Held, wanted: int) -> Held:
    """Follow the changes until so many claims are held."""
    async with asyncio.timeout(WAIT_S):
        while len(held) != wanted:
            change = await membership.change()
            at = change.claim.topic, change.claim.partition
            if isinstance(change, Gained):
                held[at] = change
            elif at in held and held[at].claim is change.claim:
                del held[at]
    return held


@asynccontextmanager
async def claimed(log: JobLog, group: str, topic: str, events: str, worker: str = "w1") -> AsyncIterator[Claim]:
    """The claim on the only partition of a topic."""
    async with log.join(group, [topic], worker, events) as membership:
        held = await hold(membership, {}, 1)
        yield held[topic, 0].claim


async def read_all(claim: Claim, count: int) -> list[Record]:
    """Reads until there are so many."""
    found: list[Record] = []
    async with asyncio.timeout(WAIT_S):
        while len(found) < count:
            found += await claim.read(count - len(found))
    return found


async def stays_empty(claim: Claim) -> bool:
    """Whether a read goes on waiting."""
    reading = asyncio.ensure_future(claim.read(1))
    done, _ = await asyncio.wait({reading}, timeout=QUIET_S)
    reading.cancel()
    await asyncio.wait({reading})
    return not done


def completed(record: Record, fence: int = 1, *, time_ms: int | None = None) -> bytes:
    """A settling event for a record."""
    origin = Origin(record.topic, record.partition, record.offset, record.time_ms if time_ms is None else time_ms)
    assert record.key is not None
    return encode(
        Completed(
            id=record.key.decode(),
            time_ms=record.time_ms,
            attempt=1,
            root=str(origin),
            origin=origin,
            worker="w",
            fence=fence,
            finish_reason="stop",
        )
    )


def settle(events: str, fence: int, *records: Record) -> Commit:
    """A commit that settles these records, each by its event."""
    return Commit(
        records=[Outgoing(events, record.key or b"", completed(record, fence)) for record in records],
        settled=[record.offset for record in records],
    )


# topics


async def test_ensuring_topics_again_changes_nothing(job_log: JobLog, names: Names) -> None:
    specs = [TopicSpec(names.events, 3)]
    await job_log.ensure(specs)
    await place(job_log, jobs(names.events, "a"))
    await job_log.ensure(specs)
    assert await job_log.partitions(names.events) == 3
    assert sum((await job_log.ends([names.events])).values()) == 1


async def test_another_number_of_partitions_is_a_fault(job_log: JobLog, names: Names) -> None:
    await job_log.ensure([TopicSpec(names.events, 3)])
    with pytest.raises(TopicFault, match=r"3.*4|4.*3"):
        await job_log.ensure([TopicSpec(names.events, 4)])


async def test_a_missing_topic_is_a_fault(job_log: JobLog, names: Names) -> None:
    with pytest.raises(TopicFault, match=names.events):
        await job_log.partitions(names.events)


# publishing and reading without claims


async def test_published_records_are_read_back_as_they_were(fleet: JobLog, topic: str) -> None:
    record = Outgoing(topic, b"key", b"value", [("traceparent", b"00-1")])
    before_ms = int(time.time() * 1000)
    (placed,) = await place(fleet, [record])
    (found,) = await tailed(fleet, [topic], 1)
    assert found == Record(topic, placed.partition, placed.offset, placed.time_ms, b"key", b"value", found.headers)
    assert [tuple(header) for header in found.headers] == [("traceparent", b"00-1")]
    assert before_ms - 1_000 <= found.time_ms <= time.time() * 1000 + 1_000


async def test_partitions_follow_from_keys_by_murmur2(fleet: JobLog, topic: str) -> None:
    keys = [f"job-{number}" for number in range(50)]
    placed = await place(fleet, jobs(topic, *keys))
    assert [each.partition for each in placed] == [partition_of(key.encode(), PARTITIONS) for key in keys]


async def test_a_tail_keeps_the_order_of_each_partition(fleet: JobLog, topic: str) -> None:
    keys = [f"job-{number}" for number in range(100)]
    placed = await place(fleet, jobs(topic, *keys))
    found = await tailed(fleet, [topic], 100)
    for partition in range(PARTITIONS):
        expected = [(each.offset, key) for each, key in zip(placed, keys, strict=True) if each.partition == partition]
        assert [(r.offset, (r.key or b"").decode()) for r in found if r.partition == partition] == expected


async def test_a_tail_starts_at_positions(single: JobLog, topic: str) -> None:
    placed = await place(single, jobs(topic, "a", "b", "c"))
    found = await tailed(single, [topic], 1, {(topic, 0): placed[2].offset})
    assert [record.key for record in found] == [b"c"]


async def test_a_tail_starts_at_a_time(single: JobLog, topic: str) -> None:
    await place(single, jobs(topic, "a", "b"))
    await asyncio.sleep(0.01)
    start = time.time()
    await asyncio.sleep(0.01)
    await place(single, jobs(topic, "c"))
    assert [record.key for record in await tailed(single, [topic], 1, start)] == [b"c"]


async def test_a_tail_of_a_time_to_come_waits_for_what_comes(single: JobLog, topic: str) -> None:
    await place(single, jobs(topic, "a"))
    async with asyncio.timeout(WAIT_S), aclosing(single.tail([topic], time.time() + 3_600)) as tail:
        waiting = asyncio.ensure_future(anext(tail))
        done, _ = await asyncio.wait({waiting}, timeout=QUIET_S)
        assert not done
        await place(single, jobs(topic, "b"))
        assert [record.key for record in await waiting] == [b"b"]


async def test_a_tail_follows_what_another_connection_writes(single: JobLog, open_log: OpenLog, topic: str) -> None:
    other = await open_log()
    async with asyncio.timeout(WAIT_S), aclosing(single.tail([topic], {})) as tail:
        for key in ("a", "b", "c"):
            waiting = asyncio.ensure_future(anext(tail))
            await place(other, jobs(topic, key))
            assert [record.key for record in await waiting] == [key.encode()]


async def test_single_records_are_fetched_and_missing_ones_left_out(single: JobLog, topic: str) -> None:
    placed = await place(single, jobs(topic, "a", "b", "c"))
    found = await single.fetch(topic, 0, [placed[2].offset, placed[0].offset, placed[2].offset + 7])
    assert {record.offset: record.key for record in found} == {placed[2].offset: b"c", placed[0].offset: b"a"}


async def test_ends_are_the_offsets_to_be_written_next(single: JobLog, topic: str, names: Names) -> None:
    placed = await place(single, jobs(topic, "a", "b"))
    ends = await single.ends([topic, names.events])
    assert ends[topic, 0] == placed[1].offset + 1
    assert ends[names.events, 0] == 0


async def test_a_record_that_is_too_large_fails_alone(single: JobLog, topic: str) -> None:
    large = Outgoing(topic, b"large", bytes(RECORD_MAX_BYTES + 1))
    first, refused, last = await single.publish([*jobs(topic, "a"), large, *jobs(topic, "b")])
    assert isinstance(first, Placed)
    assert isinstance(refused, RecordTooLarge)
    assert isinstance(last, Placed)
    assert [record.key for record in await tailed(single, [topic], 2)] == [b"a", b"b"]


# one claim


async def test_a_claim_reads_every_record_once_and_in_order(
    single: JobLog, group: str, topic: str, names: Names
) -> None:
    await place(single, jobs(topic, "a", "b", "c"))
    async with claimed(single, group, topic, names.events) as claim:
        assert len(await read_all(claim, 1)) == 1
        assert [record.key for record in await read_all(claim, 2)] == [b"b", b"c"]
        assert await stays_empty(claim)


async def test_a_read_waits_for_records(
    single: JobLog, open_log: OpenLog, group: str, topic: str, names: Names
) -> None:
    other = await open_log()
    async with claimed(single, group, topic, names.events) as claim:
        for key in ("a", "b"):
            reading = asyncio.ensure_future(claim.read(10))
            done, _ = await asyncio.wait({reading}, timeout=QUIET_S)
            assert not done
            await place(other, jobs(topic, key))
            assert [record.key for record in await asyncio.wait_for(reading, WAIT_S)] == [key.encode()]


async def test_a_commit_writes_its_events(single: JobLog, group: str, topic: str, names: Names) -> None:
    await place(single, jobs(topic, "a", "b"))
    async with claimed(single, group, topic, names.events) as claim:
        found = await read_all(claim, 2)
        await claim.commit(settle(names.events, claim.fence, *found))
        assert claim.ledger.offset > found[-1].offset
        events = await tailed(single, [names.events], 2)
        assert [record.key for record in events] == [b"a", b"b"]
        assert decode_event(events[0].value or b"").id == "a"


async def test_jobs_settle_in_any_order(single: JobLog, group: str, topic: str, names: Names) -> None:
    await place(single, jobs(topic, *"abcdef"))
    async with claimed(single, group, topic, names.events) as claim:
        found = await read_all(claim, 6)
        for number in (4, 1, 5):
            await claim.commit(settle(names.events, claim.fence, found[number]))
        assert claim.ledger.offset == found[0].offset
    async with claimed(single, group, topic, names.events) as claim:
        assert [record.key for record in await read_all(claim, 3)] == [b"a", b"c", b"d"]
        assert await stays_empty(claim)


async def test_what_is_settled_is_not_read_by_the_next_owner(
    single: JobLog, group: str, topic: str, names: Names
) -> None:
    await place(single, jobs(topic, "a", "b"))
    async with claimed(single, group, topic, names.events) as claim:
        await claim.commit(settle(names.events, claim.fence, *await read_all(claim, 2)))
    await place(single, jobs(topic, "c"))
    async with claimed(single, group, topic, names.events) as claim:
        assert [record.key for record in await read_all(claim, 1)] == [b"c"]


async def test_what_was_only_read_is_read_again_by_the_next_owner(
    single: JobLog, group: str, topic: str, names: Names
) -> None:
    await place(single, jobs(topic, "a", "b"))
    async with claimed(single, group, topic, names.events) as claim:
        await read_all(claim, 2)
    async with claimed(single, group, topic, names.events) as claim:
        assert [record.key for record in await read_all(claim, 2)] == [b"a", b"b"]


async def test_a_commit_may_settle_nothing(single: JobLog, group: str, topic: str, names: Names) -> None:
    await place(single, jobs(topic, "a"))
    async with claimed(single, group, topic, names.events) as claim:
        (record,) = await read_all(claim, 1)
        started = Started(
            id="a", time_ms=1, attempt=1, root="r", worker="w", fence=claim.fence, origin=Origin(topic, 0, 0, 1)
        )
        await claim.commit(Commit(records=[Outgoing(names.events, b"a", encode(started))], oldest_start_ms=4711))
        assert claim.ledger.oldest_start_ms == 4711
        await claim.commit(Commit(settled=[record.offset]))
        assert claim.ledger.oldest_start_ms == 4711
    async with claimed(single, group, topic, names.events) as claim:
        assert claim.ledger.oldest_start_ms == 4711
        await claim.commit(Commit(oldest_start_ms=0))
        assert claim.ledger.oldest_start_ms == 0


async def test_a_commit_that_is_too_large_writes_nothing_and_leaves_the_claim(
    single: JobLog, group: str, topic: str, names: Names
) -> None:
    await place(single, jobs(topic, "a"))
    async with claimed(single, group, topic, names.events) as claim:
        (record,) = await read_all(claim, 1)
        large = Outgoing(names.events, b"a", bytes(RECORD_MAX_BYTES + 1))
        with pytest.raises(RecordTooLarge):
            await claim.commit(Commit(records=[Outgoing(names.events, b"a", b"small"), large], settled=[record.offset]))
        assert not claim.ledger.is_settled(record.offset)
        await claim.commit(settle(names.events, claim.fence, record))
        (event,) = await tailed(single, [names.events], 1)
        assert event.value == completed(record, claim.fence)


async def test_commits_whose_callers_give_up_leave_the_claim_and_its_ledger_true(
    single: JobLog, group: str, topic: str, names: Names
) -> None:
    rounds = 12
    await place(single, jobs(topic, *(f"job-{number}" for number in range(2 * rounds))))
    async with claimed(single, group, topic, names.events) as claim:
        found = await read_all(claim, 2 * rounds)
        for turns in range(rounds):
            committing = asyncio.ensure_future(claim.commit(settle(names.events, claim.fence, found[2 * turns])))
            for _ in range(turns):
                await asyncio.sleep(0)
            committing.cancel()
            await asyncio.wait({committing})
            await claim.commit(settle(names.events, claim.fence, found[2 * turns + 1]))
        # Whether those took effect is open; events and ledger say the same.
        settled = [record for record in found if claim.ledger.is_settled(record.offset)]
        assert {record.key for record in found[1::2]} <= {record.key for record in settled}
        events = await tailed(single, [names.events], len(settled))
        assert [event.key for event in events] == [record.key for record in settled]


async def test_a_claim_holds_a_bounded_number_of_records(single: JobLog, group: str, topic: str, names: Names) -> None:
    await place(single, jobs(topic, *(f"job-{number}" for number in range(PENDING_MAX + 40))))
    async with claimed(single, group, topic, names.events) as claim:
        assert claim.capacity == PENDING_MAX
        found = await read_all(claim, PENDING_MAX)
        assert claim.capacity == 0
        assert await stays_empty(claim)
        await claim.commit(Commit(settled=[record.offset for record in found[1:40:2]]))
        assert claim.capacity == 20
        assert len(await read_all(claim, 20)) == 20
        assert claim.capacity == 0
        assert len(claim.ledger.encode()) <= LEDGER_MAX_CHARS


async def test_a_read_that_waits_for_room_goes_on_when_there_is_some(
    single: JobLog, group: str, topic: str, names: Names
) -> None:
    await place(single, jobs(topic, *(f"job-{number}" for number in range(PENDING_MAX + 1))))
    async with claimed(single, group, topic, names.events) as claim:
        found = await read_all(claim, PENDING_MAX)
        reading = asyncio.ensure_future(claim.read(5))
        await claim.commit(Commit(settled=[found[0].offset]))
        assert len(await asyncio.wait_for(reading, WAIT_S)) == 1


# from owner to owner


async def test_the_fence_rises_at_each_taking(single: JobLog, group: str, topic: str, names: Names) -> None:
    fences = []
    for worker in ("w1", "w2", "w1"):
        async with claimed(single, group, topic, names.events, worker) as claim:
            assert claim.ledger.owner.startswith(f"{worker}/")
            assert claim.ledger.fence == claim.fence
            fences.append(claim.fence)
    assert fences == sorted(set(fences))
    assert fences[0] > (time.time() - 600) * 1000


async def test_an_incarnation_is_a_stranger_to_the_one_before(
    single: JobLog, group: str, topic: str, names: Names
) -> None:
    for _ in range(2):
        async with single.join(group, [topic], "w1", names.events) as membership:
            held = await hold(membership, {}, 1)
            assert not held[topic, 0].continued


async def test_two_members_share_and_get_the_same_numbers_of_each_class(
    fleet: JobLog, open_log: OpenLog, group: str, names: Names
) -> None:
    topics = names.job_topics(POOL)
    other = await open_log()
    async with (
        fleet.join(group, topics, "w1", names.events) as one,
        AsyncExitStack() as stack,
    ):
        mine = await hold(one, {}, 12)
        two = await stack.enter_async_context(other.join(group, topics, "w2", names.events))
        mine, theirs = await asyncio.gather(hold(one, mine, 6), hold(two, {}, 6))
        assert not mine.keys() & theirs.keys()
        for held in (mine, theirs):
            numbers = {topic: {number for at, number in held if at == topic} for topic in topics}
            assert len(numbers[topics[0]]) == 2
            assert all(numbers[topic] == numbers[topics[0]] for topic in topics)


async def test_a_member_that_leaves_hands_over_everything(
    fleet: JobLog, open_log: OpenLog, group: str, topic: str, names: Names
) -> None:
    other = await open_log()
    await place(fleet, jobs(topic, *(f"job-{number}" for number in range(40))))
    async with AsyncExitStack() as stack, fleet.join(group, [topic], "w1", names.events) as one:
        mine = await hold(one, {}, PARTITIONS)
        two = await stack.enter_async_context(other.join(group, [topic], "w2", names.events))
        mine, theirs = await asyncio.gather(hold(one, mine, 2), hold(two, {}, 2))
        for gained in theirs.values():
            found = await gained.claim.read(3)
            await gained.claim.commit(settle(names.events, gained.claim.fence, found[0]))
        await stack.aclose()
        left = theirs.values()
        await hold(one, mine, PARTITIONS)
        for gained in left:
            taken = mine[topic, gained.claim.partition].claim
            assert taken.fence > gained.claim.fence
            assert taken.ledger.offset == gained.claim.ledger.offset


async def test_a_claim_that_was_lost_refuses_everything(single: JobLog, group: str, topic: str, names: Names) -> None:
    async with claimed(single, group, topic, names.events) as claim:
        reading = asyncio.ensure_future(claim.read(1))
        await asyncio.sleep(0)
    with pytest.raises(Revoked):
        await asyncio.wait_for(reading, WAIT_S)
    with pytest.raises(Revoked):
        await claim.commit(Commit())


async def test_a_released_claim_is_read_again_by_the_next_owner(
    single: JobLog, group: str, topic: str, names: Names
) -> None:
    await place(single, jobs(topic, "a", "b"))
    async with single.join(group, [topic], "w1", names.events) as membership:
        claim = (await hold(membership, {}, 1))[topic, 0].claim
        first, _ = await read_all(claim, 2)
        await claim.commit(settle(names.events, claim.fence, first))
        await claim.release()
        with pytest.raises(Revoked):
            await claim.read(1)
    async with claimed(single, group, topic, names.events) as claim:
        assert [record.key for record in await read_all(claim, 1)] == [b"b"]


OWNER = """
import asyncio, random, sys
from pathlib import Path
import structlog
from arriero.schemas.clock import SystemClock
from arriero.schemas.errors import ArrieroError
from arriero.schemas.names import Names
from arriero.transports.connect import Endpoints, make_log
from arriero.transports.log import Commit, Outgoing

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))

async def main(kafka, data, namespace, group, topic, events):
    ends = Endpoints(data=Path(data)) if data else Endpoints(kafka=kafka, redis="redis://127.0.0.1:1")
    log = make_log(ends, names=Names(namespace), clock=SystemClock(), rng=random.Random(), client="owner")
    async with log, log.join(group, [topic], "owner", events) as membership:
        claim = (await membership.change()).claim
        (record,) = await claim.read(1)
        print("owns", claim.fence, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        try:
            await claim.commit(Commit(records=[Outgoing(events, b"late", b"late")], settled=[record.offset]))
            print("committed", flush=True)
        except ArrieroError as error:
            print(error.code, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@asynccontextmanager
async def owner(
    ends: Endpoints, names: Names, group: str, topic: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Another process that owns the topic's one partition and has read its first record; its fence. Once it gets a
    line it commits, says how that went, and ends."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        OWNER,
        ends.kafka or "",
        str(ends.data or ""),
        names.namespace,
        group,
        topic,
        names.events,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(WAIT_S):
            word, fence = (await process.stdout.readline()).split()
        assert word == b"owns"
        yield process, int(fence)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_killed_owner_is_followed_by_another(
    single: JobLog, log_endpoints: Endpoints, group: str, topic: str, names: Names
) -> None:
    await place(single, jobs(topic, "a"))
    async with (
        owner(log_endpoints, names, group, topic) as (process, fence),
        single.join(group, [topic], "w2", names.events) as membership,
    ):
        process.kill()
        killed = time.monotonic()
        claim = (await hold(membership, {}, 1))[topic, 0].claim
        if log_endpoints.embedded:
            assert time.monotonic() - killed < 1.0  # seen by its FIFO's end: no lease runs out
        assert claim.fence > fence
        assert [record.key for record in await read_all(claim, 1)] == [b"a"]


async def test_a_frozen_owner_finds_itself_fenced_and_writes_nothing(
    single: JobLog, log_endpoints: Endpoints, group: str, topic: str, names: Names
) -> None:
    await place(single, jobs(topic, "a"))
    async with (
        owner(log_endpoints, names, group, topic) as (process, _),
        single.join(group, [topic], "w2", names.events) as membership,
    ):
        process.send_signal(signal.SIGSTOP)
        claim = (await hold(membership, {}, 1))[topic, 0].claim
        (record,) = await read_all(claim, 1)
        process.send_signal(signal.SIGCONT)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"go\n")
        async with asyncio.timeout(WAIT_S):
            answer = (await process.stdout.readline()).decode().strip()
        assert answer in ("fenced", "revoked")
        # It may join again and get the partition back, so that this claim is gone, too; its event never comes.
        with contextlib.suppress(Fenced, Revoked):
            await claim.commit(settle(names.events, claim.fence, record))
        assert b"late" not in [event.key for event in await written(single, names.events)]


async def written(log: JobLog, topic: str) -> list[Record]:
    """All records of a topic."""
    found = []
    for (_, partition), end in (await log.ends([topic])).items():
        found += await log.fetch(topic, partition, range(end))
    return found


# a ledger that is gone


@pytest.fixture
def forget_ledgers(log_endpoints: Endpoints) -> Callable[[str], Awaitable[None]]:
    """Deletes a group and with it the ledgers, as an operator or a broker may. Nobody may be in it."""

    async def forget(group: str) -> None:
        if log_endpoints.data is not None:
            connection = apsw.Connection(str(log_endpoints.data / "log.db"))
            connection.execute("DELETE FROM leases WHERE grp = ?", (group,))
            connection.close()
            return
        from aiokafka.admin import AIOKafkaAdminClient
        from aiokafka.protocol.admin import DeleteGroupsRequest

        admin = AIOKafkaAdminClient(bootstrap_servers=log_endpoints.kafka)
        await admin.start()
        try:
            response = await admin._send_request(DeleteGroupsRequest([group]), await admin.find_coordinator(group))
            assert response.results == [(group, 0)]
        finally:
            await admin.close()

    return forget


async def test_a_lost_ledger_is_rebuilt_from_the_settling_events(
    single: JobLog, group: str, topic: str, names: Names, forget_ledgers: Callable[[str], Awaitable[None]]
) -> None:
    await place(single, jobs(topic, *"abcde"))
    async with claimed(single, group, topic, names.events) as claim:
        found = await read_all(claim, 5)
        await claim.commit(settle(names.events, claim.fence, found[0], found[1], found[3]))
        fence = claim.fence
    await forget_ledgers(group)
    async with claimed(single, group, topic, names.events) as claim:
        assert claim.fence > fence
        assert [record.key for record in await read_all(claim, 2)] == [b"c", b"e"]
        assert await stays_empty(claim)


async def test_a_rebuilt_fence_exceeds_every_fence_in_the_events(
    single: JobLog, group: str, topic: str, names: Names
) -> None:
    ahead = int(time.time() * 1000) + 10_000_000
    (placed,) = await place(single, jobs(topic, "a"))
    record = Record(topic, 0, placed.offset, placed.time_ms, b"a", None)
    await place(single, [Outgoing(names.events, b"a", completed(record, ahead))])
    await place(single, jobs(topic, "b"))
    async with claimed(single, group, topic, names.events) as claim:
        assert claim.fence > ahead
        assert [record.key for record in await read_all(claim, 1)] == [b"b"]


async def test_events_of_another_record_at_the_same_offset_settle_nothing(
    single: JobLog, group: str, topic: str, names: Names
) -> None:
    (placed,) = await place(single, jobs(topic, "a"))
    record = Record(topic, 0, placed.offset, placed.time_ms, b"a", None)
    await place(single, [Outgoing(names.events, b"a", completed(record, time_ms=placed.time_ms - 5))])
    async with claimed(single, group, topic, names.events) as claim:
        assert [record.key for record in await read_all(claim, 1)] == [b"a"]


WriteLedger = Callable[[str, str, int, str], Awaitable[None]]


@pytest.fixture
def write_ledger(log_endpoints: Endpoints) -> WriteLedger:
    """Puts a text beside the offset of a topic's first partition, as some other program may. Nobody may be in the
    group."""

    async def write(group: str, topic: str, offset: int, text: str) -> None:
        if log_endpoints.data is not None:
            connection = apsw.Connection(str(log_endpoints.data / "log.db"))
            (number,) = connection.execute("SELECT number FROM partitions WHERE topic = ?", (topic,)).fetchone()  # type: ignore[misc]
            row = (group, number, offset, text, 1, "")
            connection.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?)", row)
            connection.close()
            return
        consumer = AIOKafkaConsumer(bootstrap_servers=log_endpoints.kafka, group_id=group, enable_auto_commit=False)
        await consumer.start()
        try:
            place = TopicPartition(topic, 0)
            consumer.assign([place])
            await consumer.commit({place: OffsetAndMetadata(offset, text)})
        finally:
            await consumer.stop()

    return write


@pytest.mark.parametrize("text", ["", "handmade; not a ledger", "1;2;3", "1;x;w/1;0;;", "1;5;w/1;0;;0,0"])
async def test_garbage_beside_an_offset_is_mended_from_the_events_and_not_believed(
    single: JobLog, group: str, topic: str, names: Names, write_ledger: WriteLedger, text: str
) -> None:
    await place(single, jobs(topic, *"abc"))
    async with claimed(single, group, topic, names.events) as claim:
        found = await read_all(claim, 3)
        await claim.commit(settle(names.events, claim.fence, found[0]))
    await write_ledger(group, topic, 3, text)
    (found_ledger,) = (await single.ledgers(group, [topic])).values() or (None,)
    assert found_ledger is None or (found_ledger.fault and not found_ledger.is_settled(0))
    assert (await single.backlog(group, [topic]))[topic].count == 3
    async with claimed(single, group, topic, names.events) as claim:
        assert [record.key for record in await read_all(claim, 2)] == [b"b", b"c"]


async def test_a_ledger_of_a_later_release_is_left_alone_and_said_aloud(
    single: JobLog, group: str, topic: str, names: Names, write_ledger: WriteLedger
) -> None:
    await place(single, jobs(topic, "a"))
    await write_ledger(group, topic, 0, "2;of tomorrow")
    with capture_logs() as entries:
        async with single.join(group, [topic], "w1", names.events), asyncio.timeout(WAIT_S):
            while not (refused := [entry for entry in entries if entry["event"] == "claim_refused"]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert (refused[0]["group"], refused[0]["topic"], refused[0]["partition"]) == (group, topic, 0)
    assert refused[0]["code"] == "unknown_version"
    assert "pgrade this worker" in refused[0]["error"]
    assert "version 2" in (await single.ledgers(group, [topic]))[topic, 0].fault


async def test_an_event_of_a_later_release_stops_the_rebuild_of_its_partition_alone(
    fleet: JobLog, group: str, topic: str, names: Names
) -> None:
    (placed,) = await place(fleet, jobs(topic, "a"))
    event = completed(Record(topic, placed.partition, placed.offset, placed.time_ms, b"a", None))
    await place(fleet, [Outgoing(names.events, b"a", event.replace(b"{", b'{"v":2,', 1))])
    with capture_logs() as entries:
        async with fleet.join(group, [topic], "w1", names.events) as membership:
            held = await hold(membership, {}, PARTITIONS - 1)
            async with asyncio.timeout(WAIT_S):
                while not (refused := [entry for entry in entries if entry["event"] == "claim_refused"]):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    assert (topic, placed.partition) not in held
    assert [(entry["partition"], entry["code"]) for entry in refused] == [(placed.partition, "unknown_version")]


# numbers


async def test_backlog_counts_what_is_not_settled(single: JobLog, group: str, topic: str, names: Names) -> None:
    empty = (await single.backlog(group, [topic]))[topic]
    assert (empty.count, empty.oldest_s) == (0, 0.0)
    await place(single, jobs(topic, *"abcde"))
    assert (await single.backlog(group, [topic]))[topic].count == 5
    async with claimed(single, group, topic, names.events) as claim:
        found = await read_all(claim, 5)
        await claim.commit(settle(names.events, claim.fence, found[0], found[2]))
        backlog = (await single.backlog(group, [topic]))[topic]
        assert backlog.count == 3
        age_s = time.time() - found[1].time_ms / 1000
        assert backlog.oldest_s == pytest.approx(age_s, abs=1.0)
        await claim.commit(settle(names.events, claim.fence, found[1], found[3], found[4]))
        backlog = (await single.backlog(group, [topic]))[topic]
        assert (backlog.count, backlog.oldest_s) == (0, 0.0)


async def test_ledgers_are_read_without_claiming(single: JobLog, group: str, topic: str, names: Names) -> None:
    assert await single.ledgers(group, [topic]) == {}
    await place(single, jobs(topic, *"abc"))
    async with claimed(single, group, topic, names.events) as claim:
        found = await read_all(claim, 3)
        await claim.commit(settle(names.events, claim.fence, found[1]))
        assert await single.ledgers(group, [topic]) == {(topic, 0): claim.ledger}


async def test_every_class_is_claimed_and_settled_apart(fleet: JobLog, group: str, names: Names) -> None:
    topics = names.job_topics(POOL)
    for priority in CLASSES:
        await place(fleet, jobs(names.jobs(POOL, priority), *(f"{priority}-{number}" for number in range(8))))
    async with fleet.join(group, topics, "w1", names.events) as membership:
        held = await hold(membership, {}, 3 * PARTITIONS)
        ends = await fleet.ends(topics)
        for at, gained in held.items():
            if ends[at]:
                found = await read_all(gained.claim, ends[at])
                await gained.claim.commit(settle(names.events, gained.claim.fence, *found))
    backlog = await fleet.backlog(group, topics)
    assert [backlog[topic].count for topic in topics] == [0, 0, 0]
    events = await tailed(fleet, [names.events], 24)
    assert len({decode_event(event.value or b"").id for event in events}) == 24
