"""What a GGUF architecture is in Hugging Face terms: keys of `config.json`, and names and layouts of tensors.

Llama (Mistral and SmolLM2 files say `llama` too), Qwen2, Qwen3 and Qwen3-MoE: the families that `causal-lm` trains.
Whatever a file holds that is not known here is refused by name, because a tensor or a rotary scaling that is passed
over would give a model that runs and is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.errors import ModelSourceError
from miles_model_gguf.reader import Header, damaged

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Family:
    """`model_type` and class in transformers; `biased`: query, key and value have biases; `permuted`: llama.cpp stores
    query and key rows so that rotary pairs are neighbours; `normed`: queries and keys have norms."""

    model_type: str
    architecture: str
    biased: bool = False
    permuted: bool = False
    normed: bool = False
    experts: bool = False


FAMILIES = {
    "llama": Family(model_type="llama", architecture="LlamaForCausalLM", permuted=True),
    "qwen2": Family(model_type="qwen2", architecture="Qwen2ForCausalLM", biased=True),
    "qwen3": Family(model_type="qwen3", architecture="Qwen3ForCausalLM", normed=True),
    "qwen3moe": Family(model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", normed=True, experts=True),
}

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_DENSE = {f"ffn_{part}.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
_BIASES = {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
_NORMS = {f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}
_EXPERTS = {"ffn_gate_inp.weight": "mlp.gate.weight"}
#: Stacked over experts; a checkpoint has one tensor each.
_STACKED = {f"ffn_{part}_exps.weight": f"{part}_proj.weight" for part in ("gate", "up", "down")}
#: Inverse frequencies of a scaled rotary embedding; the numbers of the scaling itself are not in the file.
_FREQUENCIES = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight")


def family_of(path: Path, header: Header) -> Family:
    """Raises `ModelSourceError` for an architecture that this package does not know."""
    found = header.metadata.get("general.architecture")
    if found not in FAMILIES:
        raise ModelSourceError(
            f"{path} holds a model of architecture {found!r}; converted are {', '.join(sorted(FAMILIES))}",
            fix="use a model of one of these, or convert it to a Hugging Face folder with its own tools",
        )
    return FAMILIES[found]


def config(path: Path, header: Header) -> dict[str, Any]:
    """The keys of `config.json`. Raises `ModelSourceError` where a size is missing or a rotary scaling is stated."""
    family, prefix, metadata = family_of(path, header), header.metadata["general.architecture"], header.metadata

    def need(key: str) -> Any:
        if f"{prefix}.{key}" not in metadata:
            raise damaged(path, f"its metadata lack {prefix}.{key}")
        return metadata[f"{prefix}.{key}"]

    scaling = metadata.get(f"{prefix}.rope.scaling.type", "none")
    scaled = scaling != "none" or any(_FREQUENCIES.search(t.name) for t in header.tensors)
    if scaled or any(t.name.startswith("rope_") for t in header.tensors):
        raise ModelSourceError(
            f"{path} has a scaled rotary embedding ({scaling}), which is not converted",
            fix="use the model's original Hugging Face folder",
        )
    heads, hidden = need("attention.head_count"), need("embedding_length")
    embedding = next((t for t in header.tensors if t.name == "token_embd.weight"), None)
    if embedding is None:
        raise damaged(path, "it has no tensor token_embd.weight")
    head_dim = metadata.get(f"{prefix}.attention.key_length") or metadata.get(f"{prefix}.rope.dimension_count")
    keys: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get(f"{prefix}.attention.head_count_kv", heads),
        "head_dim": head_dim or hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": _shortest(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": metadata.get(f"{prefix}.rope.freq_base", 10000.0),
        "tie_word_embeddings": all(t.name != "output.weight" for t in header.tensors),
        "dtype": "float32",
    }
    if family.experts:
        keys |= {
            "num_experts": need("expert_count"),
            "num_experts_per_tok": need("expert_used_count"),
            "moe_intermediate_size": need("expert_feed_forward_length"),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    for name in ("bos", "eos", "padding"):
        if (token := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            keys[f"{'pad' if name == 'padding' else name}_token_id"] = token
    return keys


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def tensors(path: Path, header: Header) -> dict[str, tuple[str, Callable[[Array], Iterator[tuple[str, Array]]]]]:
    """GGUF name -> (its Hugging Face name, what becomes of the tensor in float32).

    Raises `ModelSourceError` where the file has a tensor that is not known, or lacks one.
    """
    family, settings = family_of(path, header), config(path, header)
    wanted = _OUTER | {
        f"blk.{i}.{name}": f"model.layers.{i}.{target}"
        for i in range(settings["num_hidden_layers"])
        for name, target in _block(family).items()
    }
    if settings["tie_word_embeddings"]:
        wanted.pop("output.weight")
    found = {t.name for t in header.tensors}
    unknown, missing = sorted(found - set(wanted)), sorted(set(wanted) - found)
    if unknown or missing:
        raise ModelSourceError(
            f"the tensors of {path} are not those of a {header.metadata['general.architecture']!r} model: "
            f"unknown {unknown[:3] or 'none'}, missing {missing[:3] or 'none'}",
            fix="use a whole file of one model, not an adapter, a split or a variant of the architecture",
        )
    shapes = _shapes(settings, family)
    plan = {}
    for info in header.tensors:
        target = wanted[info.name]
        expected = shapes[re.sub(r"^blk\.\d+\.", "", info.name)]
        if info.shape != expected:
            raise damaged(path, f"tensor {info.name!r} has shape {info.shape}, and its metadata make it {expected}")
        plan[info.name] = (target, _change(info.name, target, family, settings))
    return plan


def _block(family: Family) -> Mapping[str, str]:
    names = dict(_BLOCK)
    names |= _BIASES if family.biased else {}
    names |= _NORMS if family.normed else {}
    names |= (
        {**_EXPERTS, **{name: f"mlp.experts.{{}}.{part}" for name, part in _STACKED.items()}}
        if family.experts
        else _DENSE
    )
    return names


def _shapes(settings: Mapping[str, Any], family: Family) -> dict[str, tuple[int, ...]]:
    """Row-major shape of every kind of tensor."""
    hidden, head = settings["hidden_size"], settings["head_dim"]
    q, kv = settings["num_attention_heads"] * head, settings["num_key_value_heads"] * head
    inner = settings["intermediate_size"]
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (settings["vocab_size"], hidden),
        "output.weight": (settings["vocab_size"], hidden),
        "output_norm.weight": (hidden,),
        "attn_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        "attn_q.weight": (q, hidden),
        "attn_k.weight": (kv, hidden),
        "attn_v.weight": (kv, hidden),
        "attn_output.weight": (hidden, q),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
        "attn_q.bias": (q,),
        "attn_k.bias": (kv,),
        "attn_v.bias": (kv,),
        "attn_q_norm.weight": (head,),
        "attn_k_norm.weight": (head,),
    }
    if family.experts:
        count, inner = settings["num_experts"], settings["moe_intermediate_size"]
        found |= {
            "ffn_gate_inp.weight": (count, hidden),
            "ffn_gate_exps.weight": (count, inner, hidden),
            "ffn_up_exps.weight": (count, inner, hidden),
            "ffn_down_exps.weight": (count, hidden, inner),
        }
    return found


def _change(
    name: str, target: str, family: Family, settings: Mapping[str, Any]
) -> Callable[[Array], Iterator[tuple[str, Array]]]:
    heads = {"attn_q": settings["num_attention_heads"], "attn_k": settings["num_key_value_heads"]}
    kind = name.split(".")[2] if name.startswith("blk.") else ""
    turned = heads.get(kind, 0) if family.permuted else 0

    def change(value: Array) -> Iterator[tuple[str, Array]]:
        if "{}" in target:
            yield from ((target.format(expert), part) for expert, part in enumerate(value))
        elif turned:
            # llama.cpp: [heads, 2, head_dim / 2] -> [heads, head_dim / 2, 2]; this is the way back.
            pairs = value.reshape(turned, len(value) // turned // 2, 2, *value.shape[1:])
            yield target, pairs.swapaxes(1, 2).reshape(value.shape)
        else:
            yield target, value

    return change
