"""compose.yaml and the images, as far as they can be checked without a Docker engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from arriero.ops.cli import cli

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}


def test_all_services_are_there() -> None:
    assert set(SERVICES) == {"kafka", "redis", "worker", "worker-cuda", "projector", "relay", "gateway", "prometheus"}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_refers_to_what_exists(name: str) -> None:
    service = SERVICES[name]
    assert "image" in service
    for other, how in service.get("depends_on", {}).items():
        assert how == {"condition": "service_healthy"}
        assert "healthcheck" in SERVICES[other]
    for volume in service.get("volumes", ()):
        source = volume.split(":")[0]
        assert (ROOT / source).is_file() if source.startswith("./") else source in COMPOSE["volumes"]


@pytest.mark.parametrize("name", OURS)
def test_our_services_call_commands_and_flags_that_exist(name: str) -> None:
    service = OURS[name]
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    role, *flags = service["command"]
    command = cli.get_command(click.Context(cli), role)
    assert command is not None
    known = {flag for parameter in command.params for flag in parameter.opts}
    variables = {parameter.envvar for parameter in command.params if isinstance(parameter, click.Option)}
    assert {flag for flag in flags if flag.startswith("--")} <= known
    assert set(service["environment"]) <= variables


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_an_image_builds_what_is_pinned_with_files_that_exist(name: str) -> None:
    text = (ROOT / "ops" / "deploy" / name).read_text()
    pinned = re.search(r'"(llama-cpp-python==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned is not None
    assert pinned[1] in text
    for source in re.findall(r"^COPY (?!--from)(\S+)", text, re.M):
        assert (ROOT / source).exists()
    assert text.count("FROM ") == 2
    assert "\nUSER arriero\n" in text
