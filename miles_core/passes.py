"""Score passes: what stages and terms need and no part gives, by whom it is scored, and in which order.

Decided once, before the run. A column comes from a model in the backend, or, where the role (or the very name before
the dot) is one of the run's scorers, from that scorer. What is scored at the ids of another scored column comes after
it, in a later layer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from miles_core.columns import CORE_COLUMNS, Array, Batch, ColumnSpec, Level
from miles_core.compatibility import takes
from miles_core.config.schema import Policy
from miles_core.contracts.environment import Scorer
from miles_core.contracts.launcher import Workers
from miles_core.contracts.learning import Output, Stage, TermInfo, UpdateResult
from miles_core.errors import BackendError, CombinationError, LearnerError, blamed
from miles_core.records import Group
from miles_core.waits import GO_ON, finish_all

#: The fields of `algorithm` that hold stages, in the order of their phases.
PHASES = ("penalties", "reward_kl", "advantage", "distill", "whiten", "corrections")
#: Core columns that passes and stages make. The others a collated batch has from the start, as it has extensions'.
MADE = {"proximal_logprobs", "values", "bootstrap_value", "advantages", "returns", "correction_weight", "rejected"}
#: Columns of roles that need not be in the run file for their name to be understood (a missing role is then named).
OUTPUTS = ("logprobs", "values", "topk_ids", "topk_logprobs", "token_logprobs")

CALL_TIMEOUT_S = 7200.0  # one score, update, save or load of the trainer

Stages = Mapping[str, Sequence[tuple[str, "Stage"]]]


@dataclass(frozen=True)
class Trainer:
    """The trainer ranks as the learner calls them: one answer from all of them."""

    workers: Workers

    async def score(self, batch: Batch, outputs: Sequence[Output]) -> Mapping[str, Array]:
        return dict(await self._call("score", batch, tuple(outputs)))

    async def update(self, minibatch: Batch) -> UpdateResult:
        result: UpdateResult = await self._call("update", minibatch)
        return result

    async def blend(self, policy: str, dst: str, src: str, decay: float) -> None:
        await self._call("blend", policy, dst, src, decay)

    async def _call(self, method: str, *args: Any) -> Any:
        with blamed(f"the trainer failed in {method!r}", BackendError, GO_ON):
            return (await self.workers.call(method, *args, timeout_s=CALL_TIMEOUT_S))[0]


def refused(policy: Policy, what: str, fix: str) -> CombinationError:
    return CombinationError(f"policy {policy.name!r}: {what}", fix=fix)


class Passes:
    """The passes of one policy. `outputs`: column -> what is scored for it. Raises `CombinationError` where something
    is needed that nothing gives."""

    def __init__(
        self,
        policy: Policy,
        stages: Stages,
        terms: Sequence[TermInfo],
        specs: Mapping[str, ColumnSpec],
        scorers: Mapping[str, Scorer],
    ) -> None:
        self._policy = policy
        self._refused = partial(refused, policy)
        self._scorers = scorers
        self._by = {name: role.held_by for name, role in policy.roles.items() if role.held_by}
        self._by |= {name: name for name in scorers if name not in policy.roles}
        found: dict[str, Output] = {}
        parts = [(f"the stage {n!r} ({phase})", stage) for phase in PHASES for n, stage in stages.get(phase, ())]
        written = {spec.name for _, stage in parts for spec in stage.gives}
        have = {*CORE_COLUMNS, *specs} - MADE - written
        for part, stage in parts:
            scores = getattr(stage, "scores", {})
            for column in sorted((stage.needs | scores.keys()) - have):
                if column in written and column != "proximal_logprobs":  # scored, until a correction replaces it
                    raise self._refused(
                        f"{part} needs column {column!r}, which is written only after it",
                        "choose parts whose phases fit: " + " -> ".join(PHASES),
                    )
                found[column] = self._output(column, part, scores, found)
            have |= {spec.name for spec in stage.gives}
        for term in terms:
            for column in sorted((term.needs | term.scores.keys()) - have):
                found[column] = self._output(column, f"the term {term.name!r}", term.scores, found)
            for output in term.outputs:
                self._check_role(f"the term {term.name!r}", output.role)
        # One update a step needs no pass of its own: there ρ = exp(π − sg π), and π_p is what the update computes.
        if policy.schedule.updates_per_step > 1 and any(term.weighted for term in terms):
            found.setdefault("proximal_logprobs", Output(name="logprobs"))
        self._layers = list(_layers(found))
        self.outputs = {column: output for layer in self._layers for column, output in layer.items()}
        read = {"actor", *(o.role for t in terms for o in t.outputs), *(o.role for o in self.outputs.values())}
        read |= {term.role for term in terms} | {role.init for role in policy.roles.values()}
        if idle := [name for name in policy.roles if name not in read]:
            fix = f"remove it (roles.{idle[0]}=null), or give a part that scores it a coefficient"
            raise self._refused(f"nothing reads the role {idle[0]!r}", fix)

    def _output(self, column: str, part: str, scores: Mapping[str, Output], found: Mapping[str, Output]) -> Output:
        """The output behind a needed column."""
        role, dot, name = column.partition(".")
        if column in scores:
            output = scores[column]
        elif column == "proximal_logprobs":
            output = Output(name="logprobs")
        elif column in ("values", "bootstrap_value"):
            output = Output(name=column, role="critic" if "critic" in self._policy.roles else "actor")
        elif dot and (role in self._policy.roles or role in self._by or name in OUTPUTS):
            output = Output(name=name, role=role)
        else:
            raise self._refused(
                f"{part} needs column {column!r}, and nothing writes it",
                "add a part or extension that gives it (an advantage stage gives `advantages`)",
            )
        self._check_role(part, output.role)
        if output.role in self._by and output.inputs:
            raise self._refused(
                f"{part} needs {output.name!r} of role {output.role!r} at ids that the trainer chooses, and the scorer "
                f"{self._by[output.role]!r} cannot be asked for chosen ids",
                f"make {output.role!r} a model of the backend (roles.{output.role}.source), or let it choose the ids",
            )
        rivals = [o for c, o in found.items() if o != output and (c == column or o.column == output.column)]
        if rivals:
            raise self._refused(
                f"{part} needs {output.name!r} of role {output.role!r} with k={output.k} and ids {output.inputs}; "
                f"another part needs it with k={rivals[0].k} and other ids",
                "give both parts the same numbers",
            )
        return output

    def _check_role(self, part: str, role: str) -> None:
        if role not in self._policy.roles and role not in self._by:
            raise self._refused(
                f"{part} needs the role {role!r}; the run file has {sorted(self._policy.roles)}",
                f"add `roles: {{{role}: {{init: actor, update: frozen}}}}`, or set the part's coefficient to 0",
            )

    async def score(self, batch: Batch, groups: Sequence[Group], trainer: Trainer) -> Batch:
        """The batch with every scored column."""
        for layer in self._layers:
            by: dict[str, dict[str, Output]] = {}
            for column, output in layer.items():
                by.setdefault(self._by.get(output.role, ""), {})[column] = output
            asked = [self._ask(name, w, groups) if name else _score(trainer, w, batch) for name, w in by.items()]
            found = {column: value for columns in await finish_all(asked) for column, value in columns.items()}
            batch = self._with(batch, layer, found)
        return batch

    async def _ask(self, name: str, wanted: Mapping[str, Output], groups: Sequence[Group]) -> dict[str, Array]:
        """What one scorer says of every trajectory of the step: [units, …], or [trajectories] of a `reward`."""
        rows = [(t, group.task) for group in groups for e in group.episodes for t in e.trajectories]
        with blamed(f"the scorer {name!r} failed", LearnerError, GO_ON):
            async with asyncio.timeout(self._policy.schedule.stall_deadline_s):
                score = self._scorers[name].score
                tasks = ([task for _, task in rows],) if takes(score, "tasks") else ()
                scored = await score([t for t, _ in rows], [o.column for o in wanted.values()], *tasks)
        found: dict[str, Array] = {}
        for column, output in wanted.items():
            values = [np.asarray(value) for value in _scored(f"the scorer {name!r}", scored, output.column)]
            whole = output.name == "reward"
            what = "" if len(values) == len(rows) else f"{len(values)} arrays for {len(rows)} trajectories"
            for (trajectory, _), value in zip(rows, values, strict=False):
                fits = value.size == 1 if whole else value.shape[:1] == (trajectory.length,)
                if not fits or (output.k and value.shape[1:] != (output.k,)):
                    what = f"shape {value.shape} for trajectory {trajectory.id!r} of {trajectory.length} tokens"
                    break
            if what:
                raise LearnerError(
                    f"the scorer {name!r} gave {what} as {output.column!r}",
                    fix="give a scalar a trajectory" if whole else "give a row a token, k wide where k was asked for",
                )
            found[column] = np.stack([v.reshape(()) for v in values]) if whole else np.concatenate(values)
        return found

    def _with(self, batch: Batch, layer: Iterable[str], found: Mapping[str, Array]) -> Batch:
        columns: dict[str, Array] = {}
        specs = []
        for column in layer:
            value, spec = found[column], CORE_COLUMNS.get(column)
            dtype = "int32" if value.dtype.kind in "iu" else "float32"
            if column == "bootstrap_value":  # V after the last token: per trajectory
                ends = batch.offsets[:-1] + batch.lengths - 1
                value = np.where(batch.lengths > 0, value[np.maximum(ends, 0)], 0.0)
            if spec is None:
                level = Level.TRAJECTORY if self.outputs[column].name == "reward" else Level.UNIT
                help = "scored at the start of the step"
                spec = ColumnSpec(name=column, level=level, dtype=dtype, inner=value.shape[1:], help=help)
            columns[column] = value.astype(spec.dtype)
            specs.append(spec)
        return with_finite(batch, columns, specs, "the score pass")


async def _score(trainer: Trainer, wanted: Mapping[str, Output], batch: Batch) -> dict[str, Array]:
    scored = await trainer.score(batch, tuple(wanted.values()))
    return {column: _scored("the backend", scored, output.column) for column, output in wanted.items()}


def _scored(by: str, scored: Mapping[str, Any], name: str) -> Any:
    if name not in scored:
        raise LearnerError(f"{by} scored {sorted(scored)}, not {name!r}", fix="return every output that was asked for")
    return scored[name]


def _layers(found: Mapping[str, Output]) -> Iterator[dict[str, Output]]:
    """Columns whose inputs are no scored columns, then those whose inputs are, and so on."""
    left = dict(sorted(found.items()))
    while left:
        layer = {column: output for column, output in left.items() if not left.keys() & set(output.inputs)}
        if not layer:
            raise CombinationError(
                f"the scored columns {sorted(left)} need each other", fix="let one of them need none of the others"
            )
        yield layer
        left = {column: output for column, output in left.items() if column not in layer}


def with_finite(batch: Batch, columns: Mapping[str, Array], specs: Iterable[ColumnSpec], by: str) -> Batch:
    """The batch with these columns. Raises where a unit column of floats is not finite at a trainable unit."""
    batch = batch.with_columns(columns, specs)
    for name in columns:
        value = batch.columns[name]
        if batch.specs[name].level != Level.UNIT or value.dtype.kind != "f":
            continue
        bad = ~np.isfinite(value).reshape(batch.units, -1).all(axis=1) & batch.columns["trainable"]
        if bad.any():
            unit = int(np.flatnonzero(bad)[0])
            row = int(batch.trajectory_of_unit[unit])
            raise LearnerError(
                f"step {batch.step}: {name!r} from {by} is {value[unit]} at token {unit - int(batch.offsets[row])} "
                f"of trajectory {batch.trajectory_ids[row]!r}",
                fix="look at that trajectory (`miles show`); an episode without a reward must not be trainable",
            )
    return batch
