"""The scheduler: which sequences hold a slot, and which of their tokens go into the next step.

Pure data in, plan out: no I/O, no thread, and the time is handed in. The policy, in the order in which `plan`
applies it:

1. What was cancelled, or whose deadline has passed, goes: waiting, in its prefill or decoding.
2. Admission by class, in a class by tenant share, deadline and arrival (fair.py). A sequence is admitted when a slot
   is free and the cells it can ever need (prompt and longest output, less the prefix that is in the cache) are, so
   nothing that runs can run out of room. Within a class the order is strict: who comes later does not slip past a head
   that needs more cells than are free, and so the head is never starved. Cached prefixes (prefix.py) give way to it.
   A lower class may fill what the head of a higher one leaves, because
3. a head that finds no room takes it from running sequences of lower classes: the lowest class first, in it
   the one admitted last, and only as many as it needs, and only when that is enough. What is preempted keeps its
   tokens and waits again at its old place; what has become of their cells meanwhile is prefilled anew.
4. A suspect (`Work.alone`) runs with nothing beside it. It waits for the others to end, `ALONE_WAIT_S` at most, then
   they are preempted for it; between two suspects the others get as long. With `ALONE_TOKENS` new tokens it is one
   like any other: what it has got past is no longer what crashed.
5. The step: one token of every decoding sequence, then chunks of prompts, the most urgent first. A prompt beside
   streams of its class or a more urgent one gets at most `chunk_tokens`, and no more than take `STREAM_S`, so that a
   long one does not hold them up; otherwise it may fill the batch within `IDLE_S`, so that cancelling and urgent work
   do not wait long. How long a token takes is learned from the steps (`Pace`). A prompt that begins like one that is
   being prefilled waits for it, and shares its cells. When few sequences decode and nothing else is in the step,
   guesses of what comes next go along (speculate.py).

Idle capacity is left only when no waiting sequence may take it (work conserving up to the strict order in a class).
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from arriero.schemas.errors import BadJob
from arriero.schemas.event import Stage
from arriero.schemas.job import CLASSES
from arriero.schemas.token import Token
from arriero.workers.engine.seam import Feed, ModelInfo, Move, StepOutcome, StepPlan, Work
from arriero.workers.fair import OUTPUT_WEIGHT, Lines, Ticket
from arriero.workers.prefix import Node, PrefixCache, common
from arriero.workers.speculate import FEW_SEQUENCES, Balance, Lookup

CHUNK_TOKENS: Final = 256
"""Most prompt tokens that a step carries beside running streams. Fewer make streams steadier and prompts slower."""
STREAM_S: Final = 0.25
"""What a new prompt may add to the running streams' wait for their next token."""
IDLE_S: Final = 1.5
"""The longest step when nothing decodes: commands are heard between steps only."""
FIRST_TOKEN_WEIGHT: Final = 16
"""How many streams that wait for their next token one more prompt outweighs, up to steps of `IDLE_S`. A single prompt
outweighs none, however long it is."""
CHUNK_MIN_TOKENS: Final = 8
"""So that a prompt gets on however slow the machine is."""
ALONE_WAIT_S: Final = 2.0
"""How long a sequence that must run alone leaves the others to themselves. They lose nothing but time."""
ALONE_TOKENS: Final = 64
"""New tokens that clear a suspect. By the rule of blame a single one does; these are enough to be in a checkpoint or on
the bus, and few enough that a long job does not hold a whole worker to its end."""
RETAINED_SHARE: Final = 0.25
"""Of all cells: what finished sequences may keep. More prompts would find their beginning in more, but every step looks
at each cell that is taken, if only to see that it is another sequence's."""
WAIT_MIN_TOKENS: Final = 16
"""A common beginning shorter than this is not worth waiting for."""
NEVER: Final = float("inf")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded model offers, in tokens but `slots`."""

    slots: int
    n_ctx: int
    n_ctx_sequence: int
    n_batch: int
    chunk_tokens: int = CHUNK_TOKENS
    holders: int = 0
    drafts: int = 0
    """Both as in `ModelInfo`."""
    retained: int = 0
    """Cells that may keep what is finished, for prompts that begin like it."""

    @staticmethod
    def of(info: ModelInfo, chunk_tokens: int = CHUNK_TOKENS) -> Limits:
        return Limits(
            slots=info.slots,
            n_ctx=info.n_ctx,
            n_ctx_sequence=min(info.n_ctx_sequence, info.n_ctx),
            n_batch=info.n_batch,
            chunk_tokens=max(1, chunk_tokens),
            holders=info.holders,
            drafts=info.drafts,
            retained=int(info.n_ctx * RETAINED_SHARE),
        )

    def output_tokens(self, work: Work) -> int:
        """The longest output of this work: its own limit, or what its prompt leaves of the context."""
        return min(work.max_tokens, self.n_ctx_sequence - len(work.prompt))


class Pace:
    """How many prompt tokens fit a span of time, by what the steps so far have taken."""

    def __init__(self) -> None:
        self._token_s = STREAM_S / 64  # a guess for the first step: quick enough anywhere, and soon corrected
        self._decode_s = 0.0
        """A step that only decodes, and for how many sequences that was."""
        self._decoding = 0

    def observe(self, prefill_tokens: int, decode_tokens: int, took_s: float) -> None:
        """Take in a step. Beside decode tokens a prompt token costs what it adds to a step without it: else small
        chunks would look dear, for each step reads the model's weights once, and become smaller still."""
        if not prefill_tokens:
            same = abs(decode_tokens - self._decoding) <= 1
            self._decode_s += (took_s - self._decode_s) / (4 if same else 1)
            self._decoding = decode_tokens
        elif prefill_tokens >= CHUNK_MIN_TOKENS:
            known = self._decode_s * min(1.0, decode_tokens / self._decoding) if self._decoding else 0.0
            even_s = took_s / (prefill_tokens + decode_tokens)
            token_s = max((took_s - known) / prefill_tokens, even_s / 4) if known else even_s
            self._token_s += (token_s - self._token_s) / 2

    def fits(self, span_s: float) -> int:
        tokens = span_s / self._token_s if self._token_s > 0 else NEVER
        return max(CHUNK_MIN_TOKENS, int(min(tokens, 1 << 30)))


class Seat(NamedTuple):
    """A sequence that gets a slot. `work.resume` ends with what was decoded before a preemption (ids only)."""

    slot: int
    work: Work


class Vacated(NamedTuple):
    key: int
    slot: int


class Cut(NamedTuple):
    """A sequence that is over without its own doing; `slot` is -1 when it held none."""

    key: int
    slot: int
    kind: Literal["cancelled", "expired"]
    stage: Stage


class Picked(NamedTuple):
    """A token for a sequence; `full` when it may have no further one."""

    key: int
    slot: int
    token: int
    error: str
    full: bool


class Plan(msgspec.Struct):
    """One step, and what had to happen before it: first the slots of `ended` and `preempted` are freed, then
    `admitted` are seated, then cells are moved."""

    step: StepPlan
    admitted: list[Seat]
    preempted: list[Vacated]
    ended: list[Cut]
    moves: list[Move] = []
    """What the KV cache has to do between that and the step."""
    shared: list[tuple[int, int]] = []
    """Keys, and how many tokens of their prompts need no prefill."""
    decode_tokens: int = 0
    prefill_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Guesses that were right; known once the outcome is."""


class _Sequence(msgspec.Struct, eq=False):
    work: Work
    ticket: Ticket
    tokens: list[int]
    """Prompt, resumed and decoded tokens."""
    limit: int
    """Tokens that it can ever have."""
    slot: int = -1
    done: int = 0
    """Tokens whose cells are filled."""
    prefill: int = 0
    """Tokens that were there at admission: once they are done, it decodes."""
    own: int = 0
    """Cells that are reserved for it alone: `limit` less what it has of the prefix cache."""
    ran: bool = False
    lookup: Lookup | None = None

    @property
    def level(self) -> int:
        return self.ticket.level

    @property
    def stage(self) -> Stage:
        if self.slot < 0:
            return "queue"
        return "prefill" if self.done < self.prefill else "decode"


class Scheduler:
    """Holds every sequence from `add` until it is reported in `Plan.ended` or given to `finish`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._sequences: dict[int, _Sequence] = {}
        self._running: dict[int, _Sequence] = {}
        """By key, in the order of admission."""
        self._by_slot: list[_Sequence | None] = [None] * limits.slots
        self._free_slots = list(range(limits.slots))
        self._cache = PrefixCache(limits.slots, limits.holders, limits.retained)
        self._capacity = limits.n_ctx
        self._own = 0
        """Cells reserved for single sequences; those of the prefix cache come on top."""
        self._lines = Lines(len(CLASSES))
        self._entering: list[_Sequence] = []
        """Added since the last plan."""
        self._deadlines: list[tuple[float, int]] = []
        """A heap; what is gone is dropped when it comes up."""
        self._suspects: deque[int] = deque()
        """Waiting sequences that must run alone, in the order of their coming."""
        self._alone_from = NEVER
        """When the first of them may preempt all others."""
        self._cancelled: list[int] = []
        self._plan = _nothing()
        """The step that is under way."""
        self._pace = Pace()
        self._balance = Balance()

    # --- what is there -------------------------------------------------------------------------------------

    def __contains__(self, key: int) -> bool:
        return key in self._sequences

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self._sequences

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._sequences) - len(self._running)

    @property
    def cells_used(self) -> int:
        """Cells that running sequences hold, shared ones counted once."""
        alone = sum(sequence.done - self._cache.depth(sequence.slot) for sequence in self._running.values())
        return self._cache.cells - self._cache.retained + alone

    @property
    def cells_reserved(self) -> int:
        """Cells that they can ever need."""
        return self._cache.cells - self._cache.retained + self._own

    @property
    def cells_retained(self) -> int:
        """Cells of what is finished; they give way to any other use."""
        return self._cache.retained

    # --- what comes in -------------------------------------------------------------------------------------

    def add(self, work: Work) -> None:
        """Queue a sequence. Raises BadJob(empty_prompt, prompt_too_long) for one that could never run."""
        assert work.key not in self._sequences, "a key is never reused"
        tokens = [*work.prompt, *(token.id for token in work.resume)]
        if not work.prompt:
            raise BadJob("the prompt has no tokens", code="empty_prompt")
        room = self.limits.output_tokens(work)
        if room <= len(work.resume):
            raise BadJob(
                f"the prompt is {len(work.prompt):,} tokens long and leaves no room for output: prompt and output "
                f"together may take {self.limits.n_ctx_sequence:,}",
                code="prompt_too_long",
            )
        deadline = NEVER if work.deadline is None else work.deadline
        level = CLASSES.index(work.priority)
        sequence = _Sequence(
            work=work,
            ticket=Ticket((deadline, work.arrived, work.key), work.tenant, level, level),
            tokens=tokens,
            limit=len(work.prompt) + room,
        )
        self._sequences[work.key] = sequence
        if work.alone:
            self._suspects.append(work.key)
        else:
            self._entering.append(sequence)
        if deadline != NEVER:
            heapq.heappush(self._deadlines, (deadline, work.key))

    def cancel(self, key: int) -> None:
        """End a sequence with the next plan; unknown keys are ignored, for they may just have ended."""
        if key in self._sequences:
            self._cancelled.append(key)

    # --- the step ------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """The next step at monotonic time `now`. With anything left to do it is never empty."""
        plan = Plan(StepPlan([]), [], [], self._cut(now))
        for sequence in self._entering:
            if sequence.work.key in self._sequences:
                self._lines.enter(sequence.ticket, now)
        self._entering.clear()
        self._lines.age(now)
        if not self._alone(now, plan):
            self._admit(now, plan)
        self._fill(plan)
        plan.moves = self._cache.moves()
        self._plan = plan
        return plan

    def apply(self, outcome: StepOutcome) -> list[Picked]:
        """Take in what the planned step brought. `no_room` is not for here: see `shed`."""
        plan, self._plan = self._plan, _nothing()
        got = Counter(pick.slot for pick in outcome.picks)
        for feed in plan.step.feeds:
            fed = self._by_slot[feed.slot]
            if fed is None:
                continue
            decodes = fed.done >= fed.prefill
            fed.done += len(feed.tokens) - feed.draft
            if not decodes:
                self._publish(fed)
            elif feed.draft and fed.lookup is not None:
                accepted = max(0, got[feed.slot] - 1)
                fed.done += accepted
                fed.lookup.learn(feed.draft, accepted)
                plan.accepted_tokens += accepted
        self._observe(plan, outcome)
        picked: list[Picked] = []
        for pick in outcome.picks:
            sequence = self._by_slot[pick.slot]
            if sequence is None:
                continue
            sequence.tokens.append(pick.token)
            self._lines.charge(sequence.work.tenant, OUTPUT_WEIGHT)
            full = len(sequence.tokens) >= sequence.limit
            if sequence.work.alone and len(sequence.tokens) >= sequence.prefill + ALONE_TOKENS:
                sequence.work = msgspec.structs.replace(sequence.work, alone=False)
            picked.append(Picked(sequence.work.key, pick.slot, pick.token, pick.error, full))
        return picked

    def _observe(self, plan: Plan, outcome: StepOutcome) -> None:
        took_s = outcome.decode_s + outcome.sample_s
        if plan.draft_tokens:
            self._balance.guessed(plan.decode_tokens, plan.accepted_tokens, took_s)
            return
        self._pace.observe(plan.prefill_tokens, plan.decode_tokens, outcome.decode_s)
        if not plan.prefill_tokens:
            self._balance.plain(plan.decode_tokens, took_s)

    def finish(self, key: int, *, retain: bool = True) -> int:
        """Forget a sequence that has ended; returns the slot it held, -1 for none. With `retain` its cells stay for
        prompts that begin like it, as long as there is room."""
        sequence = self._sequences.pop(key)
        self._lines.forget(sequence.ticket)
        slot = sequence.slot
        if slot >= 0:
            self._vacate(sequence, retain=retain)
        return slot

    def shed(self) -> Vacated | None:
        """Preempt the least urgent running sequence, because the cache had no room after all.

        Until nothing runs the cache counts as no larger than what is reserved now: else the same sequence came
        back at once. None when fewer than two run: then there is nobody to make room for.
        """
        self._cache.evict(self._cache.retained)
        if len(self._running) < 2:
            return None
        victim = self._victims(-1)[0]
        vacated = Vacated(victim.work.key, victim.slot)
        self._preempt(victim, retain=False)
        self._entering.append(victim)
        self._capacity = self.cells_reserved
        return vacated

    @property
    def yields_to(self) -> int:
        """Work of a class before this one need not wait for the step planned last: it only prefills, so nobody's stream
        stands still when it is broken off, and less urgent work."""
        if self._plan.decode_tokens:
            return 0
        fed = (self._by_slot[feed.slot] for feed in self._plan.step.feeds)
        return min((sequence.level for sequence in fed if sequence is not None), default=0)

    def fed_keys(self) -> list[int]:
        """Who is in the step planned last: whom its failure hits."""
        fed = (self._by_slot[feed.slot] for feed in self._plan.step.feeds)
        return [sequence.work.key for sequence in fed if sequence is not None]

    # --- inside: who goes, who comes -----------------------------------------------------------------------

    def _cut(self, now: float) -> list[Cut]:
        ended: list[Cut] = []
        for key in self._cancelled:
            self._end(key, "cancelled", ended)
        self._cancelled.clear()
        while self._deadlines and self._deadlines[0][0] <= now:
            self._end(heapq.heappop(self._deadlines)[1], "expired", ended)
        if not self._sequences:
            self._deadlines.clear()
        return ended

    def _end(self, key: int, kind: Literal["cancelled", "expired"], ended: list[Cut]) -> None:
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        stage = sequence.stage
        ended.append(Cut(key, self.finish(key), kind, stage))

    def _alone(self, now: float, plan: Plan) -> bool:
        """Whether a sequence runs alone in this step; seats the next one when it is time."""
        if any(sequence.work.alone for sequence in self._running.values()):
            self._alone_from = now + ALONE_WAIT_S
            return True
        while self._suspects and self._suspects[0] not in self._sequences:
            self._suspects.popleft()
        if not self._suspects:
            self._alone_from = NEVER
            return False
        if self._alone_from == NEVER:
            self._alone_from = now + ALONE_WAIT_S
        others_wait = any(self._lines.head(level) is not None for level in range(len(CLASSES)))
        if now < self._alone_from and (self._running or others_wait):
            return False
        for victim in list(self._running.values()):
            plan.preempted.append(Vacated(victim.work.key, victim.slot))
            self._preempt(victim)
            self._lines.enter(victim.ticket, now)
        self._seat(self._sequences[self._suspects.popleft()], plan)
        self._alone_from = now + ALONE_WAIT_S
        return True

    def _admit(self, now: float, plan: Plan) -> None:
        victims: list[_Sequence] = []
        for level in range(len(CLASSES)):
            while (ticket := self._lines.head(level)) is not None:
                head = self._sequences[ticket.key]
                displaced = self._displaced(head, level)
                if displaced is None:
                    break
                for victim in displaced:
                    plan.preempted.append(Vacated(victim.work.key, victim.slot))
                    self._preempt(victim)
                victims += displaced
                if displaced and self._room_after(head, []) is None:
                    break  # less was kept of what it would share: next time
                self._seat(head, plan)
        for victim in victims:
            # Not before: what has just given way has no place in this step.
            self._lines.enter(victim.ticket, now)

    def _displaced(self, head: _Sequence, level: int) -> list[_Sequence] | None:
        """Running sequences of lower classes that have to go for `head`; None when not even that is enough."""
        displaced: list[_Sequence] = []
        if self._room_after(head, displaced) is not None:
            return displaced
        lower = iter(self._victims(level))
        while self._room_after(head, displaced) is None:
            victim = next(lower, None)
            if victim is None:
                return None
            displaced.append(victim)
        for victim in list(displaced):
            fewer = [one for one in displaced if one is not victim]
            if self._room_after(head, fewer) is not None:
                displaced = fewer  # a later and larger one made it needless
        return displaced

    def _room_after(self, head: _Sequence, displaced: Sequence[_Sequence]) -> int | None:
        """Cells that would be left beside `head` without these; None when it would not fit."""
        if len(self._free_slots) + len(displaced) < 1:
            return None
        depth, shared = self._cache.match(head.tokens, len(head.tokens) - 1)
        pinned = {node: min(node.end, depth) - node.start for node in shared}
        """What it shares counts for it, so it cannot be given up for it."""
        cells = self._capacity - self._cache.cells - self._own + self._cache.retained
        cells -= sum(tokens for node, tokens in pinned.items() if not node.live)
        live: dict[Node, int] = {}
        for victim in displaced:
            cells += victim.own
            for node in self._cache.path(victim.slot):
                live[node] = live.get(node, node.live) - 1
                if live[node] == 0:
                    cells += len(node.tokens) - pinned.get(node, 0)
        cells -= head.limit - depth
        return cells if cells >= 0 else None

    def _victims(self, level: int) -> list[_Sequence]:
        """Running sequences of classes below `level`, whom to take first coming first."""
        lower = [sequence for sequence in reversed(self._running.values()) if sequence.level > level]
        lower.sort(key=lambda sequence: -sequence.level)
        return lower

    def _seat(self, sequence: _Sequence, plan: Plan) -> None:
        self._lines.leave(sequence.ticket)
        slot = sequence.slot = self._free_slots.pop()
        self._by_slot[slot] = sequence
        self._running[sequence.work.key] = sequence
        sequence.prefill = len(sequence.tokens)
        self._share(sequence, plan)
        self._reserve(sequence)
        self._cache.evict(self._cache.cells + self._own - self._capacity)
        if not sequence.ran:
            self._lines.charge(sequence.work.tenant, sequence.prefill - sequence.done)
        plan.admitted.append(Seat(slot, sequence.work))

    def _preempt(self, victim: _Sequence, *, retain: bool = True) -> None:
        """Takes the slot; whoever calls sees to it that the sequence waits again."""
        self._vacate(victim, retain=retain)
        decoded = victim.tokens[len(victim.work.prompt) + len(victim.work.resume) :]
        resume = [*victim.work.resume, *(Token(token, "") for token in decoded)]
        victim.work = msgspec.structs.replace(victim.work, resume=resume)
        victim.ran = True

    def _vacate(self, sequence: _Sequence, *, retain: bool) -> None:
        slot = sequence.slot
        if retain:
            self._cache.extend(slot, sequence.tokens, sequence.done)
        self._own -= sequence.own
        sequence.own = 0
        self._cache.leave(slot, retain=retain and not sequence.work.alone)
        del self._running[sequence.work.key]
        self._by_slot[slot] = None
        self._free_slots.append(slot)
        if not self._running:
            self._capacity = self.limits.n_ctx
        sequence.slot, sequence.done = -1, 0

    # --- inside: the prefix cache --------------------------------------------------------------------------

    def _share(self, sequence: _Sequence, plan: Plan) -> None:
        """Take what there is of the tokens that are still to be prefilled; the last one is fed for its logits."""
        if not self._cache.enabled:
            return
        before = sequence.done
        sequence.done = self._cache.share(sequence.slot, sequence.tokens, sequence.prefill - 1)
        if sequence.done > before and not sequence.ran:
            plan.shared.append((sequence.work.key, sequence.done - before))

    def _publish(self, sequence: _Sequence) -> None:
        """Others may share what has been prefilled."""
        self._cache.extend(sequence.slot, sequence.tokens, sequence.done)
        self._reserve(sequence)

    def _reserve(self, sequence: _Sequence) -> None:
        own = sequence.limit - self._cache.depth(sequence.slot)
        self._own += own - sequence.own
        sequence.own = own

    # --- inside: the step ----------------------------------------------------------------------------------

    def _fill(self, plan: Plan) -> None:
        """Decode tokens first, then prompt chunks while the budget lasts."""
        feeds = plan.step.feeds
        prefills: list[_Sequence] = []
        for sequence in self._running.values():
            if sequence.done < sequence.prefill:
                prefills.append(sequence)
            else:
                feeds.append(Feed(sequence.slot, sequence.done, sequence.tokens[sequence.done :], True))
        plan.decode_tokens = len(feeds)
        room = self.limits.n_batch - len(feeds)
        idle = min(room, self._pace.fits(IDLE_S))
        # What holds streams up brings prompts on: where many wait for their first token and few for their next, as when
        # a batch comes in at once, the chunk grows.
        more = max(1.0, FIRST_TOKEN_WEIGHT * (len(prefills) - 1) / max(1, len(feeds)))
        beside = min(idle, int(self.limits.chunk_tokens * more), self._pace.fits(STREAM_S * more))
        streams = min((one.level for one in self._running.values() if one.done >= one.prefill), default=len(CLASSES))
        leaders: list[_Sequence] = []
        for sequence in sorted(prefills, key=lambda one: (one.level, one.ticket.rank)):
            if self._cache.enabled:
                self._share(sequence, plan)
                self._reserve(sequence)
                if any(_follows(sequence, leader) for leader in leaders):
                    continue
                leaders.append(sequence)
            budget = (idle if sequence.level < streams else beside) - plan.prefill_tokens
            chunk = sequence.tokens[sequence.done : min(sequence.prefill, sequence.done + budget)] if budget > 0 else []
            if not chunk:
                break
            last = sequence.done + len(chunk) == sequence.prefill
            feeds.append(Feed(sequence.slot, sequence.done, chunk, last))
            plan.prefill_tokens += len(chunk)
        if self.limits.drafts and not prefills and 0 < len(feeds) <= FEW_SEQUENCES and self._balance.allows(len(feeds)):
            self._guess(plan)

    def _guess(self, plan: Plan) -> None:
        """Let guesses go along with the decode tokens that are the step."""
        feeds = plan.step.feeds
        for place, feed in enumerate(feeds):
            sequence = self._by_slot[feed.slot]
            assert sequence is not None
            if sequence.lookup is None:
                sequence.lookup = Lookup(sequence.tokens)
            share = (self.limits.drafts - plan.draft_tokens) // (len(feeds) - place)
            guess = sequence.lookup.guess(min(share, sequence.limit - len(sequence.tokens) - 1))
            if guess:
                feeds[place] = msgspec.structs.replace(feed, tokens=[*feed.tokens, *guess], draft=len(guess))
                plan.draft_tokens += len(guess)


def _follows(sequence: _Sequence, leader: _Sequence) -> bool:
    """Whether it should wait for the leader's prefill, to share it."""
    limit = min(sequence.prefill - 1, leader.prefill)
    return common(leader.tokens, sequence.tokens, 0, limit) >= sequence.done + WAIT_MIN_TOKENS


def _nothing() -> Plan:
    return Plan(StepPlan([]), [], [], [])
