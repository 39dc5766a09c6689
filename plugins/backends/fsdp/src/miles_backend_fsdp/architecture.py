"""From a `ModelSource` to an empty Hugging Face module: which architectures are accepted, and how they are made."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from miles_backend_fsdp.attention import NAME
from miles_core.errors import ModelSourceError, clause

if TYPE_CHECKING:
    from miles_core.contracts.model import ModelSource

#: model_type -> class; each is compared with transformers' own forward by this package's tests. SmolLM2 is a `llama`.
VERIFIED = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
#: Keys of a config.json that no attribute of the config class shows: read by models only, or older spellings.
EXTRA_KEYS = frozenset(
    {"model_type", "head_dim", "architectures", "torch_dtype", "rope_theta", "rope_scaling", "transformers_version"}
)


def config_of(source: ModelSource, *, unverified: bool) -> Any:
    """The Hugging Face config. Raises `ModelSourceError`."""
    if source.folder is not None:
        if not (source.folder / "config.json").is_file():
            raise ModelSourceError(
                f"{source.asked!r}: {source.folder} has no config.json", fix="name a Hugging Face folder"
            )
        try:
            config = AutoConfig.from_pretrained(source.folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever transformers finds wrong with it
            raise ModelSourceError(
                f"{source.folder / 'config.json'} is no config that transformers reads: {clause(error)}",
                fix="repair it, or name another folder",
            ) from error
        if getattr(config, "quantization_config", None) is not None:
            raise ModelSourceError(
                f"{source.asked!r} holds quantised weights, which cannot be trained", fix="use the unquantised model"
            )
    else:
        config = _drawn(dict(source.architecture), unverified)
    kind = config.model_type
    classes = getattr(config, "architectures", None) or [VERIFIED.get(kind, "")]
    if not unverified and classes[0] != VERIFIED.get(kind):
        raise _unverified(kind, classes[0])
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelSourceError(f"model type {kind!r} has no causal language model in transformers", fix="use another")
    if not unverified:
        _refuse_sizes(config)
    return config


def _refuse_sizes(config: Any) -> None:
    """Sizes that transformers takes and no forward can run with."""
    heads = config.num_attention_heads
    sizes = {"num_attention_heads": heads, "num_key_value_heads": config.num_key_value_heads or heads}
    sizes |= {name: getattr(config, name) for name in ("hidden_size", "vocab_size", "num_hidden_layers")}
    sizes["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    if min(sizes.values()) < 1 or heads % sizes["num_key_value_heads"] or sizes["head_dim"] % 2:
        raise ModelSourceError(
            f"a {config.model_type!r} of these sizes cannot be computed: "
            + ", ".join(f"{name} {size}" for name, size in sizes.items()),
            fix="make num_attention_heads a multiple of num_key_value_heads, head_dim even, and every size at least 1",
        )


def _unverified(kind: str, name: str) -> ModelSourceError:
    return ModelSourceError(
        f"model type {kind!r} ({name or 'no causal language model named'}) is not verified by causal-lm; "
        f"verified are {', '.join(sorted(VERIFIED.values()))}",
        fix="use one of these, or set model.unverified: true and compare its numbers yourself",
    )


def _drawn(keys: dict[str, Any], unverified: bool) -> Any:
    kind = keys.pop("model_type", None)
    if not kind:
        raise ModelSourceError(
            "model.architecture has no model_type", fix=f"set model_type, one of {', '.join(sorted(VERIFIED))}"
        )
    if kind not in CONFIG_MAPPING:
        close = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING), n=1)
        raise ModelSourceError(
            f"model.architecture.model_type is {kind!r}, which transformers does not know",
            fix=(f"did you mean {close[0]!r}? " if close else "") + f"verified: {', '.join(sorted(VERIFIED))}",
        )
    if kind not in VERIFIED and not unverified:
        raise _unverified(kind, "")
    try:
        config = AutoConfig.for_model(kind, **keys)
        known = set(type(config)().to_dict()) | set(type(config).attribute_map) | EXTRA_KEYS
    except Exception as error:  # also transformers' own validation errors
        raise ModelSourceError(
            f"model.architecture cannot be made a {kind!r} config: {clause(error)}",
            fix="use the keys and types of its config.json",
        ) from error
    for key in sorted(set(keys) - known):
        close = difflib.get_close_matches(key, sorted(known), n=1)
        raise ModelSourceError(
            f"model.architecture has a key {key!r} that {kind!r} does not know",
            fix=f"did you mean {close[0]!r}?" if close else "use the keys of its config.json",
        )
    return config


def _class(config: Any) -> Any:
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def empty(config: Any) -> Any:
    """A module on CPU with uninitialised float32 parameters and right buffers; draws no random number."""
    config._attn_implementation = NAME
    with torch.device("meta"):
        lm = _class(config)(config)
    lm = lm.to(torch.float32).to_empty(device="cpu")
    lm.tie_weights()
    for name, child in list(lm.named_modules()):
        if child._non_persistent_buffers_set:  # rotary frequencies: computed in the constructor, lost on meta
            parent, _, own = name.rpartition(".")
            setattr(lm.get_submodule(parent), own, type(child)(config))
    return lm


def unverified_module(source: ModelSource, config: Any, seed: int) -> Any:
    """Any causal model as transformers builds it. Not safe beside another thread that loads a model."""
    kind = _class(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % (1 << 63))
        if source.folder is None:
            return kind(config).to(torch.float32)
        return kind.from_pretrained(
            source.folder, config=config, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )


@torch.no_grad()
def check_plain(lm: Any) -> None:
    """Refuse a model whose forward is more than `lm_head(model(x))`, or whose attention is not plain and causal."""
    what = ""
    tokens = torch.arange(24).remainder(lm.config.vocab_size)[None]
    lm.eval()
    try:
        lm.config._attn_implementation = "eager"
        expected = lm(input_ids=tokens, use_cache=False).logits
        lm.config._attn_implementation = NAME
        found = lm.lm_head(lm.model(input_ids=tokens, use_cache=False)[0])
        if not torch.allclose(found, expected, rtol=1e-3, atol=1e-4):
            what = f"logits differ by {float((found - expected).abs().max()):.3g}"
    except (AttributeError, NotImplementedError, TypeError) as error:
        what = str(error)
    if what:
        raise ModelSourceError(
            f"causal-lm cannot run {type(lm).__name__}: its forward is not `lm_head(model(tokens))` with plain causal "
            f"attention ({what})",
            fix="write a model adapter for it, or use a verified architecture",
        )
