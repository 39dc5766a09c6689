"""Stages: the advantages `group`, `leave_one_out`, `batch`, `centred`, `returns`; `reward_kl`; `whiten`; `overlong`.

The batch's column `reward` is R: the environment's reward and all penalties. An episode without a reward is in no
statistic; where it is trainable its advantage is NaN, which core refuses by name. The column `reward_kl` (float32 per
unit, coef · kl_t) exists only where that stage is built; what reads it is told so when it is built itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from miles_algo_grpo import config as c
from miles_core.columns import CORE_COLUMNS, Array, Batch, ColumnSpec, Level
from miles_core.contracts.learning import StageOutput
from miles_core.numerics import host
from miles_core.records import Metric, Origin

ADVANTAGES = CORE_COLUMNS["advantages"]
REWARD_KL = ColumnSpec(
    name="reward_kl", level=Level.UNIT, dtype="float32", help="coef · kl_t, taken off the reward of each trainable unit"
)


class EpisodeAdvantage:
    """A stage from a function (reward [episodes], group [episodes]) -> advantage float64 [episodes].

    Metrics: `zero` (share of rewarded episodes whose advantage is 0) and `abs` (mean of its size).
    """

    needs = frozenset({"reward"})
    gives = (ADVANTAGES,)

    def __init__(self, formula: Callable[[Array, Array], Array]) -> None:
        self._formula = formula

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        per_episode = self._formula(batch.columns["reward"], batch.group_of)
        rewarded = per_episode[np.isfinite(per_episode)]
        count = float(len(rewarded))
        return StageOutput(
            columns={"advantages": host.to_units(batch, per_episode)},
            metrics={"zero": (float((rewarded == 0).sum()), count), "abs": (float(np.abs(rewarded).sum()), count)},
        )


def group(config: c.GroupConfig) -> EpisodeAdvantage:
    """(R − mean of the group) / (std of the group + eps); only centred under `scale: none`."""

    def formula(reward: Array, group_of: Array) -> Array:
        return host.group_advantages(reward, group_of, scale=config.scale.value, ddof=config.ddof, eps=config.eps)

    return EpisodeAdvantage(formula)


def leave_one_out() -> EpisodeAdvantage:
    """R − mean of the others in the group."""
    return EpisodeAdvantage(host.leave_one_out_advantages)


def batch(config: c.BatchConfig) -> EpisodeAdvantage:
    """(R − mean) / (std + eps) over the episodes of the step."""
    return EpisodeAdvantage(lambda reward, _: host.batch_advantages(reward, ddof=config.ddof, eps=config.eps))


@dataclass(frozen=True, kw_only=True)
class UnitAdvantage:
    """A stage from a function (batch, reward_kl [units] or None) -> advantage float64 [units].

    `reads_kl`: whether the column `reward_kl` is there. Metric: `abs`, the mean size over trainable units.
    """

    formula: Callable[[Batch, Array | None], Array]
    reads_kl: bool = False
    gives: tuple[ColumnSpec, ...] = (ADVANTAGES,)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"reward", "reward_kl"} if self.reads_kl else {"reward"})

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        live = batch.columns["trainable"]
        found = self.formula(batch, batch.columns["reward_kl"] if self.reads_kl else None)
        column = np.where(live, found, 0.0).astype(np.float32)
        return StageOutput(columns={"advantages": column}, metrics={"abs": _mean(np.abs(column[live]))})


def centred(reads_kl: bool = False) -> UnitAdvantage:
    """(R − mean of the group) − reward_kl.coef · kl_t."""

    def formula(batch: Batch, kl: Array | None) -> Array:
        episodes = host.centred_advantages(batch.columns["reward"], batch.group_of)
        units = episodes[batch.episode_of_unit] if batch.units else np.zeros(0)
        return units if kl is None else units - kl.astype(np.float64)

    return UnitAdvantage(formula=formula, reads_kl=reads_kl)


def returns(config: c.ReturnsConfig, reads_kl: bool = False) -> UnitAdvantage:
    """Σ over later trainable units of γ^n · r, with r = −reward_kl.coef · kl_t, and R at each trajectory's last one."""

    def formula(batch: Batch, kl: Array | None) -> Array:
        rewards = host.token_rewards(batch, kl)
        return host.discounted_sums(rewards, batch.columns["trainable"], batch.trajectory_of_unit, config.gamma)

    return UnitAdvantage(formula=formula, reads_kl=reads_kl)


@dataclass(frozen=True)
class Whiten:
    """(A − μ)/√(var + 1e-8), two passes, ddof 1, over all trainable units of the step; `shift_mean: false` adds μ back.

    Metrics: `mean` and `std` of what came in.
    """

    config: c.WhitenConfig
    needs: frozenset[str] = frozenset({"advantages"})
    gives: tuple[ColumnSpec, ...] = (ADVANTAGES,)

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        live, found = batch.columns["trainable"], batch.columns["advantages"]
        white = host.whiten(found, live, shift_mean=self.config.shift_mean)
        values = found[live].astype(np.float64)
        spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
        metrics = {"mean": _mean(values), "std": (spread, 1.0)}
        return StageOutput(columns={"advantages": white.astype(np.float32)}, metrics=metrics)


@dataclass(frozen=True)
class RewardKl:
    """coef · estimator(π_p, π_ref) per trainable unit, float32; 0 elsewhere. Metric: `kl`, the estimator's mean."""

    config: c.RewardKlConfig
    needs: frozenset[str] = frozenset({"proximal_logprobs", "reference.logprobs"})
    gives: tuple[ColumnSpec, ...] = (REWARD_KL,)

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        live = batch.columns["trainable"]
        proximal, reference = batch.columns["proximal_logprobs"], batch.columns["reference.logprobs"]
        kl = host.kl(proximal[live].astype(np.float64) - reference[live], self.config.estimator.value)
        column = np.zeros(batch.units, np.float32)
        column[live] = self.config.coef * kl
        return StageOutput(columns={"reward_kl": column}, metrics={"kl": _mean(kl)})


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """reward.overlong = −penalty · clamp((len − (L_max − L_buf)) / L_buf, 0, 1), float64 per episode.

    len: sampled tokens of the episode's longest trajectory. Metric: `episodes`, the share that is penalised.
    """

    max_length: int
    buffer: float
    penalty: float
    needs: frozenset[str] = frozenset({"origin"})
    gives: tuple[ColumnSpec, ...] = field(
        default=(ColumnSpec(name="reward.overlong", level=Level.EPISODE, dtype="float64", help="penalty of length"),)
    )

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        sampled = batch.columns["origin"] == Origin.SAMPLED
        tokens = np.bincount(batch.trajectory_of_unit, weights=sampled, minlength=batch.n_trajectories)
        longest = np.zeros(batch.n_episodes)
        np.maximum.at(longest, batch.episode_of, tokens)
        share = np.clip((longest - (self.max_length - self.buffer)) / self.buffer, 0.0, 1.0)
        return StageOutput(
            columns={"reward.overlong": 0.0 - self.penalty * share},
            metrics={"episodes": (float((share > 0).sum()), float(batch.n_episodes))},
        )


def _mean(values: Array) -> Metric:
    return float(values.sum(dtype=np.float64)), float(len(values))
