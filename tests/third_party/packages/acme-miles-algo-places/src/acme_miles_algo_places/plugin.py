"""Stage `places`: rewards become places in their group, from -1 (lowest) to 1 (highest); ties share the mean place."""

from dataclasses import dataclass

import numpy as np

from miles_core import hookimpl
from miles_core.columns import CORE_COLUMNS
from miles_core.config.schema import opt
from miles_core.contracts.learning import StageOutput
from miles_core.numerics.host import to_units
from miles_core.provider import Provider


@dataclass(frozen=True, kw_only=True)
class PlacesConfig:
    scale: float = opt(1.0, "advantage of the best of a group", low=0)


class Places:
    needs = frozenset({"reward"})
    gives = (CORE_COLUMNS["advantages"],)

    def __init__(self, config):
        self.scale = config.scale

    def __call__(self, batch, rng):
        rewards = batch.columns["reward"]
        places = np.where(np.isnan(rewards), np.nan, 0.0)
        for group in range(batch.n_groups):
            mine = (batch.group_of == group) & ~np.isnan(rewards)
            r = rewards[mine]
            if len(r) > 1:
                equal = np.abs(r[:, None] - r[None, :]) <= 1e-6 * max(1.0, float(np.abs(r).max()))
                below = ((r[:, None] > r[None, :]) & ~equal).sum(axis=1) + 0.5 * (equal.sum(axis=1) - 1)
                places[mine] = self.scale * (2.0 * below / (len(r) - 1) - 1.0)
        return StageOutput(columns={"advantages": to_units(batch, places)})


@hookimpl
def miles_stage():
    return Provider(
        name="places",
        config=PlacesConfig,
        build=lambda config, context: Places(config),
        field="advantage",
        requires=("siblings",),
        summary="the place of a reward in its group, from -1 to 1",
    )
