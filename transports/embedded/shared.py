"""A SQLite file that several processes share: how it is opened, locked and spoken of in errors."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import apsw
import msgspec

from arriero.schemas.errors import ArrieroError, SetupError

SQLITE_LEAST: Final = (3, 51, 3)
CHECKPOINT_PAGES: Final = 1_000
JOURNAL_BYTES: Final = 4 << 20
"""The WAL file is cut to this after a checkpoint; one long reader would else leave it huge for ever."""
BUSY_MS: Final = 1_000
"""Only for the moments in which SQLite itself recovers or checkpoints: writers take turns by the lock file."""


class SharedFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a database is opened with; see db.py."""

    path: Path
    schema: str
    version: int
    durable: bool
    unavailable: type[ArrieroError]

    def connect(self) -> apsw.Connection:
        """Raises apsw.Error."""
        connection = apsw.Connection(str(self.path))
        connection.set_busy_timeout(BUSY_MS)
        connection.execute(
            f"PRAGMA journal_mode=WAL; PRAGMA synchronous={'FULL' if self.durable else 'OFF'};"
            f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}; PRAGMA journal_size_limit={JOURNAL_BYTES};"
            "PRAGMA temp_store=MEMORY"
        ).fetchall()
        return connection

    def prepare(self) -> apsw.Connection:
        """A connection to a file that has its tables; to be called under the lock. Raises SetupError, `unavailable`."""
        if not self.durable:
            self._discard_after_boot()
        try:
            connection = self.connect()
            found = connection.pragma("user_version")
            if found == 0:
                with connection:
                    connection.execute(self.schema)
                    connection.pragma("user_version", self.version)
        except apsw.NotADBError as error:
            raise SetupError(f"{self.path} is not a database: give another data folder, or move it away") from error
        except apsw.Error as error:
            raise self.translate(error) from error
        if found not in (0, self.version):
            connection.close()
            raise SetupError(f"{self.path} was written by another release (layout {found}, here {self.version})")
        return connection

    def translate(self, error: apsw.Error) -> ArrieroError:
        if isinstance(error, apsw.FullError):
            return self.unavailable(f"the disk that holds {self.path} is full: make room, it then goes on by itself")
        return self.unavailable(f"{self.path}: {type(error).__name__}: {error}")

    def locked_out(self, waited_s: float) -> ArrieroError:
        """The error of one who has waited for the lock in vain: it names who holds it."""
        text = f"{self.path} could not be locked for {waited_s:g} s"
        try:
            pid = int(Path(f"{self.path}.lock").read_text())
        except (OSError, ValueError):
            return self.unavailable(text)
        state = ""
        with contextlib.suppress(OSError, IndexError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state in ("T", "t"):
            return self.unavailable(
                f"{text}: process {pid} was stopped while it held the lock; let it go on (kill -CONT {pid}) or end it"
            )
        return self.unavailable(f"{text}: process {pid} holds the lock")

    def _discard_after_boot(self) -> None:
        """What was not synchronised may be torn after a power loss; nobody can hold it open from before."""
        mark = Path(f"{self.path}.boot")
        boot = boot_id()
        if mark.exists() and mark.read_text() == boot:
            return
        for name in (self.path, Path(f"{self.path}-wal"), Path(f"{self.path}-shm")):
            name.unlink(missing_ok=True)
        mark.write_text(boot)


class FileLock:
    """The lock file beside a database. Its text is the pid of who locked it last."""

    def __init__(self, path: Path) -> None:
        """Raises SetupError when the folder cannot be written."""
        try:
            self._file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise SetupError(
                f"the data folder {path.parent} cannot be used: {error.strerror}", code="data_folder_unwritable"
            ) from error

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Waits its turn, however long."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            os.pwrite(self._file, b"%-10d\n" % os.getpid(), 0)
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._file)


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


def check_sqlite() -> None:
    """Raises SetupError when the SQLite that `apsw` brings is one that corrupts shared files."""
    found = apsw.sqlite_lib_version()
    if tuple(map(int, found.split("."))) < SQLITE_LEAST:
        raise SetupError(f"SQLite {found} corrupts files that processes share; upgrade the package apsw")


def boot_id() -> str:
    """Tells one boot of this machine from another; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
