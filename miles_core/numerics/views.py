"""A View of one micro-batch on one rank, over torch: columns to tensors, sums per trajectory and per atom.

For any torch backend whose ranks hold whole trajectories (no context parallelism): build one `MicroView` a micro-batch
and hand `view.at` to `objective.evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from miles_core.columns import Batch
from miles_core.contracts.learning import Output, TermLevel
from miles_core.errors import LearnerError

if TYPE_CHECKING:
    from miles_core.records import Array


class MicroView:
    """`contracts.learning.View` over `micro`, in its own unit order.

    `outputs(output)` gives a model output [units, …]; it is asked each time, so the caller caches its forward. `level`
    is what `atom_sum` and `owns` speak of; `at(level)` is the same view for another level.
    """

    def __init__(
        self,
        micro: Batch,
        outputs: Callable[[Output], torch.Tensor],
        device: torch.device | str = "cpu",
        level: TermLevel = "unit",
        _columns: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.micro = micro
        self.level = level
        self._outputs = outputs
        self._device = torch.device(device)
        self._columns: dict[str, torch.Tensor] = {} if _columns is None else _columns  # shared by all levels

    def at(self, level: TermLevel) -> MicroView:
        """This micro-batch seen at another level; columns are converted once."""
        return MicroView(self.micro, self._outputs, self._device, level, self._columns)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._columns:
            if name not in self.micro.columns:
                raise LearnerError(
                    f"a term reads column {name!r}, which the minibatch does not have",
                    fix="name the column in the term's `needs`, so that core provides it",
                )
            self._columns[name] = self._tensor(self.micro.per_unit(name))
        return self._columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.micro.columns

    def out(self, output: Output) -> torch.Tensor:
        return self._outputs(output)

    def seq_sum(self, x: torch.Tensor) -> torch.Tensor:
        index = self._index("\0trajectory", self.micro.trajectory_of_unit)
        return segment_sum(x, index, self.micro.n_trajectories)[index]

    def atom_sum(self, x: torch.Tensor, sign: torch.Tensor | None = None) -> torch.Tensor:
        index, count = self._atoms()
        return segment_sum(x if sign is None else x * sign, index, count)

    @property
    def owns(self) -> torch.Tensor:
        return torch.ones(self._atoms()[1], device=self._device)

    def _atoms(self) -> tuple[torch.Tensor, int]:
        micro = self.micro
        if self.level == "trajectory":
            return self._index("\0trajectory", micro.trajectory_of_unit), micro.n_trajectories
        if self.level == "episode":
            return self._index("\0episode", micro.episode_of_unit), micro.n_episodes
        if self.level == "group":
            return self._index("\0group", micro.group_of[micro.episode_of_unit]), micro.n_groups
        raise LearnerError(
            "a term of level 'unit' asked for atoms", fix="declare its level trajectory, episode or group"
        )

    def _index(self, name: str, value: Array) -> torch.Tensor:
        if name not in self._columns:  # a name that no column can have
            self._columns[name] = self._tensor(value)
        return self._columns[name]

    def _tensor(self, value: Array) -> torch.Tensor:
        value = np.ascontiguousarray(value)
        return torch.from_numpy(value if value.flags.writeable else value.copy()).to(self._device)


def segment_sum(x: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    """[units, …] -> [count, …]: the sum of the rows of each segment; differentiable."""
    return torch.zeros(count, *x.shape[1:], dtype=x.dtype, device=x.device).index_add(0, index, x)
