"""Groups to updates: score passes, stages in their fixed phases, minibatches with compiled weights, updates, roles.

One `Learner` per policy, in the controller, NumPy only. A step runs

    exclude -> score -> penalties -> reward_kl -> advantage -> distill -> whiten -> corrections -> updates -> roles

Which score passes are needed follows from what stages and terms say they need, and is decided once, before the run.
Every statistic is over the whole step; every denominator over the whole minibatch of one update (`aggregation.py`).

The reward: the penalties phase sees `Episode.reward` in the column `reward`; each penalty writes its own
`reward.<penalty>`. From then on `reward` is R = Episode.reward + Σ reward.<penalty>. Components that an environment
reports are columns `reward.<name>` too, and are only reported: they are parts of Episode.reward already.

Excluded from training are failed episodes and, under `truncated: mask`, truncated ones: all their units stop being
trainable, and they still count in B. A failed episode has no reward; another excluded one counts in its group's
baseline unless `excluded_count_in_baseline` is false. `truncated: drop_group` removes whole groups before all that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from miles_core import aggregation, measures
from miles_core.columns import CORE_COLUMNS, Array, Batch, ColumnSpec, Level, collate
from miles_core.contracts.learning import Output, Stage, TermInfo, UpdateResult
from miles_core.errors import CombinationError, LearnerError, blamed
from miles_core.records import Episode, Finish, Group, Metric, Status
from miles_core.seeds import generator

if TYPE_CHECKING:
    from miles_core.config.schema import Policy

#: The fields of `algorithm` that hold stages, in the order of their phases.
PHASES = ("penalties", "reward_kl", "advantage", "distill", "whiten", "corrections")
#: What a collated batch may hold before any pass or stage, beside the columns of extensions.
ROLLOUT_COLUMNS = frozenset(
    (
        *("tokens", "origin", "trainable", "behaviour_logprobs", "truncated", "reward", "preference"),
        *("temperature", "top_p", "top_k", "keep_counts", "keep_ids"),
    )
)

#: Columns that several corrections write: core multiplies the weights and unites the rejections.
SHARED = ("correction_weight", "rejected")

Stages = Mapping[str, Sequence[tuple[str, Stage]]]


class Trainer(Protocol):
    """What the learner asks of the trainer ranks."""

    async def score(self, batch: Batch, outputs: Sequence[Output]) -> Mapping[str, Array]: ...

    async def update(self, minibatch: Batch) -> UpdateResult: ...

    async def blend(self, policy: str, dst: str, src: str, decay: float) -> None: ...


class Learner:
    """Trains one policy.

    `stages`: field -> built stages in config order. `terms`: what the trainer declared. `specs`: every column that
    trajectories may carry (core's and extensions'). `max_new_tokens` is L of the aggregation `constant` where
    `algorithm.constant_length` is null. `changed` says whether the last step changed any weights. Raises
    `CombinationError` where the parts cannot work together.
    """

    def __init__(
        self,
        policy: Policy,
        run_seed: int,
        stages: Stages,
        terms: Sequence[TermInfo],
        trainer: Trainer,
        specs: Mapping[str, ColumnSpec],
        *,
        max_new_tokens: int | None = None,
    ) -> None:
        self.policy = policy
        self.changed = False
        self._seed = run_seed
        self._keys = policy.algorithm.keys
        self._stages = [(phase, name, stage) for phase in PHASES for name, stage in stages.get(phase, ())]
        self._terms = tuple(terms)
        self._trainer = trainer
        self._specs = dict(specs)
        self._max_new_tokens = max_new_tokens
        _check_stages(policy.name, stages)
        if not any(not term.dynamic for term in terms):
            raise CombinationError(
                f"policy {policy.name!r} has no term: nothing would be trained",
                fix="give algorithm.loss a plugin and a coefficient other than 0",
            )
        if any(str(t.aggregation or self._keys.aggregation) == "constant" for t in terms if not t.dynamic):
            aggregation.constant_length(self._keys, max_new_tokens)
        self.outputs = self._passes()

    def _passes(self) -> tuple[Output, ...]:
        """The outputs that are scored before the stages, in a fixed order."""
        have = set(ROLLOUT_COLUMNS) | {name for name in self._specs if name not in CORE_COLUMNS}
        written = {spec.name for _, _, stage in self._stages for spec in stage.gives}
        have -= written
        passes: dict[str, Output] = {}
        later = set(written)

        def need(part: str, name: str, given: set[str]) -> None:
            if name in have or name in given:
                return
            if name in later:
                raise CombinationError(
                    f"policy {self.policy.name!r}: {part} needs column {name!r}, which is written only after it",
                    fix="choose parts whose phases fit: " + " -> ".join(PHASES),
                )
            passes[name] = _output(name, part, self.policy)

        given: set[str] = set()
        for phase, name, stage in self._stages:
            for column in sorted(stage.needs):
                need(f"the stage {name!r} ({phase})", column, given)
            given |= {spec.name for spec in stage.gives}
        for term in self._terms:
            for column in sorted(term.needs):
                need(f"the term {term.name!r}", column, given)
        # One update a step needs no pass of its own: there ρ = exp(π − sg π), and π_p is what the update computes.
        if self.policy.schedule.updates_per_step > 1 and any(term.weighted for term in self._terms):
            passes.setdefault("proximal_logprobs", Output(name="logprobs"))
        return tuple(passes[name] for name in sorted(passes))

    async def step(self, step: int, groups: Sequence[Group]) -> dict[str, Metric]:
        """Consume one step's groups. Metrics are (numerator, denominator): `train/…`, and under `rollout/…`
        what penalties and `drop_group` did (the loop itself reports rewards, lengths and lag).

        Raises `LearnerError` naming the trajectory where a value is not finite at a trainable unit.
        """
        groups = sorted(groups, key=lambda g: (g.slot, g.id))
        metrics: dict[str, Metric] = {}
        self.changed = False
        if self._keys.truncated == "drop_group":
            kept = [g for g in groups if not any(_truncated(e) for e in g.episodes)]
            metrics["rollout/dropped_groups"] = (float(len(groups) - len(kept)), 1.0)
            groups = kept
        batch = collate(self.policy.name, step, groups, self._specs)
        if batch.n_trajectories:
            batch = self._exclude(batch, groups)
            batch = await self._score(batch, self.outputs)
            metrics |= {f"train/{name}": value for name, value in measures.batch_mismatch(batch).items()}
            batch = self._run_stages(batch, metrics)
            metrics |= await self._update(batch)
        else:
            metrics["train/skipped_updates"] = (float(self.policy.schedule.updates_per_step), 1.0)
        for name, role in sorted(self.policy.roles.items()):
            if role.update in ("copy", "ema") and (step + 1) % role.every == 0:
                decay = role.decay if role.update == "ema" else 0.0
                await self._trainer.blend(self.policy.name, name, role.init or "actor", decay)
        return metrics

    def _exclude(self, batch: Batch, groups: Sequence[Group]) -> Batch:
        episodes = [e for g in groups for e in g.episodes]
        failed = np.array([e.status == Status.FAILED for e in episodes])
        cut_off = np.array([_truncated(e) for e in episodes])
        excluded = failed | cut_off if self._keys.truncated == "mask" else failed
        uncounted = failed if self._keys.excluded_count_in_baseline else excluded
        return batch.with_columns(
            {
                "trainable": batch.columns["trainable"] & ~excluded[batch.episode_of_unit],
                "reward": np.where(uncounted, np.nan, batch.columns["reward"]),
            },
            (),
        )

    async def _score(self, batch: Batch, outputs: tuple[Output, ...]) -> Batch:
        scored = dict(await self._trainer.score(batch, outputs)) if outputs else {}
        columns: dict[str, Array] = {}
        for output in outputs:
            source, name = _names(output)
            if source not in scored and name not in scored:
                raise LearnerError(
                    f"the backend scored {sorted(scored)}, not {source!r}", fix="return every output that was asked for"
                )
            columns[name] = np.asarray(scored.get(source, scored.get(name)))
        specs = [CORE_COLUMNS.get(name) or _scored_spec(name) for name in columns]
        batch = batch.with_columns(columns, specs)
        for name in columns:
            _require_finite(batch, name, "the score pass")
        return batch

    def _run_stages(self, batch: Batch, metrics: dict[str, Metric]) -> Batch:
        total = batch.columns["reward"].copy()
        penalties = [part for part in self._stages if part[0] == "penalties"]
        for _, name, stage in penalties:
            batch, columns = self._run("penalties", name, stage, batch, metrics)
            for column, value in columns.items():
                total = total + value
                metrics[f"rollout/{column}"] = (float(value.sum()), float(len(value)))
        batch = batch.with_columns({"reward": total}, ())
        if penalties:
            counted = total[np.isfinite(total)]
            metrics["rollout/reward_penalised"] = (float(counted.sum()), float(len(counted)))
        weight: Array | None = None
        rejected: Array | None = None
        for phase, name, stage in self._stages:
            if phase in ("reward_kl", "advantage", "distill", "whiten"):
                batch, _ = self._run(phase, name, stage, batch, metrics)
        for phase, name, stage in self._stages:
            if phase == "corrections":
                # Weights multiply, rejections add up; every correction sees the mask before rejection.
                batch, columns = self._run(phase, name, stage, batch, metrics)
                if "correction_weight" in columns:
                    given = columns["correction_weight"].astype(np.float64)
                    weight = given if weight is None else weight * given
                if "rejected" in columns:
                    rejected = columns["rejected"].astype(bool) | (False if rejected is None else rejected)
        trainable = batch.columns["trainable"]
        if weight is not None:
            columns = {"correction_weight": np.where(trainable, weight, 0.0)}
            batch = batch.with_columns(columns, (CORE_COLUMNS["correction_weight"],))
            _require_finite(batch, "correction_weight", "the corrections")
        if rejected is not None:
            batch = batch.with_columns({"rejected": rejected}, (CORE_COLUMNS["rejected"],))
            metrics["train/rejected"] = (float((trainable & rejected).sum()), float(trainable.sum()))
        return batch

    def _run(
        self, phase: str, name: str, stage: Stage, batch: Batch, metrics: dict[str, Metric]
    ) -> tuple[Batch, dict[str, Array]]:
        """One stage: the batch with what it wrote (but for what corrections share), and all that it wrote."""
        rng = generator(self._seed, self.policy.name, "stage", name, batch.step)
        with blamed(f"step {batch.step}: the stage {name!r} ({phase}) failed", LearnerError, "see it with --traceback"):
            result = stage(batch, rng)
        declared = {spec.name for spec in stage.gives}
        if set(result.columns) != declared:
            raise LearnerError(
                f"the stage {name!r} ({phase}) declares {sorted(declared)} and wrote {sorted(result.columns)}",
                fix="write exactly the columns that `gives` names",
            )
        clash = sorted(set(result.columns) & set(batch.columns)) if phase == "penalties" else []
        if clash:
            raise LearnerError(
                f"the penalty {name!r} writes {clash[0]!r}, a component that an environment already reports",
                fix="name one of them differently: a penalty is added to the reward, a component is a part of it",
            )
        columns = {key: np.asarray(value) for key, value in result.columns.items()}
        if "advantages" in columns:
            columns["advantages"] = np.where(batch.columns["trainable"], columns["advantages"], 0.0)
        own = {k: v for k, v in columns.items() if phase != "corrections" or k not in SHARED}
        batch = batch.with_columns(own, stage.gives)
        for column in own:
            _require_finite(batch, column, f"the stage {name!r}")
        metrics |= {f"train/{name}/{key}": value for key, value in result.metrics.items()}
        return batch, columns

    async def _update(self, batch: Batch) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {}
        updates, skipped, norms = 0, 0, 0.0
        for minibatch in aggregation.cut(batch, self.policy.schedule.updates_per_step):
            updates += 1
            ready = aggregation.with_weights(minibatch, self._terms, self._keys, max_new_tokens=self._max_new_tokens)
            summed = [term.name for term in self._terms if not term.dynamic]
            if not any(ready.columns[f"weight.{name}"].any() for name in summed):
                skipped += 1  # a zero denominator: loss 0 and no optimizer step
                continue
            result = await self._trainer.update(ready)
            if result.skipped:
                skipped += 1
            elif not np.isfinite(result.grad_norm):
                raise LearnerError(
                    f"step {batch.step}, update {updates - 1}: the gradient norm is {result.grad_norm}",
                    fix="resume from the last checkpoint with a lower learning rate, or set optimizer.max_grad_norm",
                )
            else:
                norms += float(result.grad_norm)
            measures.add(metrics, result.metrics)
        self.changed = updates > skipped
        found = {f"train/{name}": value for name, value in metrics.items()}
        found["train/skipped_updates"] = (float(skipped), 1.0)
        if self.changed:
            found["train/grad_norm"] = (norms, float(updates - skipped))
        return found


def _truncated(episode: Episode) -> bool:
    """Whether an episode ran out of tokens anywhere: said by its status or by an engine's finish reason."""
    return episode.status == Status.TRUNCATED or any(t.finish == Finish.LENGTH for t in episode.trajectories)


def _check_stages(policy: str, stages: Stages) -> None:
    unknown = sorted(set(stages) - set(PHASES))
    if unknown:
        raise CombinationError(
            f"policy {policy!r}: {unknown[0]!r} holds no stages", fix="choose from " + ", ".join(PHASES)
        )
    writer: dict[str, tuple[str, str]] = {}
    for phase in PHASES:
        for name, stage in stages.get(phase, ()):
            for spec in stage.gives:
                _check_writer(policy, phase, name, spec, writer.get(spec.name))
                writer[spec.name] = (phase, name)
    given = {spec.name for _, stage in stages.get("reward_kl", ()) for spec in stage.gives}
    readers = [name for name, stage in stages.get("advantage", ()) if stage.needs & given]
    if given and not readers:
        chosen = [name for name, _ in stages.get("advantage", ())]
        raise CombinationError(
            f"policy {policy!r}: reward_kl is set, and the advantage {chosen} does not use it",
            fix="choose an advantage that does (centred, returns, gae), or use algorithm.kl, a loss",
        )


def _check_writer(policy: str, phase: str, name: str, spec: ColumnSpec, earlier: tuple[str, str] | None) -> None:
    where = f"policy {policy!r}: the stage {name!r} ({phase})"
    if phase == "penalties" and (not spec.name.startswith("reward.") or spec.level != Level.EPISODE):
        raise CombinationError(
            f"{where} writes {spec.name!r} per {spec.level}; a penalty writes reward.<name> per episode",
            fix="write reward.<name>, or choose the plugin for another field",
        )
    if phase == "corrections" and spec.name in SHARED:
        return
    if earlier is None or (spec.name == "advantages" and phase in ("distill", "whiten")):
        return
    raise CombinationError(
        f"{where} writes column {spec.name!r}, which {earlier[1]!r} ({earlier[0]}) writes too",
        fix="remove one of them, or give them columns of their own",
    )


def _output(name: str, part: str, policy: Policy) -> Output:
    """The model output behind a needed column. Raises `CombinationError` where nothing can give it."""
    if name == "proximal_logprobs":
        return Output(name="logprobs")
    if name == "values":
        return Output(name="values", role="critic" if "critic" in policy.roles else "actor")
    role, dot, output = name.partition(".")
    if dot and role in policy.roles:
        return Output(name=output, role=role)
    if dot and output in ("logprobs", "values", "topk_ids", "topk_logprobs"):
        raise CombinationError(
            f"policy {policy.name!r}: {part} needs the role {role!r}; the run file has {sorted(policy.roles)}",
            fix=f"add `roles: {{{role}: {{init: actor, update: frozen}}}}`, or set the part's coefficient to 0",
        )
    raise CombinationError(
        f"policy {policy.name!r}: {part} needs column {name!r}, and nothing writes it",
        fix="add a part or extension that gives it (an advantage stage gives `advantages`)",
    )


def _names(output: Output) -> tuple[str, str]:
    """The name under which a backend returns an output, and the column that it becomes."""
    if output.role == "actor":
        column = {"logprobs": "proximal_logprobs"}.get(output.name, output.name)
        return column, column
    column = f"{output.role}.{output.name}"
    return column, "values" if column == "critic.values" else column


def _scored_spec(name: str) -> ColumnSpec:
    return ColumnSpec(name=name, level=Level.UNIT, dtype="float32", help="scored at the start of the step")


def _require_finite(batch: Batch, name: str, by: str) -> None:
    """Raise where unit column `name` is not finite at a trainable unit."""
    spec, value = batch.specs[name], batch.columns[name]
    if spec.level != Level.UNIT or value.dtype.kind != "f":
        return
    bad = ~np.isfinite(value).reshape(batch.units, -1).all(axis=1) & batch.columns["trainable"]
    if not bad.any():
        return
    unit = int(np.flatnonzero(bad)[0])
    row = int(batch.trajectory_of_unit[unit])
    raise LearnerError(
        f"step {batch.step}: {name!r} from {by} is {value[unit]} at token {unit - int(batch.offsets[row])} "
        f"of trajectory {batch.trajectory_ids[row]!r}",
        fix="look at that trajectory (`miles show`); an episode without a reward must not be trainable",
    )
