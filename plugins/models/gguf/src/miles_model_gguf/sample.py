"""A tiny GGUF file, written from nothing: what the conformance suites and this package's own tests convert."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, EXPERTS = 64, 96, 4, 2, 16, 2, 4


def alphabet() -> list[str]:
    """The 256 characters in which byte-level vocabularies spell bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(other)) for b in range(256)]


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types, and merges."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
    tokens = [*SPECIAL, *alphabet(), *(merge.replace(" ", "") for merge in merges)]
    return tokens, [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)), merges


def write(
    path: Path,
    *,
    architecture: str = "llama",
    quantisation: str = "F32",
    change: Callable[[Any], None] | None = None,
    skip: tuple[str, ...] = (),
    **metadata: Any,
) -> dict[str, Array]:
    """Write a random model; returns its tensors in float32, before quantisation, by GGUF name.

    `change` gets the `gguf.GGUFWriter` before it writes; `skip` leaves out tensors; `metadata` replaces `pre`,
    `model` or sizes (`block_count` …).
    """
    import gguf

    writer = gguf.GGUFWriter(str(path), architecture)
    sizes = {"context_length": 128, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": INNER}
    for name, size in sizes.items():
        writer.add_uint32(f"{architecture}.{name}", metadata.get(name, size))
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if architecture == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(INNER)
    tokens, types, merges = vocabulary()
    writer.add_tokenizer_model(metadata.get("model", "gpt2"))
    writer.add_tokenizer_pre(metadata.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    kind = gguf.GGMLQuantizationType[quantisation]
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes(architecture, len(tokens)).items():
        if name in skip:
            continue
        value: Array = rng.standard_normal(shape).astype(np.float32)
        tensors[name] = value
        if kind == gguf.GGMLQuantizationType.F32 or len(shape) == 1 or shape[-1] % 32:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def shapes(architecture: str, vocabulary_size: int) -> dict[str, tuple[int, ...]]:
    """Row-major shapes of a tied model, by GGUF name."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocabulary_size, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "ffn_norm.weight": (HIDDEN,),
            "attn_q.weight": (q, HIDDEN),
            "attn_k.weight": (kv, HIDDEN),
            "attn_v.weight": (kv, HIDDEN),
            "attn_output.weight": (HIDDEN, q),
        }
        if architecture == "qwen3moe":
            block["ffn_gate_inp.weight"] = (EXPERTS, HIDDEN)
            block |= {f"ffn_{part}_exps.weight": (EXPERTS, INNER, HIDDEN) for part in ("gate", "up")}
            block["ffn_down_exps.weight"] = (EXPERTS, HIDDEN, INNER)
        else:
            block |= {"ffn_gate.weight": (INNER, HIDDEN), "ffn_up.weight": (INNER, HIDDEN)}
            block["ffn_down.weight"] = (HIDDEN, INNER)
        if architecture == "qwen2":
            block |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if architecture.startswith("qwen3"):
            block |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
        found |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    return found
