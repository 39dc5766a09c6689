"""Score passes: what stages and terms need and no part gives, by whom it is scored, and in which order.

Decided once, before the run. A column comes from a model in the backend, or, where the role (or the very name before
the dot) is one of the run's scorers, from that scorer. What is scored at the ids of another scored column comes after
it, in a later layer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from miles_core.columns import CORE_COLUMNS, Array, Batch, ColumnSpec, Level
from miles_core.compatibility import takes
from miles_core.contracts.learning import Output
from miles_core.errors import CombinationError, LearnerError, blamed
from miles_core.waits import finish_all

if TYPE_CHECKING:
    from miles_core.config.schema import Policy
    from miles_core.contracts.environment import Scorer
    from miles_core.contracts.learning import Stage, TermInfo, UpdateResult
    from miles_core.records import Group

#: The fields of `algorithm` that hold stages, in the order of their phases.
PHASES = ("penalties", "reward_kl", "advantage", "distill", "whiten", "corrections")
#: What a collated batch may hold before any pass or stage, beside the columns of extensions.
ROLLOUT_COLUMNS = frozenset(
    (
        *("tokens", "origin", "trainable", "behaviour_logprobs", "truncated", "reward", "preference"),
        *("temperature", "top_p", "top_k", "keep_counts", "keep_ids"),
    )
)
#: Columns of roles that need not be in the run file for their name to be understood (a missing role is then named).
OUTPUTS = ("logprobs", "values", "topk_ids", "topk_logprobs", "token_logprobs")

Stages = Mapping[str, Sequence[tuple[str, "Stage"]]]


class Trainer(Protocol):
    """What the learner asks of the trainer ranks."""

    async def score(self, batch: Batch, outputs: Sequence[Output]) -> Mapping[str, Array]: ...

    async def update(self, minibatch: Batch) -> UpdateResult: ...

    async def blend(self, policy: str, dst: str, src: str, decay: float) -> None: ...


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
        self._scorers = scorers
        self._by = {name: role.held_by for name, role in policy.roles.items() if role.held_by}
        self._by |= {name: name for name in scorers if name not in policy.roles}
        found: dict[str, Output] = {}
        parts = [(f"the stage {n!r} ({phase})", stage) for phase in PHASES for n, stage in stages.get(phase, ())]
        written = {spec.name for _, stage in parts for spec in stage.gives}
        have = (ROLLOUT_COLUMNS | (set(specs) - set(CORE_COLUMNS))) - written
        for part, stage in parts:
            scores = getattr(stage, "scores", {})
            for column in sorted((stage.needs | scores.keys()) - have):
                if column in written and column != "proximal_logprobs":  # scored, until a correction replaces it
                    raise refused(
                        policy,
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
            raise refused(
                self._policy,
                f"{part} needs column {column!r}, and nothing writes it",
                "add a part or extension that gives it (an advantage stage gives `advantages`)",
            )
        self._check_role(part, output.role)
        if output.role in self._by and output.inputs:
            raise refused(
                self._policy,
                f"{part} needs {output.name!r} of role {output.role!r} at ids that the trainer chooses, and the scorer "
                f"{self._by[output.role]!r} cannot be asked for chosen ids",
                f"make {output.role!r} a model of the backend (roles.{output.role}.source), or let it choose the ids",
            )
        same = [c for c, o in found.items() if o.column == output.column and o != output]
        if same or found.get(column, output) != output:
            raise refused(
                self._policy,
                f"{part} needs {output.name!r} of role {output.role!r} with k={output.k} and ids {output.inputs}; "
                f"another part needs it with k={found[(same or [column])[0]].k} and other ids",
                "give both parts the same numbers",
            )
        return output

    def _check_role(self, part: str, role: str) -> None:
        if role not in self._policy.roles and role not in self._by:
            raise refused(
                self._policy,
                f"{part} needs the role {role!r}; the run file has {sorted(self._policy.roles)}",
                f"add `roles: {{{role}: {{init: actor, update: frozen}}}}`, or set the part's coefficient to 0",
            )

    async def score(self, batch: Batch, groups: Sequence[Group], trainer: Trainer) -> Batch:
        """The batch with every scored column."""
        for layer in self._layers:
            found: dict[str, Array] = {}
            by: dict[str, list[tuple[str, Output]]] = {}
            for column, output in layer.items():
                by.setdefault(self._by.get(output.role, ""), []).append((column, output))
            ours = by.pop("", [])
            asked = [self._ask(name, wanted, groups, found) for name, wanted in by.items()]
            await finish_all([self._train(trainer, batch, ours, found), *asked])
            batch = self._with(batch, layer, found)
        return batch

    async def _train(
        self, trainer: Trainer, batch: Batch, wanted: Sequence[tuple[str, Output]], found: dict[str, Array]
    ) -> None:
        if wanted:
            scored = await trainer.score(batch, tuple(output for _, output in wanted))
            found |= {column: _scored("the backend", scored, output.column) for column, output in wanted}

    async def _ask(
        self, name: str, wanted: Sequence[tuple[str, Output]], groups: Sequence[Group], found: dict[str, Array]
    ) -> None:
        """What one scorer says of every trajectory of the step: [units, …], or [trajectories] of a `reward`."""
        rows = [(t, group.task) for group in groups for e in group.episodes for t in e.trajectories]
        deadline = self._policy.schedule.stall_deadline_s
        with blamed(f"the scorer {name!r} failed", LearnerError, "see it with --traceback, then go on with --resume"):
            async with asyncio.timeout(deadline):
                score = self._scorers[name].score
                tasks = ([task for _, task in rows],) if takes(score, "tasks") else ()
                scored = await score([t for t, _ in rows], [o.column for _, o in wanted], *tasks)
        for column, output in wanted:
            values = [np.asarray(value) for value in _scored(f"the scorer {name!r}", scored, output.column)]
            whole = output.name == "reward"
            wrong = [
                (trajectory, value)
                for (trajectory, _), value in zip(rows, values, strict=False)
                if (value.size != 1 if whole else value.shape[:1] != (trajectory.length,))
                or (output.k and value.shape[1:] != (output.k,))
            ]
            if len(values) != len(rows) or wrong:
                what = f"{len(values)} arrays for {len(rows)} trajectories"
                if wrong:
                    what = f"shape {wrong[0][1].shape} for trajectory {wrong[0][0].id!r} of {wrong[0][0].length} tokens"
                raise LearnerError(
                    f"the scorer {name!r} gave {what} as {output.column!r}",
                    fix="give a scalar a trajectory" if whole else "give a row a token, k wide where k was asked for",
                )
            found[column] = np.stack([v.reshape(()) for v in values]) if whole else np.concatenate(values)

    def _with(self, batch: Batch, layer: Iterable[str], found: Mapping[str, Array]) -> Batch:
        columns: dict[str, Array] = {}
        specs = []
        for column in layer:
            value = found[column]
            dtype = "int32" if value.dtype.kind in "iu" else "float32"
            spec = CORE_COLUMNS.get(column)
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
