"""Tiny random llama models as GGUF files: real enough for every code path, a millisecond a step.

The vocabulary is the 256 bytes (so every character beyond ASCII is split between tokens), a few words made by merges,
and three control tokens. Weights are 32-bit and scaled so that the likeliest token leads clearly: greedy results then
do not depend on what shares a batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import gguf
import numpy as np

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END, START_OF_TURN, END_OF_TURN = 256, 257, 258
MERGES: Final = ("t h", "th e", "Ġ the")
N_VOCAB: Final = 256 + len(CONTROL) + len(MERGES)


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    heads_kv: int = 2,
    n_ctx: int = 512,
    chat_template: str | None = CHAT_TEMPLATE,
    add_bos: bool = False,
    poison: bool = False,
) -> Path:
    """Write a model and return its path. With `poison` a `!` in the prompt makes the numbers NaN."""
    random = np.random.default_rng(seed)
    head = width // heads
    width_kv = head * heads_kv

    def matrix(rows: int, columns: int, scale: float) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * scale).astype(np.float32)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)

    tokens = [*_byte_characters(), *CONTROL, *(merge.replace(" ", "") for merge in MERGES)]
    kinds = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * len(MERGES)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(END)
    writer.add_eos_token_id(END_OF_TURN)
    writer.add_add_bos_token(add_bos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)

    embeddings = matrix(N_VOCAB, width, 1.0)
    output = matrix(N_VOCAB, width, 1.0)
    output[256:259] = 0.0
    if poison:
        embeddings[ord("!")] = np.nan
    writer.add_tensor("token_embd.weight", embeddings)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    spread = width**-0.5
    for i in range(layers):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(width, np.float32))
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", np.ones(width, np.float32))
        writer.add_tensor(f"blk.{i}.attn_q.weight", matrix(width, width, 1.5 * spread))
        writer.add_tensor(f"blk.{i}.attn_k.weight", matrix(width_kv, width, 1.5 * spread))
        writer.add_tensor(f"blk.{i}.attn_v.weight", matrix(width_kv, width, 2 * spread))
        writer.add_tensor(f"blk.{i}.attn_output.weight", matrix(width, width, 2 * spread))
        writer.add_tensor(f"blk.{i}.ffn_gate.weight", matrix(2 * width, width, spread))
        writer.add_tensor(f"blk.{i}.ffn_up.weight", matrix(2 * width, width, spread))
        writer.add_tensor(f"blk.{i}.ffn_down.weight", matrix(width, 2 * width, spread))
    writer.add_tensor("output.weight", output)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _byte_characters() -> list[str]:
    """The characters by which byte-level vocabularies (GPT-2's and its heirs) write the bytes 0 to 255."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (256 + i for i in range(256))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]
