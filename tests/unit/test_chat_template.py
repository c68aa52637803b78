"""Chat templates: rendered as their authors meant them, and within bounds."""

from __future__ import annotations

import pytest

from arriero.schemas.clock import SystemClock
from arriero.schemas.errors import BadJob
from arriero.schemas.job import Message
from arriero.workers.engine.llama.template import ChatTemplate

TURNS = [Message("system", "Be brief."), Message("user", "¿Qué tal?")]


class FrozenClock:
    def time(self) -> float:
        return 1_764_547_200.0  # 1 December 2025

    def monotonic(self) -> float:
        return 0.0


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", clock=FrozenClock())


def test_turns_and_special_tokens_are_rendered() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "[{{ m['role'] }}] {{ m.content | trim }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert template(source).render(TURNS) == "<s>[user] ¿Qué tal?</s>[assistant]"


def test_the_usual_helpers_are_there() -> None:
    assert template("{{ strftime_now('%d %b %Y') }}").render(TURNS) == "01 Dec 2025"
    assert template("{{ messages[1].content | tojson }}").render(TURNS) == '"¿Qué tal?"'
    assert template("{% if not tools %}plain{% endif %}").render(TURNS) == "plain"


def test_a_template_may_refuse_messages_with_a_reason() -> None:
    with pytest.raises(BadJob, match="only users") as caught:
        template("{{ raise_exception('only users may speak') }}").render(TURNS)
    assert caught.value.code == "bad_template"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in %}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ messages | nonsense }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ 'x' * 100000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(9999) %}{% for j in range(9999) %}text{% endfor %}{% endfor %}",
    ],
)
def test_bad_templates_are_told_to_the_job(source: str) -> None:
    with pytest.raises(BadJob) as caught:
        template(source).render(TURNS)
    assert caught.value.code == "bad_template"
    assert len(caught.value.message) < 2_001


def test_a_template_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arriero.workers.engine.llama.template.TEMPLATE_S", 0.05)
    source = "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% set x = j %}{% endfor %}{% endfor %}"
    endless = ChatTemplate(source, bos_token="", eos_token="", clock=SystemClock())
    with pytest.raises(BadJob, match="takes longer"):
        endless.render(TURNS)


def test_a_template_that_cannot_be_read_is_not_usable() -> None:
    assert not template("{% for %}").usable
    assert template("x").usable
