"""Grammars: output that has a form, as GBNF or as a JSON schema, at next to no cost for the tokens that fit it anyway.

The pick is made as ever and only then looked up in the grammar. Only when it does not fit are others looked at, the
likeliest first, and rarely the whole vocabulary. llama.cpp ends the process on a token that its grammar does not
expect, and on a grammar nested too deeply: both are refused here first.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
from typing import Any, Final

import llama_cpp.llama_cpp as llama
import numpy as np
from llama_cpp.llama_grammar import json_schema_to_gbnf

from arriero.schemas.errors import BadJob
from arriero.schemas.job import Sampling

GRAMMAR_MAX_CHARS: Final = 256 << 10
DEPTH_MAX: Final = 1_000
"""Of parentheses, and so of a string's longest length in a JSON schema. llama.cpp's parser recurses."""
REPEAT_MAX: Final = 1_000
EXPANDED_MAX: Final = 200_000
"""Characters that a grammar has once its repetitions are written out, as llama.cpp does."""
_ITEM: Final = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_PARTS: Final = re.compile(
    r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|(?P<open>\()|(?P<close>\))'
    r"|\{(?P<low>\d*),?(?P<high>\d*)\}",
    re.DOTALL,
)
_CHARACTER: Final = r'char ::= [^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})'


def grammar_of(sampling: Sampling) -> str:
    """The GBNF that the output must follow; empty for none. Raises BadJob(bad_grammar)."""
    if sampling.json_schema is not None:
        return _from_schema(json.dumps(sampling.json_schema))
    if sampling.grammar is not None:
        _check(sampling.grammar)
        return sampling.grammar
    return ""


@functools.lru_cache(maxsize=64)
def _from_schema(schema: str) -> str:
    try:
        text = str(json_schema_to_gbnf(schema))
    except RecursionError as error:
        raise BadJob(
            "the JSON schema is nested too deeply", code="bad_grammar", field="sampling.json_schema"
        ) from error
    except Exception as error:
        what = f"the JSON schema cannot be followed: {str(error)[:300]}"
        raise BadJob(what, code="bad_grammar", field="sampling.json_schema") from error
    # The converter lets control characters through, which JSON wants escaped.
    text = re.sub(r"^char ::= .*$", lambda _: _CHARACTER, text, flags=re.MULTILINE)
    _check(text)
    return text


def _check(text: str) -> None:
    def refuse(what: str) -> BadJob:
        return BadJob(f"the grammar {what}", code="bad_grammar", field="sampling.grammar")

    if not text.strip():
        raise refuse("is empty")
    if len(text) > GRAMMAR_MAX_CHARS or "\0" in text:
        raise refuse(f"must be at most {GRAMMAR_MAX_CHARS:,} characters long, none of them NUL")
    # Written out, a repeated part counts as often as it may come: `spans` are the lengths of the open parentheses.
    spans = [0]
    last = at = 0
    for part in _PARTS.finditer(text):
        spans[-1] += part.start() - at
        at = part.end()
        if part["open"]:
            spans.append(0)
            if len(spans) > DEPTH_MAX:
                raise refuse(f"is nested more than {DEPTH_MAX:,} deep")
        elif part["close"]:
            if len(spans) == 1:
                raise refuse("closes a parenthesis that is not open")
            last = spans.pop()
            spans[-1] += last
        elif part["low"] is not None:
            times = max((int(digits[:9]) for digits in (part["low"], part["high"]) if digits), default=0)
            if times > REPEAT_MAX:
                raise refuse(f"repeats something more than {REPEAT_MAX:,} times")
            spans[-1] += max(last, 1) * times
        else:
            last = at - part.start()
            spans[-1] += last
    if sum(spans) + len(text) - at > EXPANDED_MAX:
        raise refuse("is too large once its repetitions are written out")


class Grammar:
    """How far one sequence has come in its grammar. To be freed."""

    def __init__(self, vocab: Any, text: str) -> None:
        """Raises BadJob(bad_grammar)."""
        self._sampler = llama.llama_sampler_init_grammar(vocab, text.encode(), b"root")
        if not self._sampler:
            what = "the grammar cannot be read: it needs a rule `root`, rules for all names, and no left recursion"
            raise BadJob(what, code="bad_grammar", field="sampling.grammar")

    def allowed(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which of the tokens may come next."""
        items = np.zeros(len(ids), _ITEM)
        items["id"] = ids
        array = llama.llama_token_data_array(
            data=ctypes.cast(items.ctypes.data, llama.llama_token_data_p), size=len(ids), selected=-1, sorted=False
        )
        llama.llama_sampler_apply(self._sampler, ctypes.byref(array))
        fits: np.ndarray[Any, np.dtype[np.bool_]] = np.isfinite(items["logit"])
        return fits

    def allows(self, token: int) -> bool:
        return bool(self.allowed(np.array([token]))[0])

    def accept(self, token: int) -> None:
        """Go on by a token that `allows` it."""
        llama.llama_sampler_accept(self._sampler, token)

    def free(self) -> None:
        if self._sampler:
            llama.llama_sampler_free(self._sampler)
            self._sampler = None
