"""One model of a policy on this rank: its sharded module, and its optimizer where it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from miles_backend_fsdp.checkpoint import Shard, chunk_offset
from miles_backend_fsdp.config import Dtype, FsdpConfig
from miles_backend_fsdp.optimizer import RoleOptimizer, local
from miles_backend_fsdp.recompute import Recompute
from miles_core.config.schema import OptimizerConfig
from miles_core.errors import BackendError, CapabilityError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from miles_core.contracts.backend import RoleSpec

UPDATES = ("trained", "frozen", "copy", "ema")


def check(spec: RoleSpec) -> None:
    """Raises `CapabilityError` for a way of updating that this backend does not have."""
    if spec.update not in UPDATES:
        raise CapabilityError(
            f"role {spec.name!r} has update {spec.update!r}; backend fsdp knows {', '.join(UPDATES)}",
            fix="use one of these for the role",
        )


def start_from(target: nn.Module, origin: nn.Module, what: str) -> None:
    """Copy the weights that both modules have; heads may differ. Before sharding."""
    source = dict(origin.named_parameters())
    with torch.no_grad():
        shared = [name for name, _ in target.named_parameters() if name in source]
        if not shared:
            raise BackendError(f"{what} shares no parameter with its origin", fix="start it from its own source")
        for name, parameter in target.named_parameters():
            if name in source:
                parameter.copy_(source[name])


class Role:
    """`module` is sharded in place; between forwards its parameters are shards."""

    def __init__(
        self, spec: RoleSpec, module: nn.Module, mesh: DeviceMesh, config: FsdpConfig, total: int, rank: int
    ) -> None:
        self.spec = spec
        self.adapter: Any = spec.adapter
        self.trained = spec.update == "trained"
        self.recompute = Recompute()
        self._rank = rank
        self._ranks = mesh.size()
        if not self.trained:
            module.requires_grad_(False)
        if config.checkpointing and self.trained:
            for block in self.adapter.blocks(module):
                self.recompute.wrap(block)
        self.wire_dtype = torch.bfloat16 if config.dtype == Dtype.bfloat16 else torch.float32
        self.module = _shard(module.to(mesh.device_type), self.adapter.blocks(module), mesh, config)
        self.optimizer: RoleOptimizer | None = None
        if self.trained:
            self.optimizer = RoleOptimizer(module, spec.optimizer or OptimizerConfig(), total, self._ranks)

    def settle(self) -> None:
        """Let go of gathered parameters: what follows reads or writes shards."""
        if isinstance(self.module, FSDPModule):
            self.module.reshard()

    def full_tensors(self, meta: bool) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor in the type of the wire; collective, one at a time. Tied parameters once."""
        for name, parameter in self.module.named_parameters():
            if meta:
                yield name, torch.empty(parameter.shape, dtype=self.wire_dtype, device="meta")
                continue
            whole = parameter.detach()
            if isinstance(whole, DTensor):
                whole = whole.to_local() if self._ranks == 1 else whole.full_tensor()
            yield name, whole.to(self.wire_dtype)

    def shards(self, prefix: str) -> dict[str, Shard]:
        """Everything that a checkpoint holds of this role, as this rank's rows (the live memory)."""
        self.settle()
        shapes = {name: tuple(p.shape) for name, p in self.module.named_parameters()}
        tensors = {f"weight/{name}": local(p) for name, p in self.module.named_parameters()}
        if self.optimizer is not None:
            tensors |= self.optimizer.tensors()
        found = {}
        for key, tensor in tensors.items():
            shape = shapes[key.partition("/")[2]]
            offset = chunk_offset(shape[0], self._rank, self._ranks) if shape else 0
            found[f"{prefix}/{key}"] = Shard(tensor, offset, shape)
        return found

    @torch.no_grad()
    def blend(self, source: Role, decay: float) -> None:
        """weights = decay · weights + (1 − decay) · those of `source`."""
        self.settle()
        source.settle()
        ours = dict(self.module.named_parameters())
        theirs = dict(source.module.named_parameters())
        if {n: p.shape for n, p in ours.items()} != {n: p.shape for n, p in theirs.items()}:
            raise BackendError(
                f"roles {self.spec.name!r} and {source.spec.name!r} have different parameters and cannot be blended",
                fix="give both the same model and head",
            )
        for name, parameter in ours.items():
            if decay == 0.0:
                local(parameter).copy_(local(theirs[name]))
            else:
                local(parameter).mul_(decay).add_(local(theirs[name]), alpha=1.0 - decay)


def _shard(module: nn.Module, blocks: Any, mesh: DeviceMesh, config: FsdpConfig) -> nn.Module:
    """Shard runs of blocks of at least `unit_mib`, then what is left. A model below that size is one unit."""
    policy = MixedPrecisionPolicy()
    if config.dtype == Dtype.bfloat16:
        # Inputs are token ids and float32 temperatures; they must not be cast.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    units: list[list[nn.Module]] = [[]]
    size = 0
    for block in blocks:
        units[-1].append(block)
        size += sum(p.numel() * 4 for p in block.parameters())
        if size >= config.unit_mib << 20:
            units.append([])
            size = 0
    for unit in units[:-1]:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if mesh.size() > 1:
        for child in module.modules():
            if isinstance(child, FSDPModule):  # the objective is a sum over all ranks: undo the mean
                child.set_gradient_divide_factor(1.0)
                child.set_force_sum_reduction_for_comms(True)
    return module
