"""The contract of backends, as any installed plugin is tested."""

from __future__ import annotations

from typing import Any, ClassVar

from fsdp_support import ARCHITECTURES, adapter

from miles_core.contracts.model import ModelSource
from miles_core.testing.suites.backend import BackendConformance


class TestFsdp(BackendConformance):
    name = "fsdp"

    def source(self) -> ModelSource:
        keys = {**ARCHITECTURES["qwen3"], "vocab_size": self.vocab_size}
        return ModelSource(asked="conformance", architecture=keys)

    def adapter(self, source: ModelSource) -> Any:
        return adapter()


class TestFsdpInMicroBatches(TestFsdp):
    options: ClassVar = {"micro_tokens": 20, "checkpointing": True, "unit_mib": 0}
