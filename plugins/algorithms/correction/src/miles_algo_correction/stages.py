"""The static corrections (NumPy, on the whole step): `tis`, `icepop`, `mis`, `bypass`.

Each computes its weight and its rejections from π_p and π_b alone, with m before rejection; core multiplies the weights
of several and unites their rejections. Metrics are shares of the trainable sampled tokens of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from miles_algo_correction.config import IcepopConfig, Level, MisConfig, Mode, Normalize, TisConfig
from miles_algo_correction.weights import LogWeights
from miles_core.columns import CORE_COLUMNS, Array, Batch, ColumnSpec
from miles_core.contracts.learning import StageOutput
from miles_core.errors import LearnerError
from miles_core.records import Origin

NEEDS = frozenset({"proximal_logprobs", "behaviour_logprobs"})


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a formula made of log w: `weight` float [units]; `rejected` bool [units] or none; `shares`: name -> bool
    [units], reported as metrics."""

    weight: Array
    rejected: Array | None = None
    shares: Mapping[str, Array] = field(default_factory=dict)


class Correction:
    """A stage from a formula of `LogWeights`. Metrics: `weight` (its mean over what is kept), and the shares."""

    needs = NEEDS

    def __init__(self, formula: Callable[[LogWeights], Found], *, rejects: bool = False) -> None:
        self._formula = formula
        names = ("correction_weight", "rejected") if rejects else ("correction_weight",)
        self.gives: tuple[ColumnSpec, ...] = tuple(CORE_COLUMNS[name] for name in names)

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        logs = LogWeights.of(batch)
        found = self._formula(logs)
        mask, trainable = logs.mask, batch.columns["trainable"]
        columns: dict[str, Array] = {"correction_weight": np.where(mask, found.weight, 1.0).astype(np.float32)}
        kept = mask
        if len(self.gives) > 1:
            rejected = np.zeros(batch.units, bool) if found.rejected is None else found.rejected & trainable
            columns["rejected"] = rejected
            kept = mask & ~rejected
        n = float(mask.sum())
        shares = {name: (float((flag & mask).sum()), n) for name, flag in found.shares.items()}
        weight = (float(found.weight[kept].sum(dtype=np.float64)), float(kept.sum()))
        return StageOutput(columns=columns, metrics={"weight": weight, **shares})


def tis(config: TisConfig) -> Correction:
    """clamp(w, 0, high). Metric: truncated."""

    def formula(logs: LogWeights) -> Found:
        w = logs.at(config.level)
        return Found(weight=np.minimum(w, config.high), shares={"truncated": w > config.high})

    return Correction(formula)


def icepop(config: IcepopConfig) -> Correction:
    """w where low ≤ w ≤ high, else 0: a weight of the policy term, no rejection. Metric: zeroed."""

    def formula(logs: LogWeights) -> Found:
        w = logs.at(config.level)
        outside = (w < config.low) | (w > config.high)
        return Found(weight=np.where(outside, np.float32(0), w), shares={"zeroed": outside})

    return Correction(formula)


def mis(config: MisConfig) -> Correction:
    """Bounds, then this rule's own rejection (mode `mask`, the rejection rule, veto), then normalisation over the step.

    Metrics: truncated (modes `truncate` and `clip`), rejected, and vetoed where there is a veto.
    """
    low, high = config.lowest, config.high
    rejects = config.mode is Mode.mask or config.reject is not None or config.veto is not None

    def formula(logs: LogWeights) -> Found:
        w = logs.at(config.level)
        rejected = np.zeros(len(w), bool)
        shares: dict[str, Array] = {}
        if config.mode is Mode.mask:
            weight, rejected = w, (w < low) | (w > high)
        elif config.mode is Mode.clip:
            weight, shares["truncated"] = np.clip(w, low, high), (w < low) | (w > high)
        else:
            weight, shares["truncated"] = np.minimum(w, high), w > high
        if rule := config.reject:
            other = logs.at(rule.level)
            rejected = rejected | (other < rule.lowest) | (other > rule.high)
        if config.veto is not None:
            bad = logs.at(Level.token) < config.veto  # a token outside m has w = 1
            shares["vetoed"] = np.bincount(logs.row[bad], minlength=logs.rows)[logs.row] > 0
            rejected = rejected | shares["vetoed"]
        if rejects:
            shares["rejected"] = rejected
        if config.normalize is Normalize.batch:
            weight = weight / _mean(logs, weight, logs.mask & ~rejected, config.level)
        return Found(weight=weight, rejected=rejected, shares=shares)

    return Correction(formula, rejects=rejects)


def _mean(logs: LogWeights, weight: Array, kept: Array, level: Level) -> float:
    """The mean weight of the kept tokens; at level `sequence`, of the trajectories that keep any. 1 where none is."""
    if level is Level.sequence:
        _, first = np.unique(logs.row[kept], return_index=True)
        values = weight[kept][first]
    else:
        values = weight[kept]
    mean = float(values.mean(dtype=np.float64)) if len(values) else 1.0
    return mean or 1.0


class Bypass:
    """π_p := π_b. Where one update a step needs no other π_p, there is no score pass at all.

    Raises `LearnerError` where a trainable token was not sampled: it has no behaviour that could stand for π_p.
    """

    needs = frozenset({"behaviour_logprobs"})
    gives = (CORE_COLUMNS["proximal_logprobs"],)

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        trainable = batch.columns["trainable"]
        stray = trainable & (batch.columns["origin"] != Origin.SAMPLED) if "origin" in batch.columns else trainable[:0]
        if stray.any():
            row = batch.trajectory_ids[int(batch.trajectory_of_unit[np.flatnonzero(stray)[0]])]
            raise LearnerError(
                f"bypass takes the engine's log-probabilities, and {int(stray.sum())} trainable tokens were not "
                f"sampled by an engine, the first of them in trajectory {row!r}",
                fix="use tis or mis, which leave such tokens alone",
            )
        return StageOutput(
            columns={"proximal_logprobs": np.where(trainable, batch.columns["behaviour_logprobs"], np.float32(0))}
        )
