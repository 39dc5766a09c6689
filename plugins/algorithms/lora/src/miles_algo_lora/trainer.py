"""The extension beside a training backend: adapts modules, switches adapters off, merges what leaves, guards the base.

What a backend may read besides the methods: `adapted`, the (policy, role) pairs whose modules have adapters. Around
every forward it enters `micro(view, role, purpose)`; for a role with `update: adapter_off` that switches the adapters
of the role's origin off, so that the backend can run the very same module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import nn

from miles_algo_lora import folder as peft_folder
from miles_algo_lora.config import Export
from miles_algo_lora.layers import AdaptedLinear, Switch, adapt
from miles_algo_lora.merge import PEFT_PREFIX, Adapted, Stream, alone, layers_of, whole
from miles_algo_lora.roles import followed
from miles_core.errors import CapabilityError, CombinationError, WeightError
from miles_core.seeds import derive

if TYPE_CHECKING:
    from miles_algo_lora.config import LoraConfig
    from miles_core.columns import Batch, ColumnSpec
    from miles_core.contracts.extension import Purpose
    from miles_core.contracts.learning import View
    from miles_core.contracts.weights import Layout, TensorSpec
    from miles_core.provider import BuildContext

#: Parameters that no checkpoint knows, and that are trained whole wherever there are any.
HEADS = ("value.*",)
#: One base tensor in so many is digested at each export, in turn; at the first one all are.
GUARD_EVERY = 8


class LoraTrainer:
    """See `miles_core.contracts.extension`."""

    columns: tuple[ColumnSpec, ...] = ()

    def __init__(self, config: LoraConfig, context: BuildContext) -> None:
        self.name = "lora"
        self.adapted: set[tuple[str, str]] = set()
        self._config = config
        self._policies = context.run.policies
        self._seed = context.seed
        self._rank = context.rank
        self._switches: dict[tuple[str, str], Switch] = {}
        self._layers: dict[str, frozenset[str]] = {}  # policy -> the adapted layers' names in the actor's module
        self._trained: dict[str, frozenset[str]] = {}  # policy -> parameters of the actor that are trained whole
        self._guards: dict[str, Guard] = {}
        self._check_policies()

    def _check_policies(self) -> None:
        known = list(self._policies)
        if known and (odd := [name for name in self._config.policies if name not in known]):
            raise CombinationError(
                f"extensions.{self.name}.policies names {odd[0]!r}; the run has {', '.join(known)}",
                fix="name policies of the run, or leave it empty for all",
            )
        if self._config.export is not Export.adapter:
            return
        sources = {n: p.model.core.source for n, p in self._policies.items() if n in (self._config.policies or known)}
        drawn = [name for name, source in sources.items() if source is None]
        if drawn or len(set(sources.values())) > 1:
            told = ", ".join(f"{name}: {source or 'drawn at random'}" for name, source in sources.items())
            raise CombinationError(
                f"extensions.{self.name}.export is 'adapter', and engines read one base from one folder; models are "
                f"{told}",
                fix="give every policy the same model.source, or set extensions.lora.export: merged",
            )

    # --- the model ---------------------------------------------------------------------------------------------------

    def model(self, module: Any, role: str, policy: str) -> Any:
        """Freeze `module` and adapt its target layers, where the role is one that has adapters.

        A role that follows an adapted one by `copy` has adapters too, so that there is something to follow (`ema` is
        refused beforehand: see `roles.refuse_blends`).
        Raises `CapabilityError` for a module that is not torch's, `CombinationError` where no layer matches.
        """
        if not self._has_adapters(policy, role):
            return module
        if not isinstance(module, nn.Module):
            raise CapabilityError(
                f"the extension 'lora' adapts torch modules; role {role!r} is a {type(module).__name__}",
                fix="choose a backend and a model adapter for torch",
            )
        config = self._config
        linears = {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear)}
        chosen = [name for name in linears if any(_matches(name, pattern) for pattern in config.targets)]
        idle = [p for p in config.targets if not any(_matches(name, p) for name in linears)]
        if idle:
            some = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears))
            raise CombinationError(
                f"extensions.lora.targets has {idle[0]!r}, which no linear layer of role {role!r} matches; their last "
                f"names are {some}",
                fix="use globs over these names, or over whole dotted names",
            )
        _refuse_layers(module, {name: linears[name] for name in chosen}, role)
        if frozen := [name for name, p in module.named_parameters() if not p.requires_grad]:
            raise CombinationError(
                f"{len(frozen)} parameters of role {role!r} are frozen already, {frozen[0]!r} first: what is trained "
                "was chosen twice (model.trainable, or two adapting extensions)",
                fix="drop model.trainable; extensions.lora.targets and .train_also say what is trained",
            )
        module.requires_grad_(False)
        trained = self._train_also(module, role)
        switch = Switch()
        origin = self._origin(policy, role)
        for number, name in enumerate(chosen):
            adapt(
                linears[name],
                rank=config.rank,
                scale=config.scale,
                dora=config.dora,
                dropout=config.dropout,
                seed=derive(self._seed, policy, "lora", origin, name),
                number=number,
                switch=switch,
            )
        self._switches[policy, role] = switch
        self.adapted.add((policy, role))
        if role == "actor":
            self._layers[policy] = frozenset(chosen)
            self._trained[policy] = frozenset(trained)
            self._guards[policy] = Guard(policy)
        return module

    def _has_adapters(self, policy: str, role: str) -> bool:
        config = self._config
        if config.policies and policy not in config.policies:
            return False
        return self._origin(policy, role) in config.roles

    def _origin(self, policy: str, role: str) -> str:
        """The role whose adapters `role` has: the one that it follows, or itself."""
        roles = self._policies[policy].roles if policy in self._policies else {}
        role = followed(roles, role)
        found = roles.get(role)
        if found is not None and role in self._config.roles and found.update not in ("trained", "shares"):
            raise CombinationError(
                f"extensions.lora.roles names {role!r}, whose update is {str(found.update)!r}: it is not trained",
                fix=f"set roles.{role}.update: trained, or take it out of extensions.lora.roles",
            )
        return role

    def _train_also(self, module: nn.Module, role: str) -> list[str]:
        found = []
        for name, parameter in module.named_parameters():
            if any(fnmatchcase(name, pattern) for pattern in (*HEADS, *self._config.train_also)):
                parameter.requires_grad_(True)
                found.append(name)
                if self._config.export is Export.adapter and role == "actor" and not fnmatchcase(name, HEADS[0]):
                    raise CombinationError(
                        f"extensions.lora.train_also trains {name!r} whole, and export 'adapter' sends adapters only",
                        fix="set extensions.lora.export: merged, or train adapters only",
                    )
        return found

    # --- forwards ----------------------------------------------------------------------------------------------------

    def micro(self, view: View, role: str, purpose: Purpose) -> AbstractContextManager[None]:
        """For a role with `update: adapter_off`: adapters of the role that it starts from are off inside. For an
        adapted role that is being trained: its dropout masks are those of this micro-batch."""
        return self._inside(view, role, purpose)

    @contextmanager
    def _inside(self, view: View, role: str, purpose: Purpose) -> Iterator[None]:
        silent = [self._switches[key] for key in self._silent(role) if key in self._switches]
        dropping = self._config.dropout > 0 and purpose == "update"
        keyed = [s for (_, name), s in self._switches.items() if name == role] if dropping else []
        key = self._key(view) if keyed else None
        before = [(switch, switch.off, switch.key) for switch in (*silent, *keyed)]
        try:
            for switch in silent:
                switch.off = True
            for switch in keyed:
                switch.key = key
            yield
        finally:
            for switch, off, old in reversed(before):
                switch.off, switch.key = off, old

    def _silent(self, role: str) -> list[tuple[str, str]]:
        """The adapted modules that `role` sees without adapters. A view does not name its policy: in another policy the
        role has a module of its own, and switching these off changes nothing there."""
        found = []
        for name, policy in self._policies.items():
            config = policy.roles.get(role)
            if config is not None and config.update == "adapter_off":
                found.append((name, config.init))
        return found

    def _key(self, view: View) -> int:
        """A seed of (run seed, policy, step, trajectories of the micro-batch): the same on a resume, not under another
        split, which is why the extension offers `dropout` and `miles plan` withdraws its promises."""
        batch: Batch | None = getattr(view, "micro", None)
        if batch is None:
            raise CapabilityError(
                "dropout of the extension 'lora' needs to know which trajectories a micro-batch holds, and this "
                "backend's views do not say",
                fix="set extensions.lora.dropout: 0, or use the backend `fsdp`",
            )
        return derive(self._seed, batch.policy, "dropout", batch.step, *batch.trajectory_ids)

    # --- what leaves -------------------------------------------------------------------------------------------------

    def export(self, stream: Stream, layout: Layout, policy: str) -> Stream:
        """Whole weights with adapters merged in, or adapters alone under PEFT's names with the scale inside B."""
        if layout != "full":
            raise CapabilityError(
                f"the extension 'lora' supports layout 'full', not {layout!r}: adapters and weights meet whole",
                fix="use a transport that takes whole tensors",
            )
        return self._merged(stream, policy) if self._config.export is Export.merged else self._alone(stream, policy)

    def save(self, stream: Stream, policy: str, folder: Path) -> Stream:
        """The stream of a folder that is being written: always whole weights. The adapter is written beside them, in
        `folder/adapter`, by rank 0."""
        if policy not in self._layers:
            yield from stream
            return
        tensors: dict[str, Any] = {}
        layers, modules = [], []
        trained = self._trained.get(policy, frozenset())
        for item in self._guarded(stream, policy):
            if isinstance(item, Adapted):
                layers.append(item.name)
                tensors |= {spec.name: tensor.detach().clone() for spec, tensor in alone(item, 1.0)}
                yield whole(item, self._config.scale)
                continue
            if _names(trained, item[0].name):
                modules.append(item[0].name.rpartition(".")[0])
                tensors[PEFT_PREFIX + item[0].name] = item[1].detach().clone()
            yield item
        if self._rank == 0:
            source = self._policies[policy].model.core.source if policy in self._policies else None
            where = folder / peft_folder.ADAPTER
            peft_folder.write(where, tensors, self._config, str(source or ""), layers, modules)

    def _merged(self, stream: Stream, policy: str) -> Stream:
        for item in self._guarded(stream, policy):
            yield whole(item, self._config.scale) if isinstance(item, Adapted) else item

    def _alone(self, stream: Stream, policy: str) -> Stream:
        if policy not in self._layers:
            yield from stream
            return
        for item in self._guarded(stream, policy):
            if isinstance(item, Adapted):
                yield from alone(item, self._config.scale)

    def _guarded(self, stream: Stream, policy: str) -> Iterator[tuple[TensorSpec, Any] | Adapted]:
        names = self._layers.get(policy, frozenset())

        trained = self._trained.get(policy, frozenset())
        guard = self._guards.get(policy)
        turn = guard.begin() if guard is not None else 0
        for item in layers_of(stream, lambda layer: _names(names, layer), self._config.dora):
            if guard is not None:
                if isinstance(item, Adapted):
                    guard.look(turn, item.spec.name, item.tensors["weight"])
                elif not _names(trained, item[0].name):
                    guard.look(turn, item[0].name, item[1])
            yield item


class Guard:
    """Digests of a frozen base. A base tensor that changed is an error: the adapters were trained over another one."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.digests: dict[str, str] = {}
        self.looked = 0  # comparisons made
        self._turn = 0

    def begin(self) -> int:
        self._turn += 1
        return self._turn

    def look(self, turn: int, name: str, tensor: Any) -> None:
        """Remember the digest of `tensor`, or compare with it when it is its turn. Raises `WeightError`."""
        if tensor.is_meta or (name in self.digests and hash_of(name) % GUARD_EVERY != turn % GUARD_EVERY):
            return
        found = digest(tensor)
        self.looked += name in self.digests
        if self.digests.setdefault(name, found) != found:
            raise WeightError(
                f"the frozen base of policy {self.policy!r} changed: tensor {name!r} has the digest {found}, and had "
                f"{self.digests[name]}",
                fix="resume from the last checkpoint; only adapters may be trained",
            )


def hash_of(name: str) -> int:
    return int(xxhash.xxh3_64_intdigest(name.encode()))


def digest(tensor: Any) -> str:
    """xxh3-128 hex of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return str(xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy()))


def _names(names: frozenset[str], shown: str) -> bool:
    """Whether the stream's name `shown` is one of the module's `names`, which may have a prefix that streams drop."""
    return shown in names or any(name.endswith("." + shown) for name in names)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def _refuse_layers(module: nn.Module, chosen: dict[str, nn.Linear], role: str) -> None:
    owners: dict[int, int] = {}
    for parameter in module.parameters():
        owners[id(parameter)] = 0
    for _, parameter in module.named_parameters(remove_duplicate=False):
        owners[id(parameter)] += 1
    for name, linear in chosen.items():
        if isinstance(linear, AdaptedLinear):
            raise CombinationError(
                f"two extensions adapt the layer {name!r} of role {role!r}", fix="give each its own policies or roles"
            )
        if type(linear) is not nn.Linear:
            raise CapabilityError(
                f"the layer {name!r} is a {type(linear).__name__}; only plain linear layers can be adapted",
                fix="leave it out of extensions.lora.targets",
            )
        if owners[id(linear.weight)] > 1:
            raise CapabilityError(
                f"the layer {name!r} shares its weight with another (a tied head): an adapter on one would change both",
                fix="leave it out of extensions.lora.targets",
            )
