"""What Progressed events tell of a generation."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from arriero.schemas.event import Origin, Progressed
from arriero.schemas.token import Token
from arriero.transports.lineage import extended
from arriero.workers.checkpoints import Checkpoint


def progressed(lineage: str, first: int, tokens: list[Token]) -> Progressed:
    return Progressed(
        id="a",
        time_ms=1,
        attempt=1,
        root="t/0/1",
        origin=Origin("t", 0, 1, 1),
        worker="w",
        fence=1,
        lineage=lineage,
        first=first,
        tokens=tokens,
        digests="m",
    )


def texts(count: int, letter: str) -> list[Token]:
    return [Token(number, f"{letter}{number}") for number in range(count)]


def test_checkpoints_add_up() -> None:
    tokens = texts(10, "a")
    checkpoint = Checkpoint()
    for first, stop in ((0, 3), (3, 4), (4, 10)):
        checkpoint.add(progressed("1.5@0", first, tokens[first:stop]))
    assert (checkpoint.tokens, checkpoint.lineage, checkpoint.digests) == (tokens, "1.5@0", "m")


def test_a_checkpoint_that_is_missing_leaves_what_is_certain() -> None:
    tokens = texts(10, "a")
    checkpoint = Checkpoint()
    checkpoint.add(progressed("1.5@0", 0, tokens[:3]))
    checkpoint.add(progressed("1.5@0", 6, tokens[6:]))
    assert checkpoint.tokens == tokens[:3]


def test_the_first_of_another_owner_replaces_what_it_decoded_anew() -> None:
    checkpoint = Checkpoint()
    checkpoint.add(progressed("1.5@0", 0, texts(8, "a")))
    checkpoint.add(progressed("1.5@0,1.6@2", 2, texts(3, "b")))
    assert [token.piece for token in checkpoint.tokens] == ["a0", "a1", "b0", "b1", "b2"]


def test_tokens_before_a_gap_of_another_text_do_not_count() -> None:
    checkpoint = Checkpoint()
    checkpoint.add(progressed("1.5@0", 0, texts(8, "a")))
    checkpoint.add(progressed("1.5@0,1.6@2", 5, texts(3, "b")))
    assert [token.piece for token in checkpoint.tokens] == ["a0", "a1"]


@given(seed=st.integers(0, 2**32), owners=st.integers(1, 5))
def test_what_is_remembered_is_always_a_prefix_of_the_last_owners_text(seed: int, owners: int) -> None:
    """Owners go on from anywhere in what there was, checkpoint at random, and lose some of it."""
    rng = random.Random(seed)
    checkpoint = Checkpoint()
    tokens: list[Token] = []
    lineage = ""
    for fence in range(1, owners + 1):
        kept = rng.randint(0, len(tokens))
        lineage, tokens = extended(lineage, f"1.{fence}", kept), tokens[:kept]
        recorded = rng.choice([0, kept])
        for _ in range(rng.randint(0, 4)):
            tokens = tokens + [Token(len(tokens) + i, f"{fence}") for i in range(rng.randint(1, 3))]
            if rng.random() < 0.7:
                lost = rng.random() < 0.1
                checkpoint.add(progressed(lineage, recorded, [] if lost else tokens[recorded:]))
                recorded = len(tokens)
                assert checkpoint.lineage == lineage
                assert checkpoint.tokens == tokens[: len(checkpoint.tokens)]


def test_with_nothing_lost_all_is_remembered() -> None:
    checkpoint = Checkpoint()
    checkpoint.add(progressed("1.5@0", 0, texts(2, "a")))
    checkpoint.add(progressed("1.5@0,2.7@2", 2, texts(2, "b")))
    assert [token.piece for token in checkpoint.tokens] == ["a0", "a1", "b0", "b1"]
