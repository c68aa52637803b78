"""Guessing: what is looked up, and when it pays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from arriero.workers.speculate import KNOWN_STEPS, REGRET, Balance, Lookup


def test_what_followed_last_time_is_guessed() -> None:
    tokens = [1, 2, 3, 4, 5, 9, 1, 2, 3]
    assert Lookup(tokens).guess(3) == [4, 5, 9]


def test_the_latest_and_longest_run_decides() -> None:
    tokens = [7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2]
    assert Lookup(tokens).guess(1) == [5]
    assert Lookup(tokens[3:]).guess(1) == [6]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 8))
def test_growing_finds_what_a_look_at_the_whole_finds(tokens: list[int], longest: int) -> None:
    grown: list[int] = []
    lookup = Lookup(grown)
    for token in tokens:
        grown.append(token)
        guess = lookup.guess(longest)
        assert guess == Lookup(list(grown)).guess(longest)
        assert len(guess) <= longest


def test_wrong_guesses_make_rests_and_right_ones_end_them() -> None:
    lookup = Lookup([1, 2, 1, 2])
    assert lookup.guess(2)
    lookup.learn(2, 0)
    assert [bool(lookup.guess(2)) for _ in range(3)] == [False, True, True]
    lookup.learn(2, 0)
    assert [bool(lookup.guess(2)) for _ in range(4)] == [False, False, False, True]
    lookup.learn(2, 2)
    assert lookup.guess(2)


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0.5, 3.0)), max_size=300))
def test_guessing_never_loses_more_than_its_share(steps: list[tuple[int, float]]) -> None:
    """However guesses turn out: they lose no more than the share of the time spent, and the one step that tips it."""
    balance = Balance()
    spent = won = 0.0
    for right, cost_s in steps:
        if balance.allows(1):
            balance.guessed(1, right, cost_s)
            won += 1.0 * (1 + right) - cost_s
            spent += cost_s
            if spent < 50:
                assert won >= -REGRET * spent - 2.0
        else:
            balance.plain(1, 1.0)
            spent += 1.0


def test_nothing_is_guessed_before_plain_steps_are_known() -> None:
    balance = Balance()
    for _ in range(KNOWN_STEPS):
        assert not balance.allows(2)
        balance.plain(2, 0.1)
    assert balance.allows(2)
    assert not balance.allows(1)
