"""Toy backend: trains `ToyModel`s of every role of every policy with the objective of the contract.

Every rank holds and updates everything (batches arrive whole), so any number of ranks agrees without communication;
rank 0 alone writes. Micro-batches are runs of whole groups, and only sum.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file, save_file

from miles_core.contracts.learning import UpdateResult
from miles_core.contracts.weights import Layout, Tensor, TensorSpec
from miles_core.errors import BackendError, CapabilityError, CheckpointError, LearnerError
from miles_core.numerics import objective
from miles_core.testing.toys.adapter import save_model
from miles_core.testing.toys.autodiff import Array, Var
from miles_core.testing.toys.optimizer import AdamW
from miles_core.testing.toys.table import ToyModel
from miles_core.testing.toys.view import ToyView

if TYPE_CHECKING:
    from miles_core.columns import Batch
    from miles_core.contracts.backend import RoleSpec
    from miles_core.contracts.learning import BoundTerm, Output
    from miles_core.records import Metric

STATE_FORMAT = 1


@dataclass
class _Role:
    spec: RoleSpec
    module: ToyModel
    optimizer: AdamW | None


class ToyBackend:
    """One rank. `micro_groups` groups a micro-batch; 0 for the whole minibatch at once."""

    def __init__(self, rank: int = 0, extensions: Sequence[Any] = (), micro_groups: int = 0) -> None:
        self._rank = rank
        self._extensions = tuple(extensions)
        self._micro_groups = micro_groups
        self._roles: dict[str, dict[str, _Role]] = {}
        self._offloaded: set[str] = set()

    # --- build -------------------------------------------------------------------------------------------------------

    def build(self, policies: Mapping[str, Mapping[str, RoleSpec]], total_updates: Mapping[str, int]) -> None:
        for policy, specs in policies.items():
            built: dict[str, _Role] = {}
            for spec in sorted(specs.values(), key=lambda s: s.init != ""):  # sources first, then what starts from them
                built[spec.name] = self._build_role(policy, spec, built, total_updates[policy])
            self._roles[policy] = {name: built[name] for name in specs}

    def _build_role(self, policy: str, spec: RoleSpec, built: Mapping[str, _Role], total: int) -> _Role:
        if spec.update == "adapter_off":
            raise CapabilityError(
                f"role {spec.name!r} of policy {policy!r} asks for 'adapter_off'; the toy backend has none",
                fix="use frozen, copy, ema, shares or trained",
            )
        if spec.init and spec.init not in built:
            raise BackendError(
                f"role {spec.name!r} starts from {spec.init!r}, which is no such role of {policy!r}",
                fix=f"start from one of {sorted(built)}",
            )
        if spec.update == "shares":
            return _Role(spec, built[spec.init].module, None)
        module = spec.adapter.build(spec.source, spec.seed, head=spec.head)
        for extension in self._extensions:
            if hasattr(extension, "model"):
                module = extension.model(module, spec.name, policy)
        if spec.init and spec.head == built[spec.init].spec.head:
            module.load(built[spec.init].module.weights())
        optimizer = None
        if spec.update == "trained":
            if spec.optimizer is None:
                raise BackendError(f"role {spec.name!r} is trained without an optimizer", fix="give it one")
            optimizer = AdamW(spec.optimizer, module.params, total)
        return _Role(spec, module, optimizer)

    def _role(self, policy: str, name: str) -> _Role:
        if self._offloaded:
            raise BackendError(f"used while {sorted(self._offloaded)} are offloaded", fix="onload them first")
        try:
            return self._roles[policy][name]
        except KeyError:
            have = {p: sorted(roles) for p, roles in self._roles.items()}
            raise BackendError(
                f"no role {name!r} of policy {policy!r}; built are {have}", fix="build it, or name one of those"
            ) from None

    # --- forward -----------------------------------------------------------------------------------------------------

    def _view(self, micro: Batch, purpose: str) -> ToyView:
        def serve(output: Output) -> Any:
            role = self._role(micro.policy, output.role)
            with ExitStack() as stack:
                for extension in self._extensions:
                    if hasattr(extension, "micro"):
                        stack.enter_context(extension.micro(view, output.role, purpose))
                trained = output.grad and purpose == "update" and role.optimizer is not None
                return role.spec.adapter.outputs(role.module, micro, [replace(output, grad=trained)])[output.name]

        view = ToyView(micro, serve)
        return view

    def score(self, batch: Batch, outputs: Sequence[Output]) -> Mapping[str, Array]:
        parts: dict[str, list[Array]] = {}
        for micro in self._micros(batch):
            view = self._view(micro, "score")
            for output in outputs:
                value = np.asarray(view.out(output))
                dtype = np.int32 if value.dtype.kind == "i" else np.float32
                parts.setdefault(output.column, []).append(value.astype(dtype))
        return {name: np.concatenate(values) for name, values in parts.items()}

    def _micros(self, batch: Batch) -> list[Batch]:
        if not self._micro_groups or batch.n_groups <= self._micro_groups:
            return [batch]
        slices = [s for s in batch.group_slices() if len(s)]
        size = self._micro_groups
        return [batch.select(np.concatenate(slices[i : i + size])) for i in range(0, len(slices), size)]

    # --- update ------------------------------------------------------------------------------------------------------

    def update(self, minibatch: Batch, terms: Sequence[BoundTerm]) -> UpdateResult:
        policy = minibatch.policy
        names = sorted({t.role for t in terms if not t.dynamic})
        roles = [self._role(policy, name) for name in names]
        for role in roles:
            if role.optimizer is None:
                raise BackendError(
                    f"terms update role {role.spec.name!r}, which is {role.spec.update}", fix="train it, or drop them"
                )
        sums: objective.Sums = {}
        for micro in self._micros(minibatch):
            view = self._view(micro, "update")
            loss, part = objective.evaluate(view.at, terms, lambda u, m=micro: _trajectory(m, u))  # type: ignore[misc]
            objective.accumulate(sums, part)
            loss.backward()
        metrics: dict[str, Metric] = objective.finish(sums)
        rates = {r.spec.name: r.optimizer.lr for r in roles if r.optimizer is not None}
        metrics["lr"] = (rates.get("actor", next(iter(rates.values()), 0.0)), 1.0)
        skipped = objective.skip_reason(minibatch, terms)
        if skipped:
            for role in roles:
                for var in role.module.params.values():
                    var.grad = None
            return UpdateResult(metrics=metrics, grad_norm=0.0, skipped=skipped)
        square = 0.0
        for name, role in zip(names, roles, strict=True):
            if not objective.skip_reason(minibatch, terms, name):
                square += self._apply(role)
        return UpdateResult(metrics=metrics, grad_norm=float(np.sqrt(square)))

    def _apply(self, role: _Role) -> float:
        assert role.optimizer is not None
        params = role.module.params
        square = sum(float((v.grad * v.grad).sum()) for v in params.values() if v.grad is not None)
        if not np.isfinite(square):
            raise LearnerError(
                f"the gradient of role {role.spec.name!r} is not finite", fix="look at the columns of the last batch"
            )
        norm, limit = float(np.sqrt(square)), role.optimizer.config.max_grad_norm
        scale = 1.0 if limit is None or norm <= limit else limit / norm
        role.optimizer.step(params, frozenset(role.module.frozen), scale)
        return square

    def blend(self, policy: str, dst: str, src: str, decay: float) -> None:
        old, new = self._role(policy, dst).module, self._role(policy, src).module
        mixed = {n: decay * old.params[n].value + (1.0 - decay) * new.params[n].value for n in old.params}
        old.load({name: value.astype(np.float32) for name, value in mixed.items()})

    # --- weights out, state in and out -------------------------------------------------------------------------------

    def export(self, policy: str, layout: Layout, meta: bool = False) -> Iterator[tuple[TensorSpec, Tensor]]:
        if layout != "full":
            raise CapabilityError(
                f"the toy backend exports layout 'full' only, asked was {layout!r}",
                fix="choose a transport that works on gathered tensors",
            )
        role = self._role(policy, "actor")
        weights = role.module.weights()
        if meta:  # zero strides: the shape without the memory
            weights = {name: np.broadcast_to(np.float32(0), value.shape) for name, value in weights.items()}
        stream = role.spec.adapter.export(role.module, iter(weights.items()))
        for extension in self._extensions:
            if hasattr(extension, "export"):
                stream = extension.export(stream, layout, policy)
        return stream

    def save(self, folder: Path) -> None:
        if self._rank != 0:
            return
        arrays: dict[str, Array] = {}
        counts: dict[str, int] = {}
        for policy, name, role in self._all_roles():
            arrays |= {f"{policy}/{name}/weights/{n}": w for n, w in role.module.weights().items()}
            if role.optimizer is not None:
                counts[f"{policy}/{name}"] = role.optimizer.count
                arrays |= {f"{policy}/{name}/first/{n}": m for n, m in role.optimizer.first.items()}
                arrays |= {f"{policy}/{name}/second/{n}": m for n, m in role.optimizer.second.items()}
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, folder / "toy.safetensors")
        state = {"format": STATE_FORMAT, "updates": counts}
        (folder / "toy.json").write_text(json.dumps(state, sort_keys=True), encoding="utf-8")

    def load(self, folder: Path) -> None:
        try:
            state = json.loads((folder / "toy.json").read_text(encoding="utf-8"))
            arrays = load_file(folder / "toy.safetensors")
            if state["format"] != STATE_FORMAT:
                raise ValueError(f"format {state['format']}, this code reads {STATE_FORMAT}")
            for policy, name, role in self._all_roles():
                key = f"{policy}/{name}"
                role.module.load({n: arrays[f"{key}/weights/{n}"] for n in role.module.params})
                if role.optimizer is not None:
                    role.optimizer.count = int(state["updates"][key])
                    role.optimizer.first = {n: arrays[f"{key}/first/{n}"] for n in role.module.params}
                    role.optimizer.second = {n: arrays[f"{key}/second/{n}"] for n in role.module.params}
        except Exception as error:
            raise CheckpointError(
                f"cannot load {folder}: {error!r}", fix="resume from an earlier checkpoint"
            ) from error

    def _all_roles(self) -> Iterator[tuple[str, str, _Role]]:
        for policy, roles in self._roles.items():
            for name, role in roles.items():
                if role.spec.update != "shares":
                    yield policy, name, role

    def save_model(self, policy: str, folder: Path) -> None:
        """Writes what `export` yields, so that extensions are folded in."""
        role = self._role(policy, "actor")
        weights = {spec.name: np.asarray(tensor) for spec, tensor in self.export(policy, "full")}
        if self._rank == 0:
            save_model(role.spec.adapter, role.module, weights, folder)  # type: ignore[arg-type]

    def offload(self, tags: Sequence[str]) -> None:
        self._offloaded |= set(tags)

    def onload(self, tags: Sequence[str]) -> None:
        self._offloaded -= set(tags)

    def close(self) -> None:
        self._roles = {}


def _trajectory(micro: Batch, unit: int) -> str:
    return micro.trajectory_ids[int(micro.trajectory_of_unit[unit])]


def parameters(backend: ToyBackend, policy: str, role: str = "actor") -> dict[str, Var]:
    """The live parameters of a role; for tests."""
    return backend._role(policy, role).module.params
