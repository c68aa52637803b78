"""The scheduler: its promises under any sequence of events, and its policy by example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from arriero.schemas.errors import BadJob
from arriero.schemas.job import CLASSES, Sampling
from arriero.schemas.token import Token
from arriero.workers.engine.seam import TO_THE_END, Feed, Move, Pick, StepOutcome, Work
from arriero.workers.fair import AGING_S
from arriero.workers.schedule import (
    ALONE_TOKENS,
    ALONE_WAIT_S,
    FIRST_TOKEN_WEIGHT,
    IDLE_S,
    Limits,
    Picked,
    Plan,
    Scheduler,
)

LIMITS = Limits(slots=3, n_ctx=60, n_ctx_sequence=40, n_batch=16, chunk_tokens=4)


def work(key: int, prompt: int | list[int] = 4, max_tokens: int = 4, **changes: Any) -> Work:
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    fields: dict[str, Any] = {"prompt": tokens, "sampling": Sampling(), "seed": 0, "arrived": float(key)}
    return Work(key=key, max_tokens=max_tokens, **{**fields, **changes})


def run(scheduler: Scheduler, now: float = 0.0) -> Plan:
    """One step in which every sequence that wants a token gets 7."""
    plan = scheduler.plan(now)
    picks = [Pick(feed.slot, 7) for feed in plan.step.feeds if feed.pick]
    for picked in scheduler.apply(StepOutcome(picks)):
        if picked.full:
            scheduler.finish(picked.key)
    return plan


def admitted(plan: Plan) -> list[int]:
    return [seat.work.key for seat in plan.admitted]


def test_a_class_goes_before_deadline_and_deadline_before_arrival() -> None:
    scheduler = Scheduler(Limits(slots=5, n_ctx=1000, n_ctx_sequence=40, n_batch=16))
    scheduler.add(work(1, priority="batch", deadline=1.0))
    scheduler.add(work(2, priority="standard"))
    scheduler.add(work(3, priority="standard", deadline=9.0))
    scheduler.add(work(4, priority="interactive", arrived=20.0))
    scheduler.add(work(5, priority="interactive", arrived=10.0))
    assert admitted(scheduler.plan(0.0)) == [5, 4, 3, 2, 1]


def test_decode_tokens_come_first_and_prompts_share_a_budget() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(work(1, prompt=4, max_tokens=10))
    run(scheduler)
    scheduler.add(work(2, prompt=10))
    plan = run(scheduler)
    assert [len(feed.tokens) for feed in plan.step.feeds] == [1, 4]
    assert (plan.decode_tokens, plan.prefill_tokens) == (1, 4)
    assert not plan.step.feeds[1].pick
    run(scheduler)
    last = run(scheduler)
    assert (last.step.feeds[1].position, last.step.feeds[1].tokens) == (8, [8, 9])
    assert last.step.feeds[1].pick


def test_a_prompt_more_urgent_than_the_streams_beside_it_need_not_be_cut() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(work(1, prompt=4, max_tokens=10, priority="batch"))
    run(scheduler)
    scheduler.add(work(2, prompt=10, priority="interactive"))
    assert run(scheduler).prefill_tokens == 10


def test_without_running_streams_a_prompt_may_fill_the_batch() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(work(1, prompt=30))
    assert len(run(scheduler).step.feeds[0].tokens) == 16


def steps_of(scheduler: Scheduler, token_s: float, count: int, step_s: float = 0.0) -> list[int]:
    """Prompt tokens of the next steps on a machine that takes `token_s` for each token, and `step_s` for each step."""
    sizes = []
    for _ in range(count):
        plan = scheduler.plan(0.0)
        picks = [Pick(feed.slot, 7) for feed in plan.step.feeds if feed.pick]
        tokens = plan.prefill_tokens + plan.decode_tokens
        scheduler.apply(StepOutcome(picks, decode_s=step_s + token_s * tokens))
        sizes.append(plan.prefill_tokens)
    return sizes


@pytest.mark.parametrize(("token_s", "chunk"), [(0.01, 25), (0.0001, 256), (1.0, 8)])
def test_chunks_beside_streams_keep_to_a_span_of_time(token_s: float, chunk: int) -> None:
    scheduler = Scheduler(Limits(slots=2, n_ctx=20_000, n_ctx_sequence=10_000, n_batch=512))
    scheduler.add(work(1, prompt=4, max_tokens=1_000))
    run(scheduler)
    scheduler.add(work(2, prompt=9_000))
    sizes = steps_of(scheduler, token_s, 12)
    assert sizes[-1] == pytest.approx(chunk, rel=0.1)


def test_what_a_step_takes_anyway_does_not_make_chunks_smaller() -> None:
    scheduler = Scheduler(Limits(slots=2, n_ctx=20_000, n_ctx_sequence=10_000, n_batch=512))
    scheduler.add(work(1, prompt=4, max_tokens=1_000))
    steps_of(scheduler, 0.002, 20, step_s=0.2)
    scheduler.add(work(2, prompt=9_000))
    assert steps_of(scheduler, 0.002, 20, step_s=0.2)[-1] == pytest.approx(125, rel=0.1)


def test_a_batch_that_comes_in_at_once_is_prefilled_in_larger_chunks() -> None:
    scheduler = Scheduler(Limits(slots=8, n_ctx=20_000, n_ctx_sequence=10_000, n_batch=512))
    scheduler.add(work(0, prompt=4, max_tokens=1_000))
    steps_of(scheduler, 0.004, 10)
    for key in range(1, 3):
        scheduler.add(work(key, prompt=[key] * 1_000))
    assert steps_of(scheduler, 0.004, 2)[-1] == pytest.approx(IDLE_S / 0.004, rel=0.1)


def test_a_prompt_alone_may_take_longer_steps_but_not_endless_ones() -> None:
    scheduler = Scheduler(Limits(slots=2, n_ctx=20_000, n_ctx_sequence=10_000, n_batch=512))
    scheduler.add(work(1, prompt=9_000))
    assert steps_of(scheduler, 0.01, 12)[-1] == pytest.approx(IDLE_S / 0.01, rel=0.1)


def test_later_work_of_a_class_does_not_slip_past_its_head() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(work(1, prompt=30, max_tokens=10))
    scheduler.add(work(2, prompt=30, max_tokens=10))
    scheduler.add(work(3))
    assert admitted(scheduler.plan(0.0)) == [1]


def test_a_lower_class_may_fill_what_the_head_of_a_higher_one_leaves() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(work(1, prompt=30, max_tokens=10))
    scheduler.add(work(2, prompt=30, max_tokens=10))
    scheduler.add(work(3, priority="batch"))
    assert admitted(scheduler.plan(0.0)) == [1, 3]


def test_urgent_work_takes_no_more_than_it_needs_from_the_lowest_class() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(work(1, prompt=20, max_tokens=10, priority="standard"))
    scheduler.add(work(2, prompt=5, max_tokens=5, priority="batch"))
    scheduler.add(work(3, prompt=10, max_tokens=10, priority="batch"))
    run(scheduler)
    scheduler.add(work(4, prompt=10, max_tokens=10, priority="interactive"))
    plan = scheduler.plan(0.0)
    assert [vacated.key for vacated in plan.preempted] == [3]
    assert admitted(plan) == [4]


def test_nobody_is_preempted_when_it_would_not_be_enough() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(work(1, prompt=25, max_tokens=10, priority="interactive"))
    scheduler.add(work(2, priority="batch"))
    scheduler.add(work(3, prompt=30, max_tokens=10, priority="interactive"))
    plan = scheduler.plan(0.0)
    assert (admitted(plan), plan.preempted) == ([1, 2], [])
    assert scheduler.plan(0.0).preempted == []


def test_a_class_does_not_preempt_itself() -> None:
    scheduler = Scheduler(Limits(slots=1, n_ctx=100, n_ctx_sequence=100, n_batch=16))
    scheduler.add(work(1, priority="standard"))
    run(scheduler)
    scheduler.add(work(2, priority="standard", deadline=1.0))
    assert scheduler.plan(0.0).preempted == []


def test_the_preempted_keeps_its_tokens() -> None:
    scheduler = Scheduler(Limits(slots=1, n_ctx=100, n_ctx_sequence=100, n_batch=16))
    scheduler.add(work(1, prompt=3, max_tokens=9, priority="batch", resume=[Token(5, "x")]))
    run(scheduler)
    run(scheduler)
    scheduler.add(work(2, max_tokens=1, priority="standard"))
    run(scheduler)
    plan = scheduler.plan(0.0)
    assert [token.id for token in plan.admitted[0].work.resume] == [5, 7, 7]
    assert list(plan.step.feeds[0].tokens) == [0, 1, 2, 5, 7, 7]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_expired_sequence_ends_where_it_is(steps: int) -> None:
    scheduler = Scheduler(Limits(slots=1, n_ctx=100, n_ctx_sequence=100, n_batch=4))
    if steps == 0:
        scheduler.add(work(1, max_tokens=50))
        run(scheduler)
    scheduler.add(work(2, prompt=8, max_tokens=50, deadline=5.0))
    for _ in range(steps):
        run(scheduler)
    (cut,) = scheduler.plan(5.0).ended
    assert (cut.key, cut.kind, cut.stage) == (2, "expired", {0: "queue", 1: "prefill", 3: "decode"}[steps])


def test_a_suspect_waits_for_the_others_and_then_takes_their_place() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(work(1, max_tokens=30))
    run(scheduler)
    scheduler.add(work(2, alone=True))
    scheduler.add(work(3, priority="interactive"))
    assert admitted(run(scheduler, 0.0)) == [3]
    assert admitted(run(scheduler, ALONE_WAIT_S - 0.1)) == []
    plan = run(scheduler, ALONE_WAIT_S)
    assert admitted(plan) == [2]
    assert 1 in [vacated.key for vacated in plan.preempted]
    assert {feed.slot for feed in plan.step.feeds} == {plan.admitted[0].slot}


def test_a_suspect_runs_at_once_when_nothing_else_is_there() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(work(1, alone=True))
    assert admitted(run(scheduler)) == [1]
    scheduler.add(work(2, priority="interactive"))
    assert admitted(run(scheduler)) == []


def test_a_suspect_with_new_tokens_lets_the_others_in_again_and_keeps_its_slot() -> None:
    scheduler = Scheduler(Limits(slots=3, n_ctx=400, n_ctx_sequence=200, n_batch=16))
    scheduler.add(work(1, max_tokens=100, alone=True))
    run(scheduler)
    scheduler.add(work(2, max_tokens=100))
    for _ in range(ALONE_TOKENS - 1):
        assert admitted(run(scheduler)) == []
    plan = run(scheduler)
    assert admitted(plan) == [2]
    assert plan.preempted == []
    assert len(plan.step.feeds) == 2


def test_between_two_suspects_the_others_get_their_time() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(work(1, max_tokens=1, alone=True))
    scheduler.add(work(2, max_tokens=1, alone=True))
    scheduler.add(work(3, max_tokens=30))
    assert admitted(run(scheduler, 0.0)) == [3]
    assert admitted(run(scheduler, ALONE_WAIT_S)) == [1]
    assert admitted(run(scheduler, ALONE_WAIT_S + 0.1)) == [3]
    assert admitted(run(scheduler, 2 * ALONE_WAIT_S - 0.1)) == []
    assert admitted(run(scheduler, 2 * ALONE_WAIT_S + 0.1)) == [2]


def test_work_that_can_never_run_is_refused() -> None:
    scheduler = Scheduler(LIMITS)
    for bad, code in ((work(1, prompt=0), "empty_prompt"), (work(2, prompt=40), "prompt_too_long")):
        with pytest.raises(BadJob) as caught:
            scheduler.add(bad)
        assert caught.value.code == code
    assert scheduler.idle


def test_a_cache_that_turned_out_smaller_is_trusted_again_when_nothing_runs() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(work(1))
    scheduler.add(work(2))
    scheduler.plan(0.0)
    vacated = scheduler.shed()
    assert vacated is not None
    assert vacated.key == 2
    assert admitted(scheduler.plan(0.0)) == []
    scheduler.finish(1)
    assert admitted(scheduler.plan(0.0)) == [2]


SHARING = Limits(slots=4, n_ctx=400, n_ctx_sequence=200, n_batch=64, holders=4, retained=100)
SYSTEM = list(range(100, 140))


def fed(plan: Plan) -> int:
    return sum(len(feed.tokens) for feed in plan.step.feeds)


def test_a_common_beginning_is_prefilled_once_by_jobs_that_come_together() -> None:
    scheduler = Scheduler(SHARING)
    for key in range(4):
        scheduler.add(work(key, [*SYSTEM, key, key]))
    first = run(scheduler)
    assert [len(feed.tokens) for feed in first.step.feeds] == [42]
    second = run(scheduler)
    assert second.shared == [(key, 40) for key in (1, 2, 3)]
    assert second.prefill_tokens == 6


def test_a_long_common_beginning_is_shared_as_soon_as_it_is_there() -> None:
    scheduler = Scheduler(Limits(slots=2, n_ctx=400, n_ctx_sequence=200, n_batch=20, holders=4))
    scheduler.add(work(1, [*SYSTEM, 1]))
    scheduler.add(work(2, [*SYSTEM, 2]))
    assert [fed(run(scheduler)) for _ in range(3)] == [20, 20, 2]


def test_what_is_finished_serves_a_later_prompt_and_gives_way_to_a_larger_one() -> None:
    scheduler = Scheduler(SHARING)
    scheduler.add(work(1, SYSTEM, max_tokens=1))
    run(scheduler)
    assert scheduler.cells_retained == 40
    scheduler.add(work(2, [*SYSTEM[:30], 1], max_tokens=1))
    assert run(scheduler).shared == [(2, 30)]
    for key in (3, 4):
        scheduler.add(work(key, [key] * 150, max_tokens=50))
    assert admitted(run(scheduler)) == [3, 4]
    assert scheduler.cells_retained == 0


def test_the_preempted_finds_its_cells_again() -> None:
    scheduler = Scheduler(Limits(slots=1, n_ctx=400, n_ctx_sequence=200, n_batch=64, holders=4, retained=100))
    scheduler.add(work(1, SYSTEM, max_tokens=20, priority="batch"))
    run(scheduler)
    run(scheduler)
    scheduler.add(work(2, max_tokens=1, priority="standard"))
    run(scheduler)
    (feed,) = run(scheduler).step.feeds
    assert (feed.position, list(feed.tokens)) == (41, [7])


def test_without_holders_nothing_is_shared() -> None:
    scheduler = Scheduler(msgspec.structs.replace(SHARING, holders=0))
    for key in range(2):
        scheduler.add(work(key, SYSTEM))
    assert run(scheduler).prefill_tokens == 64


def test_a_failed_sequence_leaves_nothing_behind() -> None:
    scheduler = Scheduler(SHARING)
    scheduler.add(work(1, SYSTEM))
    run(scheduler)
    scheduler.finish(1, retain=False)
    assert scheduler.cells_retained == 0


def test_batch_work_is_not_starved_by_urgent_work_without_end() -> None:
    scheduler = Scheduler(Limits(slots=1, n_ctx=100, n_ctx_sequence=100, n_batch=16))
    scheduler.add(work(0, max_tokens=1, priority="batch"))
    seen: list[int] = []
    for second in range(1, 200):
        scheduler.add(work(second, max_tokens=1, priority="interactive", arrived=float(second)))
        seen += admitted(run(scheduler, float(second)))
    assert 0 in seen
    assert seen.index(0) == pytest.approx(2 * AGING_S, abs=2)


sizes = st.integers(1, 39)


class Cells:
    """A unified KV cache as llama.cpp has it: by sequence and position a cell, which others may share."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._sequences: dict[int, dict[int, list[int]]] = {}
        """A cell is a list of its one token, told apart by identity."""

    def move(self, moves: list[Move]) -> None:
        for source, target, start, end in moves:
            places = self._sequences.setdefault(target, {})
            if source < 0:
                for place in [one for one in places if one >= start and (one < end or end == TO_THE_END)]:
                    del places[place]
            else:
                for place in range(start, end):
                    assert place not in places, "nothing is shared over what is there"
                    places[place] = self._sequences[source][place]

    def feed(self, slot: int, position: int, tokens: Sequence[int], expected: list[int]) -> None:
        """Fill the next cells, after a look at those before them."""
        places = self._sequences.setdefault(slot, {})
        assert [places[place][0] for place in sorted(places)] == expected[:position]
        assert list(tokens) == expected[position : position + len(tokens)]
        places.update((position + i, [token]) for i, token in enumerate(tokens))

    def filled(self) -> int:
        return len({id(cell) for places in self._sequences.values() for cell in places.values()})


class Machine(RuleBasedStateMachine):
    """Anything may come, be cancelled, expire, end early or meet a full cache between any two steps."""

    @initialize(
        slots=st.integers(1, 4),
        n_ctx=st.integers(40, 120),
        n_batch=st.integers(4, 24),
        chunk=st.integers(1, 8),
        drafts=st.sampled_from([0, 0, 6]),
        holders=st.sampled_from([0, 1, 5]),
        retained=st.sampled_from([0, 30, 120]),
    )
    def start(self, slots: int, n_ctx: int, n_batch: int, chunk: int, drafts: int, holders: int, retained: int) -> None:
        self.limits = Limits(
            slots=slots,
            n_ctx=n_ctx,
            n_ctx_sequence=40,
            n_batch=n_batch,
            chunk_tokens=chunk,
            holders=holders,
            drafts=drafts,
            retained=retained,
        )
        self.scheduler = Scheduler(self.limits)
        self.kv = Cells(slots)
        self.alive: dict[int, Work] = {}
        self.ended: set[int] = set()
        self.seated: dict[int, int] = {}  # slot -> key, as a backend sees it
        self.tokens: dict[int, list[int]] = {}
        self.outputs: dict[int, int] = {}
        self.cancelled: set[int] = set()
        self.now = 0.0
        self.next_key = 0

    @rule(
        prompt=sizes,
        max_tokens=sizes,
        priority=st.sampled_from(CLASSES),
        deadline=st.none() | st.integers(0, 30),
        resume=st.integers(0, 3),
        alone=st.sampled_from([False, False, False, True]),
        branch=st.sampled_from([8, 20, 40]),
        tenant=st.sampled_from("ab"),
    )
    def add(
        self,
        prompt: int,
        max_tokens: int,
        priority: str,
        deadline: int | None,
        resume: int,
        alone: bool,
        branch: int,
        tenant: str,
    ) -> None:
        self.next_key += 1
        room = min(max_tokens, 40 - prompt)
        new = work(
            self.next_key,
            max_tokens=max_tokens,
            prompt=[one % 9 if one > branch else one for one in range(prompt)],
            tenant=tenant,
            priority=priority,
            deadline=None if deadline is None else self.now + deadline,
            resume=[Token(9, "")] * min(resume, room - 1),
            alone=alone,
        )
        self.scheduler.add(new)
        self.alive[new.key] = new
        self.outputs[new.key] = len(new.resume)
        self.tokens[new.key] = [*new.prompt, *(token.id for token in new.resume)]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.alive)))
        self.scheduler.cancel(key)
        self.cancelled.add(key)

    @rule(ahead=st.integers(1, 5))
    def wait(self, ahead: int) -> None:
        self.now += ahead

    @rule(data=st.data(), full_cache=st.sampled_from([False, False, False, True]))
    def step(self, data: st.DataObject, full_cache: bool) -> None:
        plan = self.scheduler.plan(self.now)
        self._arrange(plan)
        feeds = plan.step.feeds
        assert bool(feeds) == bool(self.alive), "with anything left a step does something"
        assert sum(len(feed.tokens) for feed in feeds) <= self.limits.n_batch
        assert len({feed.slot for feed in feeds}) == len(feeds)
        streams, prompts = feeds[: plan.decode_tokens], feeds[plan.decode_tokens :]
        most_urgent = min((self._level(feed) for feed in streams), default=len(CLASSES))
        held = [feed for feed in prompts if self._level(feed) >= most_urgent]
        waiting = self.scheduler.running - len(streams)
        more = max(1.0, FIRST_TOKEN_WEIGHT * (waiting - 1) / max(1, len(streams)))
        assert sum(len(feed.tokens) for feed in held) <= self.limits.chunk_tokens * more
        if full_cache and len(feeds) > 1:
            vacated = self.scheduler.shed()
            assert vacated is not None
            self._leave(vacated.slot, vacated.key)
            return
        for one in self._decode(plan):
            if one.key in self.ended:
                continue  # an earlier token of this step was its last
            assert self.seated[one.slot] == one.key
            self._take(one)
            longest = self.limits.output_tokens(self.alive[one.key])
            assert one.full == (self.outputs[one.key] == longest)
            if one.full or data.draw(st.integers(0, 9)) == 0:
                self._leave(self.scheduler.finish(one.key), one.key)
                self._end(one.key)

    def _level(self, feed: Feed) -> int:
        return CLASSES.index(self.alive[self.seated[feed.slot]].priority)

    def _decode(self, plan: Plan) -> list[Picked]:
        """Feed the cells as a backend does, and pick what follows a pattern that guesses sometimes hit."""
        picks: list[Pick] = []
        for feed in plan.step.feeds:
            known = self.tokens[self.seated[feed.slot]]
            guesses = list(feed.tokens[len(feed.tokens) - feed.draft :])
            self.kv.feed(feed.slot, feed.position, feed.tokens, [*known, *guesses])
            end = feed.position + len(feed.tokens) - feed.draft
            for guess in [*guesses, None] if feed.pick else []:
                picks.append(Pick(feed.slot, end // 5 % 2))
                if picks[-1].token != guess:
                    break
                end += 1
            self.kv.move([Move(-1, feed.slot, end, TO_THE_END)])
        assert self.kv.filled() <= self.limits.n_ctx
        assert plan.draft_tokens == sum(feed.draft for feed in plan.step.feeds) <= self.limits.drafts
        return self.scheduler.apply(StepOutcome(picks))

    def _take(self, picked: Picked) -> None:
        self.outputs[picked.key] += 1
        self.tokens[picked.key].append(picked.token)

    def _arrange(self, plan: Plan) -> None:
        for cut in plan.ended:
            if cut.slot >= 0:
                self._leave(cut.slot, cut.key)
            if cut.kind == "cancelled":
                assert cut.key in self.cancelled
            else:
                deadline = self.alive[cut.key].deadline
                assert deadline is not None
                assert deadline <= self.now
            self._end(cut.key)
        assert not self.cancelled & set(self.alive), "a cancelled sequence is gone with the next plan"
        assert all(one.deadline is None or one.deadline > self.now for one in self.alive.values())
        for vacated in plan.preempted:
            self._leave(vacated.slot, vacated.key)
        for slot, admitted_work in plan.admitted:
            assert slot not in self.seated
            assert len(admitted_work.resume) == self.outputs[admitted_work.key]
            self.seated[slot] = admitted_work.key
        self.kv.move(plan.moves)
        assert self.scheduler.cells_used + self.scheduler.cells_retained == self.kv.filled()
        if any(seat.work.alone for seat in plan.admitted):
            assert len(plan.admitted) == len(self.seated) == 1
        elif plan.preempted:
            highest = min(CLASSES.index(seat.work.priority) for seat in plan.admitted)
            assert all(CLASSES.index(self.alive[one.key].priority) > highest for one in plan.preempted)

    def _leave(self, slot: int, key: int) -> None:
        assert self.seated.pop(slot) == key

    def _end(self, key: int) -> None:
        assert key not in self.ended, "a key ends once"
        self.ended.add(key)
        del self.alive[key]

    @invariant()
    def nothing_overcommits(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        assert len(self.seated) <= self.limits.slots
        assert self.scheduler.cells_retained <= self.limits.retained
        assert self.scheduler.cells_used <= self.scheduler.cells_reserved <= self.limits.n_ctx

    @invariant()
    def what_must_run_alone_does(self) -> None:
        if hasattr(self, "scheduler") and any(self.alive[key].alone for key in self.seated.values()):
            assert len(self.seated) == 1

    @invariant()
    def no_key_is_lost(self) -> None:
        if hasattr(self, "scheduler"):
            assert all(key in self.scheduler for key in self.alive)
            assert self.scheduler.running + self.scheduler.waiting == len(self.alive)
            assert self.scheduler.running == len(self.seated)

    def teardown(self) -> None:
        """Whatever happened, everything left ends."""
        for _ in range(10_000):
            plan = self.scheduler.plan(self.now)
            self._arrange(plan)
            if not self.alive:
                break
            for one in self._decode(plan):
                self._take(one)
                if one.full:
                    self._leave(self.scheduler.finish(one.key), one.key)
                    self._end(one.key)
        assert self.scheduler.idle
        assert self.ended == set(range(1, self.next_key + 1))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@settings(deadline=None)
@given(st.lists(st.tuples(sizes, sizes, st.sampled_from(CLASSES)), min_size=1, max_size=12))
def test_a_waiting_sequence_waits_for_a_reason(jobs: list[tuple[int, int, Any]]) -> None:
    """Work conserving: after a plan the first waiting sequence of each class finds no slot or too few cells."""
    scheduler = Scheduler(LIMITS)
    by_key = {}
    for key, (prompt, max_tokens, priority) in enumerate(jobs):
        by_key[key] = work(key, prompt, max_tokens, priority=priority)
        scheduler.add(by_key[key])
    seated = admitted(scheduler.plan(0.0))
    free = LIMITS.n_ctx - sum(len(by_key[key].prompt) + LIMITS.output_tokens(by_key[key]) for key in seated)
    for priority in CLASSES:
        waiting = [one for key, one in by_key.items() if one.priority == priority and key not in seated]
        if waiting and len(seated) < LIMITS.slots:
            assert len(waiting[0].prompt) + LIMITS.output_tokens(waiting[0]) > free
