"""Penalties (NumPy, on the whole step): `compose`, `rank`, `duplicates`. Each writes `reward.<its instance>`.

R is Episode.reward plus all `reward.<penalty>`; `Episode.reward` itself is never rewritten, so a weight of it other
than 1 is the column (base − 1) · Episode.reward. An episode without a reward (failed, or excluded) gains 0, and is
ranked in no group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from miles_algo_rewards.config import Absent, ComposeConfig, DuplicatesConfig, RankConfig, Siblings
from miles_core.columns import Array, Batch, ColumnSpec, Level
from miles_core.contracts.learning import StageOutput
from miles_core.errors import LearnerError
from miles_core.records import Metric, Origin


def _spec(name: str) -> ColumnSpec:
    return ColumnSpec(name=f"reward.{name}", level=Level.EPISODE, dtype="float64", help="what a penalty adds to R")


class Components:
    """Finds named components of a step's episodes.

    `scored` are the columns of scorers among `names`, which must be asked for; what an environment reports is there.
    """

    def __init__(self, names: Sequence[str], siblings: Siblings, absent: Absent) -> None:
        self.scored = frozenset(name for name in names if name.endswith(".reward"))
        self._siblings = siblings
        self._absent = absent

    def of(self, batch: Batch, name: str) -> Array:
        """float64 [episodes]. Raises `LearnerError` where no episode reports it, unless it may be absent."""
        if name == "reward":
            return batch.columns["reward"]
        if name in self.scored:
            return self._of_trajectories(batch, batch.columns[name].astype(np.float64))
        column = batch.columns.get(f"reward.{name}")
        if column is not None:
            return column
        if self._absent is Absent.zero or not np.isfinite(batch.columns["reward"]).any():
            return np.zeros(batch.n_episodes)
        reported = sorted(c.removeprefix("reward.") for c in batch.columns if c.startswith("reward."))
        raise LearnerError(
            f"step {batch.step}: no episode reports the component {name!r}; reported: {', '.join(reported) or 'none'}",
            fix=f"name one of them, or {name}.reward for the scorer {name!r}, or write absent: zero where an "
            "environment reports it only sometimes",
        )

    def _of_trajectories(self, batch: Batch, values: Array) -> Array:
        """An episode's number out of its trajectories'; 0 where it has none."""
        found = np.zeros(batch.n_episodes)
        if not len(values):
            return found
        ends = np.append(np.flatnonzero(np.diff(batch.episode_of)), len(values) - 1)
        starts = np.append(0, ends[:-1] + 1)
        here = batch.episode_of[ends]
        if self._siblings is Siblings.last:
            found[here] = values[ends]
        elif self._siblings is Siblings.mean:
            found[here] = np.add.reduceat(values, starts) / (ends - starts + 1)
        else:
            reduce = np.minimum if self._siblings is Siblings.min else np.maximum
            found[here] = reduce.reduceat(values, starts)
        return found


class Compose:
    """Σ weight · component + (base − 1) · Episode.reward. Metrics: the mean of each component."""

    def __init__(self, name: str, config: ComposeConfig) -> None:
        self._config = config
        self._components = Components(tuple(config.weights), config.siblings, config.absent)
        self.needs = frozenset({"reward"}) | self._components.scored
        self.gives = (_spec(name),)

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        rewarded = np.isfinite(batch.columns["reward"])
        total = (self._config.base - 1.0) * np.where(rewarded, batch.columns["reward"], 0.0)
        metrics: dict[str, Metric] = {}
        for name, weight in self._config.weights.items():
            value = np.where(rewarded, self._components.of(batch, name), 0.0)
            total = total + weight * value
            metrics[name.removesuffix(".reward")] = (float(value.sum()), float(rewarded.sum()))
        return StageOutput(columns={self.gives[0].name: total}, metrics=metrics)


class Rank:
    """weight · (rank within the group, ties averaged) / (n − 1) + (base − 1) · Episode.reward; .5 in a group of one."""

    def __init__(self, name: str, config: RankConfig) -> None:
        self._config = config
        self._components = Components((config.of,), config.siblings, config.absent)
        self.needs = frozenset({"reward"}) | self._components.scored
        self.gives = (_spec(name),)

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        reward = batch.columns["reward"]
        rewarded = np.isfinite(reward)
        values = self._components.of(batch, self._config.of)
        total = (self._config.base - 1.0) * np.where(rewarded, reward, 0.0)
        for group in np.unique(batch.group_of[rewarded]):
            members = np.flatnonzero((batch.group_of == group) & rewarded)
            total[members] += self._config.weight * ranks(values[members])
        return StageOutput(columns={self.gives[0].name: total})


def ranks(values: Array) -> Array:
    """Ranks from 0 to 1, equal values sharing their mean rank; .5 for a single value."""
    if len(values) == 1:
        return np.array([0.5])
    below = (values[:, None] > values[None, :]).sum(axis=1)
    equal = (values[:, None] == values[None, :]).sum(axis=1) - 1
    ranked: Array = (below + equal / 2) / (len(values) - 1)
    return ranked


class Duplicates:
    """−weight · share of the group's other episodes with the very same sampled tokens. Metric: share of repeats."""

    needs = frozenset({"reward"})

    def __init__(self, name: str, config: DuplicatesConfig) -> None:
        self._weight = config.weight
        self.gives = (_spec(name),)

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        sampled = batch.columns["origin"] == Origin.SAMPLED
        said: Mapping[int, list[bytes]] = {episode: [] for episode in range(batch.n_episodes)}
        for row, episode in enumerate(batch.episode_of):
            units = slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))
            said[int(episode)].append(batch.columns["tokens"][units][sampled[units]].tobytes())
        keys = [tuple(said[episode]) for episode in range(batch.n_episodes)]
        rewarded = np.isfinite(batch.columns["reward"])
        share = np.zeros(batch.n_episodes)
        for group in np.unique(batch.group_of[rewarded]):
            members = np.flatnonzero((batch.group_of == group) & rewarded)
            for episode in members if len(members) > 1 else ():
                same = sum(keys[other] == keys[episode] for other in members) - 1
                share[episode] = same / (len(members) - 1)
        metrics = {"share": (float(share.sum()), float(rewarded.sum()))}
        return StageOutput(columns={self.gives[0].name: -self._weight * share}, metrics=metrics)
