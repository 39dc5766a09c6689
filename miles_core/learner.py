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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

import numpy as np

from miles_core import aggregation, measures
from miles_core.columns import Array, Batch, ColumnSpec, Level, collate
from miles_core.contracts.learning import Stage, TermInfo
from miles_core.errors import NEW_RUN, LearnerError, blamed
from miles_core.passes import PHASES, Passes, Stages, Trainer, refused, with_finite
from miles_core.records import Episode, Finish, Group, Metric, Status
from miles_core.seeds import generator

if TYPE_CHECKING:
    from miles_core.config.schema import Policy
    from miles_core.contracts.environment import Scorer

#: Columns that several corrections write: core multiplies the weights and unites the rejections.
SHARED = ("correction_weight", "rejected")
#: What a phase may write although an earlier stage did.
MAY_WRITE_AGAIN = {"distill": ("advantages",), "whiten": ("advantages",), "corrections": SHARED}


@dataclass(eq=False)
class Learner:
    """Trains one policy.

    `stages`: field -> built stages in config order. `terms`: what the trainer declared. `specs`: every column that
    trajectories may carry (core's and extensions'). `max_new_tokens` is L of the aggregation `constant` where
    `algorithm.constant_length` is null. `scorers`: those of the run, by name. `changed` says whether the last step
    changed the actor's weights. Raises `CombinationError` where the parts cannot work together.
    """

    policy: Policy
    run_seed: int
    stages: Stages
    terms: Sequence[TermInfo]
    trainer: Trainer
    specs: Mapping[str, ColumnSpec]
    _: KW_ONLY
    max_new_tokens: int | None = None
    scorers: Mapping[str, Scorer] | None = None

    def __post_init__(self) -> None:
        self.changed = False
        self.learnt: Callable[[str], Mapping[str, float]] = lambda episode: {}  # `measures.by_episode` of the last step
        self._penalties = [spec.name for _, stage in self.stages.get("penalties", ()) for spec in stage.gives]
        self._keys = self.policy.algorithm.keys
        self._summed = [term for term in self.terms if not term.dynamic]
        _check_stages(self.policy, self.stages)
        if not self._summed:
            fix = "give algorithm.loss a plugin and a coefficient other than 0"
            raise refused(self.policy, "has no term: nothing would be trained", fix)
        if any(str(term.aggregation or self._keys.aggregation) == "constant" for term in self._summed):
            aggregation.constant_length(self._keys, self.max_new_tokens)
        _check_weights(self.policy, self.stages, self.terms)
        self._passes = Passes(self.policy, self.stages, self.terms, self.specs, self.scorers or {})
        self.outputs = tuple(self._passes.outputs.values())
        moving = {"actor", *(n for n, r in self.policy.roles.items() if r.update == "shares" and r.init == "actor")}
        self._moving = frozenset(moving)  # roles whose updates change the actor's weights

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
        batch = collate(self.policy.name, step, groups, self.specs)
        if batch.n_trajectories:
            batch = self._exclude(batch, groups)
            batch = await self._passes.score(batch, groups, self.trainer)
            mismatch = {f"train/{name}": value for name, value in measures.batch_mismatch(batch).items()}
            batch = self._run_stages(batch, metrics)
            self.learnt = measures.by_episode(batch, self._penalties)
            metrics |= await self._update(batch)
            metrics |= mismatch  # π_p of the score pass, where there was one, before what the updates saw
        else:
            metrics["train/skipped_updates"] = (float(self.policy.schedule.updates_per_step), 1.0)
        for name, role in sorted(self.policy.roles.items()):
            if role.update in ("copy", "ema") and (step + 1) % role.every == 0:
                decay = role.decay if role.update == "ema" else 0.0
                await self.trainer.blend(self.policy.name, name, role.init or "actor", decay)
        return metrics

    def _exclude(self, batch: Batch, groups: Sequence[Group]) -> Batch:
        episodes, lost = [e for g in groups for e in g.episodes], Status.FAILED
        excluded = failed = np.array([e.status == lost for e in episodes])
        if self._keys.truncated == "mask":
            excluded = failed | np.array([_truncated(e) for e in episodes])
        uncounted = failed if self._keys.excluded_count_in_baseline else excluded
        return batch.with_columns(
            {
                "trainable": batch.columns["trainable"] & ~excluded[batch.episode_of_unit],
                "reward": np.where(uncounted, np.nan, batch.columns["reward"]),
            },
            (),
        )

    def _run_stages(self, batch: Batch, metrics: dict[str, Metric]) -> Batch:
        reward = batch.columns["reward"]
        penalties = self.stages.get("penalties", ())
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
            for name, stage in self.stages.get(phase, ()):
                batch, _ = self._run(phase, name, stage, batch, metrics)
        shared: dict[str, list[Array]] = {column: [] for column in SHARED}
        for name, stage in self.stages.get("corrections", ()):
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
        rng = generator(self.run_seed, self.policy.name, "stage", name, batch.step)
        with blamed(f"step {batch.step}: the stage {name!r} ({phase}) failed", LearnerError, "see it with --traceback"):
            result = stage(batch, rng)
        declared = {spec.name for spec in stage.gives}
        if set(result.columns) != declared:
            what = f"the stage {name!r} ({phase}) declares {sorted(declared)} and wrote {sorted(result.columns)}"
            raise LearnerError(what, fix="write exactly the columns that `gives` names")
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
        waiting = {name for name, role in self.policy.roles.items() if batch.step < role.from_step}
        for update, minibatch in enumerate(aggregation.cut(batch, self.policy.schedule.updates_per_step)):
            ready = aggregation.with_weights(minibatch, self.terms, self._keys, max_new_tokens=self.max_new_tokens)
            for term in self._summed:
                if term.role in waiting:
                    ready.columns[f"weight.{term.name}"][:] = 0.0
            live = {term.role for term in self._summed if ready.columns[f"weight.{term.name}"].any()}
            if not live:
                skipped += 1  # a zero denominator: loss 0 and no optimizer step
                continue
            result = await self.trainer.update(ready)
            measures.add(metrics, result.metrics)
            if result.skipped:
                skipped += 1
            elif not np.isfinite(result.grad_norm):
                what = f"step {batch.step}, update {update}: the gradient norm is {result.grad_norm}"
                raise LearnerError(what, fix=f"take a lower optimizer.lr, or set optimizer.max_grad_norm, {NEW_RUN}")
            else:
                norms.append(float(result.grad_norm))
                self.changed |= bool(live & self._moving)
        found = {f"train/{name}": value for name, value in metrics.items()}
        found["train/skipped_updates"] = (float(skipped), 1.0)
        if norms:
            found["train/grad_norm"] = (sum(norms), float(len(norms)))
        return found


def _truncated(episode: Episode) -> bool:
    """Whether an episode ran out of tokens anywhere: said by its status or by an engine's finish reason."""
    return episode.status == Status.TRUNCATED or any(t.finish == Finish.LENGTH for t in episode.trajectories)


def _check_stages(policy: Policy, stages: Stages) -> None:
    unknown = sorted(set(stages) - set(PHASES))
    if unknown:
        raise refused(policy, f"{unknown[0]!r} holds no stages", "choose from " + ", ".join(PHASES))
    writer: dict[str, str] = {}
    for phase in PHASES:
        for name, stage in stages.get(phase, ()):
            for spec in stage.gives:
                where = f"the stage {name!r} ({phase}) writes"
                if phase == "penalties" and (not spec.name.startswith("reward.") or spec.level != Level.EPISODE):
                    what = f"{where} {spec.name!r} per {spec.level}; a penalty writes reward.<name> per episode"
                    raise refused(policy, what, "write reward.<name>, or choose the plugin for another field")
                if spec.name in writer and spec.name not in MAY_WRITE_AGAIN.get(phase, ()):
                    what = f"{where} column {spec.name!r}, which {writer[spec.name]} writes too"
                    raise refused(policy, what, "remove one of them, or give them columns of their own")
                writer[spec.name] = f"{name!r} ({phase})"
            if "reward" in stage.needs and policy.algorithm.keys.episodes == "demonstrations":
                what = f"the stage {name!r} ({phase}) reads the reward, and demonstrations have none"
                raise refused(policy, what, f"remove {name!r}, or choose a preset that samples")
    given = {spec.name for _, stage in stages.get("reward_kl", ()) for spec in stage.gives}
    advantages = stages.get("advantage", ())
    if given and not any(stage.needs & given for _, stage in advantages):
        what = f"reward_kl is set, and the advantage {[name for name, _ in advantages]} does not use it"
        fix = "choose an advantage that does (centred, returns, gae), or use algorithm.kl, a loss"
        raise refused(policy, what, fix)


def _check_weights(policy: Policy, stages: Stages, terms: Sequence[TermInfo]) -> None:
    """Refuse weights that nothing is multiplied by: a run would pass for corrected that is not."""
    if any(term.weighted for term in terms if not term.dynamic):
        return
    only = {"correction_weight"}
    idle = [name for name, stage in stages.get("corrections", ()) if {spec.name for spec in stage.gives} == only]
    idle += [term.name for term in terms if term.dynamic]
    if idle:
        fix = "remove it, or give algorithm.loss a policy term"
        raise refused(policy, f"the correction {idle[0]!r} weighs the policy term, and there is none", fix)
