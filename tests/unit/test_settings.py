"""Settings: their checks, their way into a child, the flags that lead another terminal to the same stack."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from arriero.ops.cli import options
from arriero.ops.settings import EngineSettings, Settings, data_folder, from_json, to_json, writable
from arriero.schemas.errors import SetupError


def make(**values: object) -> Settings:
    return Settings(**{"data": Path("/d"), "cache": Path("/c"), **values})  # type: ignore[arg-type]


def test_settings_reach_a_child_as_they_are() -> None:
    settings = make(kafka="a:1,b:2", redis="redis://:secret@r/0", engine=EngineSettings(tensor_split=(0.5, 1.0)))
    assert from_json(to_json(settings)) == settings


def test_flags_become_settings_and_engine_settings() -> None:
    settings = options.make_settings({"data": Path("/d"), "slots": 3, "tensor_split": "1,2", "pool": "p", "json": True})
    assert settings.engine.slots == 3
    assert settings.engine.tensor_split == (1.0, 2.0)
    assert settings.pool == "p"


def test_a_home_folder_in_a_path_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert options.make_settings({"data": Path("~/x")}).data == Path("/home/somebody/x")


def test_the_data_folder_follows_the_desktop_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/elsewhere")
    assert data_folder() == Path("/elsewhere/arriero")


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        (make(data=data_folder()), []),
        (make(data=Path("/with space")), ["--data", "/with space"]),
        (make(kafka="k:1", redis="redis://r", pool="big"), ["--kafka", "k:1", "--redis", "redis://r", "--pool", "big"]),
        (make(data=data_folder(), namespace="n"), ["--namespace", "n"]),
    ],
)
def test_the_address_leads_another_terminal_to_the_same_pool(settings: Settings, flags: list[str]) -> None:
    assert shlex.split(settings.address) == flags


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"kafka": "k:1"}, "--kafka and --redis go together"),
        ({"redis": "redis://r"}, "--kafka and --redis go together"),
        ({"partitions": 0}, "--partitions"),
        ({"pool": "A B"}, "pool"),
        ({"namespace": ""}, "namespace"),
        ({"data": Path(__file__)}, "is no folder"),
        ({"data": Path(__file__) / "x"}, None),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(values: dict[str, object], says: str | None) -> None:
    settings = make(**values)
    if says is None:
        settings.check()  # whether a folder can be made there turns out when it is made
        return
    with pytest.raises(SetupError, match=says):
        settings.check()


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(SetupError, match="cannot be written") as caught:
        writable(Path(__file__) / "below")
    assert caught.value.code == "data_folder_unwritable"
