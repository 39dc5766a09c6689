"""What the loop reports: numbers of a batch and of an evaluation, and handing them to every tracker.

Metrics are (numerator, denominator). Those of a batch depend on its groups alone, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from miles_core.contracts.launcher import Tracker
from miles_core.errors import TrackerError, blamed
from miles_core.records import Finish, Group, Metric, Origin, Status


def rollout_metrics(groups: Sequence[Group], step: int) -> dict[str, Metric]:
    """Rewards, lengths, ends and lag of the groups that `step` consumes."""
    rewarded = failed = truncated = trajectories = tokens = lag_tokens = lag_sum = lag_max = spread = 0
    reward = 0.0
    components: dict[str, list[float]] = {}
    for group in groups:
        rewards: set[float] = set()
        for episode in group.episodes:
            failed += episode.status == Status.FAILED
            if episode.reward is not None:
                reward += episode.reward
                rewarded += 1
                rewards.add(episode.reward)
            for name, value in episode.components.items():
                entry = components.setdefault(name, [0.0, 0.0])
                entry[0] += value
                entry[1] += 1
            for trajectory in episode.trajectories:
                trajectories += 1
                truncated += trajectory.finish == Finish.LENGTH
                tokens += sampled(trajectory.columns, trajectory.length)
                for span in trajectory.spans:
                    lag = step - span.version.number
                    lag_tokens += span.end - span.start
                    lag_sum += lag * (span.end - span.start)
                    lag_max = max(lag_max, lag)
        spread += len(rewards) > 1
    out: dict[str, Metric] = {
        "tokens": (tokens, 1),
        "length": (tokens, trajectories),
        "truncated": (truncated, trajectories),
        "failed_episodes": (failed, 1),
    }
    if rewarded:
        out["reward"] = (reward, rewarded)
        out["mixed_groups"] = (spread, len(groups))
    if lag_tokens:
        out["lag"] = (lag_sum, lag_tokens)
        out["lag_max"] = (lag_max, 1)
    return out | {f"reward.{name}": (total, count) for name, (total, count) in sorted(components.items())}


def evaluation_metrics(results: Sequence[tuple[str, Group]]) -> dict[str, Metric]:
    """Mean reward of an evaluation over all tasks (a failed episode counts as 0), and for each of several
    environments."""
    out: dict[str, Metric] = {}
    environments = sorted({env for env, _ in results})
    for prefix, chosen in (
        ("", results),
        *((f"/{env}", [r for r in results if r[0] == env]) for env in environments if len(environments) > 1),
    ):
        rewards = [e.reward or 0.0 for _, group in chosen for e in group.episodes]
        trajectories = [t for _, group in chosen for e in group.episodes for t in e.trajectories]
        out[f"reward{prefix}"] = (float(sum(rewards)), len(rewards))
        out[f"length{prefix}"] = (sum(sampled(t.columns, t.length) for t in trajectories), len(trajectories))
    out["failed_episodes"] = (sum(e.status == Status.FAILED for _, g in results for e in g.episodes), 1)
    return out


def sampled(columns: Mapping[str, Any], length: int) -> int:
    """How many tokens of a trajectory the model wrote (all of them, on an axis without origins)."""
    origin = columns.get("origin")
    return length if origin is None else int(np.count_nonzero(np.asarray(origin) == Origin.SAMPLED))


def told(tracker: Tracker) -> AbstractContextManager[None]:
    """Where a tracker is told something: what it raises is a `TrackerError` that names it."""
    return blamed(f"tracker {type(tracker).__name__} failed", TrackerError, "mend or leave it out, then use --resume")


class Reports:
    """All trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def event(self, kind: str, **fields: Any) -> None:
        for tracker in self._trackers:
            with told(tracker):
                tracker.event(kind, fields)

    def metrics(self, step: int, values: Mapping[str, Metric], policy: str) -> None:
        """`values` by `side/name`; each side goes out once."""
        sides: dict[str, dict[str, Metric]] = {}
        for key, value in values.items():
            side, _, name = key.partition("/")
            sides.setdefault(side, {})[name] = value
        for side, named in sides.items():
            for tracker in self._trackers:
                with told(tracker):
                    tracker.metrics(step, side, named, policy)
