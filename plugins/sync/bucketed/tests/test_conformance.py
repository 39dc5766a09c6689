"""The contract of transports, on both paths and with tensors of both libraries."""

from __future__ import annotations

from typing import Any

import torch

from miles_core.contracts.weights import TensorSpec
from miles_core.testing.suites.transport import TransportConformance


class TestInProcess(TransportConformance):
    name = "bucketed"


class TestSharedMemory(TransportConformance):
    name = "bucketed"
    options = {"path": "shared_memory"}  # noqa: RUF012


class TestTorch(TestSharedMemory):
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
