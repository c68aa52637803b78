"""The vocabulary: text to tokens, tokens to bytes, and the tokens that only the model's author may write.

A control token (`<|im_end|>` and its like) steers a chat, so the text of a client must never become one. A raw
prompt is tokenised with control tokens switched off. In a rendered chat the template's own control tokens count and
those in the messages do not; the two are told apart by marks (`Guard`).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import llama_cpp.llama_cpp as llama
import msgspec

from arriero.schemas.errors import BadJob, ModelError

PIECE_START_BYTES: Final = 256
"""First guess at the longest piece; a longer one is asked for again."""
MARKS: Final = range(0x10F000, 0x10FFFE)
"""Private-use characters: two of them that a chat does not contain mark what is the client's in it."""


class Vocabulary:
    """Read once from a loaded model; afterwards plain Python but for `tokenize`, which any thread may call."""

    def __init__(self, model: Any) -> None:
        self.native = llama.llama_model_get_vocab(model)
        if not self.native:
            raise ModelError("the model has no vocabulary", code="model_unsupported")
        vocab = self.native
        self.size: int = llama.llama_vocab_n_tokens(vocab)
        if self.size <= 0:
            raise ModelError("the model has no vocabulary", code="model_unsupported")
        self.pieces = self._read_pieces()
        self.ends = frozenset(token for token in range(self.size) if llama.llama_vocab_is_eog(vocab, token))
        self.bos = self._bos()
        self.suppressed = self._suppressed()
        control = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNKNOWN
        self._control_texts = {
            text
            for token in range(self.size)
            if llama.llama_vocab_get_attr(vocab, token) & control and (text := self.text(token))
        }
        self.guard = Guard(self._control_texts)

    def text(self, token: int) -> str:
        """The token as the model file writes it; empty for -1 (none)."""
        if not 0 <= token < self.size:
            return ""
        return (llama.llama_vocab_get_text(self.native, token) or b"").decode("utf-8", "replace")

    @property
    def bos_text(self) -> str:
        return self.text(llama.llama_vocab_bos(self.native))

    @property
    def eos_text(self) -> str:
        return self.text(llama.llama_vocab_eos(self.native))

    def tokenize_prompt(self, text: str) -> list[int]:
        """A raw prompt: the beginning token where the model wants one, and no control token out of the text."""
        return [*self.bos, *self._tokenize(text, special=False)]

    def tokenize_chat(self, parts: Sequence[Part]) -> list[int]:
        """A rendered chat, taken apart by `Guard.split`."""
        tokens: list[int] = []
        for part in parts:
            tokens += self._tokenize(part.text, special=part.trusted)
        if self.bos and tokens[:1] != self.bos:
            tokens[:0] = self.bos
        return tokens

    def _tokenize(self, text: str, *, special: bool) -> list[int]:
        data = text.encode("utf-8", "replace")
        room = len(data) + 8
        buffer = (ctypes.c_int32 * room)()
        count = llama.llama_tokenize(self.native, data, len(data), buffer, room, False, special)
        if count < 0:
            room = -count
            buffer = (ctypes.c_int32 * room)()
            count = llama.llama_tokenize(self.native, data, len(data), buffer, room, False, special)
        if count < 0:
            raise BadJob("the prompt could not be tokenised", code="bad_value")
        return list(buffer[:count])

    # --- read at the start ---------------------------------------------------------------------------------

    def _read_pieces(self) -> list[bytes]:
        """The bytes of every token, by id; none for control tokens."""
        piece, vocab = llama.llama_token_to_piece, self.native
        size = PIECE_START_BYTES
        buffer = ctypes.create_string_buffer(size)
        pieces: list[bytes] = []
        for token in range(self.size):
            length = piece(vocab, token, buffer, size, 0, False)
            if length < 0:
                size = -length
                buffer = ctypes.create_string_buffer(size)
                length = piece(vocab, token, buffer, size, 0, False)
            pieces.append(buffer.raw[:length] if length > 0 else b"")
        return pieces

    def _bos(self) -> list[int]:
        token = llama.llama_vocab_bos(self.native)
        return [token] if llama.llama_vocab_get_add_bos(self.native) and 0 <= token < self.size else []

    def _suppressed(self) -> list[int]:
        count = ctypes.c_int32(0)
        tokens = llama.llama_vocab_get_suppress_tokens(self.native, ctypes.byref(count))
        if not tokens:
            return []
        return [token for token in tokens[: count.value] if 0 <= token < self.size]


class Part(msgspec.Struct, frozen=True):
    """A stretch of a rendered chat. In a trusted one control tokens count."""

    text: str
    trusted: bool


class Guard:
    """Keeps control tokens out of what clients write, without touching any other text.

    1. `mark` encloses, in a message, what reads like a control token, and an end or a beginning of the message that
       could become one together with the template's text beside it.
    2. The template renders the marked messages like any others. (A message without such text is not changed at all,
       so templates that trim, compare or cut messages see what they expect, and borders of tokens stay where the
       model's author had them.)
    3. `split` takes the result apart at the marks: what they enclose is tokenised as mere text.
    """

    def __init__(self, control_texts: Iterable[str]) -> None:
        texts = sorted(set(control_texts), key=lambda text: (-len(text), text))
        self._whole = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._starts = {text[:i] for text in texts for i in range(1, len(text))}
        self._ends = {text[i:] for text in texts for i in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def marks(self, texts: Sequence[str]) -> tuple[str, str]:
        """Two characters that none of the texts contains."""
        present = set().union(*texts)
        free = (chr(code) for code in MARKS if chr(code) not in present)
        opening, closing = next(free, ""), next(free, "")
        if not closing:
            raise BadJob("the messages use up the private characters that are needed to read them safely")
        return opening, closing

    def mark(self, text: str, marks: tuple[str, str]) -> str:
        if self._whole is None:
            return text
        spans = [found.span() for found in self._whole.finditer(text)]
        spans += self._loose_ends(text)
        if not spans:
            return text
        opening, closing = marks
        parts: list[str] = []
        at = 0
        for start, end in _merged(spans):
            parts += (text[at:start], opening, text[start:end], closing)
            at = end
        return "".join((*parts, text[at:]))

    def split(self, rendered: str, marks: tuple[str, str]) -> list[Part]:
        """The rendered chat as stretches; a template may have lost one of two marks, so each speaks for itself."""
        opening, closing = marks
        if opening not in rendered and closing not in rendered:
            return [Part(rendered, True)]
        parts: list[Part] = []
        trusted = True
        for piece in re.split(f"([{opening}{closing}])", rendered):
            if piece in marks:
                trusted = piece == closing
            elif piece:
                parts.append(Part(piece, trusted))
        return parts

    def _loose_ends(self, text: str) -> list[tuple[int, int]]:
        """Where the text begins or ends with part of a control token."""
        spans = []
        reach = min(self._longest - 1, len(text))
        head = next((i for i in range(reach, 0, -1) if text[:i] in self._ends), 0)
        tail = next((i for i in range(reach, 0, -1) if text[-i:] in self._starts), 0)
        if head:
            spans.append((0, head))
        if tail:
            spans.append((len(text) - tail, len(text)))
        return spans


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
