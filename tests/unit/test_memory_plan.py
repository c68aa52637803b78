"""Memory planned from a header and faked devices: what is chosen fits, what cannot fit is refused with numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.schemas.errors import ModelError
from arriero.workers.engine.llama.gguf_check import Header, Length
from arriero.workers.engine.llama.model import Device, LlamaSettings, plan_load
from arriero.workers.engine.llama.plan import CTX_MIN_TOKENS, MARGIN, Asked, kv_token_bytes, plan

GIB = 1 << 30


def header(size_bytes: int = 4 * GIB, **own: Any) -> Header:
    values = {
        "block_count": 32,
        "embedding_length": 4_096,
        "feed_forward_length": 14_336,
        "attention.head_count": 32,
        "attention.head_count_kv": 8,
        "context_length": 8_192,
        **own,
    }
    metadata: dict[str, Any] = {f"llama.{name}": value for name, value in values.items()}
    metadata |= {"general.architecture": "llama", "tokenizer.ggml.tokens": Length(128_256)}
    return Header(version=3, metadata=metadata, tensors=[], size_bytes=size_bytes)


def test_keys_and_values_of_a_token_are_counted_by_layer() -> None:
    assert kv_token_bytes(header(), "f16", "f16") == 32 * 8 * 128 * 2 * 2
    assert kv_token_bytes(header(), "q8_0", "q8_0") == 32 * 8 * 128 * 2 * 34 / 32
    mixed = header(**{"attention.head_count_kv": [8] * 16 + [0] * 16})
    assert kv_token_bytes(mixed, "f16", "f16") == 16 * 8 * 128 * 2 * 2


def test_a_machine_with_room_gets_the_defaults() -> None:
    made = plan(header(), Asked(), host_free=64 * GIB)
    assert (made.slots, made.n_ctx, made.on_device, made.device_bytes) == (16, 16 * 1_024, 0, 0)


def test_a_small_machine_gets_a_smaller_cache_and_fewer_slots() -> None:
    tight = plan(header(), Asked(), host_free=5 * GIB)
    assert tight.slots <= 16
    assert tight.n_ctx < 16 * 1_024
    assert tight.host_bytes <= 5 * GIB
    assert tight.n_ctx >= tight.slots * CTX_MIN_TOKENS or tight.n_ctx == CTX_MIN_TOKENS


def test_all_layers_go_to_a_device_that_holds_them_and_as_many_as_fit_to_a_smaller_one() -> None:
    assert plan(header(), Asked(), host_free=64 * GIB, device_free=24 * GIB).on_device == 32
    part = plan(header(), Asked(), host_free=64 * GIB, device_free=3 * GIB)
    assert 0 < part.on_device < 32
    assert part.device_bytes <= 3 * GIB


def test_a_refusal_says_what_is_needed_and_what_would_fit() -> None:
    with pytest.raises(ModelError) as caught:
        plan(header(), Asked(n_ctx=1_000_000), host_free=16 * GIB)
    assert caught.value.code == "model_too_large"
    assert "4.0 GiB of weights" in caught.value.message
    fitting = int(caught.value.message.partition("--ctx ")[2].split()[0])
    assert plan(header(), Asked(n_ctx=fitting), host_free=16 * GIB).n_ctx == fitting
    with pytest.raises(ModelError, match="smaller model"):
        plan(header(), Asked(), host_free=2 * GIB)
    with pytest.raises(ModelError, match="gpu-layers"):
        plan(header(), Asked(gpu_layers=32), host_free=64 * GIB, device_free=2 * GIB)


@given(
    st.integers(1, 200 * GIB),
    st.integers(0, 200 * GIB),
    st.integers(1 << 20, 80 * GIB),
    st.none() | st.integers(1, 255),
    st.none() | st.integers(1, 1 << 20),
    st.none() | st.integers(0, 100),
)
def test_whatever_is_planned_fits(
    host: int, device: int, size: int, slots: int | None, n_ctx: int | None, gpu_layers: int | None
) -> None:
    asked = Asked(slots=slots, n_ctx=n_ctx, gpu_layers=gpu_layers)
    try:
        made = plan(header(size), asked, host_free=host, device_free=device)
    except ModelError:
        return  # said above
    assert made.host_bytes <= host
    assert made.device_bytes <= device * (1 - MARGIN)
    assert made.n_batch >= made.n_ubatch >= made.slots
    assert n_ctx in (None, made.n_ctx)
    assert slots in (None, made.slots)


def test_the_devices_that_count_are_those_of_the_split() -> None:
    devices = [Device("CUDA0", "one", 3 * GIB), Device("CUDA1", "other", 24 * GIB)]

    def on(**changes: Any) -> int:
        return plan_load(LlamaSettings(path=Path("x"), name="x", **changes), header(), devices, 64 * GIB).on_device

    assert on() == 32
    assert on(split_mode="none", main_gpu=1) == 32
    assert on(split_mode="none", main_gpu=0) < 32
