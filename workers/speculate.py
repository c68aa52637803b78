"""Speculation by prompt lookup: guess that what followed these words before follows them again (Saxena, 2023).

A guess costs a wider step, and wins a step for each token that was right. The pick of each token is a function of its
logits, the seed and its index, so a right guess is simply one that equals the pick: the output is what it would have
been. When to guess is decided by what it has brought: a balance of time won and lost, which may fall no lower than a
small share of all time spent.
"""

from __future__ import annotations

from typing import Final

FEW_SEQUENCES: Final = 4
"""Beyond them a step is wide enough to keep the machine busy, and guesses only cost."""
GRAMS: Final = (4, 3, 2)
"""Lengths of the runs looked up, longest first."""
FIRST_TOKENS: Final = 4
REGRET: Final = 0.02
"""Most of the time that guessing may lose over not guessing."""
REST_MAX_STEPS: Final = 64
KNOWN_STEPS: Final = 3
"""Plain steps whose time has to be known before a guess can be judged."""
WINDOW_S: Final = 60.0
"""How far back the balance looks: what was won long ago pays for nothing."""


class Lookup:
    """The runs of one sequence's tokens, and what followed each when it came last."""

    __slots__ = ("_after", "_seen", "_tokens", "length", "rest", "skipped")

    def __init__(self, tokens: list[int]) -> None:
        """`tokens` is read as it grows."""
        self._tokens = tokens
        self._seen = 0
        self._after: dict[tuple[int, ...], int] = {}
        self.length = FIRST_TOKENS
        """How far the next guess goes."""
        self.rest = 0
        """Steps without a guess after one that was wrong at once; doubled each time."""
        self.skipped = 0

    def guess(self, longest: int) -> list[int]:
        """What may come next; often nothing."""
        tokens, after = self._tokens, self._after
        for place in range(self._seen, len(tokens)):
            for size in GRAMS:
                if place >= size:
                    after[tuple(tokens[place - size : place])] = place
        self._seen = len(tokens)
        longest = min(longest, self.length)
        if longest < 1:
            return []
        for size in GRAMS:
            found = after.get(tuple(tokens[-size:]))
            if found is not None:
                if self.skipped < self.rest:
                    self.skipped += 1
                    return []
                return tokens[found : found + longest]
        return []

    def learn(self, guessed: int, right: int) -> None:
        """Go further after a guess that was right to its end; rest after one that was wrong at once."""
        self.skipped = 0
        if right == guessed:
            self.length, self.rest = max(self.length, 2 * guessed), 0
        elif right:
            self.length, self.rest = right + 1, 0
        else:
            self.length = max(1, self.length // 2)
            self.rest = min(REST_MAX_STEPS, 2 * self.rest + 1)


class Balance:
    """What guessing has won or lost, in seconds, over the last minute or so."""

    def __init__(self) -> None:
        self._plain: dict[int, tuple[int, float]] = {}
        """By the number of sequences: how many plain steps, and the mean time of the last ones."""
        self._won_s = 0.0
        self._spent_s = 0.0

    def allows(self, sequences: int) -> bool:
        known, _ = self._plain.get(sequences, (0, 0.0))
        return known >= KNOWN_STEPS and self._won_s >= -REGRET * self._spent_s

    def plain(self, sequences: int, took_s: float) -> None:
        """A step that only decoded, without guesses."""
        known, mean = self._plain.get(sequences, (0, took_s))
        self._plain[sequences] = known + 1, mean + (took_s - mean) / min(known + 1, 8)
        self._spend(took_s)

    def guessed(self, sequences: int, right: int, took_s: float) -> None:
        """One with guesses, of which `right` tokens were. A token more is worth its share of a plain step."""
        _, mean = self._plain[sequences]
        self._won_s += mean * (1 + right / sequences) - took_s
        self._spend(took_s)

    def _spend(self, took_s: float) -> None:
        self._spent_s += took_s
        if self._spent_s > WINDOW_S:
            self._spent_s /= 2
            self._won_s /= 2
