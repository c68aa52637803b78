"""Sampling: the same distributions as llama.cpp's own samplers, and draws that depend on seed and index only."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.schemas.job import Sampling
from arriero.workers.engine.llama.sampling import NotFinite, SequenceSampler, choose, draw, keep

CASES = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=1.6, top_k=40),
    Sampling(temperature=0.8, top_k=40, top_p=0.9),
    Sampling(temperature=0.8, top_p=0.95),
    Sampling(top_p=0.999),
    Sampling(temperature=1.2, min_p=0.05),
    Sampling(temperature=0.8, top_k=100, top_p=0.95, min_p=0.02),
    Sampling(top_k=1),
    Sampling(top_k=400, top_p=0.5),
    Sampling(repeat_penalty=1.3, penalty_last_n=8, top_k=20),
    Sampling(frequency_penalty=0.9, presence_penalty=0.4, penalty_last_n=16),
    Sampling(repeat_penalty=0.7, frequency_penalty=-1.0, penalty_last_n=4, top_p=0.8),
]
SIZES = [50, 1_000, 5_003]
HISTORY = [3, 7, 7, 11, 3, 3, 21, 9, 40, 41, 7, 2]


def logits_of(seed: int, size: int, spread: float = 3.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def reference(logits: np.ndarray[Any, Any], sampling: Sampling, history: list[int]) -> dict[int, float]:
    """What llama.cpp's own chain leaves of these logits, and with which likelihood."""
    entries = (llama.llama_token_data * logits.size)()
    for token, logit in enumerate(logits):
        entries[token] = llama.llama_token_data(token, float(logit), 0.0)
    array = llama.llama_token_data_array(entries, logits.size, -1, False)
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    penalties = llama.llama_sampler_init_penalties(
        logits.size,
        sampling.penalty_last_n,
        sampling.repeat_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
    )
    members = [
        penalties,
        llama.llama_sampler_init_top_k(sampling.top_k),
        llama.llama_sampler_init_top_p(sampling.top_p, 1),
        llama.llama_sampler_init_min_p(sampling.min_p, 1),
        llama.llama_sampler_init_temp(sampling.temperature),
    ]
    for member in members:
        llama.llama_sampler_chain_add(chain, member)
    for token in history:
        llama.llama_sampler_accept(chain, token)
    llama.llama_sampler_apply(chain, ctypes.byref(array))
    kept = {array.data[i].id: array.data[i].logit for i in range(array.size)}
    llama.llama_sampler_free(chain)
    top = max(kept.values())
    weights = {token: math.exp(logit - top) for token, logit in kept.items()}
    whole = sum(weights.values())
    return {token: weight / whole for token, weight in weights.items()}


def ours(logits: np.ndarray[Any, Any], sampling: Sampling, history: list[int]) -> dict[int, float]:
    values = logits.copy()
    sampler = SequenceSampler(sampling, 0, history, [])
    if sampler._counts:
        sampler._penalise(values)
    kept = keep(values, float(values.max()), sampling)
    tokens = np.arange(values.size) if kept is None else kept
    weights = np.exp((values[tokens].astype(np.float64) - float(values.max())) / sampling.temperature)
    return {int(token): float(weight) for token, weight in zip(tokens, weights / weights.sum(), strict=True)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sampling", CASES, ids=lambda one: str(one)[9:-1][:60])
def test_the_distribution_is_that_of_llama_cpps_chain(sampling: Sampling, size: int) -> None:
    for seed in range(3):
        logits = logits_of(seed, size)
        theirs, mine = reference(logits, sampling, HISTORY), ours(logits, sampling, HISTORY)
        for token in set(mine) | set(theirs):
            # llama.cpp adds up in 32 bits, so the border of a nucleus may lie a token of no weight elsewhere.
            assert mine.get(token, 0.0) == pytest.approx(theirs.get(token, 0.0), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=0.9), Sampling(temperature=0.6, top_k=30)])
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    logits = logits_of(1, 2_000, spread=2.0)
    expected = reference(logits, sampling, [])
    top = float(logits.max())
    draws = 4_000
    seen: dict[int, int] = {}
    for i in range(draws):
        token = choose(logits, top, sampling, (i + 0.5) / draws)  # evenly spread numbers: no luck involved
        seen[token] = seen.get(token, 0) + 1
    distance = sum(abs(seen.get(token, 0) / draws - share) for token, share in expected.items()) / 2
    assert set(seen) <= set(expected)
    assert distance < (0.35 if sampling.top_p == 1.0 and not sampling.top_k else 0.05)


def test_the_likeliest_tokens_come_up_as_often_as_they_should() -> None:
    logits = logits_of(5, 3_000, spread=2.5)
    expected = reference(logits, Sampling(), [])
    sampler = SequenceSampler(Sampling(), 42, [], [])
    draws = 6_000
    picks = [sampler.pick(logits) for _ in range(draws)]
    for token in sorted(expected, key=lambda one: -expected[one])[:5]:
        share = expected[token]
        assert picks.count(token) / draws == pytest.approx(share, abs=5 * math.sqrt(share / draws))


@given(st.integers(0, 2**63 - 1), st.integers(0, 100_000))
def test_a_draw_is_a_function_of_seed_and_index(seed: int, index: int) -> None:
    assert draw(seed, index) == draw(seed, index)
    assert 0.0 <= draw(seed, index) < 1.0
    assert draw(seed, index) != draw(seed, index + 1)


def test_a_resumed_sequence_draws_what_it_would_have_drawn() -> None:
    sampling = Sampling(temperature=1.0, repeat_penalty=1.2, penalty_last_n=5)
    rows = [logits_of(i, 500) for i in range(30)]
    whole = SequenceSampler(sampling, 9, [1, 2, 3], [])
    tokens = [whole.pick(row.copy()) for row in rows]
    again = SequenceSampler(sampling, 9, [1, 2, 3], tokens[:12])
    assert [again.pick(row.copy()) for row in rows[12:]] == tokens[12:]


def test_temperature_zero_takes_the_likeliest_after_penalties() -> None:
    logits = np.array([1.0, 5.0, 4.9, 0.0], np.float32)
    assert SequenceSampler(Sampling(temperature=0.0), 1, [], []).pick(logits.copy()) == 1
    penalised = Sampling(temperature=0.0, repeat_penalty=1.5)
    assert SequenceSampler(penalised, 1, [1], []).pick(logits.copy()) == 2


def test_the_window_of_the_penalties_moves_on() -> None:
    sampling = Sampling(temperature=0.0, presence_penalty=2.0, penalty_last_n=2)
    sampler = SequenceSampler(sampling, 1, [], [])
    logits = np.array([3.0, 2.5, 2.0], np.float32)
    assert [sampler.pick(logits.copy()) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numbers_that_are_not_finite_are_refused(bad: float, temperature: float) -> None:
    logits = logits_of(1, 300)
    logits[17] = bad
    with pytest.raises(NotFinite):
        SequenceSampler(Sampling(temperature=temperature), 1, [], []).pick(logits)


def test_tokens_without_any_likelihood_are_refused() -> None:
    with pytest.raises(NotFinite):
        SequenceSampler(Sampling(), 1, [], []).pick(np.full(300, -np.inf, np.float32))


@given(st.floats(0.0, 1.0, exclude_max=True), st.integers(0, 50), st.sampled_from([40, 1_100, 3_000]))
def test_a_suppressed_token_is_never_drawn(u: float, seed: int, size: int) -> None:
    logits = logits_of(seed, size)
    logits[::2] = -np.inf
    token = choose(logits, float(logits.max()), Sampling(), u)
    assert token % 2 == 1


@pytest.mark.parametrize("temperature", [1e-45, 1e-7, 1e-5, 0.01])
def test_a_tiny_temperature_is_greedy_and_quiet(temperature: float) -> None:
    logits = logits_of(2, 1_000)
    sampler = SequenceSampler(Sampling(temperature=temperature), 3, [], [])
    assert [sampler.pick(logits) for _ in range(20)] == [int(logits.argmax())] * 20


def test_of_equal_logits_top_k_keeps_the_lower_ids() -> None:
    kept = keep(np.zeros(1_000, np.float32), 0.0, Sampling(top_k=3))
    assert kept is not None
    assert kept.tolist() == [0, 1, 2]


class Odd:
    """A grammar that allows odd tokens only."""

    def __init__(self) -> None:
        self.asked = 0

    def allowed(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        self.asked = max(self.asked, len(ids))
        return np.asarray(ids % 2 == 1)

    def allows(self, token: int) -> bool:
        return token % 2 == 1

    def accept(self, token: int) -> None:
        assert token % 2 == 1

    def free(self) -> None:
        pass


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.7), Sampling(top_k=12), Sampling(top_p=0.7), Sampling(min_p=0.1)]
)
def test_what_a_grammar_leaves_is_drawn_by_its_likelihood(sampling: Sampling) -> None:
    """First a draw as ever; where that does not fit, one among all that fits, cut as ever."""
    logits = logits_of(4, 600, spread=2.0)
    free = ours(logits, sampling, [])
    masked = logits.copy()
    masked[::2] = -np.inf
    again = ours(masked, sampling, [])
    refused = sum(share for token, share in free.items() if token % 2 == 0)
    expected = {token: free.get(token, 0.0) + refused * share for token, share in again.items() if token % 2}
    draws = 20_000
    seen: dict[int, int] = {}
    sampler = SequenceSampler(sampling, 5, [], [], Odd())  # type: ignore[arg-type]
    for _ in range(draws):
        token = sampler.pick(logits.copy())
        seen[token] = seen.get(token, 0) + 1
    distance = sum(abs(seen.get(token, 0) / draws - share) for token, share in expected.items()) / 2
    assert distance < 0.03


def test_a_greedy_pick_that_does_not_fit_gives_way_to_the_likeliest_that_does() -> None:
    logits = np.arange(2_001, dtype=np.float32)
    grammar = Odd()
    assert SequenceSampler(Sampling(temperature=0.0), 1, [], [], grammar).pick(logits) == 1_999  # type: ignore[arg-type]
    assert grammar.asked < 2_001, "only the likeliest were looked at"


def test_a_bias_is_added_before_all_else() -> None:
    logits = np.zeros(100, np.float32)
    for token, bias in ((7, 50.0), (0, -100.0)):
        sampler = SequenceSampler(Sampling(logit_bias={str(token): bias}), 3, [], [])
        drawn = {sampler.pick(logits.copy()) for _ in range(50)}
        assert (drawn == {token}) if bias > 0 else (token not in drawn)
