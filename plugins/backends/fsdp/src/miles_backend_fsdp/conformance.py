"""What `miles conformance` tests of `backend:fsdp` and `model:causal-lm`: both on a tiny random Qwen3."""

from __future__ import annotations

from typing import Any, ClassVar

from miles_backend_fsdp.config import CausalLMConfig
from miles_core.contracts.model import ModelSource
from miles_core.testing import BackendConformance, ModelConformance

#: A tiny model, without its vocabulary: what the suites and this package's own tests build.
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,  # far from uniform, so that a wrong token shows
}


def _source(vocab_size: int) -> ModelSource:
    return ModelSource(asked="conformance", architecture={**TINY, "model_type": "qwen3", "vocab_size": vocab_size})


class FsdpConformance(BackendConformance):
    name = "fsdp"

    def source(self) -> ModelSource:
        return _source(self.vocab_size)

    def adapter(self, source: ModelSource) -> Any:
        from miles_backend_fsdp.causal_lm import CausalLM

        return CausalLM(CausalLMConfig(), share_prefixes=True)


class MicroBatchesConformance(FsdpConformance):
    options: ClassVar[dict[str, Any]] = {"micro_tokens": 20, "checkpointing": True, "unit_mib": 0}


class CausalLMConformance(ModelConformance):
    name = "causal-lm"

    def source(self) -> ModelSource:
        return _source(self.vocab_size)
