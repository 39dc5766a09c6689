"""Toy stages, terms and filter: every field of `algorithm` has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.columns import CORE_COLUMNS, Batch, ColumnSpec, Level
from miles_core.contracts.learning import (
    ENTROPY,
    LOGPROBS,
    Output,
    StageOutput,
    TermLevel,
    TermMask,
    TermOutput,
    View,
)
from miles_core.testing.toys.autodiff import value_of

if TYPE_CHECKING:
    from miles_core.records import Group
    from miles_core.testing.toys.config import StageConfig, TermConfig

ADVANTAGES = CORE_COLUMNS["advantages"]


class CentredAdvantage:
    """Field `advantage`: reward minus the mean of its group, on every trainable token; a group of one gives 0.

    Episodes without a reward (NaN) count nowhere and get 0.
    """

    needs: frozenset[str] = frozenset({"reward"})
    gives = (ADVANTAGES,)

    def __init__(self, config: StageConfig) -> None:
        self._coef = config.coef

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        rewarded = ~np.isnan(batch.columns["reward"])
        reward = np.where(rewarded, batch.columns["reward"], 0.0)
        count = np.bincount(batch.group_of[rewarded], minlength=batch.n_groups)
        total = np.bincount(batch.group_of[rewarded], weights=reward[rewarded], minlength=batch.n_groups)
        mean = total / np.maximum(count, 1)
        centred = np.where(rewarded, reward - mean[batch.group_of], 0.0) * self._coef
        column = np.where(batch.columns["trainable"], centred[batch.episode_of_unit], 0.0)
        return StageOutput(
            columns={"advantages": column.astype(np.float32)},
            metrics={"advantage_abs": (float(np.abs(centred).sum()), float(len(centred)))},
        )


class PenalisedAdvantage(CentredAdvantage):
    """Field `advantage`: as `CentredAdvantage`, minus the column that `RewardKL` writes."""

    needs: frozenset[str] = frozenset({"reward", "toy.reward_kl"})

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        centred = super().__call__(batch, rng).columns["advantages"]
        return StageOutput(columns={"advantages": (centred - batch.columns["toy.reward_kl"]).astype(np.float32)})


class LengthPenalty:
    """Field `penalty`: minus `coef` for each sampled token of the episode."""

    needs: frozenset[str] = frozenset({"trainable"})
    gives = (ColumnSpec(name="reward.toy", level=Level.EPISODE, dtype="float64"),)

    def __init__(self, config: StageConfig) -> None:
        self._coef = config.coef

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        tokens = np.bincount(batch.episode_of_unit, weights=batch.columns["trainable"], minlength=batch.n_episodes)
        return StageOutput(columns={"reward.toy": -self._coef * tokens})


class RewardKL:
    """Field `reward_kl`: k1 to the reference, as a column and a metric."""

    needs: frozenset[str] = frozenset({"proximal_logprobs", "reference.logprobs"})
    gives = (ColumnSpec(name="toy.reward_kl", level=Level.UNIT, dtype="float32"),)

    def __init__(self, config: StageConfig) -> None:
        self._coef = config.coef

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        kept = batch.columns["trainable"]
        kl = np.where(kept, batch.columns["proximal_logprobs"] - batch.columns["reference.logprobs"], 0.0)
        metric = (float(kl.sum()), float(kept.sum()))
        return StageOutput(columns={"toy.reward_kl": (self._coef * kl).astype(np.float32)}, metrics={"kl": metric})


class Distill:
    """Field `distill`: A minus coef · (π_p − π_T) with the column `teacher.logprobs`."""

    needs: frozenset[str] = frozenset({"advantages", "proximal_logprobs", "teacher.logprobs"})
    gives = (ADVANTAGES,)

    def __init__(self, config: StageConfig) -> None:
        self._coef = config.coef

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        kept = batch.columns["trainable"]
        gap = np.where(kept, batch.columns["proximal_logprobs"] - batch.columns["teacher.logprobs"], 0.0)
        return StageOutput(columns={"advantages": (batch.columns["advantages"] - self._coef * gap).astype(np.float32)})


class Whiten:
    """Field `whiten`: advantages to mean 0 and variance 1 over all trainable tokens of the step."""

    needs: frozenset[str] = frozenset({"advantages"})
    gives = (ADVANTAGES,)

    def __init__(self, config: StageConfig) -> None:
        self._coef = config.coef

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        kept = batch.columns["trainable"]
        x = batch.columns["advantages"].astype(np.float64)
        n = int(kept.sum())
        mean = x[kept].mean() if n else 0.0
        var = ((x[kept] - mean) ** 2).sum() / max(n - 1, 1)
        white = np.where(kept, self._coef * (x - mean) / np.sqrt(var + 1e-8), 0.0)
        return StageOutput(columns={"advantages": white.astype(np.float32)})


class Correction:
    """Field `correction`, static: exp(π_p − π_b) bounded by `high`; with `reject`, tokens beyond it are rejected."""

    needs: frozenset[str] = frozenset({"proximal_logprobs", "behaviour_logprobs"})

    def __init__(self, config: StageConfig) -> None:
        self._high = config.high
        self._reject = config.reject
        names = ("correction_weight", "rejected") if config.reject else ("correction_weight",)
        self.gives = tuple(CORE_COLUMNS[name] for name in names)

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        kept = batch.columns["trainable"]
        log_w = np.where(kept, batch.columns["proximal_logprobs"] - batch.columns["behaviour_logprobs"], 0.0)
        w = np.exp(np.clip(log_w, -20.0, 20.0))
        columns: dict[str, Any] = {"correction_weight": np.minimum(w, self._high).astype(np.float32)}
        if self._reject:
            columns["rejected"] = kept & (w > self._high)
        return StageOutput(columns=columns, metrics={"weight": (float((w * kept).sum()), float(kept.sum()))})


class _Term:
    level: TermLevel = "unit"
    mask: TermMask = "kept"
    weighted = False
    aggregation: str | None = None
    outputs: tuple[Output, ...] = (LOGPROBS,)
    needs: frozenset[str] = frozenset()

    def __init__(self, config: TermConfig) -> None:
        self._clip = config.clip


class Policy(_Term):
    """Field `loss`: max(−ρA, −clip(ρ)A)."""

    weighted = True
    needs: frozenset[str] = frozenset({"advantages"})

    def __call__(self, view: View) -> TermOutput:
        a = view["advantages"]
        log_ratio = view.out(LOGPROBS) - value_of(view["proximal_logprobs"])
        ratio = np.exp(np.clip(log_ratio, -20.0, 20.0))
        value = np.maximum(-ratio * a, -np.clip(ratio, 1.0 - self._clip, 1.0 + self._clip) * a)
        return TermOutput(value=value, metrics={"approx_kl": -value_of(log_ratio)})


class Supervised(_Term):
    """Field `loss`: minus the log-probability of demonstrations."""

    weighted = True

    def __call__(self, view: View) -> TermOutput:
        return TermOutput(value=-view.out(LOGPROBS))


class Sequence(_Term):
    """Field `loss`, level trajectory: −A · Σ π, one value per trajectory."""

    level: TermLevel = "trajectory"
    needs: frozenset[str] = frozenset({"advantages"})

    def __call__(self, view: View) -> TermOutput:
        total = view.atom_sum(view.out(LOGPROBS) * view["advantages"])
        return TermOutput(value=-total, metrics={"sum": value_of(total)})


class ReferenceKL(_Term):
    """Field `kl`: k2 = d²/2 with d = π − π_ref."""

    REFERENCE = Output(name="logprobs", role="reference")
    outputs: tuple[Output, ...] = (LOGPROBS, REFERENCE)

    def __call__(self, view: View) -> TermOutput:
        d = view.out(LOGPROBS) - value_of(view.out(self.REFERENCE))
        return TermOutput(value=d * d * 0.5, metrics={"k1": value_of(d)})


class Entropy(_Term):
    """Field `entropy`: minus the entropy, so that a positive coefficient raises it."""

    outputs: tuple[Output, ...] = (ENTROPY,)

    def __call__(self, view: View) -> TermOutput:
        h = view.out(ENTROPY)
        return TermOutput(value=-h, metrics={"entropy": value_of(h)})


class Value(_Term):
    """Field `value`: squared error of the critic against the sum of the episode's reward."""

    VALUES = Output(name="values", role="critic", grad=True)
    mask: TermMask = "trainable"
    outputs: tuple[Output, ...] = (VALUES,)
    needs: frozenset[str] = frozenset({"reward"})

    def __call__(self, view: View) -> TermOutput:
        error = view.out(self.VALUES) - np.nan_to_num(view["reward"])
        return TermOutput(value=error * error)


class Weight(_Term):
    """Field `correction`, dynamic: 0 where the ratio has left [1 − clip, 1 + clip], else 1."""

    needs: frozenset[str] = frozenset({"proximal_logprobs"})

    def __call__(self, view: View) -> TermOutput:
        ratio = np.exp(np.clip(value_of(view.out(LOGPROBS)) - value_of(view["proximal_logprobs"]), -20.0, 20.0))
        inside = (np.abs(ratio - 1.0) <= self._clip).astype(np.float64)
        return TermOutput(value=inside, metrics={"inside": inside})


class SpreadFilter:
    """Rejects a group whose rewards do not spread by more than `minimum`."""

    def __init__(self, minimum: float) -> None:
        self._minimum = minimum

    def __call__(self, group: Group) -> str | None:
        rewards = [e.reward for e in group.episodes if e.reward is not None]
        spread = max(rewards) - min(rewards) if rewards else 0.0
        return None if spread > self._minimum else f"rewards spread by {spread:g}"
