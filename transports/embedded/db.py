"""One SQLite file that several processes write: what log and bus of a data folder stand on.

    db = Database(folder / "log.db", schema=SCHEMA, version=1, durable=True, unavailable=LogUnavailable)
    async with db:
        answer = await db.write(work, rings=("events",))   # work(connection) -> answer, in the writer's thread
        rows = db.read(lambda connection: connection.execute(...).fetchall())    # at once, here; keep it short
        with db.bells.listen("events") as bell:                                  # see bells.py
            ...

Writes: one thread a process takes all that is pending into one transaction (no window: what comes while one runs
makes up the next), each work in a savepoint of its own, so that one which raises undoes itself alone. An `flock`
on a lock file goes around each transaction, as it is fair where SQLite's busy handler is not. After COMMIT the
bells are rung from the thread, then one callback enters the loop for the whole batch.

Errors: what a work raises reaches its caller. SQLite's own errors, a full disk, and a lock not had within
`LOCK_WAIT_S` (a process stopped inside its transaction holds everybody) raise `unavailable`, and then nothing of
that batch was written. A folder that cannot be used, or too old a SQLite, raises SetupError on entering.

SQLite only ever through `apsw`: before 3.51.3 one process that writes while another checkpoints corrupts the file,
and closing any descriptor of it that SQLite has not opened itself (the standard library's `sqlite3`, a copy)
drops this process's locks on it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import apsw

from arriero.schemas.clock import Clock
from arriero.schemas.errors import ArrieroError
from arriero.transports.embedded.bells import Doorbell
from arriero.transports.embedded.peers import Peers
from arriero.transports.embedded.shared import SharedFile, check_sqlite, make_folder
from arriero.transports.embedded.writer import Job, Work, Writer

LOCK_WAIT_S: Final = 5.0
"""A transaction takes milliseconds. Who waits longer is behind a stopped process, or a disk that has gone."""

T = TypeVar("T")


class Database:
    """See the module. `durable` files survive power loss (synchronous FULL); others are emptied after a boot."""

    def __init__(
        self, path: Path, *, schema: str, version: int, durable: bool, unavailable: type[ArrieroError]
    ) -> None:
        self.path = path
        self.bells = Doorbell(path.parent)
        self._file = SharedFile(path=path, schema=schema, version=version, durable=durable, unavailable=unavailable)
        self._waiting: deque[Job[Any]] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self._open = False

    async def __aenter__(self) -> Database:
        check_sqlite()
        make_folder(self.path.parent)
        self._loop = asyncio.get_running_loop()
        self._writer = Writer(self._file, self.bells.ring, self._finish)
        self._writer.start()
        try:
            async with asyncio.timeout(LOCK_WAIT_S):
                await asyncio.shield(self._writer.opened)
            self._reader = self._file.connect()
        except BaseException as error:
            self._writer.close()
            if isinstance(error, TimeoutError):
                raise self._file.locked_out(LOCK_WAIT_S) from None
            if isinstance(error, apsw.Error):
                raise self._file.translate(error) from error
            raise
        self._open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        """What is pending is written first; behind a stopped process's lock it is given up after LOCK_WAIT_S."""
        self._open = False
        self._reader.close()
        self._writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOCK_WAIT_S):
                await asyncio.shield(self._writer.closed)
        self._give_up(float("inf"))
        if self._watch is not None:
            self._watch.cancel()

    async def write(self, work: Work[T], *, rings: Sequence[str] = (), urgent: bool = False) -> T:
        """Run `work` in the next transaction; returns its answer once that is committed.

        rings: bells to ring after the commit. urgent: it frees space, and may use the reserve on a full disk.
        A caller that is cancelled does not cancel the work.
        """
        return await asyncio.shield(self.submit(work, rings=rings, urgent=urgent))

    def submit(self, work: Work[T], *, rings: Sequence[str] = (), urgent: bool = False) -> asyncio.Future[T]:
        """As `write`, for those who hold the future themselves (and do not cancel it)."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_mark_retrieved)
        if not self._open:
            future.set_exception(self._closed())
            return future
        job = Job(work, future, rings, urgent, self._loop.time() + LOCK_WAIT_S)
        self._waiting.append(job)
        self._writer.put(job)
        if self._watch is None:
            self._watch = self._loop.call_at(job.give_up_at, self._look)
        return future

    def read(self, work: Work[T]) -> T:
        """Run `work` now, in the caller's thread (the loop's): for reads of well under a millisecond."""
        if not self._open:
            raise self._closed()
        try:
            return work(self._reader)
        except apsw.Error as error:
            raise self._file.translate(error) from error

    def peers(self, member: str, clock: Clock, died: Callable[[], None]) -> Peers:
        """One member of a group among the others that use this folder; not entered yet."""
        return Peers(self.path.parent / "members", member, clock, died)

    def _finish(self, batch: Sequence[Job[Any]]) -> None:
        """One batch's answers, in the loop."""
        for job in batch:
            if job.future.done():
                pass  # it was given up, or its caller cancelled it
            elif job.error is not None:
                job.future.set_exception(job.error)
            else:
                job.future.set_result(job.answer)
        while self._waiting and self._waiting[0].future.done():
            self._waiting.popleft()

    def _look(self) -> None:
        """See whether works have waited too long for the lock, as long as any are pending."""
        self._watch = None
        now = self._loop.time()
        self._give_up(now)
        if self._waiting:
            # What has begun, and is late, is waited for.
            self._watch = self._loop.call_at(max(self._waiting[0].give_up_at, now + LOCK_WAIT_S / 10), self._look)

    def _give_up(self, now: float) -> None:
        late = [job for job in self._waiting if job.give_up_at <= now and not job.future.done() and job.give_up()]
        for job in late:
            job.future.set_exception(self._file.locked_out(LOCK_WAIT_S))
        while self._waiting and self._waiting[0].future.done():
            self._waiting.popleft()

    def _closed(self) -> ArrieroError:
        return self._file.unavailable(f"{self.path.name} is closed")


def _mark_retrieved(future: asyncio.Future[Any]) -> None:
    """A cancelled caller leaves its error unread; that is no fault to report."""
    if not future.cancelled():
        future.exception()
