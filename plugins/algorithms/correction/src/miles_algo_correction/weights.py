"""log w = π_p − π_b per token and per trajectory, in float64 (NumPy).

m is the trainable mask *before* any rejection, and within it what the engine sampled: a demonstration has no behaviour
and is on-policy by definition (w = 1). Masked inputs are selected to 0 before anything is computed, NaN included.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from miles_algo_correction.config import Level
from miles_core.columns import Array, Batch
from miles_core.measures import EXP_LIMIT
from miles_core.records import Origin


@dataclass(frozen=True, kw_only=True)
class LogWeights:
    """`mask` bool [units] is m; `token` float64 [units] is log w, 0 outside m; `row` is each unit's trajectory."""

    mask: Array
    token: Array
    row: Array
    rows: int

    @classmethod
    def of(cls, batch: Batch) -> LogWeights:
        columns = batch.columns
        mask = columns["trainable"]
        if "origin" in columns:
            mask = mask & (columns["origin"] == Origin.SAMPLED)
        token = np.zeros(batch.units)
        token[mask] = columns["proximal_logprobs"][mask].astype(np.float64) - columns["behaviour_logprobs"][mask]
        return cls(mask=mask, token=token, row=batch.trajectory_of_unit, rows=batch.n_trajectories)

    def of_rows(self, x: Array) -> Array:
        """[units] -> float64 [trajectories]: the sum over m of each trajectory."""
        return np.bincount(self.row[self.mask], weights=x[self.mask], minlength=self.rows)

    def at(self, level: Level) -> Array:
        """w float32 [units] at this level, the same on every unit of a trajectory unless the level is `token`.

        Rounded to the columns' own precision, in which bounds are inclusive: log .5 in float32 is a w of exactly .5.
        """
        if level is Level.token:
            return bounded_exp(self.token)
        total = self.of_rows(self.token)
        if level is Level.geometric:
            total = total / np.maximum(self.of_rows(np.ones(len(self.mask))), 1)
        return bounded_exp(total)[self.row]


def bounded_exp(x: Array) -> Array:
    """exp(clamp(x, −20, 20)): float32 from float64."""
    bounded: Array = np.exp(np.clip(x, -EXP_LIMIT, EXP_LIMIT)).astype(np.float32)
    return bounded
