"""From a model source to a module on CPU whose projections lie fused in memory; refuses what was never verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from miles_core.errors import ModelSourceError, clause

if TYPE_CHECKING:
    from miles_core.contracts.model import ModelSource
    from miles_rollout_local.config import LocalConfig

#: Architectures whose log-probabilities the tests compare with a plain forward. SmolLM2 is `llama`.
VERIFIED = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
#: Kinds of rotary embedding whose angles depend on the position alone.
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


def load(source: ModelSource, config: LocalConfig) -> tuple[Any, bool]:
    """The module without weights (they arrive through a port), and whether its architecture is verified.

    Raises `ModelSourceError` for an architecture that is not verified (unless `unverified`), and for features that this
    engine does not compute: sliding windows shorter than `max_length`, rotary embeddings that depend on the length.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    try:
        if source.folder is not None:
            settings = AutoConfig.from_pretrained(source.folder, local_files_only=True)
        else:
            keys = dict(source.architecture)
            settings = AutoConfig.for_model(str(keys.pop("model_type", "")), **keys)
    except Exception as error:  # whatever transformers finds wrong with it, its validation errors too
        raise ModelSourceError(
            f"model source {source.asked!r} has no configuration that transformers can read: "
            + clause(error).partition(" Should ")[0],  # behind it stands every model that transformers knows
            fix="name a folder with a config.json, or an architecture with its model_type",
        ) from error
    verified = settings.model_type in VERIFIED
    if not verified and not config.unverified:
        raise ModelSourceError(
            f"the engine `local` was never verified with architecture {settings.model_type!r} ({source.asked}); "
            f"verified: {', '.join(VERIFIED)}",
            fix="set rollout.unverified=true to try it through the model's own forward, or choose another engine",
        )
    limit = max_length(settings, config)
    _refuse_windows(settings, limit)
    if verified:
        _refuse_rope(settings)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, config.dtype.value))
    model.tie_weights()
    model.eval().requires_grad_(False)
    if verified:
        for layer in model.model.layers:
            fuse(layer)
    return model, verified


def max_length(settings: Any, config: LocalConfig) -> int:
    """Longest prompt and answer together: `max_length`, or the model's own limit."""
    own = getattr(settings, "max_position_embeddings", None)
    if config.max_length is None and own is None:
        raise ModelSourceError(
            f"architecture {settings.model_type!r} states no longest length", fix="set rollout.max_length"
        )
    if own is not None and config.max_length is not None and config.max_length > own:
        raise ModelSourceError(
            f"rollout.max_length is {config.max_length}; the model was made for {own} positions",
            fix=f"set rollout.max_length to {own} or less",
        )
    return int(config.max_length or own)  # type: ignore[arg-type]


def _refuse_windows(settings: Any, limit: int) -> None:
    window = getattr(settings, "sliding_window", None)
    kinds = getattr(settings, "layer_types", None)
    slides = kinds is None or any(kind != "full_attention" for kind in kinds)
    if slides and getattr(settings, "use_sliding_window", True) and window is not None and window < limit:
        raise ModelSourceError(
            f"{settings.model_type!r} attends in a sliding window of {window} tokens, and answers may reach {limit}",
            fix=f"set rollout.max_length to {window} or less (the window then never cuts), or choose another engine",
        )
    if window is None and kinds is not None and any(kind != "full_attention" for kind in kinds):
        raise ModelSourceError(
            f"{settings.model_type!r} has layers of kinds {sorted(set(kinds))}; this engine caches full attention only",
            fix="choose another engine for it",
        )


def _refuse_rope(settings: Any) -> None:
    rope = getattr(settings, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in STATIC_ROPE or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelSourceError(
            f"rotary embedding {rope} is not one that this engine computes; verified: {', '.join(STATIC_ROPE)}",
            fix="choose another engine for it",
        )


def fuse(layer: Any) -> None:
    """Move q, k, v (and gate, up) of a decoder layer into one block of memory each.

    The module's parameters become views of the blocks, so one matrix product serves all three, and what is loaded into
    or digested from a parameter is what the engine computes with.
    """
    attention, mlp = layer.self_attn, layer.mlp
    layer.qkv_weight, layer.qkv_bias = _join([attention.q_proj, attention.k_proj, attention.v_proj])
    if hasattr(mlp, "gate_proj"):
        layer.gate_up_weight, layer.gate_up_bias = _join([mlp.gate_proj, mlp.up_proj])


def _join(parts: list[Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = torch.cat([part.weight.data for part in parts])
    bias = torch.cat([part.bias.data for part in parts]) if parts[0].bias is not None else None
    row = 0
    for part in parts:
        rows = part.weight.shape[0]
        part.weight = nn.Parameter(weight[row : row + rows], requires_grad=False)
        if bias is not None:
            part.bias = nn.Parameter(bias[row : row + rows], requires_grad=False)
        row += rows
    return weight, bias
