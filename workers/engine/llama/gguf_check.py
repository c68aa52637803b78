"""A model file's header, read and bounded in pure Python before llama.cpp sees the file.

llama.cpp asserts on many an odd header, and an assertion takes the process with it; older releases overflow. So a
file comes to it only when its header holds together: known version, counts and strings within bounds, arrays that
belong together equally long, and every tensor inside the file. (The format: docs/gguf.md in ggml's repository.)
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, Final

import msgspec

from arriero.schemas.errors import ModelError

KEYS_MAX: Final = 4_096
TENSORS_MAX: Final = 20_000
STRING_MAX_BYTES: Final = 16 << 20
VOCABULARY_MAX: Final = 1 << 20
ARRAY_MAX: Final = 4 << 20
"""Merges outnumber tokens; nothing else comes near."""
LAYERS_MAX: Final = 512
DIMENSION_MAX: Final = 1 << 40
DIMENSIONS_MAX: Final = 4
NAME_MAX_BYTES: Final = 64
KEPT_ARRAY_MAX: Final = 64
"""Longer arrays are walked over, and only their length is kept."""

_SCALARS: Final[dict[int, struct.Struct]] = {
    kind: struct.Struct("<" + form)
    for kind, form in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_STRING: Final = 8
_ARRAY: Final = 9
_TOKENS: Final = "tokenizer.ggml.tokens"
_U32, _U64 = _SCALARS[4], _SCALARS[10]

BLOCKS: Final[dict[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""Tensor types by number: name, elements of a block, bytes of a block."""


class Tensor(msgspec.Struct, frozen=True):
    name: str
    dims: tuple[int, ...]
    kind: str
    offset: int
    """From the start of the tensor data, in bytes."""
    size_bytes: int


class Length(msgspec.Struct, frozen=True):
    """Stands for an array too long to keep."""

    items: int


class Header(msgspec.Struct, frozen=True):
    version: int
    metadata: dict[str, Any]
    """Arrays of more than 64 items appear as their `Length`."""
    tensors: list[Tensor]
    size_bytes: int

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def own(self, name: str, default: Any = None) -> Any:
        """A value under the architecture's own prefix, such as `context_length`."""
        return self.metadata.get(f"{self.architecture}.{name}", default)


def check(path: Path) -> Header:
    """Read and check the header. Raises ModelError(model_missing, model_invalid, model_unsupported)."""
    try:
        if not path.exists():
            raise ModelError(f"there is no model file at {path}", code="model_missing")
        if not path.is_file():
            raise ModelError(f"{path} is not a file", code="model_missing")
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise _invalid(path, "is too short to be a GGUF model")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).read()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", code="model_missing") from error


def _invalid(path: Path, what: str) -> ModelError:
    return ModelError(f"{path} {what}", code="model_invalid")


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0
        self._size = len(data)

    def read(self) -> Header:
        if self._data[:4] != b"GGUF":
            raise self._bad("is not a GGUF model (it does not begin with GGUF)")
        self._at = 4
        version = self._number(_U32)
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "big-endian GGUF" if swapped in (2, 3) else f"GGUF version {version}"
            raise ModelError(f"{self._path} is {what}; versions 2 and 3 are read", code="model_unsupported")
        tensor_count, key_count = self._number(_U64), self._number(_U64)
        if not 0 < key_count <= KEYS_MAX:
            raise self._bad(f"declares {key_count:,} metadata keys; 1 to {KEYS_MAX:,} are accepted")
        if not 0 < tensor_count <= TENSORS_MAX:
            raise self._bad(f"declares {tensor_count:,} tensors; 1 to {TENSORS_MAX:,} are accepted")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            if key in metadata:
                raise self._bad(f"has the metadata key {key[:80]!r} twice")
            metadata[key] = self._value(key)
        alignment = self._check_metadata(metadata)
        tensors = [self._tensor() for _ in range(tensor_count)]
        self._check_tensors(tensors, alignment)
        return Header(version, metadata, tensors, self._size)

    # --- pieces of the format ------------------------------------------------------------------------------

    def _bad(self, what: str) -> ModelError:
        return _invalid(self._path, what)

    def _take(self, count: int) -> int:
        """Move over `count` bytes; returns where they begin."""
        start = self._at
        if count > self._size - start:
            raise self._bad("is cut short: its header goes on past the end of the file")
        self._at = start + count
        return start

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack_from(self._data, self._take(form.size))[0]

    def _string(self, limit: int = STRING_MAX_BYTES) -> str:
        length: int = self._number(_U64)
        if length > limit:
            raise self._bad(f"has a string of {length:,} bytes in its header; at most {limit:,} are accepted")
        start = self._take(length)
        return self._data[start : start + length].decode("utf-8", "replace")

    def _value(self, key: str) -> Any:
        kind = self._number(_U32)
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        raise self._bad(f"has metadata of the unknown type {kind} ({key[:80]!r})")

    def _array(self, key: str) -> list[Any] | Length:
        kind, count = self._number(_U32), self._number(_U64)
        if count > ARRAY_MAX:
            raise self._bad(f"has {count:,} items in {key[:80]!r}; at most {ARRAY_MAX:,} are accepted")
        if kind in _SCALARS:
            form = _SCALARS[kind]
            start = self._take(count * form.size)
            if count > KEPT_ARRAY_MAX:
                return Length(count)
            return [form.unpack_from(self._data, start + i * form.size)[0] for i in range(count)]
        if kind != _STRING:
            raise self._bad(f"has an array of the unknown type {kind} ({key[:80]!r})")
        if count <= KEPT_ARRAY_MAX:
            return [self._string() for _ in range(count)]
        unpack, data, at, size = _U64.unpack_from, self._data, self._at, self._size
        words: set[bytes] | None = set() if key == _TOKENS else None
        repeated = False
        for _ in range(count):  # by hand: a vocabulary is long, and each string a call otherwise
            if at + 8 > size:
                self._at = at
                self._take(8)
            length = unpack(data, at)[0]
            if length > STRING_MAX_BYTES:
                raise self._bad(f"has a string of {length:,} bytes in {key[:80]!r}")
            if words is not None and length:
                word = data[at + 8 : at + 8 + length]
                repeated = repeated or word in words
                words.add(word)
            at += 8 + length
        self._at = min(at, size)
        self._take(at - self._at)
        if repeated:
            raise self._bad("has a token twice in its vocabulary")
        return Length(count)

    def _tensor(self) -> Tensor:
        name = self._string(NAME_MAX_BYTES)
        count = self._number(_U32)
        if not 1 <= count <= DIMENSIONS_MAX:
            raise self._bad(f"has a tensor of {count} dimensions ({name!r})")
        dims = tuple(self._number(_U64) for _ in range(count))
        kind, offset = self._number(_U32), self._number(_U64)
        if not all(0 < dim <= DIMENSION_MAX for dim in dims):
            raise self._bad(f"has a tensor with a dimension out of bounds ({name!r}: {dims})")
        if kind not in BLOCKS:
            raise ModelError(
                f"{self._path} has a tensor of the unknown type {kind} ({name!r})", code="model_unsupported"
            )
        label, block, block_bytes = BLOCKS[kind]
        if dims[0] % block:
            raise self._bad(f"has a tensor whose rows are no whole blocks ({name!r}: {dims[0]} of {label})")
        elements = 1
        for dim in dims:
            elements *= dim
        return Tensor(name, dims, label, offset, elements // block * block_bytes)

    # --- what must hold together ---------------------------------------------------------------------------

    def _check_metadata(self, metadata: dict[str, Any]) -> int:
        """The tensors' alignment, in bytes."""
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            raise self._bad("does not say its architecture")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment.bit_count() != 1 or not 32 <= alignment <= 4096:
            raise self._bad(f"has the alignment {alignment!r}; a power of two from 32 to 4,096 is accepted")
        if metadata.get("split.count", 0) not in (0, 1):
            raise ModelError(
                f"{self._path} is one part of a split model; merge the parts first (llama-gguf-split --merge)",
                code="model_unsupported",
            )
        self._check_range(metadata, f"{architecture}.block_count", LAYERS_MAX)
        for name in ("embedding_length", "context_length", "feed_forward_length", "attention.head_count"):
            self._check_range(metadata, f"{architecture}.{name}", 1 << 31)
        self._check_vocabulary(metadata)
        return alignment

    def _check_range(self, metadata: dict[str, Any], key: str, limit: int) -> None:
        value = metadata.get(key, 1)  # what an architecture needs and lacks, llama.cpp reports by itself
        if isinstance(value, (list, Length)):
            return
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
            raise self._bad(f"has {key} = {str(value)[:40]}; 1 to {limit:,} is accepted")

    def _check_vocabulary(self, metadata: dict[str, Any]) -> None:
        tokens = _items(metadata.get(_TOKENS))
        if tokens is None:
            raise ModelError(f"{self._path} has no vocabulary", code="model_unsupported")
        if not 0 < tokens <= VOCABULARY_MAX:
            raise self._bad(f"has {tokens:,} tokens in its vocabulary; 1 to {VOCABULARY_MAX:,} are accepted")
        for name in ("scores", "token_type"):
            items = _items(metadata.get(f"tokenizer.ggml.{name}"))
            if items is not None and items != tokens:
                raise self._bad(f"has {tokens:,} tokens and {items:,} of tokenizer.ggml.{name}")
        for key, value in metadata.items():
            if not (key.startswith("tokenizer.ggml.") and key.endswith("_token_id") and isinstance(value, int)):
                continue
            if not (0 <= value < tokens or value in (-1, 0xFFFFFFFF)):  # all ones: there is none
                raise self._bad(f"has {key} = {value:,}, outside its vocabulary of {tokens:,}")

    def _check_tensors(self, tensors: list[Tensor], alignment: int) -> None:
        data_start = -(-self._at // alignment) * alignment
        names: set[str] = set()
        for tensor in tensors:
            if tensor.name in names:
                raise self._bad(f"has the tensor {tensor.name!r} twice")
            names.add(tensor.name)
            if tensor.offset % alignment:
                raise self._bad(f"has a tensor at an odd place ({tensor.name!r})")
            if data_start + tensor.offset + tensor.size_bytes > self._size:
                raise self._bad(f"is cut short: the tensor {tensor.name!r} lies past the end of the file")


def _items(value: Any) -> int | None:
    if isinstance(value, Length):
        return value.items
    return len(value) if isinstance(value, list) else None
