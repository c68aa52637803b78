"""A worker without what recovery costs: it streams nothing, and records neither Started nor Progressed. For
`bench fleet --against bare`, which says what that price is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec

from arriero.transports.bus import Appended, AppendRequest, Opened, OpenRequest, TokenBus
from arriero.transports.log import Claim, Commit, Gained, JobLog, Lost, Membership

_LEFT_OUT: Final = (b'{"type":"Started"', b'{"type":"Progressed"')


class SilentBus:
    """Takes everything and keeps nothing of a stream; presence and states are the real bus's."""

    def __init__(self, bus: TokenBus) -> None:
        self._bus = bus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def open(self, requests: Sequence[OpenRequest]) -> list[Opened]:
        return [Opened(code="fresh", lineage=request.lineage) for request in requests]

    async def append(self, requests: Sequence[AppendRequest]) -> list[Appended]:
        return [Appended(code="ok", next=request.first + len(request.tokens)) for request in requests]


class _TerseClaim:
    """Commits nothing that only recovery needs."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim

    def __getattr__(self, name: str) -> Any:
        return getattr(self._claim, name)

    async def commit(self, commit: Commit) -> None:
        records = [record for record in commit.records if not record.value.startswith(_LEFT_OUT)]
        if records or commit.settled:
            await self._claim.commit(msgspec.structs.replace(commit, records=records))


class _TerseMembership:
    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._claims: dict[int, _TerseClaim] = {}

    async def change(self) -> Gained | Lost:
        change = await self._membership.change()
        claim: Any = self._claims.setdefault(id(change.claim), _TerseClaim(change.claim))
        return msgspec.structs.replace(change, claim=claim)


class TerseLog:
    """The log for such a worker."""

    def __init__(self, job_log: JobLog) -> None:
        self._log = job_log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    @asynccontextmanager
    async def join(self, *arguments: Any) -> AsyncIterator[_TerseMembership]:
        async with self._log.join(*arguments) as membership:
            yield _TerseMembership(membership)
