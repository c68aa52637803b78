"""Consumer groups in log.db: who is a member, who shall own which partition, who holds it, under which ledger.

A partition goes from hand to hand like this: a member joins, leaves or is found dead; whoever writes that down also
deals the group's partitions anew (`deal`), in the same transaction. A member that holds what is no longer its own
lets go of it; a member whose partition is free, or held by the dead, takes it.

Functions over a connection: those that write run inside a transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import apsw
import msgspec
import structlog

from arriero.schemas.errors import Unreadable
from arriero.transports.embedded.records import Place, bounds, times
from arriero.transports.ledger import Ledger, LedgerError

log = structlog.get_logger(__name__)

SCHEMA: Final = """
CREATE TABLE members (
    id TEXT PRIMARY KEY, grp TEXT NOT NULL, topics TEXT NOT NULL, boot TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE dealt (
    grp TEXT NOT NULL, number INTEGER NOT NULL, member TEXT NOT NULL, PRIMARY KEY (grp, number)
) STRICT, WITHOUT ROWID;
-- an empty ledger: it has gone, and is being rebuilt. The fence alone decides who may commit
CREATE TABLE leases (
    grp TEXT NOT NULL, number INTEGER NOT NULL, offset INTEGER NOT NULL, ledger TEXT NOT NULL,
    fence INTEGER NOT NULL, holder TEXT NOT NULL, PRIMARY KEY (grp, number)
) STRICT, WITHOUT ROWID;
"""


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A partition in a new owner's hands."""

    place: Place
    ledger: Ledger
    before: str
    """The owner before."""
    gone: bool
    """There was no ledger, or one of another topic of this name: to be rebuilt before anything is read."""
    lost: int
    """Records that retention removed before anyone had read them."""


def balance(partitions: int, members: Sequence[str], holders: Mapping[int, str]) -> dict[int, str]:
    """Deal partitions to members: equal shares, give or take one, and as few changes of hands as can be. Pure."""
    if not members:
        return {}
    least, more = divmod(partitions, len(members))
    held: dict[str, list[int]] = {member: [] for member in members}
    for partition in range(partitions):
        if holders.get(partition) in held:
            held[holders[partition]].append(partition)
    # Who has most keeps the odd one more.
    ranked = sorted(members, key=lambda member: (-len(held[member]), member))
    shares = {member: least + (rank < more) for rank, member in enumerate(ranked)}
    dealt = {partition: member for member in members for partition in held[member][: shares[member]]}
    short = [member for member in ranked for _ in range(shares[member] - len(held[member]))]
    free = (partition for partition in range(partitions) if partition not in dealt)
    return dealt | dict(zip(free, short, strict=True))


def join(connection: apsw.Connection, group: str, member: str, topics: Sequence[str], boot: str) -> None:
    connection.execute("INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?)", (member, group, " ".join(topics), boot))
    deal(connection, group)


def leave(connection: apsw.Connection, group: str, member: str) -> bool:
    """Strike a member off and free what it holds; False when somebody has done it before."""
    connection.execute("DELETE FROM members WHERE id = ?", (member,))
    gone = connection.changes() > 0
    if gone:
        connection.execute("UPDATE leases SET holder = '' WHERE grp = ? AND holder = ?", (group, member))
        deal(connection, group)
    return gone


def deal(connection: apsw.Connection, group: str) -> None:
    """Deal the group's partitions to its members. Topics with the same subscribers are dealt as one, so that the
    same numbers of each meet in one hand."""
    subscribers: dict[str, list[str]] = {}
    for member, topics in connection.execute("SELECT id, topics FROM members WHERE grp = ? ORDER BY id", (group,)):
        for topic in topics.split():
            subscribers.setdefault(topic, []).append(member)
    before: dict[str, dict[int, str]] = {}
    numbers: dict[str, dict[int, int]] = {}
    for topic, partition, number, member in connection.execute(
        "SELECT topic, partition, partitions.number, member FROM partitions "
        "LEFT JOIN dealt ON dealt.number = partitions.number AND grp = ?",
        (group,),
    ):
        numbers.setdefault(topic, {})[partition] = number
        if member is not None:
            before.setdefault(topic, {})[partition] = member
    connection.execute("DELETE FROM dealt WHERE grp = ?", (group,))
    for members in dict.fromkeys(tuple(members) for members in subscribers.values()):
        topics = sorted(topic for topic in subscribers if tuple(subscribers[topic]) == members)
        holders = next((before[topic] for topic in topics if topic in before), {})
        dealt = balance(len(numbers[topics[0]]), members, holders)
        connection.executemany(
            "INSERT INTO dealt VALUES (?, ?, ?)",
            [(group, numbers[topic][partition], dealt[partition]) for topic in topics for partition in numbers[topic]],
        )


def dealt_to(connection: apsw.Connection, group: str, member: str) -> set[int] | None:
    """The numbers of the partitions that are to be this member's; None when it has been struck off."""
    if connection.execute("SELECT 1 FROM members WHERE id = ?", (member,)).fetchone() is None:
        return None
    rows = connection.execute("SELECT number FROM dealt WHERE grp = ? AND member = ?", (group, member))
    return {number for (number,) in rows}


def others(connection: apsw.Connection, group: str, member: str) -> dict[str, str]:
    """The group's other members, and the boot in which each joined."""
    rows = connection.execute("SELECT id, boot FROM members WHERE grp = ? AND id <> ?", (group, member))
    return {str(other): str(boot) for other, boot in rows}


def free(connection: apsw.Connection, group: str, numbers: set[int], member: str) -> set[int]:
    """Which of these partitions nobody alive holds, or this member itself."""
    rows = connection.execute(
        "SELECT number FROM leases JOIN members ON holder = id WHERE leases.grp = ? AND id <> ?", (group, member)
    )
    return numbers - {number for (number,) in rows}


def take(connection: apsw.Connection, group: str, place: Place, member: str, owner: str, clock_ms: int) -> Taken | None:
    """Make a partition this member's, under a raised fence; None when it is not free for it any more. Raises
    Unreadable, with nothing written, when a later release has left its ledger."""
    dealt = connection.execute(
        "SELECT 1 FROM dealt WHERE grp = ? AND number = ? AND member = ?", (group, place.number, member)
    ).fetchone()
    if dealt is None or not free(connection, group, {place.number}, member):
        return None
    first, end = bounds(connection, [place.number])[place.number]
    row = connection.execute(
        "SELECT offset, ledger, fence FROM leases WHERE grp = ? AND number = ?", (group, place.number)
    ).fetchone()
    before, fence = _known_ledger(connection, group, place, row, first, end), row[2] if row else 0
    gone = before is None
    if before is None:
        before = Ledger(offset=first)
    lost = before.pending(first)
    ledger = before.cover([(before.offset, first)]).raised(clock_ms, owner, fence)
    connection.execute(
        "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?)",
        (group, place.number, ledger.offset, "" if gone else ledger.encode(), ledger.fence, member),
    )
    return Taken(place=place, ledger=ledger, before=before.owner, gone=gone, lost=lost)


def put_ledger(connection: apsw.Connection, group: str, number: int, ledger: Ledger, fence: int) -> bool:
    """Store a claim's ledger; False when `fence` is not the last any more, and nothing may be written then."""
    connection.execute(
        "UPDATE leases SET offset = ?, ledger = ?, fence = ? WHERE grp = ? AND number = ? AND fence = ?",
        (ledger.offset, ledger.encode(), ledger.fence, group, number, fence),
    )
    return connection.changes() > 0


def held_by(connection: apsw.Connection, group: str, member: str) -> set[int]:
    """The numbers of the partitions that a member holds, rightly or not."""
    rows = connection.execute("SELECT number FROM leases WHERE grp = ? AND holder = ?", (group, member))
    return {number for (number,) in rows}


def let_go(connection: apsw.Connection, group: str, numbers: set[int], member: str) -> None:
    """Free partitions for their next owners."""
    connection.executemany(
        "UPDATE leases SET holder = '' WHERE grp = ? AND number = ? AND holder = ?",
        [(group, number, member) for number in numbers],
    )


def ledger_of(connection: apsw.Connection, group: str, number: int) -> Ledger | None:
    """A partition's ledger as committed; None when nobody has claimed it yet, or it is being rebuilt."""
    row = connection.execute(
        "SELECT offset, ledger FROM leases WHERE grp = ? AND number = ? AND ledger <> ''", (group, number)
    ).fetchone()
    if row is None:
        return None
    try:
        return Ledger.decode(*row)
    except LedgerError as error:
        log.error("ledger_unreadable", group=group, number=number, error=str(error))
        return Ledger(offset=0, fault=str(error))


def _known_ledger(
    connection: apsw.Connection, group: str, place: Place, row: tuple[int, str, int] | None, first: int, end: int
) -> Ledger | None:
    """The ledger that a lease carries; None when it has to be rebuilt. Raises Unreadable."""
    if row is None:
        # A partition that never had a record has nothing to rebuild from.
        return Ledger(offset=0) if end == 0 else None
    try:
        ledger = Ledger.decode(row[0], row[1])
    except LedgerError as error:
        if error.later:
            raise Unreadable(f"{error}. Upgrade this worker", code="unknown_version") from error
        if row[1]:  # an empty one was left by who died while rebuilding it
            log.error(
                "ledger_unreadable",
                group=group,
                topic=place.topic,
                partition=place.partition,
                error=str(error),
                mended_by="a rebuild from the settling events",
            )
        return None
    stamp = ledger.stamp
    if ledger.offset > end or (
        stamp is not None
        and stamp.offset >= first
        and times(connection, place.number, stamp.offset, stamp.offset + 1).get(stamp.offset) != stamp.time_ms
    ):
        return None
    return ledger


def unsettled(connection: apsw.Connection, group: str, number: int) -> tuple[int, int | None]:
    """How many of a partition's records are not settled, and the time of the oldest of them."""
    first, end = bounds(connection, [number])[number]
    ledger = (ledger_of(connection, group, number) or Ledger(offset=first)).cover([(0, first)])
    count = ledger.pending(end)
    oldest = next(iter(ledger.unsettled(0)))[0]
    return count, times(connection, number, oldest, oldest + 1).get(oldest) if count else None
