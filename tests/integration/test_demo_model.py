"""The demo's model itself, where it has been fetched: a real vocabulary, a real template, words that mean something."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from engine_listener import Listener

from arriero.ops import models
from arriero.schemas.clock import SystemClock
from arriero.schemas.errors import ModelError
from arriero.schemas.job import Job, Message, Sampling
from arriero.workers.engine.llama.backend import LlamaBackend
from arriero.workers.engine.llama.model import LlamaSettings
from arriero.workers.engine.runner import EngineRunner
from arriero.workers.engine.seam import Work

pytestmark = pytest.mark.model


@pytest.fixture
def settings() -> LlamaSettings:
    try:
        found = models.resolve(models.DEMO.name, models.default_cache(os.environ))
    except ModelError:
        pytest.skip("the demo's model has not been fetched (arriero models fetch)")
    return LlamaSettings(path=found.path, name=found.name, slots=4, n_ctx=2048)


@pytest.fixture
def backend(settings: LlamaSettings) -> Iterator[LlamaBackend]:
    loaded = LlamaBackend(settings, SystemClock())
    yield loaded
    loaded.close()


def test_its_template_is_rendered_as_its_authors_meant(backend: LlamaBackend) -> None:
    tokens = backend.prepare(Job(id="j", messages=[Message("user", "What is the capital of France?")]))
    start, end = tokens[0], tokens[19]
    assert (tokens.count(start), tokens.count(end)) == (3, 2)
    text = b"".join(map(backend.piece, tokens)).decode()
    assert text.startswith("system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("user\nWhat is the capital of France?\nassistant\n")


async def test_it_answers_several_questions_at_once(settings: LlamaSettings) -> None:
    seen, clock = Listener(), SystemClock()
    questions = ["Explain in two sentences why the sky is blue.", "What is 2 + 2?", "Name a large animal."]
    async with EngineRunner(lambda: LlamaBackend(settings, clock), seen, clock) as runner:
        for key, question in enumerate(questions):
            prompt = await runner.prepare(Job(id=f"j{key}", messages=[Message("user", question)]))
            greedy = Sampling(temperature=0.0)
            runner.submit(Work(key=key, prompt=prompt, sampling=greedy, seed=0, max_tokens=24))
        await seen.end_of(*range(len(questions)))
    assert "sky" in seen.text(0)
    assert all(len(seen.text(key)) > 3 for key in range(len(questions)))
