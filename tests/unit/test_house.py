"""The order of the house: who may import whom, who may read the machine, and that the docs name what exists."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import click
import pytest

from arriero.ops.cli import cli

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "schemas": {"schemas"},
    "transports": {"schemas", "transports"},
    "producer": {"schemas", "transports", "producer"},
    "workers": {"schemas", "transports", "workers"},
    "ops": {"schemas", "transports", "producer", "workers", "ops"},
}
SOURCES = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Modules of ours that a file imports anywhere in it, without the `arriero.`."""
    known = {module_name(source) for source in SOURCES}
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("arriero.") in known else node.module for name in names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name.removeprefix("arriero.") for name in names if name.startswith("arriero."))


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_go_one_way(package: str) -> None:
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] == package:
            for name in imports(path):
                assert name.split(".")[0] in MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {name}"


def test_no_imports_go_in_a_circle() -> None:
    faces = {module_name(path) for path in SOURCES if path.name == "__init__.py"}
    graph = {module_name(path): set(imports(path)) - faces for path in SOURCES}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


FORBIDDEN = re.compile(
    r"time\.(?!sleep\b)"  # an engine's thread may sleep; it must not ask what time it is
    r"|random\.(?!Random\b|SystemRandom\b)"  # the types; what draws is passed down
    r"|os\.(environ|getenv|putenv|urandom)\b|(secrets|signal|uuid)\."
    r"|datetime\.(datetime|date)\.(now|utcnow|today)\b"
)
"""Names that read the clock, chance, the environment or signals."""


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name of another module that a file uses, in full (`from time import time` and an alias do not hide it)."""
    full: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                full[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in full:
            yield inner.lineno, ".".join([full[inner.id], *reversed(parts)])


def reads_of_the_machine(source: str) -> list[str]:
    return [f"{line}: {name}" for line, name in uses(ast.parse(source)) if FORBIDDEN.match(name)]


def test_only_ops_reads_the_machine() -> None:
    for path in SOURCES:
        place = path.relative_to(ROOT)
        if place.parts[0] != "ops" and str(place) != "schemas/clock.py":
            assert reads_of_the_machine(path.read_text()) == [], place


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.monotonic()",
        "import time as t\nt.time_ns()",
        "from time import perf_counter",
        "import random\nrandom.choice('ab')",
        "from random import randint",
        "import os\nos.environ['HOME']",
        "from os import environ",
        "import signal\nsignal.signal(2, print)",
        "from datetime import datetime\ndatetime.now()",
        "import uuid\nuuid.uuid4()",
    ],
)
def test_a_read_of_the_machine_is_found_in_any_dress(source: str) -> None:
    assert reads_of_the_machine(source)


def test_types_of_chance_and_a_given_clock_are_no_reads() -> None:
    source = "import random\ndef draw(rng: random.Random, clock):\n    return rng.random() + clock.time()"
    assert reads_of_the_machine(source) == []


def test_every_folder_of_code_is_packaged() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"arriero." + module_name(path) for path in SOURCES if path.name == "__init__.py"}
    assert set(setuptools["packages"]) == folders


def test_every_file_beside_the_code_is_packaged() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in MAY_IMPORT:
        for path in (ROOT / package).rglob("*"):
            place = path.relative_to(ROOT)
            if path.is_dir() or "__pycache__" in place.parts or path.suffix == ".py":
                continue
            if place.parts[:2] in (("ops", "setup"), ("ops", "deploy")):
                continue  # used from a checkout only
            homes = [parent for parent in place.parents if "arriero." + ".".join(parent.parts) in data]
            patterns = [(home, pattern) for home in homes for pattern in data["arriero." + ".".join(home.parts)]]
            assert any(place in map(relative, (ROOT / home).glob(pattern)) for home, pattern in patterns), place


def relative(path: Path) -> Path:
    return path.relative_to(ROOT)


def commands() -> Iterator[tuple[str, str]]:
    """Command lines that the docs show: in code, after `make` or `arriero`."""
    for path in DOCS:
        text = path.read_text()
        blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.M | re.S)
        code = "\n".join([*re.findall(r"^ {4,}(.+)$", text, re.M), *re.findall(r"`([^`\n]+)`", text), *blocks])
        for line in code.splitlines():
            found = re.match(r"(?:\$ +)?(?:\.venv/bin/)?(make|arriero) ([a-z-]+)(?: +([a-z-]+))?", line.strip())
            if found:
                yield path.name, found[0].lstrip("$ ")


@pytest.mark.parametrize(("document", "command"), sorted(set(commands())))
def test_every_command_that_the_docs_name_exists(document: str, command: str) -> None:
    program, name, *rest = command.removeprefix(".venv/bin/").split()
    if program == "make":
        assert re.search(rf"^{re.escape(name)}:", (ROOT / "Makefile").read_text(), re.M), f"{document}: {command}"
        return
    group: click.Command | None = cli
    for word in [name, *rest]:
        if not isinstance(group, click.Group):
            break
        group = group.get_command(click.Context(group), word)
        assert group is not None, f"{document}: {command}"


def test_every_metric_that_the_docs_name_exists() -> None:
    source = "".join(path.read_text() for path in SOURCES)
    known = set(re.findall(r'"(arriero_[a-z_]+)"', source))
    for document in DOCS:
        for name in re.findall(r"`(arriero_[a-z_]+)`", document.read_text()):
            assert name.removesuffix("_total") in known, f"{document.name}: {name}"


def test_every_file_that_the_docs_link_to_exists() -> None:
    for document in DOCS:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
