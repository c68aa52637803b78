"""Generations as the log remembers them: what Progressed events say, for when the token bus has forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Final

import msgspec
import structlog

from arriero.schemas.codec import decode_event
from arriero.schemas.errors import Unreadable
from arriero.schemas.event import Progressed
from arriero.schemas.token import Token
from arriero.transports.lineage import common
from arriero.transports.log import JobLog, Record
from arriero.transports.reading import since

log = structlog.get_logger(__name__)

SKEW_S: Final = 60.0
"""Events carry the clocks of those who wrote them: so much earlier than asked for the reading begins."""
_MARK: Final = b'"type":"Progressed"'


class Checkpoint(msgspec.Struct):
    """What one job had decoded when it was last recorded."""

    lineage: str = ""
    tokens: list[Token] = []
    digests: str = ""

    def add(self, event: Progressed) -> None:
        """Take in the next event in the log's order.

        It replaces what is there from its first token on; where tokens before that are of another text, or missing (a
        checkpoint that the log refused for its size), only the part that is certain stays.
        """
        certain = min(event.first, common(self.lineage, len(self.tokens), event.lineage, event.first))
        del self.tokens[certain:]
        self.lineage, self.digests = event.lineage, event.digests
        if certain == event.first:
            self.tokens += event.tokens


Found = Mapping[tuple[str, str], Checkpoint]
"""By the job's id and root: on a topic that was made anew, another job's record has the same root."""


class Checkpoints:
    """Those of one claim's jobs."""

    def __init__(self, job_log: JobLog, events: str, topic: str, partition: int, since_ms: int) -> None:
        """since_ms: no event of a job that a former owner has begun is older."""
        self._log = job_log
        self._events = events
        self._place = topic, partition
        self._since_ms = since_ms
        self._of_claim: Found | None = None

    async def of_claim(self) -> Found:
        """Nobody else records any while the claim is ours: they are read once. Raises LogUnavailable."""
        if self._of_claim is None:
            self._of_claim = await self._read(
                self._since_ms, lambda event: (event.origin.topic, event.origin.partition) == self._place
            )
        return self._of_claim

    async def of_retries(self, roots: Iterable[str], since_ms: int) -> Found:
        """Earlier attempts were recorded under other claims. Raises LogUnavailable."""
        wanted = set(roots)
        return await self._read(since_ms, lambda event: event.root in wanted)

    async def _read(self, since_ms: int, wanted: Callable[[Progressed], bool]) -> Found:
        found: dict[tuple[str, str], Checkpoint] = {}
        async with aclosing(since(self._log, [self._events], since_ms / 1000 - SKEW_S)) as batches:
            async for batch in batches:
                for record in batch:
                    event = _progressed(record)
                    if event is not None and wanted(event):
                        found.setdefault((event.id, event.root), Checkpoint()).add(event)
        log.info("checkpoints_read", topic=self._place[0], partition=self._place[1], jobs=len(found))
        return found


def _progressed(record: Record) -> Progressed | None:
    if record.value is None or _MARK not in record.value[:40]:
        return None
    try:
        event = decode_event(record.value)
    except Unreadable as error:  # the generation goes on from an earlier checkpoint
        log.warning("event_unreadable", code=error.code, partition=record.partition, offset=record.offset)
        return None
    return event if isinstance(event, Progressed) else None
