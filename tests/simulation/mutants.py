"""The protocol with one rule taken out each: a simulation that does not notice would notice no bug either.

A mutant is a context manager that patches the fleet's own code while it is entered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import apsw
import msgspec

from arriero.transports.embedded import groups, member, streams
from arriero.transports.embedded.records import Place
from arriero.transports.ledger import Ledger
from arriero.transports.log import Gained
from arriero.transports.rebuild import Rebuild
from arriero.workers.checkpoints import Checkpoints
from arriero.workers.commit import Committer
from arriero.workers.relay import Relay

Mutant = Callable[[], AbstractContextManager[object]]
MUTANTS: dict[str, Mutant] = {}


def mutant(make: Mutant) -> Mutant:
    MUTANTS[make.__name__] = make
    return make


@mutant
@contextmanager
def ledger_read_before_fencing() -> Iterator[None]:
    """The order of taking swapped: what the former owner commits until it is fenced is not seen."""
    seen: dict[tuple[str, int], tuple[int, str]] = {}
    free, known = groups.free, groups._known_ledger

    def look(connection: apsw.Connection, group: str, numbers: set[int], member: str) -> set[int]:
        """Called twice: by a read when a partition is found free, then in the transaction that takes it."""
        if not connection.in_transaction:
            for number, offset, text in connection.execute(
                "SELECT number, offset, ledger FROM leases WHERE grp = ?", (group,)
            ):
                seen[group, number] = offset, text
        return free(connection, group, numbers, member)

    def stale(connection: apsw.Connection, group: str, place: Place, row: Any, first: int, end: int) -> Any:
        if row is not None and (group, place.number) in seen:
            row = (*seen[group, place.number], row[2])
        return known(connection, group, place, row, first, end)

    with patch.object(groups, "free", look), patch.object(groups, "_known_ledger", stale):
        yield


@mutant
def ledger_ignored() -> AbstractContextManager[object]:
    """Only the offset counts, as with ordinary consumers."""
    decode = Ledger.decode

    def forget(offset: int, text: str) -> Ledger:
        return msgspec.structs.replace(decode(offset, text), settled=())

    return patch.object(Ledger, "decode", staticmethod(forget))


@mutant
def fence_not_raised() -> AbstractContextManager[object]:
    """A new owner commits under the fence of the former one, and so may the former one."""

    def keep(self: Ledger, clock_ms: int, owner: str, seen_fence: int = 0) -> Ledger:
        return msgspec.structs.replace(self, owner=owner)

    return patch.object(Ledger, "raised", keep)


@mutant
def fence_unchecked() -> AbstractContextManager[object]:
    """Whoever believes to own a partition may commit."""

    def put(connection: apsw.Connection, group: str, number: int, ledger: Ledger, fence: int) -> bool:
        connection.execute(
            "UPDATE leases SET offset = ?, ledger = ?, fence = ? WHERE grp = ? AND number = ?",
            (ledger.offset, ledger.encode(), ledger.fence, group, number),
        )
        return True

    return patch.object(groups, "put_ledger", put)


@mutant
def rebuild_left_out() -> AbstractContextManager[object]:
    """A ledger that is gone means that nothing has been done."""
    return patch.object(member, "fold_events", lambda events, rebuilds: None)


@mutant
def rebuild_unchecked() -> AbstractContextManager[object]:
    """An event settles whatever lies at its offset, also on a topic that was made anew."""

    def settle(self: Rebuild, times: Any) -> Ledger:
        return Ledger(offset=self.first).settle(self._settled).with_start(0)

    return patch.object(Rebuild, "ledger", settle)


@mutant
def stamp_unchecked() -> AbstractContextManager[object]:
    """A topic that was made anew goes on under the ledger of the old one."""
    known = groups._known_ledger

    def trust(connection: apsw.Connection, group: str, place: Place, row: Any, first: int, end: int) -> Any:
        if row is not None and row[1]:
            return Ledger.decode(row[0], row[1])
        return known(connection, group, place, row, first, end)

    return patch.object(groups, "_known_ledger", trust)


@mutant
def ambiguous_commit_taken_for_failure() -> AbstractContextManager[object]:
    return patch.object(Committer, "_is_recorded", lambda self, claim: False)


@mutant
def ambiguous_commit_taken_for_success() -> AbstractContextManager[object]:
    return patch.object(Committer, "_is_recorded", lambda self, claim: True)


@mutant
def anothers_continuation_kept() -> AbstractContextManager[object]:
    """What is in hand is kept although another has owned the partition in between."""

    def keep(claim: Any, continued: bool) -> Gained:
        return Gained(claim, True)

    return patch.object(member, "Gained", keep)


@mutant
@contextmanager
def streams_fence_unchecked() -> Iterator[None]:
    """Tokens of whoever believes to own a stream are stored and shown."""
    open_, append = streams.Streams.open, streams.Streams.append

    def as_owner(self: Any, job: str, request: Any) -> Any:
        head = self._head(job)
        if head is not None and (request.attempt, request.fence) < head.owner:
            request = msgspec.structs.replace(request, attempt=head.attempt, fence=head.fence)
        return request

    def open_all(self: Any, job: str, request: Any) -> Any:
        return open_(self, job, as_owner(self, job, request))

    def append_all(self: Any, job: str, request: Any) -> Any:
        request = as_owner(self, job, request)
        head = self._head(job)
        if head is not None:
            request = msgspec.structs.replace(request, epoch=streams.lineages.last_epoch(head.lineage))
        return append(self, job, request)

    with patch.object(streams.Streams, "open", open_all), patch.object(streams.Streams, "append", append_all):
        yield


@mutant
def lineage_ignored() -> AbstractContextManager[object]:
    """Two texts are taken for one where their lengths agree."""
    return patch.object(streams.lineages, "common", lambda lineage, count, other, other_count: min(count, other_count))


@mutant
def stream_ended_with_what_it_holds() -> AbstractContextManager[object]:
    """The end does not replace the text of another run."""
    finish = streams.Streams.finish

    def leave(self: Any, job: str, request: Any) -> Any:
        head = self._head(job)
        if head is not None and not head.finished:
            self._put_head(job, finished=1, count=self._count(job), ending=request.end)
            self._publish(job, streams.End(head.root, head.lineage, self._count(job), request.end))
            return streams.Finished("ok", 0)
        return finish(self, job, request)

    return patch.object(streams.Streams, "finish", leave)


@mutant
def checkpoints_of_another_job() -> AbstractContextManager[object]:
    """A checkpoint is known by the root alone, which a topic that was made anew gives to another job."""
    add = Checkpoints._read

    async def read(self: Any, *arguments: Any) -> Any:
        found = await add(self, *arguments)
        return _ByRoot({root: checkpoint for (_, root), checkpoint in found.items()})

    return patch.object(Checkpoints, "_read", read)


class _ByRoot(dict[str, Any]):
    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key[1], default)


@mutant
def rebuild_beyond_the_end() -> AbstractContextManager[object]:
    """Offsets that hold no record yet count as settled where an event names later ones."""
    return patch.object(Rebuild, "cut", lambda self, end: None)


@mutant
def events_written_before_the_ledger() -> AbstractContextManager[object]:
    """A commit is two transactions; whoever dies between them has recorded what its ledger does not know."""
    return patch.object(Committer, "_commit", _in_two)


async def _in_two(self: Any, claim: Any, records: Any) -> bool | None:
    from arriero.schemas.errors import LogError
    from arriero.transports.log import Commit

    settled = [item.settles for item in self._in_flight if item.settles is not None]
    try:
        await claim.commit(Commit(records=records))
        await claim.commit(Commit(settled=settled))
    except LogError:
        return None
    return True


@mutant
def requeued_in_two() -> AbstractContextManager[object]:
    """The relay writes a due record first, and settles it in its delay topic later."""

    def requeue(self: Any, committer: Any, record: Any) -> None:
        add = committer.add

        def split(event: Any, *, settles: int, records: Any) -> None:
            add(event, records=records)
            add(event, settles=settles)

        with patch.object(committer, "add", split):
            whole(self, committer, record)

    whole = Relay._requeue
    return patch.object(Relay, "_requeue", requeue)
