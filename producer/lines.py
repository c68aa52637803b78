"""The files of a batch: the input's lines, and the outputs that say what is done.

An input line is `{"custom_id", "method", "url", "body"}`. Line n of an input with digest d is the job `d-n`, so an
output line tells by its id which line of which input it answers. Outputs are only ever appended to; a line that a
crash has torn off is cut away when they are opened again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from arriero.producer.openai import PATHS, Request, read_json, read_request, refuse_unknown
from arriero.schemas.errors import BadJob, SetupError
from arriero.schemas.job import JOB_MAX_BYTES, BatchRef

LINE_MAX_BYTES: Final = JOB_MAX_BYTES + (64 << 10)
"""Longest line that is read; a longer one is refused without being held in memory."""
BLOCK_BYTES: Final = 1 << 20
DIGEST_BYTES: Final = 6
"""Of an input file: 12 hex digits begin the ids of its jobs."""
CUSTOM_ID_MAX_CHARS: Final = 512

_OUTPUT_LINE: Final = re.compile(rb'\{"id":"([0-9a-f]{12})-([0-9]{1,12})",')
"""Every output line begins so: looking at its first bytes is enough, however long it is."""
_OUTPUT_START: Final = b'{"id":"'


class Line(msgspec.Struct, frozen=True):
    """A line of the input; `raw` is None when it is too long to be a job."""

    number: int
    raw: bytes | None


class Source(msgspec.Struct, frozen=True):
    """An input file, read through once."""

    path: Path
    digest: str
    lines: int
    """Physical lines, blank ones included."""
    jobs: int
    """Lines that are not blank."""

    def job_id(self, number: int) -> str:
        return f"{self.digest}-{number}"


class _InputLine(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


def check_source(path: Path) -> None:
    """Raises SetupError for what cannot be an input."""
    if not path.is_file():
        raise SetupError(f"{path} is not a file: a batch reads its input twice", code="bad_input")


def open_source(path: Path) -> Source:
    """Digest and count. Raises SetupError."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    lines = jobs = 0
    try:
        check_source(path)
        with path.open("rb") as file:
            while chunk := file.read(BLOCK_BYTES):
                digest.update(chunk)
        for line in read_lines(path):
            lines = line.number
            jobs += not _is_blank(line)
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror}", code="bad_input") from error
    return Source(path, digest.hexdigest(), lines, jobs)


def read_lines(path: Path) -> Iterator[Line]:
    """All lines, in bounded memory."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(LINE_MAX_BYTES):
            number += 1
            whole = raw.endswith(b"\n") or len(raw) < LINE_MAX_BYTES
            rest = raw
            while not rest.endswith(b"\n") and (rest := file.readline(BLOCK_BYTES)):
                pass
            yield Line(number, raw if whole else None)


def _is_blank(line: Line) -> bool:
    return line.raw is not None and not line.raw.strip()


def jobs_of(source: Source) -> Iterator[Line]:
    """The lines that are not blank."""
    return (line for line in read_lines(source.path) if not _is_blank(line))


def read_line(source: Source, line: Line) -> tuple[str, Request]:
    """The line's custom id and its request. Raises BadJob; `custom_id_of` may still tell whose it was."""
    if line.raw is None:
        raise BadJob(f"the line is longer than {LINE_MAX_BYTES:,} bytes", code="job_too_large")
    raw = read_json(line.raw)
    refuse_unknown("", raw, _InputLine)
    try:
        asked = msgspec.convert({"method": "POST"} | raw, _InputLine)
    except msgspec.ValidationError as error:
        code = "missing_field" if "missing required field" in str(error) else "bad_type"
        raise BadJob(f"the line does not fit the batch format: {error}", code=code) from error
    if len(asked.custom_id) > CUSTOM_ID_MAX_CHARS:
        raise BadJob(f"`custom_id` has more than {CUSTOM_ID_MAX_CHARS} characters", field="custom_id")
    if asked.method != "POST":
        raise BadJob("`method` must be POST", field="method")
    if asked.url not in PATHS:
        raise BadJob(f"`url` must be one of {', '.join(PATHS)}", field="url")
    request = read_request(
        PATHS[asked.url],
        asked.body,
        job_id=source.job_id(line.number),
        batch=BatchRef(source.digest, line.number),
    )
    if request.stream:
        raise BadJob("`stream` has no meaning in a batch", code="unsupported_option", field="stream")
    return asked.custom_id, request


def custom_id_of(line: Line) -> str | None:
    """The custom id of a line that is otherwise refused."""
    try:
        found = read_json(line.raw or b"").get("custom_id")
    except BadJob:
        return None
    return found[:CUSTOM_ID_MAX_CHARS] if isinstance(found, str) else None


class Done:
    """Which lines are done: a byte each."""

    def __init__(self, lines: int) -> None:
        self._marks = bytearray(lines + 1)
        self.count = 0

    def __contains__(self, number: int) -> bool:
        return bool(self._marks[number])

    def add(self, number: int) -> None:
        """Raises IndexError for a line that the input does not have."""
        self.count += not self._marks[number]
        self._marks[number] = 1


class Memory(msgspec.Struct, frozen=True):
    """What a batch remembers beside its output until all is done."""

    digest: str
    started_ms: int
    """When its first job was published; Unix milliseconds."""
    submitted: int = 0
    """Lines up to this one may have been published."""


def memory_path(target: Path) -> Path:
    return target.with_name(target.name + ".batch.json")


def recall(path: Path) -> Memory | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Memory)
    except (FileNotFoundError, msgspec.MsgspecError):  # lost, it is done without: what is published twice is told apart
        return None


def remember(path: Path, memory: Memory) -> None:
    """Replaced at once, so that a crash leaves the old or the new."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(msgspec.json.encode(memory))
    fresh.replace(path)


class Output:
    """A result file that this process alone appends to. Enter it to lock it and to learn what it holds."""

    def __init__(self, path: Path, source: Source, done: Done, *, force: bool) -> None:
        self.path = path
        self._source = source
        self._done = done
        self._force = force
        self.found = 0
        """Lines that were there already."""

    def __enter__(self) -> Output:
        try:
            self._file: BinaryIO = self.path.open("a+b")
        except OSError as error:
            raise SetupError(f"{self.path} cannot be written: {error.strerror}", code="bad_output") from error
        try:
            self._take()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.sync()
        finally:
            with contextlib.suppress(OSError):  # what could not be written has been told
                self._file.close()

    # These raise SetupError(bad_output), when the disk is full say: the next run goes on from what was written.

    def append(self, line: dict[str, Any]) -> None:
        with self._telling():
            self._file.write(msgspec.json.encode(line) + b"\n")

    def flush(self) -> None:
        """What is written survives this process from now on."""
        with self._telling():
            self._file.flush()

    def sync(self) -> None:
        """What is written survives the machine from now on. Takes a disk's time: call it in a thread."""
        with self._telling():
            self._file.flush()
            os.fsync(self._file.fileno())

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SetupError(f"{self.path} cannot be written: {error.strerror}", code="bad_output") from error

    def _take(self) -> None:
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            raise SetupError(
                f"{self.path} is not a plain file: a batch reads again what it has written", code="bad_output"
            )
        if self.path.samefile(self._source.path):
            raise SetupError(f"{self.path} is the input; give another output", code="bad_output")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SetupError(f"{self.path} is being written by another batch", code="output_busy") from error
        if self._force:
            self._file.truncate(0)
        whole = self._scan()
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)

    def _scan(self) -> int:
        """Mark the lines that are answered; where the last whole line ends."""
        self._file.seek(0)
        whole = number = 0
        while start := self._file.readline(BLOCK_BYTES):
            length, last = len(start), start
            while not last.endswith(b"\n") and (last := self._file.readline(BLOCK_BYTES)):
                length += len(last)
            if not last.endswith(b"\n"):
                if start[: len(_OUTPUT_START)] != _OUTPUT_START[: len(start)]:
                    self._mark(number + 1, start)  # not torn off by us: refused, not cut away
                break
            number += 1
            self._mark(number, start)
            whole += length
        return whole

    def _mark(self, number: int, start: bytes) -> None:
        other = f"give another output, or --force to begin it anew: {self.path}"
        match = _OUTPUT_LINE.match(start)
        if match is None:
            raise SetupError(f"line {number} of the output is no result of a batch; {other}", code="output_foreign")
        digest, line = match[1].decode(), int(match[2])
        if digest != self._source.digest or not 1 <= line <= self._source.lines:
            raise SetupError(
                f"the output holds results of another input (digest {digest}, this input's is {self._source.digest}: "
                f"was {self._source.path} changed?); {other}",
                code="output_foreign",
            )
        self._done.add(line)
        self.found += 1
