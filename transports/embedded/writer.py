"""The thread through which one process writes to a shared file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import apsw
import structlog

from arriero.transports.embedded.shared import FileLock, SharedFile
from arriero.transports.failpoints import reach

BATCH_MAX: Final = 1_000
"""Works in one transaction: bounds how long other processes wait for it."""
RESERVE_BYTES: Final = 1_500_000
"""Given back when the disk is full: without it not even deleting old records would be possible."""

T = TypeVar("T")
Work = Callable[[apsw.Connection], T]

log = structlog.get_logger(__name__)


class Job(Generic[T]):
    """A work on its way through the writer."""

    __slots__ = ("_gate", "_state", "answer", "error", "future", "give_up_at", "rings", "urgent", "work")

    def __init__(
        self, work: Work[T], future: asyncio.Future[T], rings: Sequence[str], urgent: bool, give_up_at: float
    ) -> None:
        self.work = work
        self.future = future
        self.rings = rings
        self.urgent = urgent
        self.give_up_at = give_up_at
        self.answer: T | None = None
        self.error: Exception | None = None
        self._state = ""
        self._gate = threading.Lock()

    def begin(self) -> bool:
        """The thread is about to run it; False when it was given up before."""
        return self._become("begun")

    def give_up(self) -> bool:
        """The loop waits no longer; False when it has begun, and its end is to be waited for."""
        return self._become("given up")

    def _become(self, state: str) -> bool:
        with self._gate:
            self._state = self._state or state
            return self._state == state


class Writer:
    """Takes all that is pending into one transaction, and again. `finished` enters the loop once a transaction."""

    def __init__(
        self, file: SharedFile, ring: Callable[[str], None], finished: Callable[[Sequence[Job[Any]]], None]
    ) -> None:
        self._file = file
        self._ring = ring
        self._finished = finished
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._reserve = Path(f"{file.path}.reserve")
        self._reserved = False
        self._full = False
        """Whether the last transaction found the disk full."""
        self._loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.closed: asyncio.Future[None] = self._loop.create_future()

    def start(self) -> None:
        # A daemon: one that waits for a stopped process's lock must not keep this process from ending.
        threading.Thread(target=self._run, name=f"write {self._file.path.name}", daemon=True).start()

    def put(self, job: Job[Any]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Write what is pending and end."""
        self._jobs.put(None)

    # all below runs in the thread

    def _run(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                try:
                    self._lock = FileLock(self._file.path)
                    stack.callback(self._lock.close)
                    with self._lock.held():
                        self._connection = self._file.prepare()
                        stack.callback(self._connection.close)
                        self._keep_reserve()
                except Exception as error:
                    self._tell(_settle, self.opened, error)
                    return
                self._tell(_settle, self.opened, None)
                while self._turn():
                    pass
        finally:
            self._tell(_settle, self.closed, None)

    def _turn(self) -> bool:
        """Write what is pending, waiting for something; False when nothing will follow."""
        batch: list[Job[Any]] = []
        job = self._jobs.get()
        while job is not None:
            batch.append(job)
            if len(batch) == BATCH_MAX:
                break
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
        # On a full disk what frees space goes first and alone, so that nobody else uses up the reserve.
        urgent = [each for each in batch if each.urgent] if self._full else []
        for part in (urgent, [each for each in batch if each not in urgent]):
            if part:
                self._write(part)
                self._tell(self._finished, part)
        return job is not None

    def _write(self, batch: list[Job[Any]]) -> None:
        """One transaction, then the bells."""
        try:
            with self._lock.held():
                rings = self._transact([job for job in batch if job.begin()])
        except (apsw.Error, OSError) as error:
            log.warning("database_write_failed", file=self._file.path.name, works=len(batch), error=repr(error))
            self._full = isinstance(error, apsw.FullError)
            for job in batch:
                # An instance each: raising one exception in many tasks would tangle their tracebacks.
                if isinstance(error, apsw.Error):
                    job.error = self._file.translate(error)
                else:
                    job.error = self._file.unavailable(f"{self._file.path}: {error.strerror}")
                job.error.__cause__ = error
            return
        for interest in rings:
            self._ring(interest)

    def _transact(self, batch: Sequence[Job[Any]]) -> Iterable[str]:
        """One transaction; the interests to ring for. Raises apsw.Error with all of it undone."""
        rings: dict[str, None] = {}
        urgent = any(job.urgent for job in batch)
        if self._full and urgent:
            self._give_reserve()
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for job in batch:
                if self._do(job):
                    rings.update(dict.fromkeys(job.rings))
            reach("write.done")
            self._connection.execute("COMMIT")
            reach("write.committed")
        except apsw.Error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        if self._full or (urgent and not self._reserved):
            self._full = False
            self._keep_reserve()
        return rings

    def _do(self, job: Job[Any]) -> bool:
        """One work in its savepoint; False when it raised and is undone."""
        self._connection.execute("SAVEPOINT work")
        try:
            job.answer = job.work(self._connection)
        except apsw.Error:
            raise
        except Exception as error:
            self._connection.execute("ROLLBACK TO work; RELEASE work")
            job.error = error
            return False
        self._connection.execute("RELEASE work")
        return True

    def _keep_reserve(self) -> None:
        """Hold space back, where there is some."""
        try:
            if not self._reserve.exists() or self._reserve.stat().st_size < RESERVE_BYTES:
                self._reserve.write_bytes(bytes(RESERVE_BYTES))
            self._reserved = True
        except OSError:
            self._give_reserve()  # half a reserve helps nobody

    def _give_reserve(self) -> None:
        self._reserved = False
        with contextlib.suppress(OSError):
            os.truncate(self._reserve, 0)

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        # The loop is closed when its owner did not wait for this thread, which a stopped process held up.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        pass
    elif error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
