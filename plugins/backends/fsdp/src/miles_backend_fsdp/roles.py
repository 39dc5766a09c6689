"""One model of a policy on this rank: its sharded module, and its optimizer where it is trained."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from miles_backend_fsdp.checkpoint import Shard, chunk_offset
from miles_backend_fsdp.config import Dtype, FsdpConfig
from miles_backend_fsdp.frozen import digest
from miles_backend_fsdp.optimizer import RoleOptimizer, local
from miles_backend_fsdp.recompute import Recompute
from miles_core.config.schema import OptimizerConfig
from miles_core.errors import BackendError, CapabilityError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from miles_core.contracts.backend import RoleSpec

UPDATES = ("trained", "frozen", "copy", "ema", "adapter_off", "shares")
#: Ways of updating under which a role has no module of its own, but that of the role it starts from.
BORROWED = ("adapter_off", "shares")


def check(spec: RoleSpec) -> None:
    """Raises `CapabilityError` for a way of updating that this backend does not have."""
    if spec.update not in UPDATES:
        raise CapabilityError(
            f"role {spec.name!r} has update {spec.update!r}; backend fsdp knows {', '.join(UPDATES)}",
            fix="use one of these for the role",
        )
    if spec.update == "adapter_off" and not spec.init:
        raise CapabilityError(
            f"role {spec.name!r} has update 'adapter_off' and names no role whose adapters are off",
            fix=f"set roles.{spec.name}.init: actor",
        )


def origin(specs: Mapping[str, RoleSpec], name: str) -> str:
    """The role with a module of its own whose weights `name` starts from."""
    found = specs[name].init
    while specs[found].update in BORROWED:
        found = specs[found].init
    return found


def shared_heads(specs: Mapping[str, RoleSpec]) -> dict[str, str]:
    """Roles with update `shares` -> the trained role on whose module their value head stands.

    Raises `CapabilityError` where that role is not a trained language model, or has another head already.
    """
    found: dict[str, str] = {}
    for name, spec in specs.items():
        if spec.update != "shares":
            continue
        owner = specs[spec.init]
        if (owner.update, owner.head, spec.head) != ("trained", "lm", "value") or spec.init in found.values():
            raise CapabilityError(
                f"role {name!r} (head {spec.head!r}) would share the module of role {spec.init!r} (update "
                f"{owner.update!r}, head {owner.head!r}); backend fsdp puts one value head beside a trained lm head",
                fix=f"write roles.{name}: {{init: {spec.init}, update: shares, head: value}}, or update: trained",
            )
        found[name] = spec.init
    return found


def moving_of(specs: Mapping[str, RoleSpec], name: str, modules: Mapping[str, nn.Module]) -> frozenset[str]:
    """Names of the parameters of role `name` that ever change. Before gradients are switched off for whole roles."""
    spec = specs[name]
    if spec.update == "trained":
        return frozenset(n for n, p in modules[name].named_parameters() if p.requires_grad)
    if spec.update in ("copy", "ema"):
        followed = moving_of(specs, origin(specs, name), modules)
        return followed & {n for n, _ in modules[name].named_parameters()}
    return frozenset()


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
    """`module` is sharded in place; between forwards its parameters are shards.

    `moving` names the parameters that ever change: those that are trained, and in a role that follows another one,
    those that are trained there. The rest (what an extension froze) is built again, and no checkpoint holds it.
    """

    def __init__(
        self,
        spec: RoleSpec,
        module: nn.Module,
        mesh: DeviceMesh,
        config: FsdpConfig,
        total: int,
        rank: int,
        moving: frozenset[str],
    ) -> None:
        self.spec = spec
        self.moving = moving
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

        self.frozen = self.frozen_digest()

    def frozen_digest(self) -> str:
        """What identifies the frozen part of a role that has a moving one; empty where all of it moves, or nothing."""
        frozen = {name: p for name, p in self.module.named_parameters() if name not in self.moving}
        if not self.moving:
            return ""
        offsets = {name: chunk_offset(p.shape[0], self._rank, self._ranks) for name, p in frozen.items()}
        return digest(((name, local(p), offsets[name]) for name, p in frozen.items()), self._ranks)

    def without_adapters(self, spec: RoleSpec) -> Role:
        """The same module as the role of `spec`: an extension switches its adapters off around every forward."""
        role = copy.copy(self)
        role.spec, role.trained, role.optimizer, role.moving = spec, False, None, frozenset()
        return role

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
        moving = {name: p for name, p in self.module.named_parameters() if name in self.moving}
        shapes = {name: tuple(p.shape) for name, p in moving.items()}
        tensors = {f"weight/{name}": local(p) for name, p in moving.items()}
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
        """weights = decay · weights + (1 − decay) · those of `source`, where either side ever changes."""
        self.settle()
        source.settle()
        ours = dict(self.module.named_parameters())
        theirs = dict(source.module.named_parameters())
        if any(name not in theirs or theirs[name].shape != p.shape for name, p in ours.items()):
            raise BackendError(
                f"roles {self.spec.name!r} and {source.spec.name!r} have different parameters and cannot be blended",
                fix="give both the same model and head",
            )
        for name, parameter in ours.items():
            if name not in self.moving | source.moving:
                continue  # equal, and rounding must not change that
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
