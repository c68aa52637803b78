"""How partitions are dealt to members."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from arriero.transports.embedded.groups import balance

MEMBERS = st.lists(st.sampled_from("abcdefg"), min_size=1, unique=True)


@given(st.integers(0, 40), MEMBERS, st.dictionaries(st.integers(0, 40), st.sampled_from("abcdefgxyz")))
def test_shares_are_equal_give_or_take_one(partitions: int, members: list[str], holders: dict[int, str]) -> None:
    dealt = balance(partitions, members, holders)
    assert sorted(dealt) == list(range(partitions))
    counts = Counter(dict.fromkeys(members, 0))
    counts.update(dealt.values())
    assert set(counts) == set(members)
    assert max(counts.values()) - min(counts.values()) <= 1


@given(st.integers(0, 40), MEMBERS)
def test_dealing_again_moves_nothing(partitions: int, members: list[str]) -> None:
    dealt = balance(partitions, members, {})
    assert balance(partitions, members, dealt) == dealt


@given(st.integers(1, 40), MEMBERS)
def test_a_member_that_joins_only_takes(partitions: int, members: list[str]) -> None:
    before = balance(partitions, members, {})
    after = balance(partitions, [*members, "z"], before)
    assert all(after[number] in (before[number], "z") for number in range(partitions))


@given(st.integers(1, 40), MEMBERS)
def test_what_a_leaving_member_held_is_all_that_moves(partitions: int, members: list[str]) -> None:
    before = balance(partitions, [*members, "z"], {})
    after = balance(partitions, members, before)
    assert all(after[number] == before[number] for number in range(partitions) if before[number] != "z")


def test_nobody_gets_nothing() -> None:
    assert balance(4, [], {0: "a"}) == {}
