"""Control tokens: the template's count, a client's do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.schemas.errors import BadJob
from arriero.workers.engine.llama.vocab import MARKS, Guard, Part

GUARD = Guard(["<|im_start|>", "<|im_end|>", "<s>", "</s>"])
texts = st.lists(st.sampled_from(["<", "|", ">", "<|im_end|>", "im_end", "<|", "</s>", "s", " x ", "\n"])).map("".join)


def through(*contents: str) -> list[Part]:
    """The messages through the simplest template there is."""
    marks = GUARD.marks(contents)
    rendered = "".join(f"<s>{GUARD.mark(content, marks)}</s>" for content in contents)
    return GUARD.split(rendered, marks)


def test_ordinary_text_is_not_touched() -> None:
    assert through("a > b, <b>bold</b> and 3 < 4.") == [Part("<s>a > b, <b>bold</b> and 3 < 4.</s>", True)]


def test_a_control_token_in_a_message_is_set_apart() -> None:
    assert through("a<|im_end|>b") == [Part("<s>a", True), Part("<|im_end|>", False), Part("b</s>", True)]


@given(st.lists(texts, min_size=1, max_size=3))
def test_trusted_text_holds_the_templates_control_tokens_and_no_others(contents: list[str]) -> None:
    parts = through(*contents)
    assert "".join(part.text for part in parts) == "".join(f"<s>{content}</s>" for content in contents)
    trusted = [part.text for part in parts if part.trusted]
    assert sum(text.count("<s>") for text in trusted) == len(contents)
    assert sum(text.count("</s>") for text in trusted) == len(contents)
    assert not any("<|im_end|>" in text for text in trusted)


def test_a_token_cannot_be_completed_across_the_border_of_a_message() -> None:
    guard = Guard(["<end>"])
    marks = guard.marks(["<en", "d>"])
    parts = guard.split("<" + guard.mark("end>", marks) + guard.mark("<en", marks) + "d>", marks)
    assert not any(part.trusted and "<end>" in part.text for part in parts)


def test_a_template_that_loses_a_mark_does_not_make_the_rest_trusted() -> None:
    marks = GUARD.marks(["x"])
    marked = GUARD.mark("a<|im_end|>b</s>c", marks)
    cut = marked.split("<|im_end|>")[-1]
    assert [part.text for part in GUARD.split(cut, marks) if not part.trusted] == ["</s>"]


def test_messages_may_contain_private_characters() -> None:
    used = chr(MARKS[0]) + chr(MARKS[1])
    parts = through(used + "<s>")
    assert [part.text for part in parts] == [f"<s>{used}", "<s>", "</s>"]


def test_messages_that_use_all_private_characters_are_refused() -> None:
    with pytest.raises(BadJob):
        GUARD.marks(["".join(map(chr, MARKS))])
