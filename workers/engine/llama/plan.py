"""Memory, planned before a model is loaded: weights, KV cache and compute buffers against what is free.

Pure: the file's header, the settings and the free memory in, numbers out. llama.cpp would find out by failing, on a CPU
by being ended by the system; a refusal that says what would fit is better than either.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from arriero.schemas.errors import ModelError
from arriero.workers.engine.llama.gguf_check import Header, Length

SLOTS_DEFAULT: Final = 16
SLOT_CTX_TOKENS: Final = 1_024
"""KV cells for each slot when nobody says: a prompt and the default 512 tokens of output."""
CTX_MIN_TOKENS: Final = 256
"""llama.cpp's own granularity, and the least that is worth a slot."""
KV_SHARE: Final = 0.5
"""Of the memory that weights and buffers leave: the largest KV cache that is chosen unasked."""
BATCH_CPU_TOKENS: Final = 512
"""A step's tokens on a CPU: about a second of prefill for a small model, so that cancelling stays quick."""
BATCH_GPU_TOKENS: Final = 2_048
UBATCH_TOKENS: Final = 512
MARGIN: Final = 0.03
"""Of a device's free memory: what its driver and rounding take."""
GIB: Final = 1 << 30

KV_ELEMENT_BYTES: Final[dict[str, float]] = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32, "q4_0": 18 / 32}


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the settings say; None leaves the choice here."""

    slots: int | None = None
    n_ctx: int | None = None
    n_batch: int | None = None
    gpu_layers: int | None = None
    draft_tokens: int = 0
    type_k: str = "f16"
    type_v: str = "f16"
    flash: bool = True


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How to load, and the bytes that it takes."""

    slots: int
    n_ctx: int
    n_batch: int
    n_ubatch: int
    layers: int
    on_device: int
    """Layers."""
    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    device_bytes: int
    """Of all three together what lies on devices; the rest is the host's."""

    @property
    def host_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.compute_bytes - self.device_bytes


def kv_token_bytes(header: Header, type_k: str, type_v: str) -> float:
    """Bytes of keys and values of one token in all layers."""
    layers = _number(header, "block_count", 1)
    heads = max(1, _number(header, "attention.head_count", 1))
    head_size = _number(header, "embedding_length", 0) / heads
    key_size = _number(header, "attention.key_length", head_size)
    value_size = _number(header, "attention.value_length", head_size)
    width = key_size * KV_ELEMENT_BYTES[type_k] + value_size * KV_ELEMENT_BYTES[type_v]
    by_layer = header.own("attention.head_count_kv", heads)
    heads_kv = sum(by_layer) if isinstance(by_layer, list) else layers * _scalar(by_layer, heads)
    return float(max(1, heads_kv) * width)


def plan(header: Header, asked: Asked, *, host_free: int, device_free: int = 0) -> MemoryPlan:
    """Choose what was not asked for, so that all fits.

    1. On the device go all layers, or as many as leave room for a small KV cache and the buffers.
    2. The KV cache has `SLOT_CTX_TOKENS` for each slot, or fewer within half of what is left.
    3. Where even that leaves less than `CTX_MIN_TOKENS` a slot, there are fewer slots.

    Raises ModelError(model_too_large) with the numbers, and what would fit.
    """
    layers = int(_number(header, "block_count", 1))
    token_bytes = kv_token_bytes(header, asked.type_k, asked.type_v)
    slots = asked.slots or SLOTS_DEFAULT

    def made(slots: int, n_ctx: int, on_device: int) -> MemoryPlan:
        outputs = slots + asked.draft_tokens
        n_batch = max(outputs, asked.n_batch or (BATCH_GPU_TOKENS if on_device else BATCH_CPU_TOKENS))
        n_ubatch = max(outputs, min(UBATCH_TOKENS, n_batch))
        weights, kv = header.size_bytes, int(n_ctx * token_bytes)
        compute = _compute_bytes(header, n_ctx, n_ubatch, outputs, flash=asked.flash)
        share = on_device / layers
        return MemoryPlan(
            slots=slots,
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            layers=layers,
            on_device=on_device,
            weights_bytes=weights,
            kv_bytes=kv,
            compute_bytes=compute,
            device_bytes=int((weights + kv) * share) + (compute if on_device else 0),
        )

    def fits(one: MemoryPlan) -> bool:
        return one.device_bytes <= device_free * (1 - MARGIN) and one.host_bytes <= host_free

    least_ctx = asked.n_ctx or CTX_MIN_TOKENS
    on_device = min(layers, layers if asked.gpu_layers is None else asked.gpu_layers) if device_free else 0
    if asked.gpu_layers is None:
        while on_device and made(slots, least_ctx, on_device).device_bytes > device_free * (1 - MARGIN):  # 1.
            on_device -= 1
    if asked.n_ctx is not None:
        chosen = made(slots, asked.n_ctx, on_device)
    else:
        train_ctx = int(_number(header, "context_length", CTX_MIN_TOKENS)) or CTX_MIN_TOKENS
        base = made(slots, 0, on_device)
        share = on_device / layers
        left = min(
            (device_free * (1 - MARGIN) - base.device_bytes) / share if share else float("inf"),
            (host_free - base.host_bytes) / (1 - share) if share < 1 else float("inf"),
        )
        affordable = int(max(0.0, left) * KV_SHARE / max(1.0, token_bytes))
        if asked.slots is None:
            slots = max(1, min(slots, affordable // CTX_MIN_TOKENS))  # 3.
        n_ctx = min(slots * min(train_ctx, SLOT_CTX_TOKENS), affordable)  # 2.
        chosen = made(slots, max(CTX_MIN_TOKENS, n_ctx // CTX_MIN_TOKENS * CTX_MIN_TOKENS), on_device)
    if not fits(chosen):
        raise _too_large(chosen, asked, token_bytes, host_free, device_free)
    return chosen


def _compute_bytes(header: Header, n_ctx: int, n_ubatch: int, outputs: int, *, flash: bool) -> int:
    """An upper estimate of llama.cpp's buffers: activations of the widest layer, the mask, and the logits."""
    width = _number(header, "embedding_length", 0)
    feed_forward = _number(header, "feed_forward_length", 4 * width)
    heads = _number(header, "attention.head_count", 1)
    vocabulary = header.metadata.get("tokenizer.ggml.tokens")
    n_vocab = vocabulary.items if isinstance(vocabulary, Length) else len(vocabulary or ())
    activations = n_ubatch * (6 * width + 2 * feed_forward) * 4
    attention = n_ubatch * n_ctx * (4 if flash else 4 + 4 * heads)
    return int(activations + attention + 2 * outputs * n_vocab * 4)


def _too_large(chosen: MemoryPlan, asked: Asked, token_bytes: float, host_free: int, device_free: int) -> ModelError:
    free = device_free * (1 - MARGIN) if chosen.on_device else host_free
    needed = chosen.device_bytes if chosen.on_device else chosen.host_bytes
    rest = needed - chosen.kv_bytes
    where = "device" if chosen.on_device else "host"
    room = int((free - rest) / max(1.0, token_bytes)) // CTX_MIN_TOKENS * CTX_MIN_TOKENS
    if room >= CTX_MIN_TOKENS:
        advice = f"--ctx {room} would fit"
        if asked.type_k not in ("q8_0", "q4_0"):
            advice += ", or --kv-type q8_0 with about twice as much"
    elif chosen.on_device:
        advice = "fewer --gpu-layers leave some of it to the host"
    else:
        advice = "a smaller model, or one with fewer bits a weight, is needed"
    return ModelError(
        f"{chosen.weights_bytes / GIB:,.1f} GiB of weights, {chosen.kv_bytes / GIB:,.1f} of KV cache (n_ctx = "
        f"{chosen.n_ctx:,}) and {chosen.compute_bytes / GIB:,.1f} of buffers need {needed / GIB:,.1f} GiB of {where} "
        f"memory, of which {free / GIB:,.1f} are free; {advice}",
        code="model_too_large",
    )


def _number(header: Header, name: str, default: float) -> float:
    return _scalar(header.own(name, default), default)


def _scalar(value: Any, default: float) -> float:
    """The number behind a key that may be an array by layer: then its largest."""
    if isinstance(value, list):
        value = max(value, default=default)
    return float(value) if isinstance(value, int | float) else default
