"""Chat templates: the model file's own Jinja template, rendered in a sandbox and within bounds.

A template is code that came with a file. It gets no way out (Jinja's immutable sandbox), `TEMPLATE_S` seconds, and
room for what it writes. The bound on time is checked at each line that the compiled template runs, for a loop needs
neither output nor a call.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from types import FrameType
from typing import Any, Final

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from arriero.schemas.clock import Clock
from arriero.schemas.errors import BadJob
from arriero.schemas.job import Message

TEMPLATE_S: Final = 2.0
"""Far above what the slowest template in use takes for a job of 1 MiB."""
OUTPUT_MAX_CHARS: Final = 4 << 20
"""Four times the largest job: a template repeats roles and separators, not whole conversations."""
PRODUCT_MAX: Final = 1 << 20
"""Largest number, or length of a sequence, that `*` and `**` may make in a template."""
_FILE: Final = "<chat template>"


class ChatTemplate:
    """One compiled template; `render` may be called from any thread."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str, clock: Clock) -> None:
        """Never raises: what is wrong with the source is told to each job that needs it."""
        self._clock = clock
        self._variables = {"bos_token": bos_token, "eos_token": eos_token, "tools": None, "documents": None}
        self._fault = ""
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._strftime_now
        environment.filters["tojson"] = _tojson
        try:
            code = environment.compile(source, filename=_FILE)
            self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
        except Exception as error:
            self._fault = f"the model's chat template cannot be read: {error}"

    @property
    def usable(self) -> bool:
        return not self._fault

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt for the assistant's next turn. Raises BadJob(bad_template)."""
        if self._fault:
            raise _bad(self._fault)
        turns = [{"role": message.role, "content": message.content} for message in messages]
        variables = {**self._variables, "messages": turns, "add_generation_prompt": True}
        parts: list[str] = []
        length = 0
        try:
            with _Deadline(self._clock, TEMPLATE_S):
                for part in self._template.generate(variables):
                    parts.append(part)
                    length += len(part)
                    if length > OUTPUT_MAX_CHARS:
                        raise _bad(f"the model's chat template writes more than {OUTPUT_MAX_CHARS:,} characters")
        except BadJob:
            raise
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise _bad(f"the model's chat template refuses these messages: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise _bad("the model's chat template needs too much room for these messages") from error
        return "".join(parts)

    def _strftime_now(self, form: str) -> str:
        return datetime.fromtimestamp(self._clock.time(), UTC).strftime(form)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(one) if isinstance(one, (str, list, tuple)) else one for one in (left, right)]
        if not all(isinstance(size, (int, float)) for size in sizes):
            raise TypeError(f"{operator} needs numbers")
        if operator == "**" and (abs(sizes[0]) > PRODUCT_MAX or abs(sizes[1]) > 64):
            raise _bad("the model's chat template computes too large a power")
        if operator == "*" and abs(sizes[0] * sizes[1]) > PRODUCT_MAX:
            raise _bad("the model's chat template computes too large a product")
        return super().call_binop(context, operator, left, right)


class _Deadline:
    """Ends the template's code in this thread when its time is up."""

    def __init__(self, clock: Clock, allowed_s: float) -> None:
        self._now = clock.monotonic
        self._end = clock.monotonic() + allowed_s

    def __enter__(self) -> None:
        self._previous = sys.gettrace()
        if self._previous is None:  # a debugger's or a coverage tool's stays
            sys.settrace(self._on_call)

    def __exit__(self, *_: object) -> None:
        if self._previous is None:
            sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._on_line if frame.f_code.co_filename == _FILE else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._now() > self._end:
            raise _bad(f"the model's chat template takes longer than {TEMPLATE_S:g} s")
        return self._on_line


def _bad(message: str) -> BadJob:
    return BadJob(message, code="bad_template", field="messages")


def _raise_exception(message: str) -> None:
    raise _bad(f"the model's chat template refuses these messages: {str(message)[:500]}")


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
