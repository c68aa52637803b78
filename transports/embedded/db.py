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
import fcntl
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import apsw
import structlog

from arriero.schemas.errors import ArrieroError, SetupError
from arriero.transports.embedded.bells import Doorbell

SQLITE_LEAST: Final = (3, 51, 3)
LOCK_WAIT_S: Final = 5.0
"""A transaction takes milliseconds. Who waits longer is behind a stopped process, or a disk that has gone."""
BATCH_MAX: Final = 1_000
"""Works in one transaction: bounds how long other processes wait for it."""
CHECKPOINT_PAGES: Final = 1_000
JOURNAL_BYTES: Final = 4 << 20
"""The WAL file is cut to this after a checkpoint; one long reader would else leave it huge for ever."""
RESERVE_BYTES: Final = 1_500_000
"""Given back when the disk is full: without it not even deleting old records would be possible."""

T = TypeVar("T")
Work = Callable[[apsw.Connection], T]

log = structlog.get_logger(__name__)


class Database:
    """See the module. `durable` files survive power loss (synchronous FULL); others are emptied after a boot."""

    def __init__(
        self, path: Path, *, schema: str, version: int, durable: bool, unavailable: type[ArrieroError]
    ) -> None:
        self.path = path
        self.bells = Doorbell(path.parent)
        self._schema = schema
        self._version = version
        self._durable = durable
        self._unavailable = unavailable
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._waiting: deque[_Job[Any]] = deque()
        self._gate = threading.Lock()
        self._watch: asyncio.TimerHandle | None = None
        self._closed = True

    async def __aenter__(self) -> Database:
        if tuple(map(int, apsw.sqlite_lib_version().split("."))) < SQLITE_LEAST:
            raise SetupError(f"SQLite {apsw.sqlite_lib_version()} corrupts shared files; upgrade the package apsw")
        make_folder(self.path.parent)
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._stopped = self._loop.create_future()
        opened: asyncio.Future[None] = self._loop.create_future()
        writer = _Writer(self, opened)
        # A daemon: one that waits for a stopped process's lock must not keep this process from ending.
        threading.Thread(target=writer.run, name=f"write {self.path.name}", daemon=True).start()
        try:
            async with asyncio.timeout(LOCK_WAIT_S):
                await asyncio.shield(opened)
        except TimeoutError:
            self._closed = True
            self._jobs.put(None)
            raise self._unavailable(self._holder()) from None
        self._reader = _connect(self.path, self._durable)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """What is pending is written first; behind a stopped process's lock it is given up after LOCK_WAIT_S."""
        self._closed = True
        self._reader.close()
        self._jobs.put(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOCK_WAIT_S + 1):
                await asyncio.shield(self._stopped)
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
        future: asyncio.Future[T] = self._loop.create_future()
        future.add_done_callback(_mark_retrieved)
        if self._closed:
            future.set_exception(self._unavailable(f"{self.path.name} has been closed"))
            return future
        job = _Job(work, future, rings, urgent, self._loop.time() + LOCK_WAIT_S)
        self._waiting.append(job)
        self._jobs.put(job)
        if self._watch is None:
            self._watch = self._loop.call_later(LOCK_WAIT_S, self._expire)
        return future

    def read(self, work: Work[T]) -> T:
        """Run `work` now, in the caller's thread (the loop's): for reads of well under a millisecond."""
        if self._closed:
            raise self._unavailable(f"{self.path.name} has been closed")
        try:
            return work(self._reader)
        except apsw.Error as error:
            raise self._translate(error) from error

    def _finish(self, batch: Sequence[_Job[Any]]) -> None:
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

    def _expire(self) -> None:
        """Give up on works that have waited too long for the lock. What has begun is never given up."""
        self._watch = None
        now = self._loop.time()
        for job in self._waiting:
            with self._gate:
                if job.future.done() or job.begun:
                    continue
                if job.give_up_at > now:
                    break
                job.given_up = True
            job.future.set_exception(self._unavailable(self._holder()))
        while self._waiting and self._waiting[0].future.done():
            self._waiting.popleft()
        if self._waiting and not self._closed:
            next_at = max(self._waiting[0].give_up_at, now + 0.1)
            self._watch = self._loop.call_at(next_at, self._expire)

    def _holder(self) -> str:
        """Who holds the lock, in a sentence."""
        text = f"{self.path} could not be locked for {LOCK_WAIT_S:.0f} s"
        try:
            pid = int(Path(f"{self.path}.lock").read_text())
        except (OSError, ValueError):
            return text
        state = ""
        with contextlib.suppress(OSError, IndexError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state in ("T", "t"):
            return (
                f"{text}: process {pid} was stopped while it held the lock; go on with it (kill -CONT {pid}) or end it"
            )
        return f"{text}: process {pid} holds the lock"

    def _translate(self, error: apsw.Error) -> ArrieroError:
        if isinstance(error, apsw.FullError):
            return self._unavailable(f"the disk that holds {self.path} is full: make room, it then goes on by itself")
        return self._unavailable(f"{self.path}: {type(error).__name__}: {error}")


class _Job(Generic[T]):
    """A work on its way through the writer."""

    __slots__ = ("answer", "begun", "error", "future", "give_up_at", "given_up", "rings", "urgent", "work")

    def __init__(
        self, work: Work[T], future: asyncio.Future[T], rings: Sequence[str], urgent: bool, give_up_at: float
    ) -> None:
        self.work = work
        self.future = future
        self.rings = rings
        self.urgent = urgent
        self.give_up_at = give_up_at
        self.given_up = False
        self.begun = False
        self.answer: T | None = None
        self.error: Exception | None = None


class _Writer:
    """The thread of a `Database`."""

    def __init__(self, db: Database, opened: asyncio.Future[None]) -> None:
        self._db = db
        self._opened = opened
        self._reserve = Path(f"{db.path}.reserve")
        self._lock = -1
        self._full = False
        """Whether the last transaction found the disk full."""
        self._reserved = False

    def run(self) -> None:
        db = self._db
        try:
            self._open()
        except Exception as error:
            if self._lock >= 0:
                os.close(self._lock)
            self._tell(_settle, self._opened, error)
            return
        self._tell(_settle, self._opened, None)
        running = True
        try:
            while running:
                batch: list[_Job[Any]] = []
                job = db._jobs.get()
                while job is not None:
                    batch.append(job)
                    if len(batch) == BATCH_MAX:
                        break
                    try:
                        job = db._jobs.get_nowait()
                    except queue.Empty:
                        break
                running = job is not None
                urgent = [job for job in batch if job.urgent] if self._full else []
                for part in (urgent, [job for job in batch if job not in urgent]):
                    if part:
                        self._write(part)
                        self._tell(db._finish, part)
        finally:
            self._connection.close()
            os.close(self._lock)
            self._tell(_settle, db._stopped, None)

    def _open(self) -> None:
        db = self._db
        try:
            self._lock = os.open(f"{db.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise SetupError(
                f"the data folder {db.path.parent} cannot be used: {error.strerror}", code="data_folder_unwritable"
            ) from error
        with self._locked():
            if not db._durable:
                self._discard_after_boot()
            try:
                self._connection = _connect(db.path, db._durable)
                found = self._connection.pragma("user_version")
                if found == 0:
                    with self._connection:
                        self._connection.execute(db._schema)
                        self._connection.pragma("user_version", db._version)
            except apsw.NotADBError as error:
                raise SetupError(f"{db.path} is not a database: give another data folder, or move it away") from error
            except apsw.Error as error:
                raise db._translate(error) from error
            if found not in (0, db._version):
                raise SetupError(f"{db.path} was written by another release (layout {found}, here {db._version})")
            self._keep_reserve()

    def _write(self, batch: list[_Job[Any]]) -> None:
        """One transaction, and the bells."""
        try:
            rings = self._transact(batch)
        except OSError as error:  # of the lock file
            log.warning("database_write_failed", file=self._db.path.name, works=len(batch), error=repr(error))
            for job in batch:
                job.error = self._db._unavailable(f"{self._db.path}: {error.strerror}")
            return
        for interest in rings:
            self._db.bells.ring(interest)

    def _transact(self, batch: list[_Job[Any]]) -> Iterable[str]:
        """One transaction; the interests to ring for."""
        db = self._db
        rings: dict[str, None] = {}
        with self._locked():
            with db._gate:
                for job in batch:
                    job.begun = not job.given_up
            batch = [job for job in batch if job.begun]
            if self._full and any(job.urgent for job in batch):
                self._give_reserve()
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                for job in batch:
                    if self._run(job):
                        rings.update(dict.fromkeys(job.rings))
                self._connection.execute("COMMIT")
                if self._full or (not self._reserved and any(job.urgent for job in batch)):
                    self._full = False
                    self._keep_reserve()
            except apsw.Error as error:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                self._full = isinstance(error, apsw.FullError)
                log.warning("database_write_failed", file=db.path.name, works=len(batch), error=repr(error))
                for job in batch:
                    # An instance each: raising one exception in many tasks would tangle their tracebacks.
                    job.error = db._translate(error)
                    job.error.__cause__ = error
                rings.clear()
        return rings

    def _run(self, job: _Job[Any]) -> bool:
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

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            os.pwrite(self._lock, b"%-10d\n" % os.getpid(), 0)
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _discard_after_boot(self) -> None:
        """What was not synchronised may be torn after a power loss; nobody can hold it open from before."""
        path = self._db.path
        mark = Path(f"{path}.boot")
        boot = boot_id()
        if mark.exists() and mark.read_text() == boot:
            return
        for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
            name.unlink(missing_ok=True)
        mark.write_text(boot)

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
            self._db._loop.call_soon_threadsafe(callback, *arguments)


def make_folder(folder: Path) -> None:
    """Make a data folder. Raises SetupError when it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise SetupError(f"the data folder {folder} is a file", code="data_folder_unwritable") from error
    except OSError as error:
        raise SetupError(
            f"the data folder {folder} cannot be made: {error.strerror}", code="data_folder_unwritable"
        ) from error


def boot_id() -> str:
    """Tells one boot of this machine from another; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _connect(path: Path, durable: bool) -> apsw.Connection:
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(1_000)  # only for the moments in which SQLite itself recovers or checkpoints
    connection.execute(
        f"PRAGMA journal_mode=WAL; PRAGMA synchronous={'FULL' if durable else 'OFF'};"
        f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}; PRAGMA journal_size_limit={JOURNAL_BYTES};"
        "PRAGMA temp_store=MEMORY"
    ).fetchall()
    return connection


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        pass
    elif error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _mark_retrieved(future: asyncio.Future[Any]) -> None:
    """A cancelled caller leaves its error unread; that is no fault to report."""
    if not future.cancelled():
        future.exception()
