"""Shared formulas in NumPy, for stages: advantages, whitening, KL estimators, denominators, mismatch.

Statistics are float64 and global over the batch that a stage is given. Grouping is by group identity, never by
position, and sums are exactly rounded, so the order of episodes changes no bit. Importing this module does not import
torch. An episode whose reward is NaN (failed, not rewarded, or excluded from the baseline) is in no statistic and gets
the advantage NaN.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from miles_core.aggregation import compile_weights, cut, with_weights
from miles_core.columns import Array, Batch
from miles_core.measures import EXP_LIMIT, batch_mismatch, mismatch

__all__ = [
    "all_equal",
    "batch_mismatch",
    "compile_weights",
    "cut",
    "group_advantages",
    "kl",
    "leave_one_out_advantages",
    "mismatch",
    "to_units",
    "whiten",
    "with_weights",
]

Estimator = Literal["k1", "k2", "k3", "low_var"]


def all_equal(values: Array) -> bool:
    """max − min ≤ 1e-6 · max(1, max|R|): a group without a signal."""
    return bool(len(values) == 0 or np.ptp(values) <= 1e-6 * max(1.0, float(np.abs(values).max())))


def group_advantages(
    reward: Array, group_of: Array, *, scale: Literal["std", "none"] = "std", ddof: int = 1, eps: float = 1e-6
) -> Array:
    """(R − mean of the group) / (std of the group + eps): float64 [episodes] from reward and group [episodes].

    `scale: none` only centres. A group of one gives 0; a group whose rewards are all equal gives exactly 0.
    """
    advantage = np.full(len(reward), np.nan)
    for members in _groups(reward, group_of):
        values = reward[members].astype(np.float64)
        if len(values) == 1 or all_equal(values):
            advantage[members] = 0.0
            continue
        centred = values - math.fsum(values) / len(values)
        if scale == "std":
            centred /= math.sqrt(math.fsum(centred**2) / (len(values) - ddof)) + eps
        advantage[members] = centred
    return advantage


def leave_one_out_advantages(reward: Array, group_of: Array) -> Array:
    """R_i − mean of the others in its group: float64 [episodes]; a group of one gives 0."""
    advantage = np.full(len(reward), np.nan)
    for members in _groups(reward, group_of):
        values = reward[members].astype(np.float64)
        n = len(values)
        if n == 1 or all_equal(values):
            advantage[members] = 0.0
            continue
        # R_i − (S − R_i) / (n − 1) = (R_i − mean) · n / (n − 1)
        advantage[members] = (values - math.fsum(values) / n) * (n / (n - 1))
    return advantage


def to_units(batch: Batch, per_episode: Array, mask: Array | None = None) -> Array:
    """[episodes] -> float32 [units], selected to 0 outside `mask` (default: the trainable units)."""
    mask = batch.columns["trainable"] if mask is None else mask
    spread = per_episode[batch.episode_of_unit] if batch.units else np.zeros(0)
    return np.where(mask, spread, 0.0).astype(np.float32)


def whiten(x: Array, mask: Array, *, shift_mean: bool = True) -> Array:
    """(x − μ) / √(var + 1e-8) over the masked units, two passes, ddof 1; float64, 0 outside the mask.

    `shift_mean: False` adds μ back. A single unit has var = 0.
    """
    values = x[mask].astype(np.float64)
    result = np.zeros(len(x))
    if not len(values):
        return result
    mean = values.mean()
    var = ((values - mean) ** 2).sum() / (len(values) - 1) if len(values) > 1 else 0.0
    white = (values - mean) / np.sqrt(var + 1e-8)
    result[mask] = white if shift_mean else white + mean
    return result


def kl(d: Array, estimator: Estimator) -> Array:
    """The estimator of KL per unit from d = π − π_ref (log-probabilities): float64."""
    value: Array = d.astype(np.float64)
    if estimator == "k2":
        value = value**2 / 2
    elif estimator == "k3":
        value = np.expm1(np.clip(-value, -EXP_LIMIT, EXP_LIMIT)) + value
    elif estimator == "low_var":
        value = np.clip(value, -EXP_LIMIT, EXP_LIMIT)
        value = np.clip(np.expm1(-value) + value, -10.0, 10.0)
    return value


def _groups(reward: Array, group_of: Array) -> list[Array]:
    """Indices of the rewarded episodes of each group."""
    rewarded = ~np.isnan(reward)
    return [np.flatnonzero((group_of == g) & rewarded) for g in np.unique(group_of[rewarded])]
