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


def test_only_ops_reads_the_machine() -> None:
    forbidden = re.compile(r"\btime\.(time|monotonic|perf_counter)\(|\bos\.environ|\bos\.getenv|\bsignal\.signal\(")
    chance = re.compile(r"\brandom\.(random|randint|choice|uniform|shuffle|getrandbits)\(|\bsecrets\.|\buuid\.uuid")
    for path in SOURCES:
        place = path.relative_to(ROOT)
        if place.parts[0] == "ops" or str(place) == "schemas/clock.py":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not forbidden.search(line), f"{place}:{number}: {line.strip()}"
            assert not chance.search(line), f"{place}:{number}: {line.strip()}"


def test_every_folder_of_code_is_packaged() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"arriero." + module_name(path) for path in SOURCES if path.name == "__init__.py"}
    assert set(setuptools["packages"]) == folders


def commands() -> Iterator[tuple[str, str]]:
    """Command lines that the docs show: in code, after `make` or `arriero`."""
    for path in DOCS:
        text = path.read_text()
        code = "\n".join(re.findall(r"^ {4,}(.+)$", text, re.M) + re.findall(r"`([^`\n]+)`", text))
        for line in code.splitlines():
            found = re.match(r"(?:\.venv/bin/)?(make|arriero) ([a-z-]+)(?: +([a-z-]+))?", line.strip())
            if found:
                yield path.name, found[0]


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
    source = "".join((ROOT / path).read_text() for path in ("workers/metrics.py", "producer/gateway/metrics.py"))
    known = set(re.findall(r'"(arriero_[a-z_]+)"', source))
    for document in DOCS:
        for name in re.findall(r"`(arriero_[a-z_]+)`", document.read_text()):
            assert name.removesuffix("_total") in known, f"{document.name}: {name}"


def test_every_file_that_the_docs_link_to_exists() -> None:
    for document in DOCS:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
