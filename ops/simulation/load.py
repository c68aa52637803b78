"""What a simulated fleet is asked for: jobs of all kinds, also such as should never have been sent."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Final, Literal

import msgspec

from arriero.ops.chaos.load import AGAIN_S, Asked, Load
from arriero.ops.simulation.fleet import MARKERS
from arriero.producer.client import Client
from arriero.transports.log import Outgoing, Placed

Kind = Literal["plain", "cancelled", "twice", "other_body", "late", "bad", "garbage", "deadly"]
WEIGHTS: Final[dict[Kind, int]] = {
    "plain": 60,
    "cancelled": 10,
    "twice": 8,
    "other_body": 6,
    "late": 6,
    "bad": 3,
    "garbage": 3,
    "deadly": 1,
}
PROMPT_MAX_CHARS: Final = 100
"""A third of that are tokens: enough for several faults to strike one generation, and each costs time."""
DEADLY_MAX: Final = 1
"""Jobs that crash their workers, of a run: each costs five crashes at worst, and innocents that are in hand at five
crashes are convicted with them."""


class Wanted(msgspec.Struct):
    """What an id was used for."""

    kind: Kind
    prompts: list[str]


class MixedLoad(Load):
    """See `Load`. `wanted` tells what is expected of each id."""

    def __init__(self, client: Client, rng: random.Random, *, rate: float, read_share: float, jobs: int) -> None:
        super().__init__(client, rng, rate=rate, read_share=read_share, most=jobs)
        self.wanted: dict[str, Wanted] = {}

    def _next(self) -> Asked:
        asked = super()._next()
        (kind,) = self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        deadly = sum(wanted.kind == "deadly" for wanted in self.wanted.values())
        if kind == "deadly" and deadly == DEADLY_MAX:
            kind = "plain"
        job = msgspec.structs.replace(asked.job, prompt=(asked.job.prompt or "")[:PROMPT_MAX_CHARS])
        if kind == "deadly":
            job = msgspec.structs.replace(job, prompt=self._rng.choice(MARKERS) + (job.prompt or ""))
        elif kind == "late":
            job = msgspec.structs.replace(job, deadline=self._client.clock.time() + self._rng.uniform(-0.5, 3.0))
        self.wanted[job.id] = Wanted(kind, [job.prompt or ""])
        self.asked[job.id] = asked = Asked(job, asked.priority, "plain")
        return asked

    async def _ask(self, asked: Asked) -> None:
        job, wanted = asked.job, self.wanted[asked.job.id]
        match wanted.kind:
            case "bad" | "garbage":
                body = {"id": job.id, "prompt": job.prompt, "no such field": 1}
                await self._put(asked, json.dumps(body).encode() if wanted.kind == "bad" else b"{" + job.id.encode())
            case "other_body":
                wanted.prompts.append("another " + (job.prompt or ""))
                other = msgspec.structs.replace(job, prompt=wanted.prompts[-1])
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._submit(asked), name=f"submit {job.id}")
                    tasks.create_task(self._submit(Asked(other, asked.priority, "plain")), name=f"submit {job.id} anew")
            case _:
                await self._submit(asked)
        if wanted.kind == "twice":
            await self._submit(asked)
        elif wanted.kind == "cancelled":
            await asyncio.sleep(self._rng.random())
            await self._cancel(job.id)

    async def _put(self, asked: Asked, value: bytes) -> None:
        """As a client of another make might."""
        record = Outgoing(self._client.names.jobs(self._client.pool, asked.priority), asked.job.id.encode(), value)
        (answer,) = await self._client.log.publish([record])
        if not isinstance(answer, Placed):
            await asyncio.sleep(AGAIN_S)
            await self._put(asked, value)

    def _read(self, job_id: str) -> None:
        if self.wanted[job_id].kind != "garbage":  # of that no event carries the id
            super()._read(job_id)
