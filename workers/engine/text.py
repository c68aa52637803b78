"""From token bytes to text: characters that tokens split, and stop strings that tokens split.

Every token yields exactly one piece, which may be empty: bytes of half a character wait for the other half, and
text in which a stop string may have begun waits until it is clear. Pieces and tail together are the decoded
text, cut before the stop string that is complete first (of several complete with the same character, before
the longest), wherever the borders of the tokens lie.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

_decoder = codecs.getincrementaldecoder("utf-8")


class SequenceText:
    """The text of one sequence. `stopped` once a stop string was complete; then nothing more may be pushed."""

    __slots__ = ("_decoder", "_held", "_matchers", "stopped")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = _decoder("replace")
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""
        self.stopped = False

    def push(self, data: bytes) -> str:
        """The piece of a token with these bytes."""
        text = self._decoder.decode(data)
        if not self._matchers:
            return text
        return self._match(text)

    def replay(self, tokens: Iterable[bytes]) -> list[str]:
        """Take in tokens that were decoded before; their pieces, up to the end of a stop string."""
        pieces: list[str] = []
        for data in tokens:
            if self.stopped:
                break
            pieces.append(self.push(data))
        return pieces

    def tail(self) -> str:
        """What is still held back: half a character shows as U+FFFD, a stop string's beginning as it is."""
        if self.stopped:
            return ""
        pending: bytes = self._decoder.getstate()[0]
        tail = self._held + pending.decode("utf-8", "replace")
        found = [(start + len(one.stop), start) for one in self._matchers if (start := tail.find(one.stop)) >= 0]
        return tail[: min(found)[1]] if found else tail

    def _match(self, text: str) -> str:
        """Move all stop strings on over `text`; what none of them may still claim is released."""
        matchers = self._matchers
        for index, character in enumerate(text):
            longest = 0
            for matcher in matchers:
                if matcher.advance(character) and len(matcher.stop) > longest:
                    longest = len(matcher.stop)
            if longest:
                whole = self._held + text[: index + 1]
                self._held = ""
                self.stopped = True
                return whole[: len(whole) - longest]
        whole = self._held + text
        keep = max(matcher.state for matcher in matchers)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]


class _Matcher:
    """One stop string followed over a text (Knuth, Morris and Pratt, 1977): `state` is the length of the
    longest prefix of it that the text so far ends with."""

    __slots__ = ("_fallback", "state", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._fallback = [0] * len(stop)
        """At i: the longest proper prefix that `stop[:i + 1]` also ends with."""
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._fallback[length - 1]
            if stop[i] == stop[length]:
                length += 1
            self._fallback[i] = length

    def advance(self, character: str) -> bool:
        """Whether the stop string ends with this character."""
        stop, state = self.stop, self.state
        while state and stop[state] != character:
            state = self._fallback[state - 1]
        if stop[state] == character:
            state += 1
        self.state = state
        return state == len(stop)
