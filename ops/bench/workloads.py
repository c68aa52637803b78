"""The workloads of `arriero bench engine --against`: who asks for how much, when, with what before it.

Pure data. Prompts are made of sentences that a seed puts together, tokenised by the model and cut to the exact length,
so that both sides get the same token ids.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import msgspec

from arriero.schemas.errors import SetupError
from arriero.schemas.job import PriorityClass, Sampling

GREEDY: Final = Sampling(temperature=0.0)
SAMPLED: Final = Sampling(temperature=0.8, top_k=40, top_p=0.95)
SYSTEM_TOKENS: Final = 512
STARTED_TOKENS: Final = 8
"""A background job that has streamed so many tokens runs: what is to meet a full batch waits for that."""
CELLS: Final = 256
"""llama.cpp pads a context to a multiple of this."""
RATE: Final = 4.0
"""Jobs a second of the Poisson arrivals: more than a small machine can do, or both sides would be as fast as these."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One job."""

    own_tokens: int
    max_tokens: int
    system: int | None = None
    """Which of the system prompts comes before its own tokens."""
    at_s: float = 0.0
    """When it is sent, after the beginning or after what it waits for."""
    after_streams: int = 0
    """It waits until so many background jobs run."""
    background: bool = False
    """There to be disturbed: the run is over without it."""
    priority: PriorityClass = "standard"

    @property
    def prompt_tokens(self) -> int:
        return self.own_tokens + (0 if self.system is None else SYSTEM_TOKENS)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    about: str
    asks: tuple[Ask, ...]
    sampling: Sampling = GREEDY
    slots: int = 16
    in_flight: int | None = None
    """Jobs that the client has sent and not got back, at most."""
    measures: tuple[str, ...] = ("tokens_per_s",)
    """Fields of `Measured` that the table shows."""
    limit: bool = False
    """All jobs are alike and begin together, so llama-batched-bench can do the same."""

    def n_ctx(self, slots: int) -> int:
        """The KV cells that give every slot room for the longest job: a server divides them among its slots."""
        longest = max(ask.prompt_tokens + ask.max_tokens for ask in self.asks)
        return slots * -(-longest // CELLS) * CELLS


def _mixed(jobs: int) -> tuple[Ask, ...]:
    """Lengths spread evenly over their orders of magnitude, as those of users are; Poisson arrivals."""
    rng = random.Random(4)
    asks, at_s = [], 0.0
    for _ in range(jobs):
        at_s += rng.expovariate(RATE)
        own, longest = round(16 * 64 ** rng.random()), round(8 * 32 ** rng.random())
        asks.append(Ask(own_tokens=own, max_tokens=longest, at_s=at_s))
    return tuple(asks)


def _systems(jobs: int, systems: int) -> tuple[Ask, ...]:
    order = [number % systems for number in range(jobs)]
    random.Random(3).shuffle(order)
    return tuple(Ask(system=system, own_tokens=32, max_tokens=64) for system in order)


_ALIKE: Final = (Ask(own_tokens=128, max_tokens=64),) * 16
_RUNNING: Final = (Ask(own_tokens=128, max_tokens=512, background=True),) * 8
_JOINING: Final = Ask(own_tokens=2_048, max_tokens=32, after_streams=8)
_BATCH: Final = (Ask(own_tokens=128, max_tokens=128, background=True, priority="batch"),) * 48
_URGENT: Final = tuple(
    Ask(own_tokens=64, max_tokens=16, after_streams=16, at_s=float(number), priority="interactive")
    for number in range(12)
)

WORKLOADS: Final = (
    Workload(name="a", about="16 at once, 128 tokens in, 64 out, greedy", asks=_ALIKE, limit=True),
    Workload(
        name="b", about="the same at temperature 0.8, top-k 40, top-p 0.95", asks=_ALIKE, sampling=SAMPLED, limit=True
    ),
    Workload(
        name="c",
        about="32 at once behind one system prompt of 512 tokens, 32 of their own, 64 out; cold cache",
        asks=_systems(32, 1),
        slots=32,
        measures=("tokens_per_s", "ttft_p50_s"),
    ),
    Workload(
        name="c2",
        about="128 behind 4 such system prompts in random order, 16 at a time",
        asks=_systems(128, 4),
        in_flight=16,
    ),
    Workload(name="d", about="16 to 1,024 tokens in, 8 to 256 out, Poisson arrivals", asks=_mixed(48)),
    Workload(
        name="e",
        about="a prompt of 2,048 tokens joins 8 running streams",
        asks=(*_RUNNING, _JOINING),
        measures=("gap_worst_s", "gap_p50_s"),
    ),
    Workload(
        name="h",
        about="interactive jobs arrive in a full batch class",
        asks=(*_BATCH, *_URGENT),
        measures=("ttft_p50_s", "ttft_p95_s"),
    ),
)
LATER: Final = {"f": "speculation", "g": "output by a JSON schema"}
"""Workloads that are named and cannot run yet, and what the engine lacks for them."""


def named(names: str) -> tuple[Workload, ...]:
    """Those of a list with commas between them. Raises SetupError(bad_setting)."""
    known = {workload.name: workload for workload in WORKLOADS}
    chosen = []
    for name in (part.strip() for part in names.split(",")):
        if name in LATER:
            raise SetupError(f"workload {name} needs {LATER[name]}, which the engine does not have", code="bad_setting")
        if name not in known:
            raise SetupError(f"there is no workload {name}; there are {', '.join(known)}", code="bad_setting")
        chosen.append(known[name])
    return tuple(chosen)


# --- prompts -----------------------------------------------------------------------------------------------

_WHO: Final = "the miller,a young clerk,her sister,the old ferryman,our teacher,a stranger,the captain".split(",")
_DOES: Final = "carried,sold,described,found,repaired,remembered,counted,refused".split(",")
_WHAT: Final = "a chest,seven letters,the broken clock,some bread,a map of the coast,two mules,the key".split(",")
_WHERE: Final = "by the river,after the storm,in the market,before winter,on the bridge,without a word".split(",")


def texts(workload: Workload) -> list[str]:
    """What is to be tokenised for `prompts`: its system prompts, then what each job brings of its own."""
    made = [_text(f"system {number}", SYSTEM_TOKENS) for number in _system_numbers(workload)]
    return made + [_text(f"own {number}", ask.own_tokens) for number, ask in enumerate(workload.asks)]


def prompts(workload: Workload, tokenised: Sequence[list[int]]) -> list[list[int]]:
    """The token ids of every job's prompt, in the order of the jobs; `tokenised` are those of its texts."""
    numbers = _system_numbers(workload)
    heads = {number: _first(tokenised[place], SYSTEM_TOKENS) for place, number in enumerate(numbers)}
    made = []
    for ask, own in zip(workload.asks, tokenised[len(numbers) :], strict=True):
        if ask.system is None:
            made.append(_first(own, ask.own_tokens))
        else:  # the last ones: a token that begins a text stands before the system prompt already
            made.append([*heads[ask.system], *own[-ask.own_tokens :]])
    return made


def _system_numbers(workload: Workload) -> list[int]:
    return sorted({ask.system for ask in workload.asks if ask.system is not None})


def _first(ids: list[int], count: int) -> list[int]:
    assert len(ids) >= count, f"a text of {len(ids)} tokens is too short for {count}"
    return ids[:count]


def _text(seed: str, tokens: int) -> str:
    """Sentences that differ from their first word on; at least 5 tokens each, whatever the vocabulary."""
    rng = random.Random(seed)
    sentences = []
    for _ in range(tokens // 5 + 8):
        who, does, what, where = (rng.choice(words) for words in (_WHO, _DOES, _WHAT, _WHERE))
        sentences.append(f"{who.capitalize()} {does} {what} {where}.")
    return " ".join(sentences)
