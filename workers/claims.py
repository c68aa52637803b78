"""Which partitions are ours, and what is in hand of each, while claims come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic

import msgspec
import structlog

from arriero.transports.log import Claim, Gained, Membership
from arriero.workers.commit import Committer, P

log = structlog.get_logger(__name__)


class Partition(msgspec.Struct, Generic[P], eq=False):
    """A partition of ours, and its tasks."""

    claim: Claim
    committer: Committer[P]
    intake: asyncio.Task[None]
    commits: asyncio.Task[None]

    def stop(self) -> None:
        self.intake.cancel()
        self.commits.cancel()


class Claims(Generic[P]):
    """`follow` a membership.

    begin: takes up a claim that nobody of ours has held; None when it was given back at once. resumed: told that nobody
    owned a partition in between, after its committer. dropped: told that another owns it, before its committer.
    """

    def __init__(
        self,
        *,
        begin: Callable[[Claim], Awaitable[Partition[P] | None]],
        resumed: Callable[[Partition[P]], None] = lambda partition: None,
        dropped: Callable[[Partition[P]], None] = lambda partition: None,
    ) -> None:
        self._begin = begin
        self._resumed = resumed
        self._dropped = dropped
        self._partitions: dict[tuple[str, int], Partition[P]] = {}

    def __len__(self) -> int:
        return len(self._partitions)

    def __iter__(self) -> Iterator[Partition[P]]:
        return iter(list(self._partitions.values()))

    def clear(self) -> None:
        self._partitions.clear()

    async def follow(self, membership: Membership) -> None:
        while True:
            change = await membership.change()
            claim = change.claim
            place = claim.topic, claim.partition
            partition = self._partitions.get(place)
            if isinstance(change, Gained):
                if partition is not None and change.continued:
                    self._resume(partition, claim)
                else:
                    self._drop(place)
                    begun = await self._begin(claim)
                    if begun is not None:
                        self._partitions[place] = begun
            elif partition is not None and partition.claim is claim:
                log.info("claim_lost", topic=claim.topic, partition=claim.partition, final=change.final)
                if change.final:
                    self._drop(place)
                else:
                    partition.committer.doubt(claim)

    def _resume(self, partition: Partition[P], claim: Claim) -> None:
        """Nobody owned it in between: what is in hand goes on, under the new fence."""
        log.info(
            "claim_resumed", topic=claim.topic, partition=claim.partition, pending=len(partition.committer.pending)
        )
        partition.claim = claim
        partition.committer.resume(claim)
        self._resumed(partition)

    def _drop(self, place: tuple[str, int]) -> None:
        """Another owns it: whatever is in hand of it is forgotten."""
        partition = self._partitions.pop(place, None)
        if partition is not None:
            partition.stop()
            self._dropped(partition)
            partition.committer.drop()
