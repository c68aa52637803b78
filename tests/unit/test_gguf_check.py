"""Model files that llama.cpp must not see."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_gguf import N_VOCAB, write_tiny_gguf

from arriero.schemas.errors import ModelError
from arriero.workers.engine.llama.gguf_check import Length, check


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


def refused(path: Path, data: bytes) -> ModelError:
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        check(path)
    assert "\n" not in caught.value.message
    return caught.value


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(given_value: Any) -> bytes:
    if isinstance(given_value, str):
        return struct.pack("<I", 8) + text(given_value)
    if isinstance(given_value, list):
        return struct.pack("<IIQ", 9, 8, len(given_value)) + b"".join(map(text, given_value))
    return struct.pack("<II", 4, given_value)


def made(*tensors: bytes, data: int = 4096, keys: int | None = None, count: int | None = None, **changes: Any) -> bytes:
    """A header of our own making; a change to None leaves a key out."""
    fields: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "tokenizer.ggml.tokens": ["a", "b"],
        **{name.replace("__", "."): one for name, one in changes.items()},
    }
    fields = {name: one for name, one in fields.items() if one is not None}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors) if count is None else count, keys or len(fields))
    body = b"".join(text(name) + value(one) for name, one in fields.items()) + b"".join(tensors)
    return head + body + bytes(-len(head + body) % 32 + data)


def tensor(name: str = "w", dims: tuple[int, ...] = (32, 2), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def test_a_good_file_is_read(tmp_path: Path) -> None:
    header = check(write_tiny_gguf(tmp_path / "tiny.gguf"))
    assert header.architecture == "llama"
    assert header.own("block_count") == 2
    assert header.metadata["tokenizer.ggml.tokens"] == Length(N_VOCAB)
    assert sum(one.size_bytes for one in header.tensors) < header.size_bytes


def test_a_header_of_our_own_making_is_read(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(made(tensor()))
    assert check(tmp_path / "m").tensors[0].size_bytes == 256


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelError) as caught:
            check(path)
        assert caught.value.code == "model_missing"
        assert str(path) in caught.value.message


def test_what_is_no_gguf_is_said_to_be_none(tmp_path: Path) -> None:
    error = refused(tmp_path / "m", b"PK\x03\x04" + bytes(100))
    assert (error.code, "not a GGUF" in error.message) == ("model_invalid", True)


@pytest.mark.parametrize("size", [0, 3, 10, 23, 24, 100, 1_000, 5_000])
def test_a_file_cut_short_is_refused(tmp_path: Path, whole: bytes, size: int) -> None:
    assert refused(tmp_path / "m", whole[:size]).code == "model_invalid"


def test_a_file_that_lacks_its_last_byte_is_refused(tmp_path: Path) -> None:
    data = made(tensor(dims=(32, 2)), data=256)
    (tmp_path / "m").write_bytes(data)
    check(tmp_path / "m")
    assert "past the end" in refused(tmp_path / "m", data[:-1]).message


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GGUF" + struct.pack("<IQQ", 1, 1, 1) + bytes(64), "model_unsupported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(64), "model_unsupported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 1 << 60) + bytes(64), "model_invalid"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1) + bytes(64), "model_invalid"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", 1 << 62) + bytes(64), "model_invalid"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + text("k") + struct.pack("<I", 77) + bytes(64), "model_invalid"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + text("k") + struct.pack("<IIQ", 9, 4, 1 << 61) + bytes(64),
            "model_invalid",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + text("k") + struct.pack("<IIQ", 9, 9, 3) + bytes(64),
            "model_invalid",
        ),
        (made(tensor(), general__architecture=None), "model_invalid"),
        (made(tensor(), general__alignment=24), "model_invalid"),
        (made(tensor(), general__alignment=1 << 20), "model_invalid"),
        (made(tensor(), llama__block_count=100_000), "model_invalid"),
        (made(tensor(), llama__embedding_length=0), "model_invalid"),
        (made(tensor(), tokenizer__ggml__tokens=None), "model_unsupported"),
        (made(tensor(), tokenizer__ggml__eos_token_id=7), "model_invalid"),
        (made(tensor(), tokenizer__ggml__token_type=["x"]), "model_invalid"),
        (made(tensor(), tokenizer__ggml__tokens=[str(i % 99) for i in range(100)]), "model_invalid"),
        (made(tensor(), split__count=3), "model_unsupported"),
        (made(tensor(), tensor()), "model_invalid"),
        (made(tensor(dims=(32, 0))), "model_invalid"),
        (made(tensor(dims=(1, 1, 1, 1, 1))), "model_invalid"),
        (made(tensor(dims=(1 << 40, 1 << 40))), "model_invalid"),
        (made(tensor(dims=(33,), kind=2)), "model_invalid"),
        (made(tensor(kind=99)), "model_unsupported"),
        (made(tensor(offset=8)), "model_invalid"),
        (made(tensor(offset=1 << 62)), "model_invalid"),
        (made(tensor(name="n" * 100)), "model_invalid"),
        (made(tensor(), keys=4)[:120], "model_invalid"),
    ],
)
def test_headers_that_do_not_hold_together_are_refused(tmp_path: Path, data: bytes, code: str) -> None:
    assert refused(tmp_path / "m", data).code == code


@given(st.integers(0, 1_500), st.binary(min_size=1, max_size=8))
def test_a_damaged_header_is_read_or_refused_but_never_breaks(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, at: int, damage: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(whole[:at] + damage + whole[at + len(damage) :])
    with contextlib.suppress(ModelError):  # and nothing else
        check(path)
