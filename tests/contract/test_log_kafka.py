"""What only Kafka's job log has: rebalances, producers that fence each other, brokers that go away."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.structs import TopicPartition

from arriero.ops import testbed
from arriero.schemas.clock import SystemClock
from arriero.schemas.errors import Fenced, LogError, LogUnavailable, RecordTooLarge, Revoked, TopicFault
from arriero.schemas.names import Names
from arriero.transports.kafka.connection import Connection, Place
from arriero.transports.kafka.log import KafkaLog
from arriero.transports.kafka.producing import PartitionProducer
from arriero.transports.ledger import LEDGER_MAX_CHARS, Ledger
from arriero.transports.log import Claim, Commit, Gained, Lost, Membership, Outgoing, Placed, Record, TopicSpec

pytestmark = pytest.mark.real

WAIT_S = 40.0


@asynccontextmanager
async def opened(
    bootstrap: str, names: Names, client: str = "test", *, create_topics: bool = True
) -> AsyncIterator[KafkaLog]:
    async with KafkaLog(
        bootstrap, names=names, clock=SystemClock(), rng=random.Random(), client=client, create_topics=create_topics
    ) as log:
        yield log


@asynccontextmanager
async def connected(bootstrap: str) -> AsyncIterator[Connection]:
    connection = Connection(bootstrap, "other")
    await connection.start()
    yield connection
    await connection.close()


@asynccontextmanager
async def producing(connection: Connection, group: str, topic: str) -> AsyncIterator[PartitionProducer]:
    """The transactional producer of the topic's first partition, in other hands than a claim's."""
    producer = PartitionProducer(connection, group, Place(topic, 0), SystemClock())
    await producer.open()
    yield producer
    await producer.close()


@pytest.fixture
async def log(kafka_bootstrap: str, names: Names) -> AsyncIterator[KafkaLog]:
    async with opened(kafka_bootstrap, names) as log:
        yield log


@pytest.fixture
async def admin(kafka_bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_bootstrap)
    await admin.start()
    yield admin
    await admin.close()


async def alter(admin: AIOKafkaAdminClient, topic: str, settings: dict[str, str]) -> None:
    """Returns once the broker goes by them."""
    await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, settings)])
    async with asyncio.timeout(WAIT_S):
        while True:
            (answer,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
            entries = answer.to_object()["resources"][0]["config_entries"]
            if settings.items() <= {entry["config_names"]: entry["config_value"] for entry in entries}.items():
                return
            await asyncio.sleep(0.02)


@pytest.fixture
def topic(names: Names) -> str:
    return names.jobs("default", "standard")


@pytest.fixture
def group(names: Names) -> str:
    return names.workers_group("default")


async def make(log: KafkaLog, names: Names, topic: str, partitions: int = 1) -> None:
    await log.ensure([TopicSpec(topic, partitions), TopicSpec(names.events, 1)])


async def publish(log: KafkaLog, topic: str, *keys: str) -> list[Placed]:
    placed: list[Placed] = []
    for answer in await log.publish([Outgoing(topic, key.encode(), b"body") for key in keys]):
        assert isinstance(answer, Placed), answer
        placed.append(answer)
    return placed


async def gained(membership: Membership) -> Gained:
    async with asyncio.timeout(WAIT_S):
        change = await membership.change()
    assert isinstance(change, Gained), change
    return change


async def lost(membership: Membership) -> Lost:
    async with asyncio.timeout(WAIT_S):
        change = await membership.change()
    assert isinstance(change, Lost), change
    return change


async def read(claim: Claim, count: int) -> list[Record]:
    found: list[Record] = []
    async with asyncio.timeout(WAIT_S):
        while len(found) < count:
            found += await claim.read(count - len(found))
    return found


async def tailed(log: KafkaLog, topic: str, count: int) -> list[bytes | None]:
    found: list[bytes | None] = []
    async with asyncio.timeout(WAIT_S), aclosing(log.tail([topic], {})) as tail:
        async for batch in tail:
            found += [record.key for record in batch]
            if len(found) >= count:
                break
    return found


def settle(events: str, *records: Record) -> Commit:
    return Commit(
        records=[Outgoing(events, record.key or b"", b"settled") for record in records],
        settled=[record.offset for record in records],
    )


# commits


@pytest.mark.parametrize("happened", [True, False])
async def test_a_commit_in_doubt_is_answered_by_the_ledger(
    log: KafkaLog, names: Names, topic: str, group: str, monkeypatch: pytest.MonkeyPatch, happened: bool
) -> None:
    await make(log, names, topic)
    await publish(log, topic, "a", "b")
    transact = PartitionProducer.transact

    async def break_off(self: PartitionProducer, records: Sequence[Outgoing], ledger: Ledger) -> None:
        monkeypatch.setattr(PartitionProducer, "transact", transact)
        if happened:
            await transact(self, records, ledger)
        raise LogUnavailable("the answer is lost")

    async with log.join(group, [topic], "w", names.events) as membership:
        claim = (await gained(membership)).claim
        first, second = await read(claim, 2)
        monkeypatch.setattr(PartitionProducer, "transact", break_off)
        with pytest.raises(LogUnavailable):
            await claim.commit(settle(names.events, first))
        change = await lost(membership)
        assert (change.claim, change.final) == (claim, False)
        again = await gained(membership)
        assert again.continued
        assert again.claim.fence > claim.fence
        assert again.claim.ledger.is_settled(first.offset) is happened
        await again.claim.commit(settle(names.events, *((second,) if happened else (first, second))))
        assert again.claim.ledger.offset == 2
    assert await tailed(log, names.events, 2) == [b"a", b"b"]


async def test_a_fenced_claim_writes_nothing_and_finds_a_stranger(
    log: KafkaLog, names: Names, topic: str, group: str, kafka_bootstrap: str
) -> None:
    """A zombie: the group believes that it owns the partition, and another has taken it since."""
    await make(log, names, topic)
    await publish(log, topic, "a")
    async with connected(kafka_bootstrap) as connection, log.join(group, [topic], "w", names.events) as membership:
        claim = (await gained(membership)).claim
        (record,) = await read(claim, 1)
        async with producing(connection, group, topic) as other:
            await other.transact([], claim.ledger.raised(0, "other/1"))
            with pytest.raises(Fenced):
                await claim.commit(settle(names.events, record))
        assert not (await lost(membership)).final
        again = await gained(membership)  # for the group has not given it to another
        assert not again.continued
        assert again.claim.fence > claim.fence + 1
        assert await read(again.claim, 1) == [record]
    assert await log.ends([names.events]) == {(names.events, 0): 0}


async def test_a_cancelled_caller_leaves_its_commit_whole(log: KafkaLog, names: Names, topic: str, group: str) -> None:
    await make(log, names, topic)
    await publish(log, topic, "a", "b")
    async with log.join(group, [topic], "w", names.events) as membership:
        claim = (await gained(membership)).claim
        first, second = await read(claim, 2)
        committing = asyncio.create_task(claim.commit(settle(names.events, first)))
        await asyncio.sleep(0)
        committing.cancel()
        await claim.commit(settle(names.events, second))
        assert claim.ledger.offset == 2
    assert await tailed(log, names.events, 2) == [b"a", b"b"]


async def test_a_ledger_of_the_greatest_length_is_kept(
    log: KafkaLog, names: Names, topic: str, group: str, kafka_bootstrap: str
) -> None:
    await make(log, names, topic)
    ledger = Ledger(offset=0, fence=1, owner="w/1")
    while len(ledger.encode()) < LEDGER_MAX_CHARS - 8:  # four characters a range
        start = ledger.settled[-1][1] + 1 if ledger.settled else 1
        ledger = ledger.cover([(start, start + 1)])
    ledger = msgspec.structs.replace(ledger, owner="w" * (LEDGER_MAX_CHARS - len(ledger.encode())) + ledger.owner)
    assert len(ledger.encode()) == LEDGER_MAX_CHARS
    async with connected(kafka_bootstrap) as connection, producing(connection, group, topic) as producer:
        await producer.transact([], ledger)
        found = await connection.committed(group, [Place(topic, 0)])
    assert Ledger.decode(*found[Place(topic, 0)]) == ledger


async def test_a_record_that_the_broker_refuses_leaves_the_claim_alive(
    log: KafkaLog, names: Names, topic: str, group: str, admin: AIOKafkaAdminClient
) -> None:
    await make(log, names, topic)
    await publish(log, topic, "a", "b")
    await alter(admin, names.events, {"max.message.bytes": "10000"})
    async with log.join(group, [topic], "w", names.events) as membership:
        claim = (await gained(membership)).claim
        first, second = await read(claim, 2)
        with pytest.raises(RecordTooLarge):
            await claim.commit(
                Commit(records=[Outgoing(names.events, b"large", bytes(20_000))], settled=[first.offset])
            )
        assert not claim.ledger.is_settled(first.offset)
        await claim.commit(settle(names.events, first, second))
        assert claim.ledger.offset == 2
    assert await tailed(log, names.events, 2) == [b"a", b"b"]


# rebalances


async def test_retained_partitions_keep_their_claims_across_a_rebalance(
    log: KafkaLog, names: Names, topic: str, group: str, kafka_bootstrap: str
) -> None:
    await make(log, names, topic, partitions=4)
    await publish(log, topic, *(f"job-{number}" for number in range(40)))
    async with opened(kafka_bootstrap, names) as other, log.join(group, [topic], "w1", names.events) as one:
        claims = [(await gained(one)).claim for _ in range(4)]
        held = {claim.partition: (claim, await read(claim, 1)) for claim in claims}
        async with other.join(group, [topic], "w2", names.events) as two:
            gone = {(await lost(one)).claim.partition for _ in range(2)}
            for _ in range(2):
                assert (await gained(two)).claim.partition in gone
            for partition in held.keys() - gone:
                claim, records = held[partition]
                await claim.commit(settle(names.events, *records))  # under its old fence, with what it has read
                end = (await log.ends([topic]))[topic, partition]
                rest = await read(claim, end - 1)
                assert [record.offset for record in rest] == list(range(1, end))


async def test_a_consumer_that_breaks_is_replaced(log: KafkaLog, names: Names, topic: str, group: str) -> None:
    await make(log, names, topic)
    await publish(log, topic, "a")
    async with log.join(group, [topic], "w", names.events) as membership:
        claim = (await gained(membership)).claim
        (record,) = await read(claim, 1)
        membership._break(RuntimeError("a fault in aiokafka"))
        assert (await lost(membership)).final
        with pytest.raises(Revoked):
            await claim.commit(settle(names.events, record))
        again = await gained(membership)
        assert not again.continued
        assert await read(again.claim, 1) == [record]


# offsets that hold no record


async def test_markers_and_aborted_records_are_settled_by_passing_them(
    log: KafkaLog, names: Names, topic: str, group: str, kafka_bootstrap: str
) -> None:
    """Retries come by transactions: their markers take offsets, and so does what was aborted."""
    await make(log, names, topic)
    relay = Ledger(offset=0, owner="relay")
    async with connected(kafka_bootstrap) as connection, producing(connection, f"{group}.r", topic) as retries:
        await publish(log, topic, "a")
        await retries.transact([Outgoing(topic, b"b", b"")], relay)
        producer = retries._producer
        assert producer is not None
        await producer.begin_transaction()
        await (await producer.send(topic, b"", b"aborted"))
        await producer.abort_transaction()
        await publish(log, topic, "c")
        await retries.transact([Outgoing(topic, b"d", b"")], relay)
    assert (await log.backlog(group, [topic]))[topic].count == 4
    async with log.join(group, [topic], "w", names.events) as membership:
        claim = (await gained(membership)).claim
        found = await read(claim, 4)
        assert [record.key for record in found] == [b"a", b"b", b"c", b"d"]
        await claim.commit(settle(names.events, *found))
        assert claim.ledger.offset == found[-1].offset + 1
        assert claim.ledger.settled == ()
    assert (await log.backlog(group, [topic]))[topic].count == 0
    assert await log.ends([topic]) == {(topic, 0): found[-1].offset + 1}


async def test_records_that_retention_removed_unread_are_passed_over(
    log: KafkaLog, names: Names, topic: str, group: str, admin: AIOKafkaAdminClient
) -> None:
    await make(log, names, topic)
    await publish(log, topic, *"abcd")
    async with log.join(group, [topic], "w", names.events) as membership:
        claim = (await gained(membership)).claim
        found = await read(claim, 1)
        await claim.commit(settle(names.events, *found))
    await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(before_offset=3)})
    async with log.join(group, [topic], "w", names.events) as membership:
        claim = (await gained(membership)).claim
        assert claim.ledger.offset == 3
        assert [record.key for record in await read(claim, 1)] == [b"d"]


async def test_a_topic_made_anew_is_not_believed_settled(
    log: KafkaLog, names: Names, topic: str, group: str, admin: AIOKafkaAdminClient, kafka_bootstrap: str
) -> None:
    """The group's offsets go with the topic; a ledger that somebody carried over must not settle other records."""
    await make(log, names, topic)
    await publish(log, topic, *"ab")
    async with log.join(group, [topic], "w", names.events) as membership:
        claim = (await gained(membership)).claim
        await claim.commit(settle(names.events, *await read(claim, 2)))
        ledger = claim.ledger
    await admin.delete_topics([topic])
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await log.partitions(topic)
            except TopicFault:
                break
            await asyncio.sleep(0.05)
    await make(log, names, topic)
    await publish(log, topic, *"cde")
    async with connected(kafka_bootstrap) as connection, producing(connection, group, topic) as producer:
        await producer.transact([], ledger)
    async with log.join(group, [topic], "w", names.events) as membership:
        claim = (await gained(membership)).claim
        assert [record.key for record in await read(claim, 3)] == [b"c", b"d", b"e"]


# topics


async def test_a_setting_that_breaks_a_guarantee_is_named_with_the_command_that_mends_it(
    log: KafkaLog, names: Names, topic: str, admin: AIOKafkaAdminClient, kafka_bootstrap: str
) -> None:
    await make(log, names, topic)
    await alter(admin, topic, {"cleanup.policy": "compact", "retention.ms": "1000"})
    with pytest.raises(TopicFault) as caught:
        await make(log, names, topic)
    message = str(caught.value)
    assert "cleanup.policy=compact" in message
    assert f"kafka-configs.sh --bootstrap-server {kafka_bootstrap} --alter" in message
    assert "cleanup.policy=delete" in message
    assert "retention.ms=1209600000" in message
    assert "max.message.bytes=4194304" in message


async def test_topics_that_are_not_to_be_made_are_named_with_the_commands_that_make_them(
    kafka_bootstrap: str, names: Names, topic: str
) -> None:
    async with opened(kafka_bootstrap, names, create_topics=False) as log:
        with pytest.raises(TopicFault) as caught:
            await log.ensure([TopicSpec(topic, 3), TopicSpec(names.events, 2)])
        with pytest.raises(TopicFault):
            await log.partitions(topic)
    assert f"--create --topic {topic} --partitions 3 --config cleanup.policy=delete" in str(caught.value)
    assert f"--create --topic {names.events} --partitions 2" in str(caught.value)


async def test_a_delay_topic_carries_the_times_of_the_broker(log: KafkaLog, names: Names) -> None:
    delay = names.delay("default", "1s")
    await log.ensure([TopicSpec(delay, 1, append_time=True)])
    (placed,) = await publish(log, delay, "a")
    (found,) = await log.fetch(delay, 0, [placed.offset])
    assert found.time_ms == placed.time_ms


async def test_topics_of_unequal_counts_are_not_joined(
    log: KafkaLog, names: Names, topic: str, group: str, admin: AIOKafkaAdminClient
) -> None:
    other = names.jobs("default", "batch")
    await log.ensure([TopicSpec(topic, 1), TopicSpec(other, 1), TopicSpec(names.events, 1)])
    await admin.create_partitions({other: NewPartitions(total_count=2)})
    with pytest.raises(TopicFault, match="equal partition counts"):
        async with log.join(group, [topic, other], "w", names.events):
            pass


async def test_publishing_to_a_missing_topic_fails_for_that_record_only(
    log: KafkaLog, names: Names, topic: str
) -> None:
    await make(log, names, topic)
    bad, good = await log.publish([Outgoing(names.dead, b"a", b""), Outgoing(topic, b"b", b"")])
    assert isinstance(bad, TopicFault)
    assert isinstance(good, Placed)


# brokers that are away


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[testbed.Broker]:
    """A broker of this test alone, to be killed."""
    lacking = testbed.missing()
    if lacking is not None:
        pytest.skip(lacking)
    broker = testbed.Broker(tmp_path / "kafka", testbed.kafka_jars(testbed.cache_folder()))
    broker.start()
    yield broker
    broker.kill()


async def test_claims_tails_and_publishing_go_on_after_a_broker_is_killed_and_started(
    broker: testbed.Broker, names: Names, topic: str, group: str
) -> None:
    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(opened(broker.bootstrap, names))
        await make(log, names, topic)
        await publish(log, topic, "a", "b")
        membership = await stack.enter_async_context(log.join(group, [topic], "w", names.events))
        claim = (await gained(membership)).claim
        tail = await stack.enter_async_context(aclosing(log.tail([names.events], {})))
        first, second = await read(claim, 2)
        await claim.commit(settle(names.events, first))
        assert [record.key for record in await anext(tail)] == [b"a"]
        broker.kill()
        committing = asyncio.create_task(claim.commit(settle(names.events, second)))
        publishing = asyncio.create_task(log.publish([Outgoing(topic, b"c", b"")]))
        await asyncio.sleep(0.5)
        broker.launch()
        await asyncio.to_thread(broker.wait)
        try:
            await committing
        except LogError:  # the restart took longer than a commit may: the claim comes back by itself
            while isinstance(change := await membership.change(), Lost):
                assert not change.final
            claim = change.claim
            if not claim.ledger.is_settled(second.offset):
                await claim.commit(settle(names.events, second))
        (placed,) = await publishing
        if not isinstance(placed, Placed):
            assert isinstance(placed, LogUnavailable)
            await publish(log, topic, "c")
        async with asyncio.timeout(WAIT_S):
            assert [record.key for record in await anext(tail)] == [b"b"]
            found = await claim.read(10)
        assert {record.key for record in found} == {b"c"}


async def test_without_a_broker_everything_ends_in_bounded_time(
    broker: testbed.Broker, names: Names, topic: str, group: str
) -> None:
    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(opened(broker.bootstrap, names))
        await make(log, names, topic)
        await publish(log, topic, "a")
        membership = await stack.enter_async_context(log.join(group, [topic], "w", names.events))
        claim = (await gained(membership)).claim
        (record,) = await read(claim, 1)
        broker.kill()
        publishing = asyncio.create_task(log.publish([Outgoing(topic, b"b", b"")]))
        async with asyncio.timeout(15):
            with pytest.raises(LogUnavailable):
                await claim.commit(settle(names.events, record))
            (answer,) = await publishing
        assert isinstance(answer, LogUnavailable)
        assert not (await lost(membership)).final
        began = time.monotonic()
        await stack.aclose()
        assert time.monotonic() - began < 20


# no traces


SPEAK = """
import asyncio, random, sys
from arriero.schemas.clock import SystemClock
from arriero.schemas.errors import LogError
from arriero.schemas.names import Names
from arriero.transports.kafka.log import KafkaLog

async def main(bootstrap):
    try:
        async with KafkaLog(bootstrap, names=Names(), clock=SystemClock(), rng=random.Random(), client="x"):
            pass
    except LogError as error:
        print(error)

asyncio.run(main(sys.argv[1]))
"""


def test_an_absent_broker_is_one_sentence(free_port: int) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SPEAK, f"127.0.0.1:{free_port}"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    assert f"127.0.0.1:{free_port}" in done.stdout
    assert time.monotonic() - began < 12
