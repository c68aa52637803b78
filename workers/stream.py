"""The owner's side of token streams: from the jobs in hand to the token bus. See docs/token-bus.md.

    open(streams) ──▶ opener: one `open` call for all that came in meanwhile
    feed, close   ──▶ pump:   one `append` call for all streams with new tokens; what comes meanwhile goes with the next

Nothing that decodes waits for the bus. Tokens wait in the job's own list, which its `max_tokens` bounds, until
the bus takes them; a bus that is away is tried again with growing pauses, and streams that it has never seen, or has
forgotten, are opened as `mine` then. The phases of a stream:

A job that another owner has begun is opened as `take`: what the bus holds of it is adopted, and decoding goes on from
there. Where the bus has forgotten it the caller is told (`none`), and opens it again with what the log remembers.

    new ──open──▶ live ──reopen, a raised fence──▶ lost ──open as mine──▶ live
     │             │ gone                            ▲
     │ no bus      └──▶ unsaved ──checkpointed───────┤
     └───────────────────────────────────────────────┘
                   any ──fenced, foreign, finished──▶ unseen: decoded and recorded, but not shown
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, Literal

import msgspec
import structlog

from arriero.schemas.clock import Clock
from arriero.schemas.errors import BusUnavailable
from arriero.schemas.token import Token
from arriero.transports.bus import APPEND_MAX_TOKENS, Appended, AppendRequest, Opened, OpenRequest, TokenBus
from arriero.transports.failpoints import reach
from arriero.transports.lineage import epoch_of, extended
from arriero.workers.metrics import WorkerMetrics

log = structlog.get_logger(__name__)

TOUCH_S: Final = 1.0
"""How often streams that the bus has not been called for since half of it are touched: that keeps them alive, and a
job that waits hears of its cancel."""
OPEN_PATIENCE_S: Final = 1.0
"""How long a new job waits for a slow bus. After that it is decoded and its stream opened later."""
TAKE_PATIENCE_S: Final = 5.0
"""How long one waits that another owner may have begun: what the bus holds of it need not be decoded again, and its
readers need not be reset."""
CALL_MAX_STREAMS: Final = 256
"""Streams in one `open` or `append` call: a call holds the bus up for everybody else."""
REOPEN_MAX_TOKENS: Final = 20_000
"""Tokens in one call that makes streams equal to their owners' again."""
PAUSE_FIRST_S: Final = 0.05
PAUSE_MAX_S: Final = 1.0
"""Pauses between two tries of a bus that is away double from the first to this; readers wait as long at most."""

Phase = Literal["new", "live", "lost", "unsaved", "unseen"]


class Stream(msgspec.Struct, kw_only=True, eq=False):
    """One job's stream, as its owner sees it."""

    key: int
    """The job's handle."""
    job_id: str
    root: str
    attempt: int
    fence: int
    epoch: str
    lineage: str
    tokens: list[Token]
    """The job's tokens; the decoder appends to the same list."""
    taken: bool = False
    """Another owner has begun it, or may have."""
    patient: bool = False
    """A bus that does not answer is asked again for a while: what it holds of this one would else be lost."""
    least: int = 0
    """So many tokens at least were streamed by earlier attempts; a bus that holds fewer has forgotten some."""
    sent: int = 0
    """How many of them the bus holds."""
    seal: str = ""
    closing: bool = False
    """No more tokens will come."""
    phase: Phase = "new"
    heard: float = 0.0
    """When the bus last answered for it, monotonic."""

    @staticmethod
    def begin(
        *,
        key: int,
        job_id: str,
        root: str,
        attempt: int,
        fence: int,
        tokens: list[Token],
        taken: bool = False,
        patient: bool = False,
        least: int = 0,
    ) -> Stream:
        """A stream as long as nothing is known of it."""
        epoch = epoch_of(attempt, fence)
        return Stream(
            key=key,
            job_id=job_id,
            root=root,
            attempt=attempt,
            fence=fence,
            epoch=epoch,
            lineage=f"{epoch}@0",
            tokens=tokens,
            taken=taken,
            patient=patient,
            least=least,
        )

    def go_on(self, lineage: str, tokens: Sequence[Token]) -> None:
        """Decoding goes on after these tokens of earlier owners."""
        self.tokens[:] = tokens
        self.lineage = extended(lineage, self.epoch, len(tokens))
        self.taken = self.patient = False

    def begin_anew(self) -> None:
        """It is decoded from its start after all."""
        self.tokens.clear()
        self.lineage, self.sent, self.seal = extended("", self.epoch, 0), 0, ""
        self.taken = self.patient = False


class Streams:
    """All streams of one worker. `run` must be running while it is used.

    on_cancel: called with a stream's key when the bus says that its job is to be cancelled.
    save: records what the job of this key has decoded, and returns when that is durable.
    """

    def __init__(
        self,
        bus: TokenBus,
        *,
        digests: str,
        clock: Clock,
        rng: random.Random,
        metrics: WorkerMetrics,
        on_cancel: Callable[[int], None],
        save: Callable[[int], Awaitable[None]],
    ) -> None:
        self._bus = bus
        self._digests = digests
        self._clock = clock
        self._rng = rng
        self._metrics = metrics
        self._on_cancel = on_cancel
        self._save_tokens = save
        self._streams: dict[int, Stream] = {}
        self._dirty: dict[int, Stream] = {}
        self._wake = asyncio.Event()
        self._opening: list[tuple[Stream, asyncio.Future[Opened | None]]] = []
        self._opening_wake = asyncio.Event()
        self._since = 0.0
        """When the oldest tokens that have not gone out yet came in, monotonic; 0 when there are none."""
        self._away = False
        self._pause_s = PAUSE_FIRST_S

    # --- what the worker calls ------------------------------------------------------------------------------

    async def open(self, streams: Sequence[Stream]) -> list[Opened | None]:
        """Take hold of new streams, at least one. None stands for a bus that is away or slow: such a stream is opened
        when it is back.

        `fresh` and `have` are ours, with the tokens that they hold now; `seal` is that of a whole generation. Of one
        that may have been another's, after `none` and after None, the caller looks into the log, and opens it again as
        not `taken`. For `foreign` and `finished` the caller decides; the stream is `unseen`, as with `fenced`.
        """
        for stream in streams:
            self._streams[stream.key] = stream
        patient = any(stream.patient for stream in streams)
        if self._away and self._dirty and not patient:  # the pump finds out when it is back
            for stream in streams:
                self._open_later(stream)
            return [None] * len(streams)
        loop = asyncio.get_running_loop()
        waits: list[tuple[Stream, asyncio.Future[Opened | None]]] = [
            (stream, loop.create_future()) for stream in streams
        ]
        self._opening += waits
        self._opening_wake.set()
        patience_s = TAKE_PATIENCE_S if patient else OPEN_PATIENCE_S
        await asyncio.wait([future for _, future in waits], timeout=patience_s)
        for stream, future in waits:
            if not future.done():
                future.set_result(None)
                self._open_later(stream)
        return [future.result() for _, future in waits]

    def feed(self, stream: Stream) -> None:
        """Its list of tokens has grown."""
        if stream.phase != "unseen":
            self._since = self._since or self._clock.monotonic()
            self._dirty[stream.key] = stream
            self._wake.set()

    def close(self, stream: Stream, seal: str = "") -> None:
        """No more tokens will come. `seal`, `<count>|<reason>`, when generation is complete."""
        stream.seal, stream.closing = seal, True
        nothing_to_say = not seal and stream.sent == len(stream.tokens)
        if stream.phase == "unseen" or self._away or nothing_to_say:
            self.drop(stream)
        else:
            self.feed(stream)

    def drop(self, stream: Stream) -> None:
        """Have nothing more to do with it."""
        stream.phase = "unseen"
        self._streams.pop(stream.key, None)
        self._dirty.pop(stream.key, None)

    def restart(self, stream: Stream) -> None:
        """What was adopted is of no use: it is decoded from its start, and readers are reset to there."""
        stream.begin_anew()
        if stream.phase == "live":
            stream.phase = "lost"
            self.feed(stream)

    def adopt(self, stream: Stream, fence: int) -> None:
        """The claim has been fenced anew and nobody owned it in between: the epoch stays, the fence is raised."""
        stream.fence = fence
        if stream.phase == "live":
            stream.phase = "lost"
            self.feed(stream)

    async def run(self) -> None:
        """Carries tokens to the bus until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._open_new(), name="streams open")
            tasks.create_task(self._pump(tasks), name="streams pump")
            tasks.create_task(self._touch(), name="streams touch")

    # --- opening --------------------------------------------------------------------------------------------

    async def _open_new(self) -> None:
        while True:
            await self._opening_wake.wait()
            self._opening_wake.clear()
            while self._opening:
                some, self._opening = self._opening[:CALL_MAX_STREAMS], self._opening[CALL_MAX_STREAMS:]
                some = [(stream, future) for stream, future in some if stream.phase == "new" and not future.done()]
                if not some:
                    continue
                try:
                    await self._open_some(some)
                    self._found_back()
                except BusUnavailable as error:
                    self._found_away(error)
                    for stream, future in some:
                        if future.done():
                            pass
                        elif stream.patient:
                            self._opening.append((stream, future))
                        else:
                            future.set_result(None)
                            self._open_later(stream)
                    if any(stream.patient for stream, _ in some):
                        await asyncio.sleep(PAUSE_FIRST_S * self._rng.uniform(0.5, 1.0))

    async def _open_some(self, some: Sequence[tuple[Stream, asyncio.Future[Opened | None]]]) -> None:
        """Steps: 1. take or start 2. adopt what another owner has left 3. cut it to nothing where it is of no use:
        another model's, or damaged."""
        # 1.
        requests = [self._request(stream, "take" if stream.taken else "start") for stream, _ in some]
        answers = await self._bus.open(requests)
        useless = []
        for (stream, future), answer in zip(some, answers, strict=True):
            # 2. Not for those whose job has stopped waiting: tokens of its own may be there by now.
            if answer.code == "have" and not future.done():
                tokens = self._usable(stream, answer)
                if tokens is None:
                    useless.append((stream, future))
                    continue
                stream.go_on(answer.lineage, tokens)
                if answer.seal and answer.seal.partition("|")[0] != str(len(tokens)):
                    answer = msgspec.structs.replace(answer, seal="")
            self._opened(stream, future, answer)
        # 3.
        if useless:
            for stream, _ in useless:
                stream.begin_anew()
            answers = await self._bus.open([self._request(stream, "restart") for stream, _ in useless])
            for (stream, future), answer in zip(useless, answers, strict=True):
                self._opened(stream, future, answer)

    def _usable(self, stream: Stream, answer: Opened) -> list[Token] | None:
        """The tokens to go on after; None when they are of no use."""
        if answer.digests != self._digests:
            log.info("stream_of_another_model", job_id=stream.job_id, count=len(answer.tokens))
            return None
        try:
            return [Token.from_bus(element) for element in answer.tokens]
        except ValueError:
            log.warning("stream_damaged", job_id=stream.job_id, count=len(answer.tokens))
            return None

    def _opened(self, stream: Stream, future: asyncio.Future[Opened | None], answer: Opened) -> None:
        if stream.phase == "new" and answer.code != "none" and not future.done():
            stream.phase = "live" if answer.code in ("fresh", "have") else "unseen"
            stream.sent, stream.heard = len(stream.tokens), self._clock.monotonic()
            if stream.phase == "unseen":
                self.drop(stream)
        if not future.done():
            future.set_result(answer)

    def _open_later(self, stream: Stream) -> None:
        """Those that may have been another's wait for what the log knows of them, or readers were reset to nothing."""
        if stream.phase == "new" and not stream.taken:
            stream.phase = "lost"
            self.feed(stream)

    def _request(self, stream: Stream, mode: Literal["start", "take", "restart", "mine"]) -> OpenRequest:
        return OpenRequest(
            job_id=stream.job_id,
            root=stream.root,
            attempt=stream.attempt,
            fence=stream.fence,
            epoch=stream.epoch,
            mode=mode,
            least=stream.least if mode == "take" else 0,
            lineage=stream.lineage,
            tokens=[token.on_bus() for token in stream.tokens] if mode in ("mine", "start") else (),
            digests=self._digests,
        )

    # --- the pump -------------------------------------------------------------------------------------------

    async def _pump(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._dirty:
                try:
                    await self._reopen()
                    await self._append(tasks)
                except BusUnavailable as error:
                    self._found_away(error)
                    await asyncio.sleep(self._pause_s * self._rng.uniform(0.5, 1.0))
                    self._pause_s = min(self._pause_s * 2, PAUSE_MAX_S)
                else:
                    self._found_back()

    async def _reopen(self) -> None:
        """Make streams of ours that the bus has lost, or never seen, equal to what we hold."""
        lost, tokens = [], 0
        for stream in self._dirty.values():
            if stream.phase == "lost":
                lost.append(stream)
                tokens += len(stream.tokens)
                if len(lost) == CALL_MAX_STREAMS or tokens > REOPEN_MAX_TOKENS:
                    break
        if not lost:
            return
        requests = [self._request(stream, "mine") for stream in lost]
        answers = await self._bus.open(requests)
        for stream, request, answer in zip(lost, requests, answers, strict=True):
            if stream.phase != "lost" or stream.fence != request.fence:
                continue  # dropped or fenced anew meanwhile
            log.debug("stream_reopened", job_id=stream.job_id, code=answer.code, count=len(request.tokens))
            if answer.code in ("fresh", "have"):
                stream.phase, stream.sent = "live", len(request.tokens)
            else:
                self.drop(stream)
            self._hear(stream, answer.cancelled)

    async def _append(self, tasks: asyncio.TaskGroup) -> None:
        requests: list[tuple[Stream, AppendRequest]] = []
        for stream in list(self._dirty.values())[:CALL_MAX_STREAMS]:
            if stream.phase != "lost":
                # Whoever has more to say afterwards comes in again behind the others.
                del self._dirty[stream.key]
            if stream.phase == "live":
                requests.append((stream, self._next(stream)))
        if not requests:
            return
        since, self._since = self._since, 0.0
        try:
            answers = await self._bus.append([request for _, request in requests])
        except BusUnavailable:
            self._since = since
            self._dirty |= {stream.key: stream for stream, _ in requests if stream.phase != "unseen"}
            raise
        reach("stream.appended")
        self._metrics.bus_lag.observe(self._clock.monotonic() - since if since else 0.0)
        for (stream, request), answer in zip(requests, answers, strict=True):
            if stream.phase == "live" and stream.fence == request.fence:
                self._appended(stream, request, answer, tasks)

    def _next(self, stream: Stream) -> AppendRequest:
        """The stream's next tokens, possibly none."""
        tokens = stream.tokens[stream.sent : stream.sent + APPEND_MAX_TOKENS]
        last = stream.sent + len(tokens) == len(stream.tokens)
        return AppendRequest(
            job_id=stream.job_id,
            root=stream.root,
            attempt=stream.attempt,
            fence=stream.fence,
            epoch=stream.epoch,
            first=stream.sent,
            tokens=[token.on_bus() for token in tokens],
            seal=stream.seal if last else "",
        )

    def _appended(self, stream: Stream, request: AppendRequest, answer: Appended, tasks: asyncio.TaskGroup) -> None:
        match answer.code:
            case "ok":
                stream.sent = answer.next
                if stream.sent < len(stream.tokens) or stream.seal != request.seal:
                    self._dirty[stream.key] = stream
                elif stream.closing:
                    self.drop(stream)
                else:
                    self._dirty.pop(stream.key, None)
            case "gone":
                # A bus that forgets and a worker that dies next would cost all that was shown: it is recorded first.
                stream.phase = "unsaved"
                tasks.create_task(self._save(stream), name=f"checkpoint {stream.key}")
            case "reopen":
                stream.phase = "lost"
                self._dirty[stream.key] = stream
            case "foreign" | "fenced" | "finished":
                log.info("stream_not_ours", job_id=stream.job_id, code=answer.code)
                self.drop(stream)
        self._hear(stream, answer.cancelled)

    async def _save(self, stream: Stream) -> None:
        if stream.tokens and not stream.closing:
            await self._save_tokens(stream.key)
        if stream.phase == "unsaved":
            stream.phase = "lost"
            self.feed(stream)

    def _hear(self, stream: Stream, cancelled: bool) -> None:
        stream.heard = self._clock.monotonic()
        if cancelled and not stream.closing:
            self._on_cancel(stream.key)

    async def _touch(self) -> None:
        while True:
            await asyncio.sleep(TOUCH_S)
            if self._streams and not self._away:
                silent_since = self._clock.monotonic() - TOUCH_S / 2
                for stream in _silent(self._streams.values(), silent_since):
                    self.feed(stream)

    # --- whether the bus is there ---------------------------------------------------------------------------

    def _found_away(self, error: BusUnavailable) -> None:
        """Streams whose last tokens have not gone out are let go of: the projector completes them."""
        if not self._away:
            log.warning("bus_away", error=error.message, streams=len(self._streams))
            self._away = True
            self._metrics.bus_away.set(1)
        for stream in [stream for stream in self._streams.values() if stream.closing]:
            self.drop(stream)
        # Something has to try again, even when nothing is decoded.
        for stream in self._streams.values():
            self._dirty[stream.key] = stream
        self._wake.set()

    def _found_back(self) -> None:
        if self._away:
            log.info("bus_back", streams=len(self._streams))
            self._away = False
            self._metrics.bus_away.set(0)
        self._pause_s = PAUSE_FIRST_S


def _silent(streams: Iterable[Stream], since: float) -> list[Stream]:
    return [stream for stream in streams if stream.phase == "live" and stream.heard <= since]
