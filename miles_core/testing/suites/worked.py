"""Worked examples: numbers that a person computed by hand, which a part must give. Suites hold any number of them.

A suite cannot know what a stranger's formula is; the author can, and writes it down where everybody can check it:

    class TestGroup(AdvantageConformance):
        name = "group"
        options: ClassVar = {"eps": 0.0}
        examples: ClassVar = (StageExample(rewards=[[1, 0, 0, 0]], expect={"advantages": [1.5, -0.5, -0.5, -0.5]}),)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from miles_core.columns import CORE_COLUMNS, Batch, ColumnSpec, Level
from miles_core.records import Group
from miles_core.testing.suites import batches

Array = np.ndarray[Any, Any]
Rows = Sequence[Sequence[int]]


def _batch(made: Sequence[Group], trainable: Rows, columns: Mapping[str, Sequence[Any]]) -> Batch:
    batch = batches.batch_of(made)
    batch = batch.with_columns({"trainable": np.concatenate([np.array(r, bool) for r in trainable])}, ())
    for name, values in columns.items():
        spec = CORE_COLUMNS.get(name) or ColumnSpec(name=name, level=Level.UNIT, dtype="float32")
        batch = batch.with_columns({name: np.asarray(values, spec.dtype)}, [spec])
    return batch


@dataclass(frozen=True, kw_only=True)
class StageExample:
    """A stage's columns, in and out.

    `rewards`: of each episode of each group. `siblings`: how many trajectories each episode has (empty: one). All
    tokens are sampled; `trainable` says which may be trained on, a row of 0 and 1 a trajectory (empty: one token each).
    `columns` and `expect` have a number per unit, trajectory or episode, as their specs say; expected unit columns are
    compared at trainable units.
    """

    rewards: Sequence[Sequence[float | None]] = ((1.0,),)
    siblings: Sequence[int] = ()
    trainable: Rows = ()
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    expect: Mapping[str, Sequence[float]]

    def batch(self) -> Batch:
        episodes = sum(len(group) for group in self.rewards)
        siblings = list(self.siblings or [1] * episodes)
        rows = list(self.trainable or [[1]] * sum(siblings))
        left = iter(rows)
        made = []
        for index, rewards in enumerate(self.rewards):
            group = batches.group(index, [[2]] * len(rewards), rewards, [])
            grown = []
            for episode in group.episodes:
                leaves = [
                    batches.trajectory(f"{episode.id}/{leaf}", [], [2] * len(next(left)))
                    for leaf in range(siblings.pop(0))
                ]
                grown.append(replace(episode, trajectories=tuple(leaves)))
            made.append(replace(group, episodes=tuple(grown)))
        return _batch(made, rows, self.columns)


@dataclass(frozen=True, kw_only=True)
class TermExample:
    """A term's values and gradients.

    `outputs`: numbers that stand for model outputs, by name (`logprobs`) or `<role>.<name>`. `trainable`: a row of 0
    and 1 a trajectory (empty: one trajectory in which all is trained on); every trajectory is an episode of one group.
    `value`: what the term gives per unit or atom, compared at trainable units. `gradient`: that of the sum of those
    values, by output.
    """

    outputs: Mapping[str, Sequence[Any]]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    trainable: Rows = ()
    value: Sequence[float]
    gradient: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def batch(self) -> Batch:
        units = len(next(iter(self.outputs.values())))
        rows = list(self.trainable or [[1] * units])
        return _batch([batches.group(0, [[2] * len(r) for r in rows], [0.0] * len(rows), [])], rows, self.columns)


def near(found: Array, expected: Array | Sequence[float]) -> bool:
    """Equal as far as float32 columns can be."""
    return bool(np.allclose(found, np.asarray(expected, np.float64), rtol=2e-6, atol=2e-7))
