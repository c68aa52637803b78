"""What only the embedded log does: retention of its own, claims in doubt while the file is out of reach."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path

import apsw
import pytest
import structlog.testing

from arriero.schemas.clock import SystemClock
from arriero.schemas.errors import Fenced, LogUnavailable, TopicFault
from arriero.schemas.names import Names
from arriero.transports.embedded import groups, member
from arriero.transports.embedded.log import EmbeddedLog
from arriero.transports.embedded.records import BATCH_MAX_BYTES
from arriero.transports.log import Claim, Commit, Gained, Lost, Membership, Outgoing, Placed, TopicSpec

TOPIC = "ns.jobs.default.standard"
EVENTS = "ns.events"
WAIT_S = 10.0


class ShiftedClock(SystemClock):
    """The machine's clock, and a few days more when asked."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


@pytest.fixture
def shifted() -> ShiftedClock:
    return ShiftedClock()


@pytest.fixture
async def log(tmp_path: Path, shifted: ShiftedClock) -> AsyncIterator[EmbeddedLog]:
    async with EmbeddedLog(tmp_path, names=Names("ns"), clock=shifted, rng=random.Random()) as log:
        await log.ensure([TopicSpec(TOPIC, 1, retention_s=3_600.0), TopicSpec(EVENTS, 1)])
        yield log


async def publish(log: EmbeddedLog, count: int, size: int = 10) -> None:
    answers = await log.publish([Outgoing(TOPIC, b"key", bytes(size)) for _ in range(count)])
    assert all(isinstance(answer, Placed) for answer in answers)


async def gained(membership: Membership) -> Gained:
    change = await asyncio.wait_for(membership.change(), WAIT_S)
    assert isinstance(change, Gained)
    return change


@asynccontextmanager
async def claimed(log: EmbeddedLog) -> AsyncIterator[Claim]:
    async with log.join("group", [TOPIC], "w1", EVENTS) as membership:
        yield (await gained(membership)).claim


async def expire(log: EmbeddedLog, shifted: ShiftedClock) -> None:
    """An hour and more passes, and retention runs."""
    shifted.ahead_s += 4_000.0
    await log._expire()


# retention


async def test_records_go_when_their_time_has_passed(log: EmbeddedLog, shifted: ShiftedClock) -> None:
    await publish(log, 1_200)  # more than one transaction deletes
    await expire(log, shifted)
    await publish(log, 1)
    assert [record.offset for record in await log.fetch(TOPIC, 0, [0, 599, 1_199, 1_200])] == [1_200]
    async with aclosing(log.tail([TOPIC], {})) as tail:
        assert [record.offset for record in await anext(tail)] == [1_200]
    assert (await log.backlog("group", [TOPIC]))[TOPIC].count == 1
    assert (await log.ends([TOPIC]))[TOPIC, 0] == 1_201


async def test_a_time_is_found_behind_what_has_gone(log: EmbeddedLog, shifted: ShiftedClock) -> None:
    await publish(log, 3)
    await expire(log, shifted)
    await publish(log, 2)
    async with aclosing(log.tail([TOPIC], shifted.time() - 60)) as tail:
        assert [record.offset for record in await anext(tail)] == [3, 4]


async def test_records_that_go_unread_before_anyone_comes_are_reported_as_lost(
    log: EmbeddedLog, shifted: ShiftedClock
) -> None:
    await publish(log, 3)
    async with claimed(log) as claim:
        (first,) = await claim.read(1)
        await claim.commit(Commit(settled=[first.offset]))
    await expire(log, shifted)
    await publish(log, 1)
    with structlog.testing.capture_logs() as entries:
        async with claimed(log) as claim:
            assert [record.offset for record in await claim.read(5)] == [3]
            await claim.commit(Commit(settled=[3]))
            assert claim.ledger.offset == 4
    assert [entry["count"] for entry in entries if entry["event"] == "records_lost_to_retention"] == [2]


async def test_records_that_go_unread_under_a_claim_are_reported_as_lost(
    log: EmbeddedLog, shifted: ShiftedClock
) -> None:
    async with claimed(log) as claim:
        await publish(log, 3)
        (first,) = await claim.read(1)
        await expire(log, shifted)
        await publish(log, 1)
        with structlog.testing.capture_logs() as entries:
            assert [record.offset for record in await claim.read(5)] == [3]
        assert [entry["count"] for entry in entries if entry["event"] == "records_lost_to_retention"] == [2]
        await claim.commit(Commit(settled=[first.offset, 3]))
        assert claim.ledger.offset == 4


async def test_a_read_of_much_comes_in_parts(log: EmbeddedLog) -> None:
    await publish(log, 5, BATCH_MAX_BYTES // 2)
    async with claimed(log) as claim:
        assert [record.offset for record in await claim.read(5)] == [0, 1]
        assert [record.offset for record in await claim.read(5)] == [2, 3]
        assert [record.offset for record in await claim.read(5)] == [4]


# claims in doubt


def limit_pages(connection: apsw.Connection, pages: int) -> None:
    """What a full disk does to SQLite, and its end."""
    connection.pragma("max_page_count", pages)


async def test_a_claim_whose_commit_failed_is_in_doubt_and_then_continued(log: EmbeddedLog) -> None:
    await publish(log, 2)
    async with log.join("group", [TOPIC], "w1", EVENTS) as membership:
        claim = (await gained(membership)).claim
        one, two = await claim.read(2)
        await claim.commit(Commit(settled=[two.offset]))
        await log._db.write(partial(limit_pages, pages=1))
        with pytest.raises(LogUnavailable, match="full"):
            await claim.commit(Commit(records=[Outgoing(EVENTS, b"k", bytes(100_000))], settled=[one.offset]))
        lost = await asyncio.wait_for(membership.change(), WAIT_S)
        assert lost == Lost(claim, final=False, reason=lost.reason)  # type: ignore[union-attr]
        with pytest.raises(LogUnavailable):
            await claim.commit(Commit())
        await log._db.write(partial(limit_pages, pages=1_000_000))
        again = await gained(membership)
        assert again.continued
        assert again.claim.fence > claim.fence
        assert not again.claim.ledger.is_settled(one.offset)
        assert again.claim.ledger.is_settled(two.offset)
        await again.claim.commit(Commit(settled=[one.offset]))
        assert again.claim.ledger.offset == 2


async def test_a_partition_in_doubt_goes_to_a_member_that_joins(
    log: EmbeddedLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = "ns.jobs.default.batch"
    await log.ensure([TopicSpec(topic, 2)])
    other = EmbeddedLog(tmp_path, names=Names("ns"), clock=SystemClock(), rng=random.Random())
    async with other, log.join("group", [topic], "w1", EVENTS) as first:
        claims = [(await gained(first)).claim for _ in range(2)]
        monkeypatch.setattr(first, "_take", unavailable)
        monkeypatch.setattr(groups, "put_ledger", unavailable)
        for claim in claims:
            with pytest.raises(LogUnavailable):
                await claim.commit(Commit())
            lost = await asyncio.wait_for(first.change(), WAIT_S)
            assert isinstance(lost, Lost)
            assert (lost.claim, lost.final) == (claim, False)
        monkeypatch.undo()
        monkeypatch.setattr(first, "_take", unavailable)
        async with other.join("group", [topic], "w2", EVENTS) as second:
            taken = (await gained(second)).claim
            lost = await asyncio.wait_for(first.change(), WAIT_S)
            assert isinstance(lost, Lost)
            assert (lost.claim.partition, lost.final) == (taken.partition, True)
            monkeypatch.undo()
            again = await gained(first)
            assert again.claim.partition != taken.partition
            assert again.continued


def unavailable(*_: object, **__: object) -> None:
    raise LogUnavailable("out of reach")


async def test_a_member_taken_for_dead_loses_its_claims_and_joins_again(log: EmbeddedLog, tmp_path: Path) -> None:
    other = EmbeddedLog(tmp_path, names=Names("ns"), clock=SystemClock(), rng=random.Random())
    async with other, log.join("group", [TOPIC], "w1", EVENTS) as first:
        claim = (await gained(first)).claim
        async with other.join("group", [TOPIC], "w2", EVENTS) as second:
            second._peers.found_dead(first._member)
            taken = (await gained(second)).claim
            assert taken.fence > claim.fence
            lost = await asyncio.wait_for(first.change(), WAIT_S)
            assert isinstance(lost, Lost)
            assert (lost.claim, lost.final) == (claim, True)
            with pytest.raises(Fenced):
                await claim.commit(Commit())
        assert not (await gained(first)).continued


# groups


async def test_topics_of_unequal_counts_cannot_be_joined(log: EmbeddedLog) -> None:
    await log.ensure([TopicSpec("ns.jobs.default.batch", 2)])
    with pytest.raises(TopicFault, match="equal"):
        async with log.join("group", [TOPIC, "ns.jobs.default.batch"], "w1", EVENTS):
            raise AssertionError


async def test_groups_do_not_meet(log: EmbeddedLog) -> None:
    await publish(log, 1)
    async with log.join("one", [TOPIC], "w1", EVENTS) as one, log.join("two", [TOPIC], "w1", EVENTS) as two:
        for membership in (one, two):
            claim = (await gained(membership)).claim
            (record,) = await claim.read(1)
            await claim.commit(Commit(settled=[record.offset]))
        assert (await log.backlog("three", [TOPIC]))[TOPIC].count == 1


async def test_a_member_of_another_boot_is_dead(log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    async with log.join("group", [TOPIC], "w1", EVENTS) as before:
        await gained(before)
        monkeypatch.setattr(member, "boot_id", lambda: "another")
        async with log.join("group", [TOPIC], "w2", EVENTS) as after:
            await gained(after)


async def test_a_membership_leaves_no_files_and_no_tasks(log: EmbeddedLog, tmp_path: Path) -> None:
    tasks = asyncio.all_tasks()
    async with log.join("group", [TOPIC], "w1", EVENTS) as membership:
        await gained(membership)
        assert [*(tmp_path / "members").iterdir()]
    assert not [*(tmp_path / "members").iterdir()]
    assert [path for path in (tmp_path / "bells").rglob("*") if not path.is_dir()] == []
    assert asyncio.all_tasks() == tasks


async def test_a_topic_made_anew_is_read_from_its_beginning(log: EmbeddedLog, shifted: ShiftedClock) -> None:
    await publish(log, 3)
    async with claimed(log) as claim:
        found = await claim.read(3)
        await claim.commit(Commit(settled=[record.offset for record in found]))
    await log._db.write(empty_topics)
    shifted.ahead_s += 1.0
    await publish(log, 3)
    async with claimed(log) as claim:
        assert [record.offset for record in await claim.read(3)] == [0, 1, 2]


def empty_topics(connection: apsw.Connection) -> None:
    """As if the topics had been deleted and made anew, with the groups' ledgers still there."""
    connection.execute("DELETE FROM records; UPDATE partitions SET first = 0, next = 0")
