"""Pieces and tail: characters and stop strings across token borders."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from arriero.workers.engine.text import SequenceText


def generate(tokens: list[bytes], stops: list[str]) -> tuple[list[str], str, bool]:
    text = SequenceText(stops)
    pieces = []
    for token in tokens:
        pieces.append(text.push(token))
        if text.stopped:
            break
    return pieces, text.tail(), text.stopped


def cut(text: str, stops: list[str]) -> str:
    """The plain reading of the rule, one character after the other."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))]
    return text


alphabet = st.sampled_from(["a", "b", "ab", "é", "日", "🫏", "�"])
texts = st.lists(alphabet, max_size=12).map("".join)
stops = st.lists(st.lists(alphabet, min_size=1, max_size=4).map("".join), max_size=4)
raw = st.one_of(
    st.binary(max_size=40),
    texts.map(str.encode),
    st.lists(st.sampled_from([b"a", b"b", b"\xf0", b"\x9f", b"\xab", b"\x8f", b"\xc3", b"\xa9", b"\xff"])).map(
        b"".join
    ),
)


@given(raw, st.lists(st.integers(0, 40), max_size=12), stops)
@example(b"abc\xf0\x9f", [1, 2, 4], ["\ufffd"])
@example(b"aab", [1, 2], ["aab", "ab"])
def test_pieces_and_tail_are_the_decoded_text_up_to_the_first_stop(
    data: bytes, borders: list[int], stop_strings: list[str]
) -> None:
    edges = sorted({0, len(data), *(border for border in borders if border < len(data))})
    tokens = [data[start:end] for start, end in pairwise(edges)]
    pieces, tail, stopped = generate(tokens, stop_strings)
    whole = data.decode("utf-8", "replace")
    assert "".join(pieces) + tail == cut(whole, stop_strings)
    if stopped:
        assert tail == ""
    else:
        assert len(pieces) == len(tokens)


@given(texts, stops)
def test_the_borders_of_tokens_do_not_matter(text: str, stop_strings: list[str]) -> None:
    data = text.encode()
    one = generate([data], stop_strings)
    many = generate([data[i : i + 1] for i in range(len(data))], stop_strings)
    assert "".join(one[0]) + one[1] == "".join(many[0]) + many[1]


@given(texts, st.integers(0, 12), stops)
def test_a_replayed_start_leaves_the_same_text_to_come(text: str, count: int, stop_strings: list[str]) -> None:
    tokens = [text.encode()[i : i + 1] for i in range(len(text.encode()))]
    whole, again = SequenceText(stop_strings), SequenceText(stop_strings)
    for token in tokens[:count]:
        if not whole.stopped:
            whole.push(token)
    again.replay(tokens[:count])
    assert (again.stopped, again.tail()) == (whole.stopped, whole.tail())


def test_text_without_stop_strings_is_not_held_back() -> None:
    assert generate([b"Hel", b"lo"], []) == (["Hel", "lo"], "", False)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    assert generate([b"see E", b"NE", b" E"], ["END"]) == (["see ", "EN", "E "], "E", False)


def test_half_a_character_shows_in_the_tail() -> None:
    assert generate([b"a\xf0\x9f"], []) == (["a"], "\ufffd", False)


@pytest.mark.parametrize("stop", ["\n\n", "###"])
def test_the_stop_string_itself_is_not_shown(stop: str) -> None:
    pieces, tail, stopped = generate([b"x", stop[:1].encode(), stop[1:].encode() + b"y"], [stop])
    assert ("".join(pieces), tail, stopped) == ("x", "", True)
