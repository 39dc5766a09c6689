"""What every stage promises, by field: pure functions on whole groups, with statistics that no order changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from miles_core.columns import CORE_COLUMNS, Batch, ColumnSpec, Level
from miles_core.contracts.learning import StageOutput
from miles_core.provider import Place
from miles_core.records import Group
from miles_core.testing.suite import Conformance, check
from miles_core.testing.suites import batches
from miles_core.testing.suites.worked import StageExample, near

Array = np.ndarray[Any, Any]


class StageConformance(Conformance):
    """Override `fill` where a stage needs columns with a meaning of their own. `examples` are worked by hand."""

    kind = "stage"
    field: ClassVar[str] = ""
    places: ClassVar[tuple[Place, ...]] = (Place.CONTROLLER,)
    examples: ClassVar[Sequence[StageExample]] = ()
    close_to = 1e-5

    def example(self, place: Place) -> Any:
        return self.build(place)

    def fill(self, batch: Batch, name: str) -> Batch:
        """The batch with the needed column `name`. Depends on trajectory ids, not on their order."""
        if name in batch.columns:
            return batch
        spec = CORE_COLUMNS.get(name) or ColumnSpec(name=name, level=Level.UNIT, dtype="float32")
        if spec.level == Level.UNIT:
            rows = [self._row(i, int(n), name) for i, n in zip(batch.trajectory_ids, batch.lengths, strict=True)]
            column = np.where(batch.columns["trainable"], np.concatenate(rows), 0.0)
        elif spec.level == Level.TRAJECTORY:
            column = np.array([self._row(i, 1, name)[0] for i in batch.trajectory_ids])
        else:
            column = np.array([self._row(i, 1, name)[0] for i in batch.episode_ids])
        return batch.with_columns({name: column.astype(spec.dtype)}, [spec])

    def _row(self, identity: str, n: int, name: str) -> Array:
        seed = sum(ord(c) * (i + 1) for i, c in enumerate(identity + name))
        rng = np.random.default_rng(seed)
        values = rng.standard_normal(n)
        return -np.abs(values) if name.endswith("logprobs") else values

    def batch(self, made: Sequence[Group] | None = None) -> Batch:
        batch = batches.batch_of(batches.groups() if made is None else made)
        for name in sorted(self.stage().needs):
            batch = self.fill(batch, name)
        return batch

    def stage(self) -> Any:
        return self.build(Place.CONTROLLER)

    def call(self, batch: Batch, stage: Any = None) -> StageOutput:
        made = self.stage() if stage is None else stage
        found = made(batch, np.random.default_rng(1))
        check("a stage returns a StageOutput", isinstance(found, StageOutput), repr(found))
        assert isinstance(found, StageOutput)
        return found

    def values(self, batch: Batch, found: StageOutput) -> dict[tuple[str, str], Array]:
        """(column, trajectory or episode) -> values, whatever the order of the batch."""
        out: dict[tuple[str, str], Array] = {}
        for spec in self.stage().gives:
            column = np.asarray(found.columns[spec.name], np.float64)
            if spec.level == Level.UNIT:
                rows: dict[str, Any] = batches.by_trajectory(batch, column)
            elif spec.level == Level.EPISODE:
                rows = batches.by_episode(batch, column)
            else:
                rows = dict(zip(batch.trajectory_ids, column, strict=True))
            out |= {(spec.name, key): np.asarray(row) for key, row in rows.items()}
        return out

    def near(self, a: dict[tuple[str, str], Array], b: dict[tuple[str, str], Array]) -> bool:
        return set(a) == set(b) and all(np.allclose(a[k], b[k], rtol=1e-5, atol=self.close_to) for k in a)

    def test_columns(self) -> None:
        provider = self.the_provider()
        check("the provider says its field", provider.field == self.field, provider.field)
        batch = self.batch()
        found = self.call(batch)
        declared = {spec.name for spec in self.stage().gives}
        check("a stage writes exactly what it gives", set(found.columns) == declared, (set(found.columns), declared))
        for spec in self.stage().gives:
            column = np.asarray(found.columns[spec.name])
            check("columns have a row for each of their level", len(column) == batch.rows(spec.level), spec.name)
            check("columns have the dtype of their spec", column.dtype == np.dtype(spec.dtype), (spec, column.dtype))
            finite = column if spec.level != Level.UNIT else column[batch.columns["trainable"]]
            check("columns are finite where they are trained on", np.isfinite(finite).all(), (spec.name, column))
        for name, metric in found.metrics.items():
            pair = len(metric) == 2 and all(np.isfinite(float(v)) for v in metric)
            check("metrics are pairs of numerator and denominator", pair, (name, metric))

    def test_purity(self) -> None:
        batch = self.batch()
        before = {name: column.copy() for name, column in batch.columns.items()}
        stage = self.stage()
        first, second = self.call(batch, stage), self.call(batch, stage)
        kept = all(
            np.array_equal(batch.columns[n], c, equal_nan=True) for n, c in before.items() if c.dtype.kind == "f"
        )
        same = kept and all(np.array_equal(batch.columns[n], c) for n, c in before.items() if c.dtype.kind != "f")
        check("a stage changes nothing of the batch", same)
        again = all(np.array_equal(first.columns[n], second.columns[n], equal_nan=True) for n in first.columns)
        check("the same batch gives the same columns", again, (first, second))
        smaller = self.batch(batches.groups(seed=3, sizes=(2, 3)))
        self.call(smaller, stage)
        third = self.call(batch, stage)
        again = all(np.array_equal(first.columns[n], third.columns[n], equal_nan=True) for n in first.columns)
        check("a stage remembers nothing of other steps", again, (first, third))

    def test_order(self) -> None:
        made = batches.groups()
        one, other = self.batch(made), self.batch(list(reversed(made)))
        a, b = self.values(one, self.call(one)), self.values(other, self.call(other))
        check("values do not depend on the order of groups", self.near(a, b), (a, b))
        turned = [replace(g, episodes=tuple(reversed(g.episodes))) for g in made]
        mixed = self.batch(turned)
        c = self.values(mixed, self.call(mixed))
        check("values do not depend on the order within a group", self.near(a, c), (a, c))

    def test_masked_garbage(self) -> None:
        batch = self.batch()
        clean = self.call(batch)
        dirty: dict[str, Array] = {}
        for name in self.stage().needs:
            column = batch.columns[name]
            if batch.specs[name].level == Level.UNIT and column.dtype.kind == "f":
                dirty[name] = np.where(batch.columns["trainable"], column, np.nan).astype(column.dtype)
        found = self.call(batch.with_columns(dirty, ()))
        for spec in self.stage().gives:
            a, b = np.asarray(clean.columns[spec.name]), np.asarray(found.columns[spec.name])
            if spec.level == Level.UNIT:
                a, b = a[batch.columns["trainable"]], b[batch.columns["trainable"]]
            same = np.allclose(a.astype(np.float64), b.astype(np.float64), rtol=1e-6, atol=1e-6)
            check("what is masked changes nothing, not even as NaN", same, (spec.name, a, b))

    def test_examples(self) -> None:
        for example in self.examples:
            batch = example.batch()
            found = self.call(batch).columns
            for name, expected in example.expect.items():
                numbers, wanted = np.asarray(found[name], np.float64), np.asarray(expected, np.float64)
                unit = self._spec(name).level == Level.UNIT
                live = batch.columns["trainable"] if unit else np.ones(len(numbers), bool)
                check("columns are those worked by hand", near(numbers[live], wanted[live]), (example, numbers))

    def _spec(self, name: str) -> ColumnSpec:
        found: ColumnSpec = next(spec for spec in self.stage().gives if spec.name == name)
        return found

    def test_extremes(self) -> None:
        batch = self.batch()
        label = "log-ratios of ±100 stay finite"
        scored = [n for n in sorted(self.stage().needs) if n.endswith("logprobs")]
        for far in (100.0, -100.0) if scored else ():
            moved = (batch.columns[scored[0]] + far * batch.columns["trainable"]).astype(np.float32)
            self._finite(label, batch.with_columns({scored[0]: moved}, ()))
        one = self.batch(batches.groups(sizes=(1,)))
        last = np.arange(one.units) == np.flatnonzero(one.columns["trainable"])[-1]
        label = "a step of one token is fine"
        self._finite(label, one.with_columns({"trainable": last}, ()))

    def _finite(self, label: str, batch: Batch) -> None:
        for name, column in self.call(batch).columns.items():
            unit = self._spec(name).level == Level.UNIT
            shown = np.asarray(column)[batch.columns["trainable"]] if unit else np.asarray(column)
            check(label, np.isfinite(shown).all(), (name, column))

    def test_corners(self) -> None:
        made = batches.groups(sizes=(1, 3))
        lonely = self.batch(made)
        found = self.call(lonely)
        live = lonely.columns["trainable"]
        for spec in self.stage().gives:
            column = np.asarray(found.columns[spec.name])
            shown = column[live] if spec.level == Level.UNIT else column
            check("a group of one gives finite values", np.isfinite(shown).all(), (spec.name, column))
        nothing = self.batch().with_columns({"trainable": np.zeros(self.batch().units, bool)}, ())
        try:
            found = self.call(nothing)
        except Exception as error:
            check("a batch without trainable units is fine", False, repr(error))
        episodes = list(made[1].episodes)
        episodes[0] = replace(episodes[0], reward=None)
        failed = self.batch([made[0], replace(made[1], episodes=tuple(episodes))])
        masked = np.array([failed.episode_ids[e] != episodes[0].id for e in failed.episode_of])
        trainable = failed.columns["trainable"] & masked[failed.trajectory_of_unit]
        failed = failed.with_columns({"trainable": trainable}, ())
        found = self.call(failed)
        for spec in self.stage().gives:
            if spec.level == Level.UNIT:
                column = np.asarray(found.columns[spec.name])[trainable]
                check("an episode without reward leaves the others finite", np.isfinite(column).all(), column)


class AdvantageConformance(StageConformance):
    """Field `advantage`."""

    field = "advantage"

    def test_advantages(self) -> None:
        stage = self.stage()
        names = [spec.name for spec in stage.gives]
        check("an advantage gives the column advantages", "advantages" in names, names)
        batch = self.batch()
        for name in stage.needs - {"reward"}:
            if batch.specs[name].level == Level.UNIT and batch.columns[name].dtype.kind == "f":
                batch = batch.with_columns({name: np.zeros_like(batch.columns[name])}, ())
        column = np.asarray(self.call(batch).columns["advantages"], np.float64)
        # At the last token: before it, what is discounted depends on the length of the answer.
        ends = [float(v[t][-1]) for v, t in self._rows(batch, column)]
        reward = batch.columns["reward"][batch.episode_of]
        group = batch.group_of[batch.episode_of]
        for g in range(batch.n_groups):
            mine = np.flatnonzero(group == g)
            order = mine[np.argsort(reward[mine])]
            rising = all(ends[a] <= ends[b] + 1e-6 for a, b in pairwise(order))
            check("a higher reward never has a lower advantage in its group", rising, [ends[i] for i in order])
        check("different rewards give different advantages", float(np.ptp(ends)) > 1e-6, ends)
        noise = 1e-12 * np.random.default_rng(0).standard_normal(batch.n_episodes)
        alike = self.call(batch.with_columns({"reward": 0.7 + noise}, ())).columns["advantages"]
        last = np.array([v[t][-1] for v, t in self._rows(batch, np.asarray(alike, np.float64))])
        check("rewards equal up to float noise give equal advantages", float(np.ptp(last)) < 1e-3, last)

    def _rows(self, batch: Batch, column: Array) -> list[tuple[Array, Array]]:
        values = batches.by_trajectory(batch, column)
        masks = batches.by_trajectory(batch, batch.columns["trainable"])
        return [(values[n], masks[n]) for n in batch.trajectory_ids]


class PenaltyConformance(StageConformance):
    """Field `penalty`."""

    field = "penalty"

    def test_penalties(self) -> None:
        odd = [s for s in self.stage().gives if not s.name.startswith("reward.") or s.level != Level.EPISODE]
        check("a penalty writes reward.<name> per episode", not odd, odd)


class RewardKLConformance(StageConformance):
    """Field `reward_kl`."""

    field = "reward_kl"

    def test_no_divergence(self) -> None:
        batch = self.batch()
        same = batch.columns["proximal_logprobs"]
        for name in sorted(self.stage().needs):
            if name.endswith(".logprobs"):
                batch = batch.with_columns({name: same}, ())
        for name, column in self.call(batch).columns.items():
            zero = bool((np.abs(np.asarray(column)) < 1e-6).all())
            check("a policy that is the reference costs nothing", zero, (name, column))


class WhitenConformance(StageConformance):
    """Field `whiten`."""

    field = "whiten"

    def test_moments(self) -> None:
        batch = self.batch()
        column = np.asarray(self.call(batch).columns["advantages"], np.float64)[batch.columns["trainable"]]
        std = float(column.std(ddof=1))
        check("whitened advantages have variance 1", abs(std - 1) < 1e-3, std)
        before = batch.columns["advantages"][batch.columns["trainable"]].astype(np.float64)
        slope, offset = np.polyfit(before, column, 1)
        one = np.allclose(column, slope * before + offset, atol=1e-4)
        check("one mean and one scale serve all trainable tokens", one, (before, column))


class DistillConformance(StageConformance):
    """Field `distill`, as a stage."""

    field = "distill"

    def test_equal_teacher(self) -> None:
        batch = self.batch()
        same = batch.columns["proximal_logprobs"]
        for name in sorted(self.stage().needs):
            if name.endswith(".logprobs"):
                batch = batch.with_columns({name: same}, ())
        live = batch.columns["trainable"]
        found = np.asarray(self.call(batch).columns["advantages"])[live]
        near = np.allclose(found, batch.columns["advantages"][live], atol=1e-6)
        check("a teacher that agrees changes no advantage", near, found)
