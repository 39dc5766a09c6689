"""Metrics of a training step as (numerator, denominator): how they add up, and training against sampling.

Mismatch is trainer against engine, log w = π_p − π_b, over all trainable sampled tokens of the step, m before
rejection: mean and maximum of |log w|, k3(π_b‖π_p) = mean(w − 1 − log w), ESS = (Σw)² / (n Σw²).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from miles_core.columns import Array, Batch
from miles_core.records import Metric, Origin

#: The argument of every `exp` is clamped to this range; beyond it the gradient is zero.
EXP_LIMIT = 20.0


def is_max(name: str) -> bool:
    """Whether this metric's numerators are combined by the maximum, not by the sum: its last part says so."""
    return name.rpartition("/")[2].startswith("max_")


def add(total: dict[str, Metric], more: Mapping[str, Metric]) -> None:
    """Add the metrics of a further update to `total`, in place."""
    for name, (num, den) in more.items():
        old = total.get(name, (num, den) if is_max(name) else (0.0, 0.0))
        total[name] = (max(old[0], num), den) if is_max(name) else (old[0] + num, old[1] + den)


def mismatch(proximal: Array, behaviour: Array, mask: Array) -> dict[str, Metric]:
    """Float [units] log-probabilities and bool [units]; empty where nothing is masked in."""
    log_w = proximal[mask].astype(np.float64) - behaviour[mask].astype(np.float64)
    n = float(len(log_w))
    if not n:
        return {}
    w = np.exp(np.clip(log_w, -EXP_LIMIT, EXP_LIMIT))
    return {
        "mismatch/abs": (float(np.abs(log_w).sum()), n),
        "mismatch/max_abs": (float(np.abs(log_w).max()), 1.0),
        "mismatch/k3": (float((w - 1.0 - log_w).sum()), n),
        "mismatch/ess": (float(w.sum() ** 2), float(n * (w * w).sum())),
    }


def batch_mismatch(batch: Batch) -> dict[str, Metric]:
    """`mismatch` of a scored batch; empty without both log-probabilities."""
    columns = batch.columns
    if "proximal_logprobs" not in columns or "behaviour_logprobs" not in columns:
        return {}
    mask = columns["trainable"]
    if "origin" in columns:  # the token axis: demonstrations have no behaviour
        mask = mask & (columns["origin"] == Origin.SAMPLED)
    return mismatch(columns["proximal_logprobs"], columns["behaviour_logprobs"], mask)


def by_episode(batch: Batch, penalties: Sequence[str]) -> Callable[[str], dict[str, float]]:
    """What training made of an episode, by its id: its penalties, and the mean advantage of what of it was trained."""
    found = {"advantage": _episode_mean(batch, batch.columns["advantages"])} if "advantages" in batch.columns else {}
    found |= {name: batch.columns[name] for name in penalties}
    ids = batch.episode_ids

    def of(episode: str) -> dict[str, float]:
        told = {name: float(values[ids.index(episode)]) for name, values in found.items() if episode in ids}
        return {name: value for name, value in told.items() if math.isfinite(value)}

    return of


def _episode_mean(batch: Batch, values: Array) -> Array:
    """float64 [n_episodes]: the mean over kept units, NaN where there are none."""
    of, n = batch.episode_of_unit[batch.kept], batch.n_episodes
    count = np.bincount(of, minlength=n)
    total = np.bincount(of, values[batch.kept], minlength=n)
    mean: Array = np.divide(total, count, out=np.full(n, np.nan), where=count > 0)
    return mean
