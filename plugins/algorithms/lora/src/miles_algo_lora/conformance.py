"""What `miles conformance extension:lora` tests: adapters on a small stack of linear layers, merged into its stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

from miles_core.config.schema import RoleConfig, RoleUpdate
from miles_core.contracts.weights import TensorSpec
from miles_core.provider import Place
from miles_core.testing import ExtensionConformance


class LoraConformance(ExtensionConformance):
    name = "lora"

    def extension(self) -> Any:
        """Of a run with a reference that sees the actor's module without adapters."""
        roles = {
            "actor": RoleConfig(update=RoleUpdate.trained),
            "reference": RoleConfig(init="actor", update=RoleUpdate.adapter_off),
        }
        policy = SimpleNamespace(roles=roles, model=SimpleNamespace(core=SimpleNamespace(source="base")))
        return self.build(Place.TRAINER, run=SimpleNamespace(policies={"main": policy}))

    def module(self) -> Any:
        import torch
        from torch import nn

        torch.manual_seed(3)
        layers = {"up_proj": nn.Linear(6, 10), "down_proj": nn.Linear(10, 6, bias=False), "norm": nn.LayerNorm(6)}
        return nn.ModuleDict({"0": nn.ModuleDict(layers), "head": nn.Linear(6, 4)})

    def stream(self, module: Any) -> list[tuple[TensorSpec, Any]]:
        return [
            (TensorSpec(name=n, shape=tuple(p.shape), dtype="F32"), p.detach()) for n, p in module.named_parameters()
        ]

    def meta(self, stream: list[tuple[TensorSpec, Any]]) -> list[tuple[TensorSpec, Any]]:
        return [(spec, tensor.to("meta")) for spec, tensor in stream]


class RankStabilisedConformance(LoraConformance):
    options: ClassVar[dict[str, Any]] = {"rank": 4, "rslora": True}


class DoraConformance(LoraConformance):
    options: ClassVar[dict[str, Any]] = {"rank": 2, "dora": True, "targets": ["*.up_proj", "head"]}
