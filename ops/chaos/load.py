"""Jobs that come steadily whatever breaks, and readers that note every token they are shown."""

from __future__ import annotations

import asyncio
import random
import string
from contextlib import aclosing
from typing import Final, Literal

import msgspec

from arriero.producer.client import Client
from arriero.producer.follow import Ended, Item, Reset, Tokens
from arriero.schemas.errors import LogUnavailable
from arriero.schemas.job import CLASSES, Job, PriorityClass
from arriero.schemas.token import StreamEnd, Token
from arriero.transports.bus import Position

PROMPT_MAX_CHARS: Final = 240
"""Eighty tokens of the echo engine."""
AGAIN_S: Final = 0.2

Kind = Literal["plain", "cancelled", "twice"]
KINDS: Final[tuple[Kind, ...]] = ("plain",) * 17 + ("cancelled", "cancelled", "twice")


class Asked(msgspec.Struct):
    """A job that was published, and what is expected of it."""

    job: Job
    priority: PriorityClass
    kind: Kind


class Transcript(msgspec.Struct):
    """What one reader was shown."""

    shown: list[Token] = []
    resets: int = 0
    gaps: int = 0
    """Tokens whose index was not the next one: shown twice, or left out."""
    end: StreamEnd | None = None


class Load:
    """`publish` until it is stopped; `readers` read on."""

    def __init__(
        self, client: Client, rng: random.Random, *, rate: float, read_share: float, most: int | None = None
    ) -> None:
        """rate: jobs a second. read_share: of the jobs, those that somebody reads. most: it stops after so many."""
        self.asked: dict[str, Asked] = {}
        self.transcripts: dict[str, Transcript] = {}
        self.readers: set[asyncio.Task[None]] = set()
        self._client = client
        self._rng = rng
        self._rate = rate
        self._read_share = read_share
        self._most = most
        self._stopping = False

    async def publish(self) -> None:
        """Until `stop`; returns when all is accepted."""
        async with asyncio.TaskGroup() as tasks:
            while not self._stopping and (self._most is None or len(self.asked) < self._most):
                asked = self._next()
                if self._rng.random() < self._read_share:
                    self._read(asked.job.id)
                tasks.create_task(self._ask(asked), name=f"ask {asked.job.id}")
                await asyncio.sleep(self._rng.expovariate(self._rate))

    def stop(self) -> None:
        self._stopping = True

    async def finish_reading(self, timeout_s: float) -> None:
        """Waits until every reader has seen an end, for so long at most."""
        if self.readers:
            _, late = await asyncio.wait(self.readers, timeout=timeout_s)
            for reader in late:
                reader.cancel()
            if late:
                await asyncio.wait(late)

    def _next(self) -> Asked:
        size = int(self._rng.triangular(1, PROMPT_MAX_CHARS, 30))
        job = Job(
            id=f"job-{len(self.asked)}",
            prompt="".join(self._rng.choices(string.ascii_letters + " ", k=size)),
            tenant=self._rng.choice(["ada", "bea"]),
        )
        asked = Asked(job, self._rng.choice(CLASSES), self._rng.choice(KINDS))
        self.asked[job.id] = asked
        return asked

    async def _ask(self, asked: Asked) -> None:
        await self._submit(asked)
        if asked.kind == "twice":
            await self._submit(asked)
        elif asked.kind == "cancelled":
            await asyncio.sleep(self._rng.random())
            await self._cancel(asked.job.id)

    async def _submit(self, asked: Asked) -> None:
        """Until it is accepted. What was not confirmed may be there: an id is an idempotency key."""
        while True:
            try:
                await self._client.submit_job(asked.job, asked.priority)
                return
            except LogUnavailable:
                await asyncio.sleep(AGAIN_S)

    async def _cancel(self, job_id: str) -> None:
        while True:
            try:
                await self._client.cancel(job_id)
                return
            except LogUnavailable:
                await asyncio.sleep(AGAIN_S)

    def _read(self, job_id: str) -> None:
        self.transcripts[job_id] = Transcript()
        reader = asyncio.create_task(self._follow(job_id), name=f"read {job_id}")
        self.readers.add(reader)
        reader.add_done_callback(self.readers.discard)

    async def _follow(self, job_id: str) -> None:
        """Some come late, some go away and come back where they were."""
        transcript = self.transcripts[job_id]
        position = Position()
        if self._rng.random() < 0.3:
            await asyncio.sleep(self._rng.random())

        def moved(to: Position) -> None:
            nonlocal position
            position = to

        while transcript.end is None:
            leave_at = len(transcript.shown) + self._rng.randint(1, 40) if self._rng.random() < 0.3 else None
            try:
                async with aclosing(self._client.stream(job_id, position, moved=moved)) as items:
                    async for item in items:
                        _note(transcript, item)
                        shown = len(transcript.shown)
                        if leave_at is not None and shown >= leave_at and shown == position.count:
                            break
            except LogUnavailable:  # the recorded output was to be read
                await asyncio.sleep(AGAIN_S)


def _note(transcript: Transcript, item: Item) -> None:
    match item:
        case Tokens():
            transcript.gaps += item.first != len(transcript.shown)
            transcript.shown[item.first :] = item.tokens
        case Reset():
            transcript.resets += 1
            del transcript.shown[item.count :]
        case Ended():
            transcript.end = item.end
