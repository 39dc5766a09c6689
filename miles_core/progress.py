"""What the loop reports: numbers of a batch and of an evaluation, and handing them to every tracker.

Metrics are (numerator, denominator). Those of a batch depend on its groups alone, in their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miles_core.contracts.launcher import Tracker
from miles_core.errors import TrackerError, blamed
from miles_core.records import Finish, Group, Metric, Origin, Status, Trajectory


def rollout_metrics(groups: Sequence[Group], step: int) -> dict[str, Metric]:
    """Rewards, lengths, ends and lag of the groups that `step` consumes."""
    episodes = [e for group in groups for e in group.episodes]
    trajectories = [t for e in episodes for t in e.trajectories]
    lags = Counter[int]()  # lag -> tokens
    for trajectory in trajectories:
        for span in trajectory.spans:
            lags[step - span.version.number] += span.end - span.start
    tokens = lags.total() if all([t.spans for t in trajectories]) else sum(map(sampled, trajectories))
    out: dict[str, Metric] = {
        "tokens": (tokens, 1),
        "length": (tokens, len(trajectories)),
        "truncated": ([t.finish for t in trajectories].count(Finish.LENGTH), len(trajectories)),
    }
    rewards = [e.reward for e in episodes if e.reward is not None]
    if rewards:
        mixed = sum(len({e.reward for e in group.episodes} - {None}) > 1 for group in groups)
        out["reward"] = (sum(rewards), len(rewards))
        out["mixed_groups"] = (mixed, len(groups))
    if lags:
        out["lag"] = (sum(lag * n for lag, n in lags.items()), lags.total())
        out["lag_max"] = (max(lags), 1)
    for name in sorted({name for e in episodes for name in e.components}):
        values = [e.components[name] for e in episodes if name in e.components]
        out[f"reward.{name}"] = (sum(values), len(values))
    return out


def evaluation_metrics(results: Sequence[tuple[str, Group]]) -> dict[str, Metric]:
    """Mean reward of an evaluation over all tasks (a failed episode counts as 0), and for each of several
    environments."""
    out: dict[str, Metric] = {}
    environments = sorted({env for env, _ in results})
    parts = {f"/{env}": [r for r in results if r[0] == env] for env in environments if len(environments) > 1}
    for prefix, chosen in ({"": results} | parts).items():
        rewards = [e.reward or 0.0 for _, group in chosen for e in group.episodes]
        trajectories = [t for _, group in chosen for e in group.episodes for t in e.trajectories]
        out[f"reward{prefix}"] = (float(sum(rewards)), len(rewards))
        out[f"length{prefix}"] = (sum(map(sampled, trajectories)), len(trajectories))
    out["failed_episodes"] = (sum(e.status == Status.FAILED for _, g in results for e in g.episodes), 1)
    return out


def sampled(trajectory: Trajectory) -> int:
    """How many tokens of a trajectory the model wrote (all of them, on an axis without origins)."""
    if trajectory.spans:  # they cover exactly what was sampled
        return sum([span.end - span.start for span in trajectory.spans])
    origin = trajectory.columns.get("origin")
    return trajectory.length if origin is None else int(np.count_nonzero(np.asarray(origin) == Origin.SAMPLED))


class Reports:
    """All trackers as one, from before they exist to after they are closed. What one raises is a `TrackerError`."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self.trackers = tuple(trackers)

    def start(self, info: Mapping[str, Any]) -> None:
        self._tell("start", info)

    def event(self, kind: str, /, **fields: Any) -> None:
        self._tell("event", kind, fields)

    def metrics(self, step: int, values: Mapping[str, Metric], policy: str) -> None:
        """`values` by `side/name`; each side goes out once."""
        sides: dict[str, dict[str, Metric]] = {}
        for key, value in values.items():
            side, _, name = key.partition("/")
            sides.setdefault(side, {})[name] = value
        for side, named in sides.items():
            self._tell("metrics", step, side, named, policy)

    def close(self, status: str) -> None:
        closing, self.trackers = Reports(self.trackers), ()
        closing._tell("close", status)

    def _tell(self, method: str, *args: Any) -> None:
        for tracker in self.trackers:
            with blamed(f"tracker {type(tracker).__name__} failed", TrackerError, "mend or leave it out and --resume"):
                getattr(tracker, method)(*args)
