"""Toy scorer: a teacher that finds every token equally likely, and the length of a trajectory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from miles_core.errors import CapabilityError

if TYPE_CHECKING:
    from miles_core.records import Array, Ref, Task, Trajectory


class UniformScorer:
    """Gives `<any role>.logprobs` (float32 per token, 0 for the first) and `toy.length` (per trajectory)."""

    def __init__(self, vocab_size: int) -> None:
        self._logprob = -math.log(vocab_size)
        self.closed = False

    async def score(
        self, trajectories: Sequence[Trajectory], want: Sequence[str], tasks: Sequence[Task] = ()
    ) -> Mapping[str, Sequence[Array | Ref]]:
        found: dict[str, list[Array | Ref]] = {}
        for name in want:
            if name.endswith(".logprobs"):
                found[name] = [self._uniform(t.length) for t in trajectories]
            elif name == "toy.length":
                found[name] = [np.array(t.length, np.int32) for t in trajectories]
            else:
                raise CapabilityError(
                    f"the toy scorer has no column {name!r}; it has '<role>.logprobs' and 'toy.length'",
                    fix="choose a scorer that gives it",
                )
        return found

    def _uniform(self, length: int) -> Array:
        column = np.full(length, self._logprob, np.float32)
        column[:1] = 0.0
        return column

    async def close(self) -> None:
        self.closed = True
