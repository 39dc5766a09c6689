"""The contract of engines, as any installed plugin is tested."""

from __future__ import annotations

from typing import Any

from local_engine_kit import ARCHITECTURES, model_of, stream

from miles_core.contracts.model import ModelSource
from miles_core.testing.suites.engine import EngineConformance

ARCHITECTURE = ARCHITECTURES["qwen3"] | {"vocab_size": 15, "max_position_embeddings": 256}


class TestLocal(EngineConformance):
    name = "local"

    def source(self) -> Any:
        return ModelSource(asked="conformance", architecture=ARCHITECTURE)

    def weights(self, seed: int) -> Any:
        return stream(model_of(ARCHITECTURE, seed))


class TestBatchInvariant(TestLocal):
    options = {"batch_invariant": True, "slots": 20}  # noqa: RUF012
