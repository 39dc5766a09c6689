"""Advantages of whole groups: `group` and `leave_one_out`. One number per episode, copied to its trainable units.

The batch's column `reward` is R: the environment's reward and all penalties. An episode without a reward is in no
statistic; where it is trainable its advantage is NaN, which core refuses by name.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from miles_algo_grpo.config import GroupConfig
from miles_core.columns import CORE_COLUMNS, Array, Batch
from miles_core.contracts.learning import StageOutput
from miles_core.numerics.host import group_advantages, leave_one_out_advantages, to_units


class EpisodeAdvantage:
    """A stage from a function (reward [episodes], group [episodes]) -> advantage float64 [episodes].

    Metrics: `zero` (share of rewarded episodes whose advantage is 0) and `abs` (mean of its size).
    """

    needs = frozenset({"reward"})
    gives = (CORE_COLUMNS["advantages"],)

    def __init__(self, formula: Callable[[Array, Array], Array]) -> None:
        self._formula = formula

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        per_episode = self._formula(batch.columns["reward"], batch.group_of)
        rewarded = per_episode[np.isfinite(per_episode)]
        count = float(len(rewarded))
        return StageOutput(
            columns={"advantages": to_units(batch, per_episode)},
            metrics={"zero": (float((rewarded == 0).sum()), count), "abs": (float(np.abs(rewarded).sum()), count)},
        )


def group(config: GroupConfig) -> EpisodeAdvantage:
    """(R − mean of the group) / (std of the group + eps); only centred under `scale: none`."""

    def formula(reward: Array, group_of: Array) -> Array:
        return group_advantages(reward, group_of, scale=config.scale.value, ddof=config.ddof, eps=config.eps)

    return EpisodeAdvantage(formula)


def leave_one_out() -> EpisodeAdvantage:
    """R − mean of the others in the group."""
    return EpisodeAdvantage(leave_one_out_advantages)
