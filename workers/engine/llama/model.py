"""Loading a model: the file checked, the devices chosen, the context made.

Nothing in here may let llama.cpp abort: the file's header is checked first, every setting is brought within its
range, and what llama.cpp refuses politely becomes a ModelError with the last thing that it said.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import llama_cpp.llama_cpp as llama
import msgspec
import structlog
from llama_cpp._ggml import libggml

from arriero.schemas.clock import Clock
from arriero.schemas.errors import ModelError
from arriero.workers.engine.llama.gguf_check import Header, check
from arriero.workers.engine.llama.plan import Asked, MemoryPlan, plan
from arriero.workers.engine.seam import ModelInfo

log = structlog.get_logger(__name__)

SEQUENCES_MAX: Final = 256
"""llama.cpp knows so many sequence ids and aborts beyond. Those that are no slots hold finished prefixes."""
SLOTS_MAX: Final = SEQUENCES_MAX - 1
DRAFT_TOKENS: Final = 16
"""Guesses that one step carries: about as many tokens as a step can take on before it takes twice as long."""
CTX_MAX_TOKENS: Final = 1 << 24
THREADS_MAX: Final = 16
"""Decoding is bound by memory; more threads than this rarely help and always cost."""

KvType = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
_KV_TYPES: Final[dict[str, int]] = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}
"""Numbers in ggml."""
_SPLIT_MODES: Final = {"none": 0, "layer": 1, "row": 2}
_FLASH: Final = {"auto": -1, "off": 0, "on": 1}
_GPU_KINDS: Final = (1, 2)
"""ggml's device types: 1 a GPU, 2 one that shares the machine's memory."""


class LlamaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to load a model. None leaves the choice to the loader."""

    path: Path
    name: str
    """What jobs call it."""
    slots: int | None = None
    n_ctx: int | None = None
    """KV cells shared by all slots, in tokens."""
    n_batch: int | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    """Layers on the device; None for all of them when there is a device, 0 for none."""
    main_gpu: int = 0
    split_mode: Literal["none", "layer", "row"] = "layer"
    tensor_split: tuple[float, ...] = ()
    """Shares of the model for each device."""
    flash_attn: Literal["auto", "on", "off"] = "auto"
    type_k: KvType = "f16"
    type_v: KvType = "f16"
    prefix_cache: bool = True
    """Whether prompts that begin alike share cells."""
    draft_tokens: int = DRAFT_TOKENS
    """Tokens that one step may guess by looking them up in the text so far; 0 for none."""
    digest: str | None = None
    """First 16 hex digits of the file's SHA-256 where it is known already."""


class Device(msgspec.Struct, frozen=True):
    name: str
    description: str
    free_bytes: int
    total_bytes: int = 0


class Loaded(msgspec.Struct, frozen=True):
    """Handles of llama.cpp, and what they are. Freed by `free`."""

    model: Any
    context: Any
    memory: Any
    info: ModelInfo
    chat_template: str
    """Empty when the file has none."""

    def free(self) -> None:
        llama.llama_free(self.context)
        llama.llama_model_free(self.model)


def load(settings: LlamaSettings, clock: Clock) -> Loaded:
    """Load the model file. Raises ModelError (see its codes)."""
    began = clock.monotonic()
    path = settings.path.expanduser()
    header = check(path)
    said = _listen()
    llama.llama_backend_init()
    devices = gpu_devices()
    _check_settings(settings, devices)
    planned = plan_load(settings, header, devices, _free_memory_bytes())
    layers, offloaded = planned.layers, planned.on_device
    digest = settings.digest or file_digest(path)

    parameters = llama.llama_model_default_params()
    parameters.n_gpu_layers = -1 if offloaded == layers and devices else offloaded
    parameters.main_gpu = settings.main_gpu
    parameters.split_mode = _SPLIT_MODES[settings.split_mode]
    if devices and offloaded == layers:
        parameters.load_mode = 0  # mapping a file that goes to the device whole only slows it down
    split = (ctypes.c_float * llama.llama_max_devices())(*settings.tensor_split)
    if settings.tensor_split:
        parameters.tensor_split = split
    model = llama.llama_model_load_from_file(os.fsencode(path), parameters)
    if not model:
        raise ModelError(f"llama.cpp cannot load {path}: {_last(said)}", code="model_invalid")
    try:
        _check_model(model, path)
        context = _make_context(settings, model, planned)
        if not context:
            raise ModelError(
                f"no room for the KV cache of {path.name}: {_last(said)}; "
                "fewer context tokens or slots, or a smaller type_k and type_v, need less",
                code="model_too_large",
            )
    except BaseException:
        llama.llama_model_free(model)
        raise
    n_ctx = llama.llama_n_ctx(context)
    train_ctx = llama.llama_model_n_ctx_train(model) or n_ctx
    template = header.metadata.get("tokenizer.chat_template", "")
    used = devices[settings.main_gpu :][:1] if settings.split_mode == "none" else devices
    device = " + ".join(one.description for one in used) if offloaded else "cpu"
    info = ModelInfo(
        name=settings.name,
        digest=digest,
        size_bytes=header.size_bytes,
        n_vocab=llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)),
        n_ctx=n_ctx,
        n_ctx_sequence=min(train_ctx, n_ctx),
        slots=llama.llama_n_seq_max(context),
        n_batch=llama.llama_n_batch(context),
        layers=layers,
        offloaded=offloaded,
        device=device,
        load_s=clock.monotonic() - began,
        chat=bool(template),
        holders=SEQUENCES_MAX - llama.llama_n_seq_max(context) if settings.prefix_cache else 0,
        drafts=settings.draft_tokens,
    )
    log.info(
        "model_loaded",
        model=info.name,
        device=info.device,
        layers_on_device=info.offloaded,
        layers=info.layers,
        slots=info.slots,
        n_ctx=info.n_ctx,
        n_ctx_sequence=info.n_ctx_sequence,
        threads=llama.llama_n_threads(context),
        load_s=round(info.load_s, 2),
    )
    return Loaded(model, context, llama.llama_get_memory(context), info, str(template))


def file_digest(path: Path) -> str:
    """First 16 hex digits of the file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def gpu_devices() -> list[Device]:
    """The devices that layers can be offloaded to."""
    if not llama.llama_supports_gpu_offload():
        return []
    get = _ggml("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    kind = _ggml("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    name = _ggml("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
    description = _ggml("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    sizes = ctypes.POINTER(ctypes.c_size_t)
    memory = _ggml("ggml_backend_dev_memory", None, ctypes.c_void_p, sizes, sizes)
    devices = []
    for index in range(_ggml("ggml_backend_dev_count", ctypes.c_size_t)()):
        device = get(index)
        if kind(device) not in _GPU_KINDS:
            continue
        free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
        memory(device, ctypes.byref(free), ctypes.byref(total))
        devices.append(Device(name(device).decode(), description(device).decode(), free.value, total.value))
    return devices


def inventory() -> dict[str, Any]:
    """What models can run on, for `arriero devices`."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    _listen()
    return {
        "cpu": Device("CPU", platform.machine(), _free_memory_bytes(), total),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpu_devices(),
        "offload": bool(llama.llama_supports_gpu_offload()),
    }


def _check_settings(settings: LlamaSettings, devices: list[Device]) -> None:
    def refuse(what: str) -> ModelError:
        return ModelError(what, code="model_unsupported")

    for name, low, high in (
        ("slots", 1, SLOTS_MAX),
        ("n_ctx", 1, CTX_MAX_TOKENS),
        ("n_batch", 1, 1 << 20),
        ("threads", 1, 512),
        ("gpu_layers", 0, 10_000),
        ("draft_tokens", 0, 256),
    ):
        value = getattr(settings, name)
        if value is not None and not low <= value <= high:
            raise refuse(f"{name} = {value:,} is out of range ({low:,} to {high:,})")
    if devices and not 0 <= settings.main_gpu < len(devices):
        raise refuse(f"main_gpu = {settings.main_gpu} names no device; there are {len(devices)}")
    if len(settings.tensor_split) > llama.llama_max_devices() or any(share < 0 for share in settings.tensor_split):
        raise refuse(f"tensor_split takes up to {llama.llama_max_devices()} shares, none below 0")
    if settings.flash_attn == "off" and settings.type_v not in ("f32", "f16", "bf16"):
        raise refuse(f"type_v = {settings.type_v} needs flash attention")


def _check_model(model: Any, path: Path) -> None:
    """Kinds of models that this engine would corrupt or crash on are refused by name."""
    for test, what in (
        (llama.llama_model_has_encoder, "has an encoder"),
        (llama.llama_model_is_recurrent, "is recurrent"),
        (llama.llama_model_is_hybrid, "is partly recurrent"),
        (llama.llama_model_is_diffusion, "is a diffusion model"),
    ):
        if test(model):
            raise ModelError(f"{path.name} {what}; only plain decoder models are served", code="model_unsupported")


def plan_load(settings: LlamaSettings, header: Header, devices: Sequence[Device], host_free: int) -> MemoryPlan:
    """What loading would take, before anything is loaded. Raises ModelError(model_too_large)."""
    used = devices[settings.main_gpu :][:1] if settings.split_mode == "none" else devices
    asked = Asked(
        slots=settings.slots,
        n_ctx=settings.n_ctx,
        n_batch=settings.n_batch,
        gpu_layers=settings.gpu_layers,
        draft_tokens=settings.draft_tokens,
        type_k=settings.type_k,
        type_v=settings.type_v,
        flash=settings.flash_attn != "off",
    )
    return plan(header, asked, host_free=host_free, device_free=sum(device.free_bytes for device in used))


def _make_context(settings: LlamaSettings, model: Any, planned: MemoryPlan) -> Any:
    threads = settings.threads or min(THREADS_MAX, len(os.sched_getaffinity(0)))
    parameters = llama.llama_context_default_params()
    parameters.n_ctx = planned.n_ctx
    parameters.n_batch = planned.n_batch
    parameters.n_ubatch = planned.n_ubatch
    parameters.n_seq_max = planned.slots
    parameters.n_outputs_max = planned.slots + settings.draft_tokens
    parameters.n_threads = threads
    parameters.n_threads_batch = threads
    parameters.flash_attn_type = _FLASH[settings.flash_attn]
    parameters.type_k = _KV_TYPES[settings.type_k]
    parameters.type_v = _KV_TYPES[settings.type_v]
    parameters.kv_unified = True  # prefill and decode in one pass over the weights, whatever the lengths
    parameters.no_perf = True
    return llama.llama_init_from_model(model, parameters)


def _free_memory_bytes() -> int:
    """What may still be taken: Linux's own estimate (free pages alone would leave its file cache out), and no more
    than the container is allowed."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):
        available = min(available, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return available


def _ggml(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(libggml, name)
    function.restype = result
    function.argtypes = arguments
    return function


# --- llama.cpp's own words ---------------------------------------------------------------------------------

_said: deque[str] = deque(maxlen=40)
"""Its last lines. llama.cpp has one log for the process, so this is one, too."""


_TOLD: Final = (1, 2, 3)
"""ggml's levels info, warning and error; 4 is its debug (thousands of lines a load), 5 continues a line."""


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes | None, _: Any) -> None:
    if level not in _TOLD:
        return
    try:
        line = (text or b"").decode("utf-8", "replace").strip()
        if line.strip("."):
            _said.append(line)
            log.debug("llama_cpp", level=level, line=line)
    except Exception:  # noqa: S110 - called from C: nothing may leave, and there is nobody to tell
        pass


def _listen() -> deque[str]:
    """Take llama.cpp's log off the terminal."""
    llama.llama_log_set(_on_log, ctypes.c_void_p(0))
    _said.clear()
    return _said


def _last(said: deque[str]) -> str:
    telling = [line for line in said if "error" in line.lower() or "failed" in line.lower()]
    return (telling or list(said) or ["it gave no reason"])[-1 if not telling else 0]
