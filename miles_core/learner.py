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

from collections.abc import Iterable, Mapping, Sequence
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
#: What a phase may write although an earlier stage did.
MAY_WRITE_AGAIN = {"distill": ("advantages",), "whiten": ("advantages",), "corrections": SHARED}

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
        self._stages = stages
        self._terms = tuple(terms)
        self._summed = [term for term in terms if not term.dynamic]
        self._trainer = trainer
        self._specs = dict(specs)
        self._max_new_tokens = max_new_tokens
        _check_stages(policy, stages)
        if not self._summed:
            fix = "give algorithm.loss a plugin and a coefficient other than 0"
            raise _refused(policy, "has no term: nothing would be trained", fix)
        if any(str(term.aggregation or self._keys.aggregation) == "constant" for term in self._summed):
            aggregation.constant_length(self._keys, max_new_tokens)
        self._passes = _passes(policy, stages, terms, specs)
        self.outputs = tuple(self._passes.values())

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
            batch = await self._score(batch)
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

    async def _score(self, batch: Batch) -> Batch:
        scored = await self._trainer.score(batch, self.outputs) if self.outputs else {}
        columns: dict[str, Array] = {}
        specs = []
        for column, output in self._passes.items():
            name = _scored_name(output)
            if name not in scored:
                raise LearnerError(
                    f"the backend scored {sorted(scored)}, not {name!r}", fix="return every output that was asked for"
                )
            columns[column] = scored[name]
            help = "scored at the start of the step"
            own = ColumnSpec(name=column, level=Level.UNIT, dtype="float32", help=help)
            specs.append(CORE_COLUMNS.get(column, own))
        return with_finite(batch, columns, specs, "the score pass")

    def _run_stages(self, batch: Batch, metrics: dict[str, Metric]) -> Batch:
        reward = batch.columns["reward"]
        penalties = self._stages.get("penalties", ())
        for name, stage in penalties:
            batch, columns = self._run("penalties", name, stage, batch, metrics)
            for column, value in columns.items():
                reward = reward + value
                metrics[f"rollout/{column}"] = (float(value.sum()), float(len(value)))
        if penalties:
            counted = reward[np.isfinite(reward)]
            metrics["rollout/reward_penalised"] = (float(counted.sum()), float(len(counted)))
            batch = batch.with_columns({"reward": reward}, ())
        for phase in PHASES[1:-1]:
            for name, stage in self._stages.get(phase, ()):
                batch, _ = self._run(phase, name, stage, batch, metrics)
        shared: dict[str, list[Array]] = {column: [] for column in SHARED}
        for name, stage in self._stages.get("corrections", ()):
            # Weights multiply, rejections add up; every correction sees the mask before rejection.
            batch, columns = self._run("corrections", name, stage, batch, metrics)
            for column in columns.keys() & shared.keys():
                shared[column].append(columns[column])
        trainable = batch.columns["trainable"]
        if weights := shared["correction_weight"]:
            weight = np.where(trainable, np.prod(weights, axis=0, dtype=np.float64), 0.0)
            batch = with_finite(batch, {"correction_weight": weight}, (), "the corrections")
        if shared["rejected"]:
            rejected = np.any(shared["rejected"], axis=0)
            batch = batch.with_columns({"rejected": rejected}, ())
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
        batch = with_finite(batch, own, stage.gives, f"the stage {name!r}")
        metrics |= {f"train/{name}/{key}": value for key, value in result.metrics.items()}
        return batch, columns

    async def _update(self, batch: Batch) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {}
        norms: list[float] = []
        skipped = 0
        for update, minibatch in enumerate(aggregation.cut(batch, self.policy.schedule.updates_per_step)):
            ready = aggregation.with_weights(minibatch, self._terms, self._keys, max_new_tokens=self._max_new_tokens)
            if not any(ready.columns[f"weight.{term.name}"].any() for term in self._summed):
                skipped += 1  # a zero denominator: loss 0 and no optimizer step
                continue
            result = await self._trainer.update(ready)
            measures.add(metrics, result.metrics)
            if result.skipped:
                skipped += 1
            elif not np.isfinite(result.grad_norm):
                raise LearnerError(
                    f"step {batch.step}, update {update}: the gradient norm is {result.grad_norm}",
                    fix="resume from the last checkpoint with a lower learning rate, or set optimizer.max_grad_norm",
                )
            else:
                norms.append(float(result.grad_norm))
        self.changed = bool(norms)
        found = {f"train/{name}": value for name, value in metrics.items()}
        found["train/skipped_updates"] = (float(skipped), 1.0)
        if norms:
            found["train/grad_norm"] = (sum(norms), float(len(norms)))
        return found


def _truncated(episode: Episode) -> bool:
    """Whether an episode ran out of tokens anywhere: said by its status or by an engine's finish reason."""
    return episode.status == Status.TRUNCATED or any(t.finish == Finish.LENGTH for t in episode.trajectories)


def _refused(policy: Policy, what: str, fix: str) -> CombinationError:
    return CombinationError(f"policy {policy.name!r}: {what}", fix=fix)


def _check_stages(policy: Policy, stages: Stages) -> None:
    unknown = sorted(set(stages) - set(PHASES))
    if unknown:
        raise _refused(policy, f"{unknown[0]!r} holds no stages", "choose from " + ", ".join(PHASES))
    writer: dict[str, str] = {}
    for phase in PHASES:
        for name, stage in stages.get(phase, ()):
            for spec in stage.gives:
                where = f"the stage {name!r} ({phase}) writes"
                if phase == "penalties" and (not spec.name.startswith("reward.") or spec.level != Level.EPISODE):
                    raise _refused(
                        policy,
                        f"{where} {spec.name!r} per {spec.level}; a penalty writes reward.<name> per episode",
                        "write reward.<name>, or choose the plugin for another field",
                    )
                if spec.name in writer and spec.name not in MAY_WRITE_AGAIN.get(phase, ()):
                    raise _refused(
                        policy,
                        f"{where} column {spec.name!r}, which {writer[spec.name]} writes too",
                        "remove one of them, or give them columns of their own",
                    )
                writer[spec.name] = f"{name!r} ({phase})"
    given = {spec.name for _, stage in stages.get("reward_kl", ()) for spec in stage.gives}
    advantages = stages.get("advantage", ())
    if given and not any(stage.needs & given for _, stage in advantages):
        raise _refused(
            policy,
            f"reward_kl is set, and the advantage {[name for name, _ in advantages]} does not use it",
            "choose an advantage that does (centred, returns, gae), or use algorithm.kl, a loss",
        )


def _passes(
    policy: Policy, stages: Stages, terms: Sequence[TermInfo], specs: Mapping[str, ColumnSpec]
) -> dict[str, Output]:
    """What is scored before the stages, by the column that it becomes: all that parts need and nothing else gives."""
    parts = [(f"the stage {n!r} ({phase})", stage) for phase in PHASES for n, stage in stages.get(phase, ())]
    written = {spec.name for _, stage in parts for spec in stage.gives}
    have = (ROLLOUT_COLUMNS | (set(specs) - set(CORE_COLUMNS))) - written
    passes: dict[str, Output] = {}

    def need(part: str, columns: frozenset[str]) -> None:
        for column in sorted(columns - have):
            if column in written:
                raise _refused(
                    policy,
                    f"{part} needs column {column!r}, which is written only after it",
                    "choose parts whose phases fit: " + " -> ".join(PHASES),
                )
            passes[column] = _output(column, part, policy)

    for part, stage in parts:
        need(part, stage.needs)
        have |= {spec.name for spec in stage.gives}
    for term in terms:
        need(f"the term {term.name!r}", term.needs)
        for output in term.outputs:
            _check_role(policy, f"the term {term.name!r}", output.role)
    # One update a step needs no pass of its own: there ρ = exp(π − sg π), and π_p is what the update computes.
    if policy.schedule.updates_per_step > 1 and any(term.weighted for term in terms):
        passes.setdefault("proximal_logprobs", Output(name="logprobs"))
    return dict(sorted(passes.items()))


def _output(column: str, part: str, policy: Policy) -> Output:
    """The model output behind a needed column. Raises `CombinationError` where nothing can give it."""
    if column == "proximal_logprobs":
        return Output(name="logprobs")
    if column == "values":
        return Output(name="values", role="critic" if "critic" in policy.roles else "actor")
    role, dot, output = column.partition(".")
    if dot and (role in policy.roles or output in ("logprobs", "values", "topk_ids", "topk_logprobs")):
        _check_role(policy, part, role)
        return Output(name=output, role=role)
    raise _refused(
        policy,
        f"{part} needs column {column!r}, and nothing writes it",
        "add a part or extension that gives it (an advantage stage gives `advantages`)",
    )


def _check_role(policy: Policy, part: str, role: str) -> None:
    if role not in policy.roles:
        raise _refused(
            policy,
            f"{part} needs the role {role!r}; the run file has {sorted(policy.roles)}",
            f"add `roles: {{{role}: {{init: actor, update: frozen}}}}`, or set the part's coefficient to 0",
        )


def _scored_name(output: Output) -> str:
    """The name under which a backend returns an output (`contracts.backend.Backend.score`)."""
    if output.role != "actor":
        return f"{output.role}.{output.name}"
    return "proximal_logprobs" if output.name == "logprobs" else output.name


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
