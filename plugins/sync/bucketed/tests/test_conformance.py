"""The contract of transports, as `miles conformance sync:bucketed` tests it, and with tensors of torch."""

from __future__ import annotations

from typing import Any

import torch
from miles_sync_bucketed.conformance import InProcessConformance, SharedMemoryConformance

from miles_core.contracts.weights import TensorSpec


class TestInProcess(InProcessConformance):
    pass


class TestSharedMemory(SharedMemoryConformance):
    pass


class TestTorch(SharedMemoryConformance):
    def stream(self, seed: int) -> list[tuple[TensorSpec, Any]]:
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            "large": torch.randn(257, 130, generator=generator).bfloat16(),
            "transposed": torch.randn(6, 4, generator=generator).t(),
            "scalar": torch.tensor(-0.0),
            "empty": torch.zeros(0, 4),
        }
        dtypes = {torch.bfloat16: "BF16", torch.float32: "F32"}
        return [(TensorSpec(name=name, shape=tuple(t.shape), dtype=dtypes[t.dtype]), t) for name, t in tensors.items()]

    def meta(self, stream: Any) -> Any:
        return [(spec, tensor.to("meta")) for spec, tensor in stream]
