"""What a step measures on its batch, as (numerator, denominator): training against sampling, rewards, lengths.

Mismatch is trainer against engine, log w = π_p − π_b, over all trainable sampled tokens of the step, m before
rejection: mean and maximum of |log w|, k3(π_b‖π_p) = mean(w − 1 − log w), ESS = (Σw)² / (n Σw²).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles_core.columns import Array, Batch
from miles_core.records import Episode, Finish, Group, Metric, Origin, Status

EXP_LIMIT = 20.0


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


def rollout(groups: Sequence[Group]) -> dict[str, Metric]:
    """What was sampled: reward and its components per rewarded episode, tokens per trajectory, shares of episodes."""
    episodes = [e for g in groups for e in g.episodes]
    rewarded = [e for e in episodes if e.reward is not None and e.status is not Status.FAILED]
    rows = [t for e in episodes for t in e.trajectories]
    sampled = [float(sum(s.end - s.start for s in t.spans)) for t in rows]
    found: dict[str, Metric] = {
        "episodes": (float(len(episodes)), 1.0),
        "failed": (float(sum(e.status is Status.FAILED for e in episodes)), float(len(episodes))),
        "truncated": (float(sum(truncated(e) for e in episodes)), float(len(episodes))),
    }
    if rewarded:
        rewards = np.array([float(e.reward or 0.0) for e in rewarded])
        found["reward"] = (float(rewards.sum()), float(len(rewards)))
        found["reward_std"] = (float(rewards.std()), 1.0)
        equal = sum(_all_equal([e.reward for e in g.episodes if e.reward is not None]) for g in groups)
        found["groups_all_equal"] = (float(equal), float(len(groups)))
        for name in sorted({key for e in rewarded for key in e.components}):
            values = [e.components[name] for e in rewarded if name in e.components]
            found[f"reward.{name}"] = (float(np.sum(values)), float(len(values)))
    if any(sampled):
        found["tokens"] = (float(np.sum(sampled)), float(len(sampled)))
        found["max_tokens"] = (float(np.max(sampled)), 1.0)
    return found


def truncated(episode: Episode) -> bool:
    """Whether an episode ran out of tokens anywhere: said by its status or by an engine's finish reason."""
    return episode.status == Status.TRUNCATED or any(t.finish == Finish.LENGTH for t in episode.trajectories)


def all_equal(values: Array) -> bool:
    """max − min ≤ 1e-6 · max(1, max|R|): a group without a signal."""
    return bool(len(values) == 0 or np.ptp(values) <= 1e-6 * max(1.0, float(np.abs(values).max())))


def _all_equal(values: Sequence[float | None]) -> bool:
    return all_equal(np.array(values, np.float64))
