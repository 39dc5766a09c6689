"""Between names inside a module and Hugging Face names, for tensors that a checkpoint splits.

Transformers holds the experts of Qwen3-MoE fused and stacked; its checkpoints (and other engines) hold one matrix per
expert and projection. Every other parameter has one name.
"""

from __future__ import annotations

from typing import Any

PREFIX = "lm."


def parts(name: str, tensor: Any, vocabulary: int | None = None) -> list[tuple[str, Any]]:
    """Hugging Face name and view, for the parameter `name` of a Hugging Face model; works on meta tensors.

    `vocabulary` cuts the padding of embedding and output head off. The views share memory with `tensor`, so that
    copying into them loads it.
    """
    stem, _, last = name.rpartition(".")
    if stem.endswith(".mlp.experts") and last == "gate_up_proj":
        half = tensor.shape[1] // 2
        found = []
        for e in range(tensor.shape[0]):
            found.append((f"{stem}.{e}.gate_proj.weight", tensor[e, :half]))
            found.append((f"{stem}.{e}.up_proj.weight", tensor[e, half:]))
        return found
    if stem.endswith(".mlp.experts") and last == "down_proj":
        return [(f"{stem}.{e}.down_proj.weight", tensor[e]) for e in range(tensor.shape[0])]
    if vocabulary is not None and name in ("model.embed_tokens.weight", "lm_head.weight"):
        return [(name, tensor[:vocabulary])]
    return [(name, tensor)]
