"""The stage `gae`: advantages and returns of every trainable unit, from the critic's values.

V_t (the column `values`) is the head's output at position t−1, before token t is seen. Statistics are float64; an
episode without a reward gives NaN, which core refuses by name where such an episode is trainable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from miles_algo_ppo.config import GaeConfig
from miles_core.columns import CORE_COLUMNS, Array, Batch, ColumnSpec
from miles_core.contracts.learning import StageOutput
from miles_core.numerics import host
from miles_core.records import Metric


@dataclass(frozen=True, kw_only=True)
class Gae:
    """A_t = δ_t + γλ·A_{t'}, δ_t = r_t + γ·V_{t'} − V_t (arXiv 1506.02438); returns G = A + V, both float32 [units].

    r_t: R at the last trainable unit of each trajectory, minus `reward_kl` on every trainable unit (`reads_kl`).
    Metrics: `explained_variance` of V for G, means `value` and `return`, and `abs`, the mean size of A.
    """

    config: GaeConfig
    reads_kl: bool = False
    gives: tuple[ColumnSpec, ...] = (CORE_COLUMNS["advantages"], CORE_COLUMNS["returns"])

    @property
    def needs(self) -> frozenset[str]:
        found = {"reward", "values"}
        if self.reads_kl:
            found.add("reward_kl")
        if self.config.bootstrap_truncated:
            found |= {"bootstrap_value", "truncated"}
        return frozenset(found)

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        columns, live = batch.columns, batch.columns["trainable"]
        rewards = host.token_rewards(batch, columns["reward_kl"] if self.reads_kl else None)
        bootstrap = None
        if self.config.bootstrap_truncated:
            bootstrap = np.where(columns["truncated"], columns["bootstrap_value"].astype(np.float64), 0.0)
        advantages, returns = host.gae(
            rewards,
            columns["values"],
            live,
            batch.trajectory_of_unit,
            gamma=self.config.gamma,
            lam=self.config.lam,
            bootstrap=bootstrap,
        )
        return StageOutput(
            columns={"advantages": advantages.astype(np.float32), "returns": returns.astype(np.float32)},
            metrics={
                "explained_variance": host.explained_variance(returns, columns["values"], live),
                "value": _mean(columns["values"][live]),
                "return": _mean(returns[live]),
                "abs": _mean(np.abs(advantages[live])),
            },
        )


def _mean(values: Array) -> Metric:
    return float(values.sum(dtype=np.float64)), float(len(values))
