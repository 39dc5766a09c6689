"""Shared formulas in NumPy, for stages: advantages, returns, whitening, KL estimators, denominators, mismatch.

Statistics are float64 and global over the batch that a stage is given. Grouping is by group identity, never by
position, and sums are exactly rounded, so the order of episodes changes no bit. Importing this module does not import
torch. An episode whose reward is NaN (failed, not rewarded, or excluded from the baseline) is in no statistic and gets
the advantage NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from miles_core.aggregation import compile_weights, cut, with_weights
from miles_core.columns import Array, Batch
from miles_core.measures import EXP_LIMIT, batch_mismatch, mismatch

__all__ = [
    "all_equal",
    "batch_advantages",
    "batch_mismatch",
    "centred_advantages",
    "compile_weights",
    "cut",
    "discounted_sums",
    "explained_variance",
    "gae",
    "group_advantages",
    "kl",
    "leave_one_out_advantages",
    "mismatch",
    "to_units",
    "token_rewards",
    "whiten",
    "with_weights",
]

Estimator = Literal["k1", "k2", "k3", "low_var"]


def all_equal(values: Array | Sequence[float]) -> bool:
    """max − min ≤ 1e-6 · max(1, max|R|): a group without a signal."""
    return _all_equal(np.asarray(values, np.float64).tolist())


def _all_equal(values: list[float]) -> bool:
    high, low = max(values, default=0.0), min(values, default=0.0)
    return high - low <= 1e-6 * max(1.0, high, -low) and not any(map(math.isnan, values))


def group_advantages(
    reward: Array, group_of: Array, *, scale: Literal["std", "none"] = "std", ddof: int = 1, eps: float = 1e-6
) -> Array:
    """(R − mean of the group) / (std of the group + eps): float64 [episodes] from reward and group [episodes].

    `scale: none` only centres. A group of one gives 0; a group whose rewards are all equal (`all_equal`) gives exactly
    0. That is a rule of this advantage alone: the others here know only rewards that are the very same number.
    """

    def formula(values: list[float]) -> list[float]:
        if _all_equal(values):
            return [0.0] * len(values)
        return _scaled(values, ddof, eps) if scale == "std" else _centred(values)

    return _by_group(reward, group_of, formula)


def centred_advantages(reward: Array, group_of: Array) -> Array:
    """R − mean of the group: float64 [episodes]; a group of one gives 0."""
    return _by_group(reward, group_of, _centred)


def leave_one_out_advantages(reward: Array, group_of: Array) -> Array:
    """R_i − mean of the others in its group: float64 [episodes]; a group of one gives 0."""

    def formula(values: list[float]) -> list[float]:
        rest = len(values) / max(len(values) - 1, 1)  # R_i − (S − R_i) / (n − 1) = (R_i − mean) · n / (n − 1)
        return [value * rest for value in _centred(values)]

    return _by_group(reward, group_of, formula)


def batch_advantages(reward: Array, *, ddof: int = 1, eps: float = 1e-6) -> Array:
    """(R − mean) / (std + eps) over the rewarded episodes of the step: float64 [episodes]; one episode gives 0."""
    return _by_group(reward, np.zeros(len(reward), np.int64), lambda values: _scaled(values, ddof, eps))


def token_rewards(batch: Batch, penalty: Array | None = None) -> Array:
    """r_t of every unit, float64 [units]: R at the last trainable unit of *each* trajectory, minus `penalty` [units]
    (reward_kl.coef · kl_t) on trainable units; 0 where nothing is trained.

    Siblings share their episode's R. NaN where the episode has no reward.
    """
    mask = batch.columns["trainable"]
    rewards = np.zeros(batch.units)
    if penalty is not None:
        rewards[mask] = -penalty[mask].astype(np.float64)
    live = np.flatnonzero(mask)
    row = batch.trajectory_of_unit[live]
    last = live[np.append(row[1:] != row[:-1], True)] if len(live) else live
    rewards[last] += batch.columns["reward"][batch.episode_of_unit[last]]
    return rewards


def discounted_sums(x: Array, mask: Array, trajectory_of_unit: Array, factor: float) -> Array:
    """y_t = x_t + factor · y_{t'}, t' the next masked-in unit of the same trajectory, 0 beyond the last.

    float64 [units], 0 outside `mask`: masked units are skipped without decay. The recursion of `returns` (x = rewards,
    factor γ) and of GAE (x = δ, factor γλ).
    """
    result = np.zeros(len(x))
    live = np.flatnonzero(mask)
    if not len(live):
        return result
    row = trajectory_of_unit[live]
    values = x[live].astype(np.float64)
    first = np.flatnonzero(np.append(True, row[1:] != row[:-1]))  # where each trajectory's run of live units begins
    count = np.diff(np.append(first, len(live)))
    order = np.argsort(-count, kind="stable")  # longest first: at every step the unfinished ones are a prefix
    ends, count = (first + count - 1)[order], count[order]
    for back in range(1, int(count[0])):
        at = ends[: np.searchsorted(-count, -back, side="left")] - back
        values[at] += factor * values[at + 1]
    result[live] = values
    return result


def gae(
    rewards: Array,
    values: Array,
    mask: Array,
    trajectory_of_unit: Array,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: Array | None = None,
) -> tuple[Array, Array]:
    """Generalised advantage estimation on trainable units (arXiv 1506.02438): (A, A + V), float64 [units], 0 elsewhere.

    A_t = δ_t + γλ·A_{t'}, δ_t = r_t + γ·V_{t'} − V_t, with t' the next unit of `mask` in the same trajectory: units
    between them are skipped without decay. Beyond the last one A is 0, and V is `bootstrap` [trajectories] (default 0).
    `rewards` and `values` are float [units]; `values` hold the head's output at t−1.
    """
    live = np.flatnonzero(mask)
    row = trajectory_of_unit[live]
    value = values[live].astype(np.float64)
    following = np.append(value[1:], 0.0) if len(live) else value
    last = np.append(row[1:] != row[:-1], True) if len(live) else np.zeros(0, bool)
    following[last] = 0.0 if bootstrap is None else bootstrap[row[last]]
    delta, before = np.zeros(len(rewards)), np.zeros(len(rewards))
    delta[live] = rewards[live] + gamma * following - value
    before[live] = value
    advantages = discounted_sums(delta, mask, trajectory_of_unit, gamma * lam)
    return advantages, advantages + before


def explained_variance(returns: Array, values: Array, mask: Array) -> tuple[float, float]:
    """1 − Var(G − V) / Var(G) over the masked units, as (numerator, denominator); (0, 0) where nothing is masked in.

    1: V is right everywhere; 0: no better than a constant; below 0: worse.
    """
    g, v = returns[mask].astype(np.float64), values[mask].astype(np.float64)
    if not len(g):
        return 0.0, 0.0

    def spread(x: Array) -> float:
        centred = x - math.fsum(x.tolist()) / len(x)
        return math.fsum((centred**2).tolist())

    total = spread(g)
    return total - spread(g - v), total


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
    mean = math.fsum(values.tolist()) / len(values)
    var = math.fsum(((values - mean) ** 2).tolist()) / (len(values) - 1) if len(values) > 1 else 0.0
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


def _by_group(reward: Array, group_of: Array, formula: Callable[[list[float]], list[float]]) -> Array:
    """`formula` of each group's rewards, float64 [episodes]; NaN for episodes without a reward. A group's rewards are
    so few that Python's numbers cost less than arrays do."""
    values: list[float] = (reward.astype(np.float64) + 0.0).tolist()  # -0.0 is 0.0, in whatever order they come
    members: dict[int, list[int]] = {}
    for i, (g, value) in enumerate(zip(group_of.tolist(), values, strict=True)):
        if not math.isnan(value):
            members.setdefault(g, []).append(i)
    advantage = [math.nan] * len(values)
    for of_group in members.values():
        for i, value in zip(of_group, formula([values[i] for i in of_group]), strict=True):
            advantage[i] = value
    return np.array(advantage, np.float64)


def _centred(values: list[float]) -> list[float]:
    """x − mean, taken from differences to the smallest: the mean of numbers far from 0 would be rounded more than they
    differ, and the same number n times must give exactly 0."""
    low = min(values)
    above = [value - low for value in values]
    mean = math.fsum(above) / len(above)
    return [value - mean for value in above]


def _scaled(values: list[float], ddof: int, eps: float) -> list[float]:
    """(x − mean) / (std + eps); 0 where nothing differs, so also for one value."""
    centred = _centred(values)
    square = math.fsum([value * value for value in centred])
    scale = math.sqrt(square / (len(values) - ddof)) + eps if square else 0.0
    return [value / scale for value in centred] if scale else centred
