"""What a loss on pairs of answers promises (field `loss`, level `group`): a chosen and a rejected demonstration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from miles_core.columns import CORE_COLUMNS, Batch, ColumnSpec, Level
from miles_core.contracts.learning import Output
from miles_core.records import Group, Origin, Trajectory
from miles_core.testing.suite import check
from miles_core.testing.suites import batches
from miles_core.testing.suites.terms import LossConformance

Array = np.ndarray[Any, Any]


class PairConformance(LossConformance):
    """As `LossConformance`, on groups of two. Each group holds one episode of `preference` +1 and one of -1, in either
    order; the reference lies where the policy started."""

    def groups(self) -> list[Group]:
        made = batches.groups(sizes=(2, 2, 2, 2))
        return [
            replace(
                group,
                episodes=tuple(
                    replace(
                        episode,
                        reward=None,
                        preference=1 if (member + index) % 2 == 0 else -1,
                        trajectories=tuple(_demonstrated(t) for t in episode.trajectories),
                    )
                    for member, episode in enumerate(group.episodes)
                ),
            )
            for index, group in enumerate(made)
        ]

    def fill(self, batch: Batch, name: str) -> Batch:
        if name != "reference.logprobs":
            return super().fill(batch, name)
        near = batch.columns["proximal_logprobs"] + 0.01 * np.random.default_rng(4).standard_normal(batch.units)
        spec = ColumnSpec(name=name, level=Level.UNIT, dtype="float32")
        return batch.with_columns({name: near}, [spec])

    def _gradient(self, batch: Batch) -> Array:
        library = self.library()
        leaves = self.leaves(library, batch)
        output = next(o for o in leaves if o.name == "logprobs" and o.role == "actor")
        return library.backward(self.loss(library, batch, leaves), leaves[output])

    def test_atoms(self) -> None:
        check("a pair is one atom: level is group", self.term().level == "group", self.term().level)

    def test_preference(self) -> None:
        batch = self.batch()
        live = batch.columns["trainable"]
        gradient = self._gradient(batch)
        sign = batch.columns["preference"][batch.episode_of_unit]
        right = bool((gradient * sign <= 1e-12).all() and (gradient * sign)[live].sum() < 0)
        check("a chosen answer rises and a rejected one falls", right, gradient)

    def test_turned_preference(self) -> None:
        batch = self.batch()
        live = batch.columns["trainable"]
        sign = batch.columns["preference"][batch.episode_of_unit]
        turned = batch.with_columns({"preference": -batch.columns["preference"]}, ())
        opposite = self._gradient(turned) * sign
        swapped = bool((opposite >= -1e-12).all() and opposite[live].sum() > 0)
        check("the column preference says which answer is chosen", swapped, opposite)

    def test_order_in_a_pair(self) -> None:
        batch = self.batch()
        order = np.concatenate([rows[::-1] for rows in batch.group_slices()])
        turned = batch.select(order)
        near = np.allclose(self._values(batch), self._values(turned), atol=1e-9)
        check("the order of the answers changes nothing", near, (self._values(batch), self._values(turned)))

    def _values(self, batch: Batch) -> Array:
        """One value a pair, with every model output at the proximal policy."""
        library = self.library()
        leaves = {o: library.leaf(self._near(batch, o)) for o in self.term().outputs}
        return library.numbers(self.term()(self.view(library, batch, leaves)).value)

    def _near(self, batch: Batch, output: Output) -> Array:
        return batch.columns["proximal_logprobs"].astype(np.float64) * 1.01


def _demonstrated(trajectory: Trajectory) -> Trajectory:
    """The same tokens as a demonstration: nobody sampled them."""
    columns = {name: trajectory.columns[name] for name in ("tokens", "trainable")}
    origin = np.where(np.asarray(columns["trainable"]), Origin.DEMONSTRATION, Origin.PROMPT)
    columns["origin"] = origin.astype(CORE_COLUMNS["origin"].dtype)
    return replace(trajectory, columns=columns, spans=(), sampling=None, engine="")
