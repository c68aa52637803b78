"""Strong: how each record was settled, and the accounts. Pure.

A retained record takes twelve bytes, in arrays by partition and offset: its time, its account, how it was settled, and,
when it is the first of its job, how that ended. Records of a job that was put off for a retry point to the first.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from arriero.ops.audit.ids import IdSet
from arriero.ops.audit.report import OUTCOMES, Account, Breach, Tell
from arriero.schemas.event import (
    DeadLettered,
    Duplicate,
    Event,
    Origin,
    OwnerEvent,
    Rejected,
    Requeued,
    RetryScheduled,
    SettlingEvent,
    Terminal,
    Undecodable,
)
from arriero.schemas.names import parse_job_topic
from arriero.schemas.state import TERMINAL_STATUS
from arriero.transports.ledger import Ledger
from arriero.transports.log import Record

# How a record was settled
ABSENT: Final = 0
"""There is no record: a transaction's marker, or an aborted one."""
UNSETTLED: Final = 1
ONCE: Final = 2

# How a job ended, by its first record; the outcomes' numbers follow
OPEN: Final = 0
PUT_OFF: Final = 1
"""Its first record was settled by a retry."""
_FIRST_OUTCOME: Final = 2
_NUMBER: Final = {name: number for number, name in enumerate(OUTCOMES, _FIRST_OUTCOME)}

TENANTS_MAX: Final = 60_000
"""Accounts of their own; what comes after is counted together."""
OTHERS: Final = "(others)"

Place = tuple[str, int]


class _Job(msgspec.Struct):
    """What the accounts need of a job record."""

    tenant: str = "default"
    root: str | None = None


_read_job = msgspec.json.Decoder(_Job).decode


class Shelf:
    """One partition's records."""

    def __init__(self, topic: str, partition: int, priority: str | None) -> None:
        """priority: the class of a job topic, None for a delay topic."""
        self.topic, self.partition, self.priority = topic, partition, priority
        self.first = -1
        """The first offset that was still there; -1 before any record was read."""
        self.marks = bytearray()
        self.ends = bytearray()
        self.times = array("q")
        self.accounts = array("H")
        self.later: dict[int, tuple[Place, int]] = {}
        """Records of jobs whose first record is another one: offset to place and offset of that one."""

    def put(self, record: Record, account: int) -> None:
        if self.first < 0:
            self.first = record.offset
        missing = record.offset - self.first - len(self.marks)
        if missing:
            self.marks.extend(bytes(missing))
            self.ends.extend(bytes(missing))
            self.times.extend([0] * missing)
            self.accounts.extend([0] * missing)
        self.marks.append(UNSETTLED)
        self.ends.append(OPEN)
        self.times.append(record.time_ms)
        self.accounts.append(account)

    def marked(self, mark: int, start: int, stop: int | None) -> Iterator[int]:
        """Offsets with this mark, start <= offset < stop."""
        at = max(0, start - self.first)
        end = len(self.marks) if stop is None else max(0, stop - self.first)
        while (at := self.marks.find(mark, at, end)) >= 0:
            yield self.first + at
            at += 1

    def where(self, offset: int) -> str:
        return f"{self.topic}/{self.partition}/{offset}"


class Books:
    def __init__(self, tell: Tell) -> None:
        """tell: hears of every lasting breach."""
        self.shelves: dict[Place, Shelf] = {}
        self._overtaken: dict[tuple[Place, int], str] = {}
        """Jobs of which a later attempt was settled as a duplicate: first record to id."""
        self.ended = IdSet()
        """Ids with a terminal event."""
        self.excused: Counter[str] = Counter()
        self.records = self.events = self.settled = 0
        self._tell = tell
        self._accounts: dict[tuple[str, str], int] = {}
        self._totals: list[list[int]] = []
        """By account: how many jobs stand at OPEN, PUT_OFF, and at each outcome."""

    def shelve(self, topic: str, partitions: int) -> None:
        """Take up a job or delay topic."""
        try:
            priority: str | None = parse_job_topic(topic).priority
        except ValueError:
            priority = None
        for partition in range(partitions):
            self.shelves.setdefault((topic, partition), Shelf(topic, partition, priority))

    # --- entries -------------------------------------------------------------------------------------------

    def add_record(self, record: Record) -> None:
        """Records of a partition come in order."""
        shelf = self.shelves[record.topic, record.partition]
        tenant, root = "", None
        try:
            job = _read_job(record.value or b"")
            tenant, root = job.tenant, job.root
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
        first = _parse_root(root) if root is not None else None
        itself = (shelf.topic, shelf.partition), record.offset
        is_first = shelf.priority is not None and first in (None, itself)
        account = self._account(shelf.priority or "", tenant) if is_first else 0
        shelf.put(record, account)
        self.records += 1
        if is_first:
            self._totals[account][OPEN] += 1
        else:
            shelf.later[record.offset] = first or ((shelf.topic, shelf.partition), -1)

    def nothing_before(self, ends: Mapping[Place, int]) -> None:
        """All records before these ends have been entered: partitions without any have lost theirs to retention."""
        for place, end in ends.items():
            if self.shelves[place].first < 0 < end:
                self.shelves[place].first = end

    def add_event(self, event: Event, record: Record) -> None:
        """Events of a partition come in order, and after the records that were there when they were written."""
        self.events += 1
        origin: Origin | None = getattr(event, "origin", None)
        if origin is None:
            return
        shelf = self.shelves.get((origin.topic, origin.partition))
        if shelf is None:
            self.excused["other_topics"] += 1
            return
        at = origin.offset - shelf.first
        if not 0 <= at < len(shelf.marks) or not shelf.marks[at] or shelf.times[at] != origin.time_ms:
            self._no_record(shelf, event, origin, record)
            return
        if isinstance(event, SettlingEvent):
            self._settle(shelf, at, event, origin, record)
        if isinstance(event, OwnerEvent) and at + shelf.first not in shelf.later:
            self._check_account(shelf, at, event, record)

    def _no_record(self, shelf: Shelf, event: Event, origin: Origin, record: Record) -> None:
        older = bool(shelf.times) and origin.time_ms < shelf.times[0]
        if older or 0 <= origin.offset < shelf.first:
            self.excused["gone"] += 1  # by retention, or with a topic that was deleted and made anew
            return
        kind = type(event).__name__
        self._tell(Breach("no_record", _where(record), f"{kind} names {origin}, time {origin.time_ms}", event.id))

    def _settle(self, shelf: Shelf, at: int, event: SettlingEvent, origin: Origin, record: Record) -> None:
        again = shelf.marks[at] != UNSETTLED
        if again:
            detail = f"again by {type(event).__name__} at {_where(record)}"
            self._tell(Breach("settled_twice", str(origin), detail, event.id))
        else:
            shelf.marks[at] = ONCE
            self.settled += 1
        if isinstance(event, Terminal):
            if not self.ended.add(event.id):
                self.excused["late_terminals"] += 1
            count, error = event.output.count, getattr(event, "error", None)
            left_out = error is not None and error.code == "output_too_large"
            if event.usage.completion_tokens != count and not left_out:
                detail = f"{event.usage.completion_tokens} tokens counted, {count} in the output"
                self._tell(Breach("usage_differs", _where(record), detail, event.id))
        if again:
            return
        later = shelf.later.get(origin.offset)
        if later is None:
            self._end(shelf, at, event, record)
        elif isinstance(event, Duplicate):
            # The bus had forgotten the job, and another record of its id has run meanwhile: see `balance`.
            self._overtaken[later] = event.id
        elif isinstance(event, Terminal | Undecodable) and (first := self.shelves.get(later[0])) is not None:
            at = later[1] - first.first
            if 0 <= at < len(first.marks) and first.marks[at]:
                self._end(first, at, event, record)

    def _end(self, shelf: Shelf, at: int, event: SettlingEvent, record: Record) -> None:
        """The job of the first record at `at` has ended, or was put off."""
        before = shelf.ends[at]
        if before >= _FIRST_OUTCOME:
            if isinstance(event, Terminal):
                where = shelf.where(shelf.first + at)
                self._tell(Breach("two_results", where, f"again at {_where(record)}", event.id))
            return
        self._move(shelf, at, _number(event))

    def _move(self, shelf: Shelf, at: int, outcome: int) -> None:
        """From one column of its account to another."""
        totals = self._totals[shelf.accounts[at]]
        totals[shelf.ends[at]] -= 1
        totals[outcome] += 1
        shelf.ends[at] = outcome

    def _check_account(self, shelf: Shelf, at: int, event: OwnerEvent, record: Record) -> None:
        if isinstance(event, Duplicate | Rejected | DeadLettered | Undecodable):
            return  # of records that need not be readable
        if shelf.priority is None or event.priority is None:
            return
        account = self._accounts.get((event.priority, event.tenant))
        if account is None:
            account = self._accounts.get((event.priority, OTHERS), -1)
        if account != shelf.accounts[at]:
            detail = f"{event.priority}/{event.tenant} for {shelf.where(shelf.first + at)}"
            self._tell(Breach("wrong_account", _where(record), detail, event.id))

    def _account(self, priority: str, tenant: str) -> int:
        key = priority, tenant
        if key not in self._accounts and len(self._accounts) >= TENANTS_MAX:
            key = priority, OTHERS
        if key not in self._accounts:
            self._accounts[key] = len(self._totals)
            self._totals.append([0] * (_FIRST_OUTCOME + len(OUTCOMES)))
        return self._accounts[key]

    # --- balance -------------------------------------------------------------------------------------------

    def balance(self) -> tuple[list[Account], list[Breach]]:
        """The accounts, and the jobs that are in none of their columns."""
        waiting: set[tuple[Place, int]] = set()
        in_flight: Counter[int] = Counter()
        for shelf in self.shelves.values():
            for offset in shelf.marked(UNSETTLED, 0, None):
                if offset in shelf.later:
                    waiting.add(shelf.later[offset])
                else:
                    in_flight[shelf.accounts[offset - shelf.first]] += 1
        breaches: list[Breach] = []
        for place, shelf in self.shelves.items():
            at = -1
            while (at := shelf.ends.find(PUT_OFF, at + 1)) >= 0:
                if (place, shelf.first + at) in waiting:
                    in_flight[shelf.accounts[at]] += 1
                elif (overtaken := self._overtaken.get((place, shelf.first + at))) and overtaken in self.ended:
                    self._move(shelf, at, _NUMBER["duplicate"])
                else:
                    breaches.append(Breach("no_result", shelf.where(shelf.first + at)))
        return [
            self._account_of(key, number, in_flight[number]) for key, number in sorted(self._accounts.items())
        ], breaches

    def _account_of(self, key: tuple[str, str], number: int, in_flight: int) -> Account:
        totals = self._totals[number]
        outcomes = {name: count for name, count in zip(OUTCOMES, totals[_FIRST_OUTCOME:], strict=True) if count}
        return Account(priority=key[0], tenant=key[1], accepted=sum(totals), outcomes=outcomes, in_flight=in_flight)

    def compare(self, before: Mapping[Place, Ledger], after: Mapping[Place, Ledger]) -> Iterator[Breach]:
        """The ledgers from before and from after the events were read: what the first list has its event, and what has
        an event is listed in the second."""
        self.excused["no_ledger"] = 0
        for place, shelf in self.shelves.items():
            early, late = before.get(place), after.get(place)
            if late is None or late.fault:
                if late is not None:
                    yield Breach("ledger_unreadable", f"{shelf.topic}/{shelf.partition}", late.fault)
                elif ONCE in shelf.marks:
                    self.excused["no_ledger"] += 1
                continue
            for start, stop in _settled(early):
                for offset in shelf.marked(UNSETTLED, start, stop):
                    yield Breach("unrecorded", shelf.where(offset), "the ledger has it settled")
            for start, end in late.unsettled(0):
                for offset in shelf.marked(ONCE, start, end):
                    yield Breach("beyond_ledger", shelf.where(offset), f"the ledger is at {late.offset}")
            # An offset alone may be a transaction's marker, which nobody has to settle.
            if shelf.priority is not None and shelf.first >= 0 and (lost := late.pending(shelf.first)) > 1:
                detail = f"{lost} before {shelf.first}"
                yield Breach("lost_to_retention", f"{shelf.topic}/{shelf.partition}", detail)


def _settled(ledger: Ledger | None) -> Iterable[tuple[int, int]]:
    return () if ledger is None or ledger.fault else ((0, ledger.offset), *ledger.settled)


def _number(event: SettlingEvent) -> int:
    if isinstance(event, Terminal):
        return _NUMBER[TERMINAL_STATUS[type(event)]]
    if isinstance(event, RetryScheduled | Requeued):
        return PUT_OFF
    return _NUMBER["duplicate" if isinstance(event, Duplicate) else "undecodable"]


def _parse_root(root: str) -> tuple[Place, int] | None:
    topic, _, rest = root.partition("/")
    partition, _, offset = rest.partition("/")
    return ((topic, int(partition)), int(offset)) if partition.isdecimal() and offset.isdecimal() else None


def _where(record: Record) -> str:
    return f"{record.topic}/{record.partition}/{record.offset}"
