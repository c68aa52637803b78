"""What an audit comes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

REPORT_VERSION: Final = 1

BREACHES: Final[dict[str, str]] = {
    # strong: from the log alone
    "unrecorded": "the ledger lists a record as settled, and no event settles it",
    "settled_twice": "more than one event settles a record",
    "two_results": "an accepted job has ended twice, by two records of it",
    "no_result": "a job was put off for a retry, and no record of it waits anywhere",
    "beyond_ledger": "an event settles a record that the ledger does not list",
    "ledger_unreadable": "what stands beside an offset is no ledger of this release",
    "no_record": "an event names a record that was never there",
    "lost_to_retention": "retention has removed records that nobody had settled",
    "event_unreadable": "a record of the events topic is no event",
    "event_of_later_version": "an event was written by a later release",
    # semantic: what the records say
    "wrong_account": "an event names another class or tenant than its record",
    "usage_differs": "a result counts other tokens than it holds",
    "state_missing": "the bus has no state of a job that has been projected",
    "state_behind": "the bus has a state from before the last event that has been projected",
    "state_differs": "the bus has another state than the events make",
    "stream_differs": "the bus holds a finished stream that is not the recorded output",
}
"""By code: what it means. What to do is in docs/operations.md."""
LASTING: Final = frozenset(
    "settled_twice two_results no_record event_unreadable event_of_later_version wrong_account usage_differs".split()
)
"""What two records show that will never change. All else is compared with what moves, and looked at again before it is
called a breach."""

OUTCOMES: Final = (
    "completed",
    "failed",
    "cancelled",
    "expired",
    "rejected",
    "dead_lettered",
    "duplicate",
    "undecodable",
)


class Breach(msgspec.Struct, frozen=True, omit_defaults=True):
    """`where` is a record, `topic/partition/offset`, or a partition; with the code it tells one breach from another."""

    code: str
    where: str
    detail: str = ""
    job_id: str = ""


class Account(msgspec.Struct, kw_only=True):
    """What became of the accepted jobs of one class and tenant whose first record is still there."""

    priority: str = msgspec.field(name="class")
    tenant: str
    """Empty for records in which none can be read."""
    accepted: int = 0
    outcomes: dict[str, int] = {}
    """By the names in OUTCOMES; what is 0 is left out."""
    in_flight: int = 0

    @property
    def unaccounted(self) -> int:
        return self.accepted - sum(self.outcomes.values()) - self.in_flight


class Report(msgspec.Struct, kw_only=True):
    """`--json` prints it; its shape changes only together with `v`."""

    v: int = REPORT_VERSION
    holds: bool = True
    at_ms: int = 0
    """When the log was looked at last."""
    took_s: float = 0.0
    records: int = 0
    """Read of job and delay topics, since the beginning."""
    events: int = 0
    settled: int = 0
    accounts: list[Account] = []
    breaches: dict[str, int] = {}
    """How many, by code; confirmed ones only."""
    shown: list[Breach] = []
    """Some of them."""
    unconfirmed: int = 0
    """Suspicions that arose too late to be looked at again."""
    excused: dict[str, int] = {}
    """gone: events whose record has expired. late_terminals: an id ended again, and that was ignored.
    other_topics: events about topics that were not audited. no_ledger: partitions with results and without a ledger;
    their next owner rebuilds it. states_lagging: not projected yet. streams_short: the bus has lost an end of a
    stream; readers take it from the log."""
    sampled: int = 1
    """Of so many jobs one was compared with the bus."""
    states: int = 0
    """Compared with the fold of their events."""
    streams: int = 0
    """Compared with the recorded output."""
    tokens_recorded: int = 0
    """Of these streams' jobs, in their results."""
    tokens_streamed: int = 0
    """Of these streams, on the bus."""
    repaired: int = 0


Tell = Callable[[Breach], None]
Progress = Callable[[int, int], None]
"""Called with what has been read, and how much there is to read."""
