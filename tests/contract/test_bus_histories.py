"""Random histories of a stream's life, call for call against a model: both adapters must answer and publish the same.

Owners come and go with rising fences and attempts, sometimes a zombie speaks, a second record of the id turns up, the
projector ends the stream, and the bus forgets. Every answer, view and message is compared.

ARRIERO_TEST_HISTORIES=2000 runs more of them than the suite has time for.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass, field

import pytest
from bus_model import BusModel, Forget, parse, text

from arriero.transports import lineage as lineages
from arriero.transports.bus import AppendRequest, FinishRequest, OpenRequest, Position, StateWrite, TokenBus

HISTORIES = int(os.environ.get("ARRIERO_TEST_HISTORIES", "60"))
STEPS = 60


@dataclass
class Owner:
    """One run of the job, as a worker would hold it."""

    root: str
    attempt: int
    fence: int
    epoch: str
    lineage: str
    tokens: list[str] = field(default_factory=list)

    def opening(self, mode: str, rng: random.Random) -> OpenRequest:
        return OpenRequest(
            job_id="j",
            root=self.root,
            attempt=self.attempt,
            fence=self.fence,
            epoch=self.epoch,
            mode=mode,  # type: ignore[arg-type]
            least=rng.choice([0, 0, len(self.tokens), 3]),
            lineage=self.lineage,
            tokens=self.tokens if mode in ("mine", "start") else (),
            digests=rng.choice(["", "m1"]),
        )


def new_owner(rng: random.Random, number: int) -> Owner:
    attempt = rng.choice([1, 1, 1, 2])
    epoch = f"{attempt}.{1_000 + number}"
    root = rng.choice(["t/0/1"] * 9 + ["t/0/2"])
    return Owner(root, attempt, 1_000 + number, epoch, f"{epoch}@0")


def decode(owner: Owner, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 4)):
        piece = rng.choice(["a", "", " é", '"', "|x", "\n", "\\", "\x00", "🦙"])
        owner.tokens.append(f"{len(owner.tokens)}|{owner.epoch}{piece}")


def adopt(owner: Owner, lineage: str, tokens: list[str]) -> None:
    """Go on where a former owner stopped."""
    owner.lineage, owner.tokens = lineage, list(tokens)
    if not lineage.endswith(f"{owner.epoch}@{len(tokens)}") and parse(lineage)[-1][0] != owner.epoch:
        owner.lineage = text([*parse(lineage), (owner.epoch, len(tokens))])


def appending(owner: Owner, rng: random.Random) -> AppendRequest:
    """The owner's next tokens, some of the last ones once more, or none at all; sometimes sealed, rightly or not."""
    sent = rng.randint(max(0, len(owner.tokens) - 3), len(owner.tokens))
    if rng.random() < 0.8:
        decode(owner, rng)
    seal = f"{len(owner.tokens) + rng.choice([0, 0, 0, 1, -1])}|stop" if rng.random() < 0.15 and owner.tokens else ""
    return AppendRequest(
        job_id="j",
        root=owner.root,
        attempt=owner.attempt,
        fence=owner.fence,
        epoch=owner.epoch,
        first=sent,
        tokens=owner.tokens[sent:],
        seal=seal,
    )


def finishing(owner: Owner, base: int) -> FinishRequest:
    return FinishRequest(
        job_id="j",
        root=owner.root,
        lineage=owner.lineage,
        count=len(owner.tokens),
        end='{"status":"x"}',
        base=base,
        tokens=owner.tokens[base:],
    )


@pytest.mark.parametrize("seed", range(HISTORIES))
async def test_the_bus_does_what_the_model_does(bus: TokenBus, forget: Forget, seed: int) -> None:
    rng = random.Random(seed)
    model = BusModel()
    living = [new_owner(rng, 0)]
    positions = [Position()]
    offset = 0
    async with bus.follow("j") as subscription:
        for step in range(STEPS):
            owner = rng.choice([*living[-3:], *[living[-1]] * 4])
            # Every other history begins without what ends a stream.
            act = rng.random() * (1.0 if step > STEPS // 2 or seed % 2 else 0.90)
            if act < 0.08:
                living.append(new_owner(rng, len(living)))
            elif act < 0.35:
                request = owner.opening(rng.choice(["start", "take", "mine", "mine", "restart"]), rng)
                (answer,) = await bus.open([request])
                assert answer == model.open(request), (seed, step, request)
                if answer.code == "have" and request.mode in ("start", "take"):
                    adopt(owner, answer.lineage, answer.tokens)
                elif answer.code == "have" and request.mode == "restart":
                    owner.lineage, owner.tokens = answer.lineage, []
            elif act < 0.68:
                append = appending(owner, rng)
                (appended,) = await bus.append([append])
                assert appended == model.append(append), (seed, step, append)
                if appended.code in ("gone", "reopen") and rng.random() < 0.7:
                    request = owner.opening("mine", rng)
                    assert [model.open(request)] == await bus.open([request]), (seed, step, request)
            elif act < 0.88:
                position = rng.choice(positions)
                view = await bus.read("j", position)
                assert view == model.read(position), (seed, step, position)
                if view.status in ("open", "fin") and (count := view.start + len(view.tokens)):
                    shown = rng.randint(1, count)
                    epoch = [epoch for epoch, start in parse(view.lineage) if start < shown][-1]
                    positions.append(Position(view.root, epoch, shown))
            elif act < 0.90:
                await bus.cancel("j")
                model.cancel()
            elif act < 0.94:
                offset += rng.choice([0, 1])
                write = StateWrite(
                    job_id="j",
                    offset=offset,
                    state=b"s%d" % offset,
                    crashes=rng.choice([0, 2]),
                    cancelled=rng.random() < 0.1,
                    terminal="0/7" if rng.random() < 0.15 else "",
                )
                await bus.put_states([write])
                model.put_state(write)
                await bus.note_queued([("j", b"queued")])
                model.note_queued(b"queued")
                assert await bus.states(["j"]) == [model.job.state]
            elif act < 0.98:
                what = rng.choice(["stream", "tokens", "tail", "tail", "all"])
                await forget("j", what)
                model.forget(what)
            else:
                finish = finishing(owner, len(owner.tokens))
                (finished,) = await bus.finish([finish])
                assert finished == model.finish(finish), (seed, step, finish)
                if finished.code == "need":
                    finish = finishing(owner, rng.randint(0, finished.base))  # also more than what is needed
                    assert [model.finish(finish)] == await bus.finish([finish]), (seed, step, finish)
        async with asyncio.timeout(20):
            published = [await subscription.message() for _ in model.messages]
    assert published == model.messages, seed


@pytest.mark.parametrize("seed", range(8))
async def test_the_bus_reckons_as_lineages_do(bus: TokenBus, seed: int) -> None:
    """Redis has an arithmetic of lineages of its own: what `finish` needs and where `read` starts tell of it."""
    rng = random.Random(seed)

    def lineage() -> str:
        names = rng.sample([f"1.{number}" for number in range(1, 6)], rng.randint(1, 4))
        return text(list(zip(names, [0, *sorted(rng.choices(range(10), k=len(names) - 1))], strict=True)))

    held, count = lineage(), rng.randint(0, 12)
    opening = OpenRequest(
        job_id="j", root="r", attempt=1, fence=9, epoch="1.9", mode="start", lineage=held, tokens=["1|x"] * count
    )
    await bus.open([opening])
    for _ in range(40):
        other, others = lineage(), rng.randint(0, 14)
        finish = FinishRequest(job_id="j", root="r", lineage=other, count=others, end="{}", base=1_000)
        (finished,) = await bus.finish([finish])
        assert finished.base == lineages.common(held, count, other, others), (held, count, other, others)
        position = Position(rng.choice(["r", "r", "s"]), f"1.{rng.randint(1, 5)}", rng.randint(0, 14))
        view = await bus.read("j", position)
        if view.status == "open":
            assert view.start == lineages.kept(held, "r", position.root, position.epoch, position.count), position
