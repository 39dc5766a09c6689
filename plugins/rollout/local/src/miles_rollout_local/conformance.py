"""What `miles conformance rollout:local` tests: the engine on a tiny random Qwen3, plain and batch-invariant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from miles_core.contracts.model import ModelSource
from miles_core.contracts.weights import TensorSpec
from miles_core.testing import EngineConformance


def model_of(architecture: Mapping[str, Any], seed: int = 0) -> Any:
    """A float32 module with random weights, biases and norms included."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.abs().max() == 0:  # routers start at zero
                parameter.normal_(std=0.3)
    return model


class LocalConformance(EngineConformance):
    name = "local"
    architecture: ClassVar[dict[str, Any]] = {
        "model_type": "qwen3",
        "vocab_size": EngineConformance.vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,  # large enough that rows, positions and neighbours matter
    }

    def source(self) -> ModelSource:
        return ModelSource(asked="conformance", architecture=self.architecture)

    def weights(self, seed: int) -> list[tuple[TensorSpec, Any]]:
        model = model_of(self.architecture, seed)
        return [
            (TensorSpec(name=n, shape=tuple(p.shape), dtype="F32"), p.detach()) for n, p in model.named_parameters()
        ]


class BatchInvariantConformance(LocalConformance):
    options: ClassVar[dict[str, Any]] = {"batch_invariant": True, "slots": 20}
