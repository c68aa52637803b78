"""What the engine thread does in one turn: plan, seat, step, text and limits.

An error that belongs to one sequence ends that sequence, one that belongs to a step ends the sequences in it; in both
cases the others go on. Anything else leaves `turn` and ends the thread.
"""

from __future__ import annotations

from typing import Literal

import structlog

from arriero.schemas.clock import Clock
from arriero.schemas.errors import ArrieroError, EngineError
from arriero.schemas.event import Stage
from arriero.schemas.token import FinishReason, Token
from arriero.workers.engine.seam import Backend, Ending, StepOutcome, StepReport, StepTimings, Update, Work
from arriero.workers.engine.text import SequenceText
from arriero.workers.flight import FlightRecorder
from arriero.workers.schedule import Limits, Picked, Plan, Scheduler

log = structlog.get_logger(__name__)

EndingKind = Literal["finished", "cancelled", "expired", "failed"]


class _Sequence:
    """What the thread keeps of a sequence beside the scheduler: its text. It outlives preemptions."""

    __slots__ = ("started", "text")

    def __init__(self, text: SequenceText) -> None:
        self.text = text
        self.started = False


class Turns:
    """One turn after the other; a thread's business without the thread."""

    def __init__(self, backend: Backend, clock: Clock, chunk_tokens: int, recorder: FlightRecorder) -> None:
        self._backend = backend
        self._recorder = recorder
        self._now = clock.monotonic
        self._limits = Limits.of(backend.info, chunk_tokens)
        self._scheduler = Scheduler(self._limits)
        self._sequences: dict[int, _Sequence] = {}
        self._updates: dict[int, Update] = {}
        self._since = self._now()
        """When the turn began."""
        self.yields_to = 0
        """The step that runs is to be broken off for work of a class before this one (an index of `CLASSES`)."""

    @property
    def idle(self) -> bool:
        return self._scheduler.idle and not self._updates

    def wake(self) -> None:
        """The turn begins now: waiting for work is not part of it."""
        self._since = self._now()

    def submit(self, work: Work) -> None:
        sequence = self._sequences[work.key] = _Sequence(SequenceText(work.stop))
        try:
            if (work.resume or work.sealed) and self._replay(work, sequence.text):
                return
            self._scheduler.add(work)
        except ArrieroError as error:
            self._fail(work.key, error, "queue")
        except Exception as error:
            self._fail(work.key, _engine_error(error), "queue")

    def _replay(self, work: Work, text: SequenceText) -> bool:
        """Take in what an earlier owner has decoded; whether the sequence is over with that.

        Raises EngineError(resume_mismatch) when these tokens cannot have been decoded for this job.
        """
        ids = [token.id for token in work.resume]
        if not all(0 <= one < self._backend.info.n_vocab and not self._backend.is_end(one) for one in ids):
            raise EngineError("the resumed tokens are not of this vocabulary", code="resume_mismatch")
        if text.replay(map(self._backend.piece, ids)) != [token.piece for token in work.resume]:
            raise EngineError("the resumed tokens do not spell the streamed text", code="resume_mismatch")
        reason: FinishReason | None = "stop" if text.stopped else work.sealed
        if reason is None and len(ids) >= self._limits.output_tokens(work) > 0:
            reason = "length"
        if reason is not None:
            self._close(work.key, "finished", reason=reason)
        return reason is not None

    def cancel(self, key: int) -> None:
        self._scheduler.cancel(key)

    def turn(self) -> StepReport | None:
        """Plan and run one step, and say what it did; None when it did nothing."""
        scheduler = self._scheduler
        plan = scheduler.plan(self._since)
        self._arrange(plan)
        outcome = StepOutcome([])
        timings = StepTimings()
        if plan.step.feeds:
            self._recorder.step("prefill" if plan.prefill_tokens else "decode", [feed.slot for feed in plan.step.feeds])
            self.yields_to = scheduler.yields_to
            try:
                outcome = self._backend.step(plan.step)
            except EngineError as error:
                log.warning("step_failed", code=error.code, error=error.message, feeds=len(plan.step.feeds))
                for key in scheduler.fed_keys():
                    self._fail(key, error, "decode")
            else:
                if outcome.aborted:
                    timings.aborted = True
                elif outcome.no_room:
                    self._make_room()
                else:
                    timings.decode_tokens, timings.prefill_tokens = plan.decode_tokens, plan.prefill_tokens
                    timings.draft_tokens = plan.draft_tokens
                    timings.accepted_tokens = max(0, len(outcome.picks) - len(plan.step.feeds)) * bool(
                        plan.draft_tokens
                    )
                    for picked in scheduler.apply(outcome):
                        if picked.key in self._sequences:  # else an earlier token of this step was its last
                            self._take(picked)
        self.yields_to = 0
        self._recorder.step("idle")
        updates = list(self._updates.values())
        self._updates.clear()
        timings.decode_s, timings.sample_s = outcome.decode_s, outcome.sample_s
        timings.sequences, timings.waiting = scheduler.running, scheduler.waiting
        timings.kv_used, timings.kv_retained = scheduler.cells_used, scheduler.cells_retained
        now = self._now()
        timings.rest_s = max(0.0, now - self._since - outcome.decode_s - outcome.sample_s)
        self._since = now
        if not updates and not plan.step.feeds:
            return None
        return StepReport(updates=updates, timings=timings)

    def _arrange(self, plan: Plan) -> None:
        """Free slots and seat sequences as planned."""
        for cut in plan.ended:
            if cut.slot >= 0:
                self._backend.end(cut.slot)
            self._close(cut.key, cut.kind, stage=cut.stage)
        for vacated in plan.preempted:
            self._backend.end(vacated.slot)
            self._update(vacated.key).preempted = True
        refused: set[int] = set()
        for slot, work in plan.admitted:
            self._recorder.seated(slot, work.label)
            self._recorder.step("prefill", [slot])
            try:
                self._backend.begin(slot, work)
            except Exception as error:
                refused.add(slot)
                self._fail(work.key, error if isinstance(error, ArrieroError) else _engine_error(error), "prefill")
            else:
                self._update(work.key).admitted = True
        self._backend.move(plan.moves)
        for key, tokens in plan.shared:
            self._update(key).cached_tokens += tokens
        if refused:
            plan.step.feeds[:] = [feed for feed in plan.step.feeds if feed.slot not in refused]

    def _take(self, picked: Picked) -> None:
        """One picked token: its text, and whether it was the last."""
        key, token = picked.key, picked.token
        if picked.error:
            self._fail(key, EngineError(picked.error), "decode")
            return
        if self._backend.is_end(token):
            self._close(key, "finished", reason="stop")
            return
        sequence = self._sequences[key]
        try:
            piece = sequence.text.push(self._backend.piece(token))
        except Exception as error:
            self._fail(key, _engine_error(error), "decode")
            return
        update = self._update(key)
        update.tokens.append(Token(token, piece))
        if not sequence.started:
            sequence.started = update.first_token = True
        if sequence.text.stopped:
            self._close(key, "finished", reason="stop")
        elif picked.full:
            self._close(key, "finished", reason="length")

    def _make_room(self) -> None:
        """The cache refused a batch that the reservations allow: give up the least urgent sequence of it."""
        keys = self._scheduler.fed_keys()
        vacated = self._scheduler.shed()
        log.warning("kv_no_room", running=self._scheduler.running, cells_used=self._scheduler.cells_used)
        if vacated is not None:
            self._backend.end(vacated.slot)
            self._update(vacated.key).preempted = True
            return
        for key in keys:
            self._fail(key, EngineError("the KV cache has no room for this sequence"), "decode")

    def _fail(self, key: int, error: ArrieroError, stage: Stage) -> None:
        self._close(key, "failed", stage=stage, code=error.code, error=error.message, retriable=error.retriable)

    def _close(
        self,
        key: int,
        kind: EndingKind,
        *,
        reason: FinishReason | None = None,
        stage: Stage = "decode",
        code: str = "",
        error: str = "",
        retriable: bool = False,
    ) -> None:
        """The sequence is over: free what it holds and note its Ending."""
        if key in self._scheduler:
            slot = self._scheduler.finish(key, retain=kind != "failed")
            if slot >= 0:
                self._backend.end(slot)
        sequence = self._sequences.pop(key)
        self._update(key).ending = Ending(
            kind=kind,
            finish_reason=reason,
            tail=sequence.text.tail(),
            stage=stage,
            code=code,
            error=error,
            retriable=retriable,
        )

    def _update(self, key: int) -> Update:
        update = self._updates.get(key)
        if update is None:
            update = self._updates[key] = Update(key=key)
        return update


def _engine_error(error: Exception) -> EngineError:
    log.error("sequence_failed", error=str(error), kind=type(error).__name__, exc_info=True)
    failure = EngineError(f"the engine failed on this sequence: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
