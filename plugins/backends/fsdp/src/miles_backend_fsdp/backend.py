"""Backend `fsdp`: trains the roles of every policy on one rank of `torch.distributed.fsdp.fully_shard`.

Every rank is given whole batches and cuts them alike (`microbatch.py`). Denominators are inside the batch, so ranks
only sum: losses, gradients and metrics do not depend on micro-batches, layouts or ranks beyond rounding. Everything
runs on the calling thread. Not here: tensor, pipeline or context parallelism, and moving state off a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from miles_backend_fsdp import checkpoint, group, hf_folder, layout, microbatch
from miles_backend_fsdp.roles import BORROWED, Role, check, moving_of, origin, shared_heads, start_from
from miles_core.contracts.learning import BoundTerm, Output, UpdateResult
from miles_core.errors import BackendError, CapabilityError, CheckpointError, ConfigError, LearnerError
from miles_core.numerics import objective
from miles_core.numerics.views import MicroView

if TYPE_CHECKING:
    from pathlib import Path

    from miles_backend_fsdp.config import FsdpConfig
    from miles_core.columns import Batch
    from miles_core.contracts.backend import RoleSpec
    from miles_core.contracts.extension import Purpose
    from miles_core.contracts.weights import Layout, TensorSpec
    from miles_core.provider import BuildContext
    from miles_core.records import Array


def _device(gpus: float, rank: int) -> torch.device:
    """Where this rank computes. Raises `ConfigError` where it was given a GPU and this machine has none."""
    if gpus <= 0:
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if not found:
        raise ConfigError(
            f"backend.gpus_per_rank is {gpus:g}, and trainer rank {rank} finds no CUDA device on its machine",
            fix="write backend.gpus_per_rank=0 to train on CPU, or run where torch.cuda.is_available() is true",
        )
    return torch.device("cuda", rank % found)


class FsdpBackend:
    """See `miles_core.contracts.backend.Backend`."""

    def __init__(self, config: FsdpConfig, context: BuildContext) -> None:
        self._config = config
        self._rank = context.rank
        self._ranks = context.ranks
        self._extensions = context.extensions
        self._wrapping = [e for e in context.extensions if hasattr(e, "micro")]
        self._device = _device(getattr(context.core, "gpus_per_rank", 0), context.rank)
        self._roles: dict[str, dict[str, Role]] = {}
        self._shared: dict[str, dict[str, str]] = {}  # policy -> role with update `shares` -> whose module it is
        self._joined = False

    # --- building ---------------------------------------------------------------------------------------------------

    def build(self, policies: Mapping[str, Mapping[str, RoleSpec]], total_updates: Mapping[str, int]) -> None:
        """See the contract. Raises `CapabilityError` for role updates that this backend does not have."""
        for specs in policies.values():
            for spec in specs.values():
                check(spec)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        mesh = group.join(self._rank, self._ranks, self._config.rendezvous, self._device.type, self._config.deadline_s)
        self._joined = True
        for policy, given in policies.items():
            specs = {name: spec for name, spec in given.items() if spec.update not in BORROWED}
            shared = self._shared[policy] = shared_heads(given)
            heads = {name: "lm+value" if name in shared.values() else spec.head for name, spec in specs.items()}
            plain = {n: spec.adapter.build(spec.source, spec.seed, head=heads[n]) for n, spec in specs.items()}
            for name, module in plain.items():
                if not isinstance(module, torch.nn.Module):
                    raise CapabilityError(
                        f"backend fsdp trains torch modules; the model adapter of role {name!r} of policy {policy!r} "
                        f"({type(specs[name].adapter).__name__}) built a {type(module).__name__}",
                        fix="choose a model adapter for torch (causal-lm), or the backend that belongs to this one",
                    )
            for name, spec in specs.items():
                if spec.init:
                    start_from(plain[name], plain[origin(given, name)], f"role {name!r} of policy {policy!r}")
            for name in specs:
                for extension in self._extensions:
                    if hasattr(extension, "model"):
                        plain[name] = extension.model(plain[name], name, policy)
            total = total_updates.get(policy, 0)
            moving = {name: moving_of(given, name, plain) for name in specs}
            built = {
                name: Role(spec, plain[name], mesh, self._config, total, self._rank, moving[name])
                for name, spec in specs.items()
            }
            self._roles[policy] = {
                name: built[name] if name in built else self._without_adapters(built, given, policy, name)
                for name in given
                if name not in shared
            }

    def _without_adapters(
        self, built: Mapping[str, Role], given: Mapping[str, RoleSpec], policy: str, name: str
    ) -> Role:
        """The role `name` with `update: adapter_off`: the module of another, which an extension runs without adapters.

        Raises `CapabilityError` where no extension of the run gave that module adapters (`Extension.adapted`).
        """
        whose = origin(given, name)
        if not any((policy, whose) in getattr(extension, "adapted", ()) for extension in self._wrapping):
            raise CapabilityError(
                f"role {name!r} of policy {policy!r} has update 'adapter_off', and no extension gives role {whose!r} "
                "adapters that could be switched off",
                fix=f"add `extensions: {{lora: {{…}}}}`, or set roles.{name}.update: frozen",
            )
        return built[whose].without_adapters(given[name])

    def _owner(self, policy: str, name: str) -> str:
        """The role on whose module `name` runs: itself, unless it shares another's."""
        return self._shared.get(policy, {}).get(name, name)

    def _role(self, policy: str, name: str) -> Role:
        found = self._roles.get(policy, {}).get(self._owner(policy, name))
        if found is None:
            raise BackendError(
                f"policy {policy!r} has no role {name!r}; it has {', '.join(self._roles.get(policy, {})) or 'none'}",
                fix="add the role to `roles`, or drop the part that needs it",
            )
        return found

    # --- forward ----------------------------------------------------------------------------------------------------

    def _rounds(self, batch: Batch, level: Any, policy: str) -> list[list[Array]]:
        lengths = layout.fed_lengths(batch, layout.needed_units(batch))
        cost = next(iter(self._roles[policy].values())).adapter.cost
        return microbatch.rounds(
            batch, level=level, ranks=self._ranks, budget=self._config.micro_tokens, lengths=lengths, cost=cost
        )

    def _forward(self, micro: Batch, wanted: Mapping[str, Sequence[Output]], purpose: Purpose) -> MicroView:
        """One forward of each role over `micro`; the view serves columns and these outputs."""
        found: dict[Output, Tensor] = {}

        def output(asked: Output) -> Tensor:
            if asked not in found:
                raise LearnerError(
                    f"a term reads output {asked.name!r} of role {asked.role!r}, which it does not declare",
                    fix="add it to the term's `outputs`",
                )
            return found[asked]

        view = MicroView(micro, output, self._device)
        by_module: dict[str, list[Output]] = {}  # two heads on one module are one forward
        for name, outputs in wanted.items():
            by_module.setdefault(self._owner(micro.policy, name), []).extend(outputs)
        for name, outputs in by_module.items():
            role = self._role(micro.policy, name)
            with (
                role.recompute.inside(self._contexts(view, name, purpose)),
                torch.set_grad_enabled(purpose == "update" and role.trained),
            ):
                values = role.adapter.outputs(role.module, micro, outputs)
            for asked in outputs:
                found[asked] = values[asked.name] if asked.grad else values[asked.name].detach()
        return view

    def _contexts(self, view: MicroView, role: str, purpose: Purpose) -> Callable[[], AbstractContextManager[None]]:
        if not self._wrapping:
            return nullcontext

        @contextmanager
        def entered() -> Iterator[None]:
            with ExitStack() as stack:
                for extension in self._wrapping:
                    stack.enter_context(extension.micro(view, role, purpose))
                yield

        return entered

    def score(self, batch: Batch, outputs: Sequence[Output]) -> Mapping[str, Array]:
        """See the contract. Values stand at trainable units; others are 0."""
        wanted = _by_role(outputs)
        found: dict[str, Array] = {}
        with torch.no_grad():
            for parts in self._rounds(batch, "unit", batch.policy):
                index = parts[self._rank]
                view = self._forward(self._micro(batch, index), wanted, "score")
                if not len(index):
                    continue
                for asked in outputs:
                    value = _numbers(view.out(asked))
                    column = found.setdefault(asked.column, np.zeros((batch.units, *value.shape[1:]), value.dtype))
                    column[_units(batch, index)] = value
        for name in wanted:
            self._role(batch.policy, name).settle()
        if self._ranks > 1:
            self._gather(batch, outputs, found)
        return found

    def _micro(self, batch: Batch, index: Array) -> Batch:
        if not len(index):
            return microbatch.idle(
                batch, int(np.argmin(np.where(batch.lengths > 0, batch.lengths, np.iinfo(np.int64).max)))
            )
        return microbatch.take(batch, index)

    def _gather(self, batch: Batch, outputs: Sequence[Output], found: dict[str, Array]) -> None:
        """Every unit was computed on one rank and is 0 elsewhere: the sum is exact."""
        for asked in outputs:
            name = asked.column
            whole = torch.from_numpy(found.get(name, _nothing_of(asked, batch))).to(self._device)
            dist.all_reduce(whole)
            found[name] = whole.cpu().numpy()

    # --- training ---------------------------------------------------------------------------------------------------

    def update(self, minibatch: Batch, terms: Sequence[BoundTerm]) -> UpdateResult:
        """See the contract. Metrics of roles other than the actor: `<role>.loss`, `<role>.lr`."""
        policy = minibatch.policy
        by_role: dict[str, list[BoundTerm]] = {}
        for bound in terms:
            by_role.setdefault(bound.role, []).append(bound)
        for name in by_role:
            if not self._role(policy, name).trained:
                raise LearnerError(
                    f"term {by_role[name][0].name!r} would train role {name!r}, which is not trained",
                    fix=f"set roles.{name}.update: trained",
                )
        reasons = {name: objective.skip_reason(minibatch, terms, name) for name in by_role}
        active = {name: bound for name, bound in by_role.items() if not reasons[name]}
        owners = dict.fromkeys(self._owner(policy, name) for name in by_role)
        rates = {_own(name, "lr"): (self._optimizer(policy, name).lr, 1.0) for name in owners}
        stepped = dict.fromkeys(self._owner(policy, name) for name in active)
        if not active:
            losses = {_own(name, "loss"): (0.0, 1.0) for name in by_role}
            return UpdateResult(metrics=losses | rates, grad_norm=0.0, skipped=next(iter(reasons.values()), "no terms"))
        try:
            sums = self._backward(minibatch, active)
            norms = {n: self._optimizer(policy, n).step(f"role {n!r} of policy {policy!r}") for n in stepped}
        except Exception:
            for name in stepped:
                self._optimizer(policy, name).drop_gradients()
            raise
        norm = norms.get("actor", next(iter(norms.values())))
        return UpdateResult(metrics=objective.finish(sums) | rates, grad_norm=norm)

    def _backward(self, minibatch: Batch, active: Mapping[str, Sequence[BoundTerm]]) -> objective.Sums:
        """Gradients of the whole minibatch, and its sums over all ranks."""
        every = [bound for terms in active.values() for bound in terms]
        wanted = _by_role([output for bound in every for output in bound.term.outputs])
        level = microbatch.coarsest(bound.term.level for bound in every)
        total: objective.Sums = {}
        for parts in self._rounds(minibatch, level, minibatch.policy):
            micro = self._micro(minibatch, parts[self._rank])
            view = self._forward(micro, wanted, "update")

            def trajectory_of(unit: int, micro: Batch = micro) -> str:
                return micro.trajectory_ids[int(micro.trajectory_of_unit[unit])]

            losses: Any = 0.0
            for name, terms in active.items():
                loss, sums = objective.evaluate(view.at, terms, trajectory_of)
                sums[_own(name, "loss")] = sums.pop("loss")
                objective.accumulate(total, sums)
                losses = losses + loss
            if not losses.requires_grad:
                raise LearnerError(
                    f"the terms {', '.join(b.name for b in every)} depend on no output of a trained role",
                    fix="give a term an output with grad=True",
                )
            losses.backward()
        return self._sum(total) if self._ranks > 1 else total

    def _sum(self, total: objective.Sums) -> objective.Sums:
        added = [name for name in total if not objective.is_max(name)]
        largest = [name for name in total if objective.is_max(name)]
        pairs = torch.stack([torch.stack(total[name]) for name in added])
        dist.all_reduce(pairs)
        found: objective.Sums = {name: (pair[0], pair[1]) for name, pair in zip(added, pairs, strict=True)}
        if largest:
            tops = torch.stack([total[name][0] for name in largest])
            dist.all_reduce(tops, dist.ReduceOp.MAX)
            found |= {name: (top, total[name][1]) for name, top in zip(largest, tops, strict=True)}
        return found

    def _optimizer(self, policy: str, name: str) -> Any:
        return self._role(policy, name).optimizer

    def blend(self, policy: str, dst: str, src: str, decay: float) -> None:
        """See the contract."""
        self._role(policy, dst).blend(self._role(policy, src), decay)

    # --- weights and state ------------------------------------------------------------------------------------------

    def export(self, policy: str, layout: Layout, meta: bool = False) -> Iterator[tuple[TensorSpec, Tensor]]:
        """See the contract. On one rank in float32 the tensors are the live weights: read them before the next update.

        Raises `CapabilityError` for layout `shards`.
        """
        if layout != "full":
            raise CapabilityError(
                f"backend fsdp exports layout 'full', not {layout!r}", fix="use a sync plugin that takes whole tensors"
            )
        stream = self._stream(policy, meta)
        for extension in self._extensions:
            if hasattr(extension, "export"):
                stream = extension.export(stream, layout, policy)
        return stream

    def _stream(self, policy: str, meta: bool) -> Iterator[tuple[TensorSpec, Tensor]]:
        role = self._role(policy, "actor")
        role.settle()
        stream: Iterator[tuple[TensorSpec, Tensor]] = role.adapter.export(role.module, role.full_tensors(meta))
        return stream

    def save(self, folder: Path) -> None:
        """See the contract. Roles that never change (`frozen`) are not written: `build` makes them again."""
        shards: dict[str, checkpoint.Shard] = {}
        state: dict[str, dict[str, dict[str, Any]]] = {}
        for policy, name, role in self._kept():
            shards |= role.shards(f"{policy}/{name}")
            updates = role.optimizer.updates if role.optimizer is not None else 0
            state.setdefault(policy, {})[name] = {"updates": updates, "frozen": role.frozen}
            if (found := role.frozen_digest()) != role.frozen:
                raise BackendError(
                    f"frozen weights of role {name!r} of policy {policy!r} changed in training: their digest is "
                    f"{found}, and was {role.frozen}",
                    fix="find what writes them; the last checkpoint is valid",
                )
        checkpoint.write(folder, self._rank, self._ranks, shards, {"policies": state})
        self._barrier()

    def load(self, folder: Path) -> None:
        """See the contract. Raises `CheckpointError` where the checkpoint is unreadable or of other models."""
        policies = checkpoint.read_state(folder)["policies"]
        wanted: dict[str, checkpoint.Shard] = {}
        for policy, name, role in self._kept():
            wanted |= role.shards(f"{policy}/{name}")
            frozen = policies.get(policy, {}).get(name, {}).get("frozen", role.frozen)
            if frozen != role.frozen:
                raise CheckpointError(
                    f"role {name!r} of policy {policy!r} has frozen weights of digest {role.frozen or 'none'}; the "
                    f"checkpoint in {folder} was trained over {frozen or 'none'}",
                    fix="resume with the model source and extensions that the run began with",
                )
        with torch.no_grad():
            checkpoint.read(folder, wanted)
        for policy, name, role in self._kept():
            if role.optimizer is not None:
                role.optimizer.restored(int(policies[policy][name]["updates"]))
        self._barrier()

    def _kept(self) -> Iterator[tuple[str, str, Role]]:
        for policy, roles in self._roles.items():
            for name, role in roles.items():
                if role.spec.update not in ("frozen", "adapter_off"):
                    yield policy, name, role

    def _barrier(self) -> None:
        if self._ranks > 1:
            dist.barrier()

    def save_model(self, policy: str, folder: Path) -> None:
        """See the contract. Weights have the type that the backend computes in."""
        stream = self._stream(policy, meta=False)
        for extension in self._extensions:
            if hasattr(extension, "save"):
                stream = extension.save(stream, policy, folder)
            elif hasattr(extension, "export"):
                stream = extension.export(stream, "full", policy)
        if self._rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
        hf_folder.write(folder, ((spec.name, tensor) for spec, tensor in stream), keep=self._rank == 0)
        if self._rank == 0:
            role = self._role(policy, "actor")
            role.adapter.save_config(role.module, folder)
        self._barrier()

    def offload(self, tags: Sequence[str]) -> None:
        """On a CPU there is nowhere to move to, and nothing is done. Raises `CapabilityError` on a GPU."""
        self._refuse_to_move("offload")

    def onload(self, tags: Sequence[str]) -> None:
        """The opposite of `offload`."""
        self._refuse_to_move("onload")

    def _refuse_to_move(self, what: Literal["offload", "onload"]) -> None:
        if self._device.type == "cuda":
            raise CapabilityError(f"backend fsdp cannot {what} yet", fix="give trainer and engines their own devices")

    def close(self) -> None:
        """Leave the process group. The backend cannot be used after."""
        self._roles.clear()
        if self._joined:
            self._joined = False
            group.leave()


def _by_role(outputs: Sequence[Output]) -> dict[str, list[Output]]:
    """Distinct outputs by role, both in order of first appearance: the same on every rank."""
    found: dict[str, list[Output]] = {}
    for output in outputs:
        own = found.setdefault(output.role, [])
        if output not in own:
            own.append(output)
    return found


def _own(role: str, metric: str) -> str:
    return metric if role == "actor" else f"{role}.{metric}"


def _numbers(value: Tensor) -> Array:
    """float32, or int32 where the output is ids."""
    return (value.float() if value.is_floating_point() else value.int()).cpu().numpy()


def _nothing_of(asked: Output, batch: Batch) -> Array:
    """The column of a rank that computed no unit of it."""
    inner: tuple[int, ...] = ()
    if asked.name in ("topk_ids", "topk_logprobs"):
        inner = (asked.k,)
    elif asked.name == "token_logprobs":
        inner = (sum(batch.columns[name].reshape(batch.units, -1).shape[1] for name in asked.inputs),)
    return np.zeros((batch.units, *inner), np.int32 if asked.name == "topk_ids" else np.float32)


def _units(batch: Batch, index: Array) -> Any:
    """Where the units of these trajectories stand in the batch, in micro-batch order."""
    if len(index) == batch.n_trajectories:
        return slice(None)
    mask = np.zeros(batch.n_trajectories, bool)
    mask[index] = True
    return np.flatnonzero(mask[batch.trajectory_of_unit])
