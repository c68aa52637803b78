"""Tokens, and the messages that carry them to readers.

A stream's text is the concatenation of its pieces, then the result's `tail`. A piece may be empty: half a
character, or text held back because a stop string may have begun in it.

On the token bus a token is one string, `<id>|<piece>`: cheap to build in a script, and readable with
nothing but a Redis client. In events it is the array `[id, piece]`.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Token(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One decoded token."""

    id: int
    piece: str

    def on_bus(self) -> str:
        return f"{self.id}|{self.piece}"

    @staticmethod
    def from_bus(element: str) -> Token:
        token_id, _, piece = element.partition("|")
        return Token(int(token_id), piece)


FinishReason = Literal["stop", "length"]


class Frame(msgspec.Struct, frozen=True, tag="frame", tag_field="type"):
    """New tokens of one stream, published in the moment in which they were stored.

    `first` is the index of the first of them, counted from 0; `epoch` is who decoded them.
    """

    root: str
    epoch: str
    first: int
    tokens: list[str]


class End(msgspec.Struct, frozen=True, tag="end", tag_field="type"):
    """The stream is complete and its result recorded. `end` is an encoded `StreamEnd`."""

    root: str
    lineage: str
    count: int
    end: str


class Look(msgspec.Struct, frozen=True, tag="look", tag_field="type"):
    """Something other than a plain append happened: read the stream instead of guessing."""


Message = Frame | End | Look


class StreamEnd(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a stream ended, as its last word to the reader: the recorded outcome without the tokens.

    `count` tokens precede it; `tail` is text still held back at the end, shown only now.
    """

    status: str
    count: int = 0
    tail: str = ""
    finish_reason: FinishReason | None = None
    code: str | None = None
    error: str | None = None
