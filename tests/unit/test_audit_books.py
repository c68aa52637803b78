"""The audit's books: how records were settled, and the accounts."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.ops.audit.books import Books
from arriero.ops.audit.ids import IdSet
from arriero.ops.audit.report import BREACHES, LASTING, Account, Breach
from arriero.schemas.event import (
    Cancelled,
    Completed,
    DeadLettered,
    Duplicate,
    Error,
    Event,
    Origin,
    Requeued,
    RetryScheduled,
    Started,
    Undecodable,
)
from arriero.schemas.job import Job, encode_job
from arriero.transports.ledger import Ledger
from arriero.transports.log import Record

JOBS = "ns.jobs.default.standard"
DELAY = "ns.delay.default.1s"
PLACE = (JOBS, 0)


def time_of(offset: int) -> int:
    return 1_000 + offset


def job_record(offset: int, job: Job, topic: str = JOBS) -> Record:
    return Record(topic, 0, offset, time_of(offset), job.key.encode(), encode_job(job))


def origin(offset: int, topic: str = JOBS) -> Origin:
    return Origin(topic, 0, offset, time_of(offset))


ERROR = Error("engine_error", "it failed")
EXTRA = {
    Completed: {"finish_reason": "stop"},
    DeadLettered: {"reason": "attempts", "error": ERROR},
    RetryScheduled: {"error": ERROR, "next_attempt": 2, "step": "1s", "due_ms": 1},
}


def event(kind: type[Event], at: Origin, job_id: str = "a", tenant: str = "default") -> Event:
    return kind(
        id=job_id, time_ms=1, attempt=1, root=str(at), origin=at, worker="w", fence=1, priority="standard",
        tenant=tenant, **EXTRA.get(kind, {}),
    )  # type: ignore[call-arg]  # fmt: skip


class Case:
    """Books, and what they told."""

    def __init__(self) -> None:
        self.told: list[Breach] = []
        self.books = Books(self.told.append)
        self.books.shelve(JOBS, 1)
        self.books.shelve(DELAY, 1)
        self._events = 0

    def records(self, *records: Record) -> Case:
        for record in records:
            self.books.add_record(record)
        return self

    def events(self, *events: Event) -> Case:
        for one in events:
            self.books.add_event(one, Record("ns.events", 0, self._events, 1, b"a", None))
            self._events += 1
        return self

    @property
    def codes(self) -> list[str]:
        return [breach.code for breach in self.told]

    def account(self, tenant: str = "default") -> Account:
        (found,) = [one for one in self.books.balance()[0] if one.tenant == tenant]
        return found

    def compare(self, before: Ledger, after: Ledger | None = None) -> list[tuple[str, str]]:
        found = self.books.compare({PLACE: before}, {PLACE: after or before})
        return [(breach.code, breach.where) for breach in found]


RETRIED = Job(id="a", prompt="x", root=f"{JOBS}/0/0", attempt=2)


def test_a_retried_job_is_one_job_from_its_first_record_to_its_last() -> None:
    case = Case().records(job_record(0, Job(id="a", prompt="x")))
    assert case.account().in_flight == 1
    case.records(job_record(0, RETRIED, DELAY)).events(event(Started, origin(0)), event(RetryScheduled, origin(0)))
    assert (case.account().in_flight, case.books.balance()[1]) == (1, [])
    case.records(job_record(1, RETRIED)).events(event(Requeued, origin(0, DELAY)))
    assert (case.account().accepted, case.account().in_flight, case.books.balance()[1]) == (1, 1, [])
    case.events(event(Completed, origin(1)))
    account = case.account()
    assert (account.accepted, account.outcomes, account.in_flight, account.unaccounted) == (1, {"completed": 1}, 0, 0)
    assert case.told == []
    assert case.books.excused == {}


def test_a_retry_whose_record_was_settled_without_an_end_is_no_result() -> None:
    case = Case().records(job_record(0, Job(id="a", prompt="x")), job_record(0, RETRIED, DELAY))
    case.events(event(RetryScheduled, origin(0)), event(Requeued, origin(0, DELAY)))
    accounts, breaches = case.books.balance()
    assert [(breach.code, breach.where) for breach in breaches] == [("no_result", f"{JOBS}/0/0")]
    assert accounts[0].unaccounted == 1


def test_a_job_that_its_relay_ends_has_ended() -> None:
    case = Case().records(job_record(0, Job(id="a", prompt="x")), job_record(0, RETRIED, DELAY))
    case.events(event(RetryScheduled, origin(0)), event(DeadLettered, origin(0, DELAY)))
    assert case.account().outcomes == {"dead_lettered": 1}


def test_a_retry_that_another_record_of_its_id_has_overtaken_is_a_duplicate() -> None:
    first = job_record(0, Job(id="a", prompt="x"))
    case = Case().records(first, job_record(0, RETRIED, DELAY), job_record(1, RETRIED))
    case.events(event(RetryScheduled, origin(0)), event(Requeued, origin(0, DELAY)), event(Duplicate, origin(1)))
    assert [breach.code for breach in case.books.balance()[1]] == ["no_result"]
    case.records(job_record(2, Job(id="a", prompt="x"))).events(event(Completed, origin(2)))
    accounts, breaches = case.books.balance()
    assert breaches == []
    assert accounts[0].outcomes == {"duplicate": 1, "completed": 1}


def test_two_ends_of_one_job_by_two_records_are_two_results() -> None:
    case = Case().records(job_record(0, Job(id="a", prompt="x")), job_record(1, RETRIED))
    case.events(event(Completed, origin(0)), event(Cancelled, origin(1)))
    assert case.codes == ["two_results"]
    assert case.account().outcomes == {"completed": 1}


def test_two_ends_of_one_id_by_two_jobs_are_no_breach() -> None:
    case = Case().records(job_record(0, Job(id="a", prompt="x")), job_record(1, Job(id="a", prompt="x")))
    case.events(event(Completed, origin(0)), event(Completed, origin(1)))
    assert case.told == []
    assert case.books.excused["late_terminals"] == 1


def test_duplicates_and_undecodable_records_have_their_columns() -> None:
    case = Case().records(
        job_record(0, Job(id="a", prompt="x", tenant="t")),
        job_record(1, Job(id="a", prompt="y", tenant="t")),
        Record(JOBS, 0, 2, time_of(2), b"k", b"no job"),
    )
    undecodable = Undecodable(id="x", time_ms=1, origin=origin(2), worker="w", fence=1, error=ERROR)
    case.events(event(Completed, origin(0), tenant="t"), event(Duplicate, origin(1)), undecodable)
    assert case.told == []
    assert case.account("t").outcomes == {"completed": 1, "duplicate": 1}
    assert case.account("").outcomes == {"undecodable": 1}


def test_an_event_whose_record_has_expired_is_excused() -> None:
    case = Case().records(job_record(5, Job(id="b", prompt="x"))).events(event(Completed, origin(4)))
    assert (case.told, case.books.excused) == ([], {"gone": 1})


def test_an_event_of_a_topic_that_was_made_anew_is_excused() -> None:
    case = Case().records(job_record(5, Job(id="b", prompt="x")))
    case.events(event(Completed, msgspec.structs.replace(origin(5), time_ms=17)))
    assert (case.told, case.books.excused) == ([], {"gone": 1})


def test_all_events_are_excused_where_all_records_have_expired() -> None:
    case = Case()
    case.books.nothing_before({(JOBS, 0): 9})
    case.events(event(Completed, origin(8)))
    assert (case.told, case.books.excused) == ([], {"gone": 1})


@pytest.mark.parametrize("at", [origin(1), origin(3), msgspec.structs.replace(origin(0), time_ms=2_000)])
def test_an_event_about_nothing_is_reported(at: Origin) -> None:
    """Offset 1 is a transaction's marker; 3 was never written."""
    case = Case().records(job_record(0, Job(id="a", prompt="x")), job_record(2, Job(id="b", prompt="x")))
    assert case.events(event(Started, at)).codes == ["no_record"]


def test_the_ledger_before_lists_nothing_without_an_event_and_the_one_after_everything_with_one() -> None:
    case = Case().records(*(job_record(offset, Job(id=f"j{offset}", prompt="x")) for offset in range(6)))
    case.events(event(Completed, origin(0), "j0"), event(Completed, origin(3), "j3"))
    right = Ledger(offset=1, settled=((3, 4),))
    assert case.compare(right) == []
    assert case.compare(Ledger(offset=0), right) == []
    assert case.compare(Ledger(offset=2), right) == [("unrecorded", f"{JOBS}/0/1")]
    assert case.compare(right, Ledger(offset=1)) == [("beyond_ledger", f"{JOBS}/0/3")]
    assert case.compare(right, Ledger(offset=0, fault="garbage")) == [("ledger_unreadable", f"{JOBS}/0")]


def test_a_partition_without_a_ledger_is_excused() -> None:
    case = Case().records(job_record(0, Job(id="a", prompt="x"))).events(event(Completed, origin(0)))
    assert list(case.books.compare({}, {})) == []
    assert case.books.excused["no_ledger"] == 1


def test_records_that_expired_unsettled_are_lost() -> None:
    case = Case().records(job_record(9, Job(id="a", prompt="x")))
    assert case.compare(Ledger(offset=5, settled=((6, 7),))) == [("lost_to_retention", f"{JOBS}/0")]
    assert case.compare(Ledger(offset=9)) == []


def test_every_lasting_breach_is_explained() -> None:
    assert BREACHES.keys() >= LASTING


@given(st.lists(st.text(max_size=6), max_size=3_000))
def test_a_set_of_ids_holds_what_was_put_in(ids: list[str]) -> None:
    held, known = IdSet(), set[str]()
    for job_id in ids:
        assert (job_id in held) is (job_id in known)
        assert held.add(job_id) is (job_id not in known)
        known.add(job_id)
    assert len(held) == len(known)
    assert all(job_id in held for job_id in known)


def test_a_set_of_ids_grows() -> None:
    held = IdSet()
    assert all(held.add(f"job-{i}") for i in range(20_000))
    assert not any(held.add(f"job-{i}") for i in range(20_000))
