"""Registers backend `fsdp` and model adapter `causal-lm`. The heavy imports happen inside `build`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_backend_fsdp.config import CausalLMConfig, FsdpConfig
from miles_core import hookimpl
from miles_core.provider import BuildContext, Provider

if TYPE_CHECKING:
    from miles_core.contracts.backend import Backend
    from miles_core.contracts.model import ModelAdapter


def _backend(config: FsdpConfig, context: BuildContext) -> Backend:
    from miles_backend_fsdp.backend import FsdpBackend

    return FsdpBackend(config, context)


def _adapter(config: CausalLMConfig, context: BuildContext) -> ModelAdapter:
    from miles_backend_fsdp.causal_lm import CausalLM

    # Where an extension brings values per token into the forward, equal prefixes are not equal.
    per_token = any(hasattr(extension, "micro") and extension.columns for extension in context.extensions)
    return CausalLM(config, share_prefixes=config.share_prefixes and not per_token)


def _offers(config: FsdpConfig) -> tuple[str, ...]:
    return "export.full", "optimizer.adamw", f"weights.dtype:{config.dtype.value}"


@hookimpl
def miles_backend() -> Provider[FsdpConfig, Backend]:
    return Provider(
        name="fsdp",
        config=FsdpConfig,
        build=_backend,
        offers=_offers,
        summary="PyTorch fully_shard on any number of ranks",
    )


@hookimpl
def miles_model() -> Provider[CausalLMConfig, ModelAdapter]:
    return Provider(
        name="causal-lm",
        config=CausalLMConfig,
        build=_adapter,
        summary="Hugging Face causal language models: Llama, Qwen2, Qwen3, Qwen3-MoE, Mistral, SmolLM2",
    )
