"""The llama.cpp backend: many sequences in one forward pass, behind the engine seam.

A slot of the scheduler is a sequence id of llama.cpp. A step lays its feeds out in one batch, decodes them in one
call and picks a token for each feed that wants one, from logits that are read where llama.cpp wrote them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np

from arriero.schemas.clock import Clock
from arriero.schemas.errors import BadJob, EngineError
from arriero.schemas.job import Job, Sampling
from arriero.workers.engine.llama.batch import Batch
from arriero.workers.engine.llama.grammar import Grammar, grammar_of
from arriero.workers.engine.llama.model import LlamaSettings, Loaded, load
from arriero.workers.engine.llama.sampling import NotFinite, NothingAllowed, SequenceSampler
from arriero.workers.engine.llama.template import ChatTemplate
from arriero.workers.engine.llama.vocab import Vocabulary
from arriero.workers.engine.seam import TO_THE_END, Feed, ModelInfo, Move, Pick, StepOutcome, StepPlan, Work

Rows = np.ndarray[Any, np.dtype[np.float32]]


class LlamaBackend:
    """One loaded model. Made in the thread that uses it; only `prepare` may be called from others."""

    def __init__(self, settings: LlamaSettings, clock: Clock) -> None:
        """Loads the model. Raises ModelError."""
        self._now = clock.monotonic
        self._loaded: Loaded | None = load(settings, clock)
        loaded = self._loaded
        self._samplers: list[SequenceSampler | None] = [None] * loaded.info.slots
        try:
            self._info = loaded.info
            self._context, self._memory = loaded.context, loaded.memory
            self._vocabulary = Vocabulary(loaded.model)
            self._template: ChatTemplate | None = None
            if loaded.chat_template:
                self._template = ChatTemplate(
                    loaded.chat_template,
                    bos_token=self._vocabulary.bos_text,
                    eos_token=self._vocabulary.eos_text,
                    clock=clock,
                )
            # llama.cpp asks before each node of its graph whether to go on. A Python callback would take the
            # interpreter's lock each time; C's strlen says as much of a buffer that is empty until it is written to.
            self._abort = ctypes.create_string_buffer(2)
            self._asked = ctypes.cast(ctypes.CDLL(None).strlen, llama.ggml_abort_callback)
            llama.llama_set_abort_callback(self._context, self._asked, ctypes.cast(self._abort, ctypes.c_void_p))
            self._batch = Batch(self._info.n_batch, self._info.slots, self._info.drafts, self._vocabulary.size)
            self._suppressed = np.array(self._vocabulary.suppressed, np.intp)
            self._pieces = self._vocabulary.pieces
            self._positions = [0] * self._info.slots
            """By slot: cells filled."""
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> ModelInfo:
        return self._info

    def prepare(self, job: Job) -> list[int]:
        """The prompt as token ids. Raises BadJob(prompt_too_long, empty_prompt, bad_template, bad_grammar)."""
        try:
            tokens = self._tokenize(job)
            self._check_sampling(job.sampling)
        except BadJob as error:
            error.job_id = job.id
            raise
        if not tokens:
            raise BadJob("the prompt has no tokens", code="empty_prompt", job_id=job.id)
        limit = self._info.n_ctx_sequence
        if len(tokens) >= limit:
            raise BadJob(
                f"the prompt is {len(tokens):,} tokens long; with one token of output at most {limit:,} fit the "
                "context",
                code="prompt_too_long",
                field="prompt" if job.messages is None else "messages",
                job_id=job.id,
            )
        return tokens

    def _tokenize(self, job: Job) -> list[int]:
        vocabulary = self._vocabulary
        if job.messages is None:
            return vocabulary.tokenize_prompt(job.prompt or "")
        if self._template is None:
            raise BadJob(
                f"the model {self._info.name} has no chat template; send `prompt` instead of `messages`",
                code="bad_template",
                field="messages",
            )
        guard = vocabulary.guard
        marks = guard.marks([message.content for message in job.messages])
        messages = [type(one)(role=one.role, content=guard.mark(one.content, marks)) for one in job.messages]
        return vocabulary.tokenize_chat(guard.split(self._template.render(messages), marks))

    def _check_sampling(self, sampling: Sampling) -> None:
        """What of it depends on the model."""
        if any(int(token) >= self._vocabulary.size for token in sampling.logit_bias):
            raise BadJob(
                f"`sampling.logit_bias` has tokens beyond the model's {self._vocabulary.size:,}",
                field="sampling.logit_bias",
            )
        if text := grammar_of(sampling):
            Grammar(self._vocabulary.native, text).free()

    def begin(self, slot: int, work: Work) -> None:
        """Seat a sequence. Raises EngineError for resumed tokens that are not this model's."""
        resumed = [token.id for token in work.resume]
        if any(not 0 <= token < self._vocabulary.size for token in resumed):
            raise EngineError("the tokens to go on from are not of this model")
        self.end(slot)
        text = grammar_of(work.sampling)
        grammar = Grammar(self._vocabulary.native, text) if text else None
        self._samplers[slot] = SequenceSampler(work.sampling, work.seed, work.prompt, resumed, grammar)

    def step(self, plan: StepPlan) -> StepOutcome:
        """One forward pass, and a pick for each feed that wants one. Raises EngineError."""
        outputs = self._batch.fill(plan, self._positions)
        began = self._now()
        self._abort[0] = b"\0"
        result = llama.llama_decode(self._context, self._batch.native)
        if result == 2:
            for feed in plan.feeds:
                llama.llama_memory_seq_rm(self._memory, feed.slot, self._positions[feed.slot], TO_THE_END)
            return StepOutcome([], decode_s=self._now() - began, aborted=True)
        if result == 1:
            return StepOutcome([], decode_s=self._now() - began, no_room=True)
        if result != 0:
            raise EngineError(f"llama.cpp could not run the step (llama_decode returned {result})")
        logits = self._logits(outputs)
        decoded = self._now()
        picks: list[Pick] = []
        row = 0
        for feed in plan.feeds:
            self._positions[feed.slot] += len(feed.tokens)
            if not feed.pick:
                continue
            if feed.draft:
                picks += self._verify(feed, logits[row : row + feed.draft + 1])
            else:
                picks.append(self._pick(feed.slot, logits[row]))
            row += feed.draft + 1
        return StepOutcome(picks, decode_s=decoded - began, sample_s=self._now() - decoded)

    def abort(self) -> None:
        self._abort[0] = b"x"

    def _verify(self, feed: Feed, logits: Rows) -> list[Pick]:
        """Pick one token after the other for as long as the guesses are right; the cells of wrong ones are freed."""
        picks: list[Pick] = []
        guesses = feed.tokens[len(feed.tokens) - feed.draft :]
        for row, guess in zip(logits, [*guesses, None], strict=True):
            pick = self._pick(feed.slot, row)
            picks.append(pick)
            if pick.error or pick.token != guess:
                break
        wrong = feed.draft + 1 - len(picks)
        if wrong:
            end = self._positions[feed.slot] = self._positions[feed.slot] - wrong
            llama.llama_memory_seq_rm(self._memory, feed.slot, end, TO_THE_END)
        return picks

    def _logits(self, rows: int) -> Rows:
        """The outputs of the last pass, in the order of the batch, as a view of llama.cpp's own memory."""
        shape = (rows, self._vocabulary.size)
        if not rows:
            llama.llama_synchronize(self._context)
            return np.empty(shape, np.float32)
        address = ctypes.cast(llama.llama_get_logits(self._context), ctypes.c_void_p).value
        if not address:
            raise EngineError("llama.cpp gave no logits")
        memory: Any = (ctypes.c_float * (shape[0] * shape[1])).from_address(address)
        logits: Rows = np.frombuffer(memory, np.float32).reshape(shape)
        if self._suppressed.size:
            logits[:, self._suppressed] = -np.inf
        return logits

    def _pick(self, slot: int, logits: Rows) -> Pick:
        sampler = self._samplers[slot]
        if sampler is None:
            return Pick(slot, 0, "the slot has no sequence")
        try:
            return Pick(slot, sampler.pick(logits))
        except (NotFinite, NothingAllowed) as error:
            return Pick(slot, 0, str(error))

    def end(self, slot: int) -> None:
        if (sampler := self._samplers[slot]) is not None:
            sampler.close()
        self._samplers[slot] = None

    def move(self, moves: Sequence[Move]) -> None:
        for source, target, start, end in moves:
            if source < 0:
                llama.llama_memory_seq_rm(self._memory, target, start, end)
            else:
                llama.llama_memory_seq_cp(self._memory, source, target, start, end)
            if target >= self._info.slots:
                continue
            if source >= 0:
                self._positions[target] = max(self._positions[target], end)
            elif end == TO_THE_END:
                self._positions[target] = start

    def piece(self, token: int) -> bytes:
        return self._pieces[token]

    def is_end(self, token: int) -> bool:
        return token in self._vocabulary.ends

    def close(self) -> None:
        """Free the model; afterwards only `info` may be asked for."""
        for sampler in self._samplers:
            if sampler is not None:
                sampler.close()
        self._samplers = []
        if self._loaded is not None:
            self._loaded.free()
            self._loaded = None
