"""Toy view: one micro-batch as terms see it, on NumPy arrays and `Var`s (`numerics.objective` masks what terms see)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.contracts.learning import TermLevel
from miles_core.errors import LearnerError
from miles_core.testing.toys.autodiff import Array, Var, value_of

if TYPE_CHECKING:
    from miles_core.columns import Batch
    from miles_core.contracts.learning import Output


class ToyView:
    """`serve(output)` runs a model; it is called once an output, whatever the levels that ask."""

    def __init__(
        self,
        micro: Batch,
        serve: Callable[[Output], Any],
        level: TermLevel = "unit",
        cache: dict[Any, Any] | None = None,
    ) -> None:
        self.micro = micro
        self.level = level
        self._serve = serve
        self._cache: dict[Any, Any] = {} if cache is None else cache

    def at(self, level: TermLevel) -> ToyView:
        """The same micro-batch for a term of `level`."""
        return ToyView(self.micro, self._serve, level, self._cache)

    def __getitem__(self, name: str) -> Array:
        if name not in self.micro.columns:
            raise LearnerError(
                f"a term reads column {name!r}, which the minibatch does not have",
                fix="name the column in the term's `needs`, so that core provides it",
            )
        column = self.micro.per_unit(name)
        return column.astype(np.float64) if column.dtype.kind == "f" else column

    def __contains__(self, name: str) -> bool:
        return name in self.micro.columns

    def out(self, output: Output) -> Any:
        if output not in self._cache:
            self._cache[output] = self._serve(output)
        return self._cache[output]

    def seq_sum(self, x: Any) -> Any:
        of_unit = self.micro.trajectory_of_unit
        return segment_sum(x, of_unit, self.micro.n_trajectories)[of_unit]

    def atom_sum(self, x: Any, sign: Any | None = None) -> Any:
        of_unit, count = self._atoms()
        return segment_sum(x if sign is None else x * value_of(sign), of_unit, count)

    @property
    def owns(self) -> Array:
        return np.ones(self._atoms()[1])

    def _atoms(self) -> tuple[Array, int]:
        micro = self.micro
        if self.level == "trajectory":
            return micro.trajectory_of_unit, micro.n_trajectories
        if self.level == "episode":
            return micro.episode_of_unit, micro.n_episodes
        if self.level == "group":
            return micro.group_of[micro.episode_of_unit], micro.n_groups
        raise LearnerError("a term of level 'unit' asked for atoms", fix="declare its level")


def segment_sum(x: Any, of_unit: Array, count: int) -> Any:
    """[units] -> [count]: the sum of each segment; differentiable."""
    sums = np.bincount(of_unit, weights=value_of(x), minlength=count)
    return Var(sums, [(x, lambda g: g[of_unit])]) if isinstance(x, Var) else sums
