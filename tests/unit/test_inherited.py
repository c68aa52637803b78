"""What an owner learns from the ledger of what its forerunners have begun: nothing of it may be forgotten."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from arriero.transports.ledger import Ledger, Stamp
from arriero.workers.commit import Inherited, _oldest


class Owners(RuleBasedStateMachine):
    """Owners that follow each other on one partition: reading, starting, committing, settling, dying at any moment.

    A record is *marked* once a commit has carried its start: from then on events of it lie in the log, and every later
    owner that reads it must look for them, from no later than that start.
    """

    @initialize()
    def begin(self) -> None:
        self.now = 1
        self.end = 0
        self.marked: dict[int, int] = {}
        self.text, self.offset = Ledger(offset=0).encode(), 0
        self.take()

    @rule()
    def take(self) -> None:
        """Another owner, whatever the last one had in hand."""
        self.ledger = Ledger.decode(self.offset, self.text).raised(self.now, "w")
        self.inherited = Inherited.of(self.ledger)
        self.position = self.ledger.offset
        self.since: dict[int, int] = {}
        self.started: dict[int, int] = {}
        self.store([])

    @rule(count=st.integers(1, 8))
    def publish(self, count: int) -> None:
        self.end += count

    @rule(most=st.integers(1, 6))
    def read(self, most: int) -> None:
        for start, stop in list(self.ledger.unsettled(self.position)):
            for offset in range(start, min(self.end, self.end if stop is None else stop)):
                if most == 0:
                    return
                most -= 1
                self.position = offset + 1
                self.since[offset] = self.inherited.read(offset)
                if offset in self.marked:
                    assert 0 < self.since[offset] <= self.marked[offset], "what was begun is not looked for"

    @precondition(lambda self: self.since)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.since)))
        self.now += 1
        self.started.setdefault(offset, self.now)
        self.since[offset] = self.since[offset] or self.now

    @rule()
    def commit(self) -> None:
        self.store([])

    @precondition(lambda self: self.since)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        done = data.draw(st.sets(st.sampled_from(sorted(self.since)), min_size=1, max_size=3))
        self.store(sorted(done))

    def store(self, settled: list[int]) -> None:
        """One commit, as the committer makes it."""
        going_on = [since for offset, since in self.since.items() if offset not in settled]
        self.ledger = self.ledger.settle(settled).with_start(_oldest([*going_on, self.inherited.since_ms]))
        if self.position:
            self.ledger = self.ledger.with_stamp(Stamp(self.position - 1, 1))
        for offset in settled:
            del self.since[offset]
        for offset in self.since:
            if offset in self.started:
                self.marked.setdefault(offset, self.started[offset])
        self.offset, self.text = self.ledger.offset, self.ledger.encode()


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
