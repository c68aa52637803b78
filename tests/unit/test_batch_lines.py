"""A batch's files: reading lines, telling what is done."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.producer.lines import (
    LINE_MAX_BYTES,
    Done,
    Line,
    Memory,
    Output,
    custom_id_of,
    jobs_of,
    memory_path,
    open_source,
    read_line,
    read_lines,
    recall,
    remember,
)
from arriero.schemas.errors import BadJob, SetupError

GOOD = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def take(path: Path, source_path: Path, *, force: bool = False) -> tuple[Done, int]:
    source = open_source(source_path)
    done = Done(source.lines)
    with Output(path, source, done, force=force) as output:
        return done, output.found


@pytest.fixture
def source_path(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", *({**GOOD, "custom_id": str(n)} for n in range(3)))


def test_lines_are_counted_and_blank_ones_are_no_jobs(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a\n\n  \r\nb")
    source = open_source(path)
    assert (source.lines, source.jobs) == (4, 2)
    assert [line.number for line in jobs_of(source)] == [1, 4]


def test_a_line_too_long_is_told_and_the_next_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * (LINE_MAX_BYTES + 5) + b"\n" + b"y" * (LINE_MAX_BYTES - 1) + b"\nb\n")
    lines = list(read_lines(path))
    assert [line.raw is None for line in lines] == [True, False, False]
    assert lines[2].raw == b"b\n"


def test_ids_follow_from_content_and_line(source_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(source_path.read_bytes())
    assert open_source(copy).job_id(2) == open_source(source_path).job_id(2)
    copy.write_bytes(source_path.read_bytes() + b"\n")
    assert open_source(copy).job_id(2) != open_source(source_path).job_id(2)


def test_a_source_that_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(SetupError) as caught:
            open_source(path)
        assert caught.value.code == "bad_input"


def test_a_good_line_is_a_job_with_its_place(source_path: Path) -> None:
    source = open_source(source_path)
    custom_id, request = read_line(source, list(jobs_of(source))[1])
    assert (custom_id, request.kind, request.job.prompt) == ("1", "completion", "hi")
    assert request.job.id == f"{source.digest}-2"
    assert request.job.batch is not None
    assert (request.job.batch.id, request.job.batch.line) == (source.digest, 2)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"method": "GET"}, "bad_value"),
        ({"url": "/v1/embeddings"}, "bad_value"),
        ({"custom_id": 5}, "bad_type"),
        ({"custom_id": "x" * 513}, "bad_value"),
        ({"boddy": {}}, "unknown_field"),
        ({"body": []}, "bad_type"),
        ({"body": {"prompt": ""}}, "empty_prompt"),
        ({"body": {"prompt": "x", "stream": True}}, "unsupported_option"),
    ],
)
def test_a_bad_line_is_refused(source_path: Path, change: dict[str, Any], code: str) -> None:
    line = Line(1, json.dumps(GOOD | change).encode())
    with pytest.raises(BadJob) as caught:
        read_line(open_source(source_path), line)
    assert caught.value.code == code


def test_the_custom_id_of_a_refused_line_is_found_where_it_can_be() -> None:
    assert custom_id_of(Line(1, json.dumps(GOOD | {"url": "?"}).encode())) == "x"
    assert custom_id_of(Line(1, b"{")) is None
    assert custom_id_of(Line(1, None)) is None


# --- outputs -------------------------------------------------------------------------------------------------


def result(source_path: Path, number: int) -> bytes:
    return json.dumps({"id": open_source(source_path).job_id(number), "x": 1}, separators=(",", ":")).encode()


@given(data=st.data())
def test_what_a_crash_leaves_is_whole_lines(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("cut")
    source_path = write(folder / "in.jsonl", GOOD, GOOD, GOOD)
    whole = b"".join(result(source_path, number) + b"\n" for number in (2, 1, 3))
    cut = data.draw(st.integers(0, len(whole)))
    output = folder / "out.jsonl"
    output.write_bytes(whole[:cut])
    done, found = take(output, source_path)
    assert found == done.count == whole[:cut].count(b"\n")
    assert output.read_bytes() == whole[: whole[:cut].rfind(b"\n") + 1]


def test_done_lines_are_known(source_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_bytes(result(source_path, 3) + b"\n")
    done, _ = take(output, source_path)
    assert [number in done for number in (1, 2, 3)] == [False, False, True]


@pytest.mark.parametrize("content", [b'{"id":"000000000000-1","x":1}\n', b"a diary", b"a diary\n", b'{"id":"x"}\n'])
def test_a_file_that_is_not_of_this_batch_is_refused_and_left_as_it_is(
    source_path: Path, tmp_path: Path, content: bytes
) -> None:
    output = tmp_path / "out.jsonl"
    output.write_bytes(content)
    with pytest.raises(SetupError) as caught:
        take(output, source_path)
    assert caught.value.code == "output_foreign"
    assert output.read_bytes() == content
    done, _ = take(output, source_path, force=True)
    assert done.count == 0
    assert output.read_bytes() == b""


def test_the_input_is_never_the_output(source_path: Path) -> None:
    before = source_path.read_bytes()
    with pytest.raises(SetupError):
        take(source_path, source_path, force=True)
    assert source_path.read_bytes() == before


@pytest.mark.parametrize("path", ["/dev/null", "/dev/full", "/dev/zero"])
def test_an_output_that_is_no_plain_file_is_refused(path: str, source_path: Path) -> None:
    source = open_source(source_path)
    with pytest.raises(SetupError, match="is not a plain file"), Output(Path(path), source, Done(1), force=False):
        pass


def test_a_full_disk_is_one_sentence(source_path: Path, tmp_path: Path) -> None:
    def run() -> None:
        with Output(tmp_path / "out.jsonl", open_source(source_path), Done(1), force=False) as output:
            with Path("/dev/full").open("ab") as full:
                os.dup2(full.fileno(), output._file.fileno())
            output.append({})

    with pytest.raises(SetupError, match="cannot be written: No space left"):
        run()


def test_two_batches_do_not_share_an_output(source_path: Path, tmp_path: Path) -> None:
    source = open_source(source_path)
    with Output(tmp_path / "out", source, Done(3), force=False), pytest.raises(SetupError) as caught:
        take(tmp_path / "out", source_path)
    assert caught.value.code == "output_busy"


def test_a_batch_remembers(tmp_path: Path) -> None:
    path = memory_path(tmp_path / "out.jsonl")
    assert recall(path) is None
    remember(path, Memory("d", 5, 7))
    assert recall(path) == Memory("d", 5, 7)
    path.write_bytes(b"{")
    assert recall(path) is None
