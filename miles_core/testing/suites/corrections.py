"""What every off-policy correction promises: static ones (stages on the whole step) and dynamic weights (terms).

Static corrections are functions of log w = π_p − π_b at trainable tokens, with m before any rejection. The suite feeds
them chosen log w, and says nothing of their formula but what holds for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, ClassVar

import numpy as np

from miles_core.columns import CORE_COLUMNS, Batch
from miles_core.contracts.learning import BoundTerm
from miles_core.measures import EXP_LIMIT
from miles_core.records import Group
from miles_core.testing.suite import CheckError, check
from miles_core.testing.suites.stages import StageConformance
from miles_core.testing.suites.terms import ArrayLibrary, TermConformance

Array = np.ndarray[Any, Any]

#: What a static correction may write; core multiplies weights, unites rejections, and a `bypass` replaces π_p.
COLUMNS = {"correction_weight", "rejected", "proximal_logprobs"}
#: How far apart trainer and engine lie in the tests of extremes, in nats a token.
FAR = 100.0


class CorrectionConformance(StageConformance):
    """Field `correction`, static: weights and rejections from π_p and π_b.

    Say what yours is, and more is tested: `level` (`token`, `sequence`, `geometric`) is how far one token's mismatch
    reaches; `rejects` (`token`, `trajectory`) what is rejected at once; `normalised` that the step's mean weight is 1.
    `monotone = False` allows a weight that falls where the trainer finds a token likelier than the engine did.
    """

    field = "correction"
    level: ClassVar[str] = ""
    rejects: ClassVar[str] = ""
    normalised: ClassVar[bool] = False
    monotone: ClassVar[bool] = True

    def batch(self, made: Sequence[Group] | None = None) -> Batch:
        return self.fill(super().batch(made), "proximal_logprobs")

    def correct(self, batch: Batch, log_w: Array) -> tuple[Array, Array]:
        """(weight, rejected) of the stage where log w is `log_w` [units]; 1 and False where it writes none."""
        live = batch.columns["trainable"]
        behaviour = np.where(live, batch.columns["proximal_logprobs"].astype(np.float64) - log_w, 0.0)
        found = self.call(batch.with_columns({"behaviour_logprobs": behaviour.astype(np.float32)}, ())).columns
        weight = np.asarray(found.get("correction_weight", np.ones(batch.units)), np.float64)
        rejected = np.asarray(found.get("rejected", np.zeros(batch.units, bool)))
        return weight, rejected & live

    def some(self, batch: Batch, size: float = 0.5, seed: int = 5) -> Array:
        return size * np.random.default_rng(seed).standard_normal(batch.units)

    def weighing(self) -> bool:
        return any(spec.name == "correction_weight" for spec in self.stage().gives)

    def rows(self, batch: Batch) -> list[Array]:
        """The trainable units of each trajectory."""
        live = np.flatnonzero(batch.columns["trainable"])
        return [live[batch.trajectory_of_unit[live] == i] for i in range(batch.n_trajectories)]

    def test_on_policy(self) -> None:
        batch = self.batch()
        names = {spec.name for spec in self.stage().gives}
        check("a correction writes weights, rejections, or π_p", bool(names) and names <= COLUMNS, names)
        live = batch.columns["trainable"]
        if "proximal_logprobs" in names:
            found = np.asarray(self.call(batch).columns["proximal_logprobs"])[live]
            same = np.array_equal(found, batch.columns["behaviour_logprobs"][live])
            check("a correction that replaces π_p puts π_b in its place", same, found)
            return
        weight, rejected = self.correct(batch, np.zeros(batch.units))
        check("on-policy tokens weigh 1", np.allclose(weight[live], 1.0, atol=1e-5), weight[live])
        check("on-policy tokens are not rejected", not rejected[live].any(), rejected[live])

    def test_bounds(self) -> None:
        batch = self.batch()
        if "proximal_logprobs" in {spec.name for spec in self.stage().gives}:
            return
        live, odd = batch.columns["trainable"], batch.trajectory_of_unit % 2 == 1
        moved = False
        for sign in (1.0, -1.0):
            for where in (live, odd, np.arange(batch.units) % 2 == 0):
                try:
                    with np.errstate(over="raise", invalid="raise"):
                        weight, rejected = self.correct(batch, sign * FAR * where)
                except FloatingPointError as error:
                    raise CheckError("nothing overflows, however far apart", str(error)) from error
                sane = bool(np.isfinite(weight[live]).all() and (weight[live] >= 0).all())
                check("weights stay finite and at least 0, however far apart", sane, weight[live])
                most = float(weight[live].max())
                small = self.normalised or most <= np.exp(EXP_LIMIT) * (1 + 1e-5)
                check("the argument of exp is clamped to ±20", small, most)
                changed = (np.abs(weight - 1.0) > 1e-3) | rejected
                moved = moved or bool(changed[live & where].any())
        check("what is far off-policy does not stay as it is", moved)

    def test_direction(self) -> None:
        if not (self.weighing() and self.monotone):
            return
        batch = self.batch()
        live = batch.columns["trainable"]
        one = live & (batch.trajectory_of_unit == 0)
        for sign in (1.0, -1.0):
            weight, _ = self.correct(batch, sign * 1e-4 * one)
            here, elsewhere = float(weight[one].mean()), float(weight[live & ~one].mean())
            right = sign * (here - elsewhere) >= -1e-6
            check("a token that the trainer finds likelier never weighs less", right, (sign, here, elsewhere))

    def test_reach(self) -> None:
        batch = self.batch()
        live = batch.columns["trainable"]
        log_w = self.some(batch)
        weight, rejected = self.correct(batch, log_w)
        last = batch.group_of[batch.episode_of_unit] == batch.n_groups - 1
        other, removed = self.correct(batch, np.where(last, self.some(batch, seed=6), log_w))
        mine = live & ~last
        local = np.array_equal(rejected[mine], removed[mine])
        if not self.normalised:
            local = local and np.allclose(weight[mine], other[mine], atol=1e-6)
        check("a correction looks at its own trajectory only", local, (weight[mine], other[mine]))
        lower = np.where(live, batch.columns["proximal_logprobs"] - 1.3, 0.0).astype(np.float32)
        other, removed = self.correct(batch.with_columns({"proximal_logprobs": lower}, ()), log_w)
        same = np.allclose(weight[live], other[live], rtol=1e-5, atol=1e-6) and np.array_equal(rejected, removed)
        check("only the difference of π_p and π_b counts", same, (weight, other))
        rows = self.rows(batch)
        group = batch.group_of[batch.episode_of]
        tried = False
        for a, b in combinations(range(len(rows)), 2):
            if len(rows[a]) == len(rows[b]) > 0 and group[a] != group[b]:
                twins = log_w.copy()
                twins[rows[b]] = twins[rows[a]]
                weight, rejected = self.correct(batch, twins)
                same = np.allclose(weight[rows[a]], weight[rows[b]], rtol=1e-5, atol=1e-6)
                same = same and np.array_equal(rejected[rows[a]], rejected[rows[b]])
                check("the same mismatch is corrected alike wherever it stands", same, (weight, rejected))
                tried = True
        assert tried, "the suite's own batch has no two trajectories of one length"
        if self.normalised:
            kept = [row[~rejected[row]] for row in rows]
            tokens = float(np.mean(np.concatenate([weight[k] for k in kept])))
            trajectories = float(np.mean([weight[k[0]] for k in kept if len(k)]))
            one = min(abs(tokens - 1.0), abs(trajectories - 1.0)) < 1e-5
            check("a normalised weight has the mean 1 over the step", one, (tokens, trajectories))

    def test_level(self) -> None:
        batch = self.batch()
        rows = [row for row in self.rows(batch) if len(row) > 1]
        log_w = self.some(batch)
        weight, rejected = self.correct(batch, log_w)
        if self.rejects == "trajectory":
            far = log_w.copy()
            far[[row[-1] for row in rows]] -= FAR
            _, gone = self.correct(batch, far)
            whole = all(len(set(gone[row])) == 1 for row in rows)
            check("a rejected trajectory is rejected as a whole", whole, gone)
        if self.level == "token" and not self.normalised:
            for place in (0, -1):
                units = [row[place] for row in rows]
                changed = self.some(batch, seed=7)
                changed[units] = log_w[units]
                other, removed = self.correct(batch, changed)
                same = rejected[units] | removed[units] | (np.abs(weight[units] - other[units]) < 1e-6)
                check("at level token, a weight depends on its own token only", same.all(), (weight, other))
        if self.level not in ("sequence", "geometric"):
            return
        one = all(np.ptp(weight[row]) < 1e-6 for row in rows)
        check("at levels sequence and geometric, a trajectory has one weight", one, weight)
        moved = log_w.copy()
        for row in rows:
            moved[row[0]] += 5.0
            moved[row[1]] -= 5.0
        other, _ = self.correct(batch, moved)
        same = all(np.allclose(weight[row], other[row], rtol=1e-4, atol=1e-5) for row in rows)
        check("every trainable token counts in its trajectory's weight, a rejected one too", same, (weight, other))
        logs = np.log(self.correct(batch, np.full(batch.units, 1e-2))[0])
        first = {len(row): float(logs[row[0]]) for row in rows}
        for (n, a), (m, b) in combinations(sorted(first.items()), 2):
            want = 0.0 if self.level == "geometric" else 1e-2 * (m - n)
            label = "at level sequence log w adds up, at level geometric length does not count"
            check(label, abs(b - a - want) < 1e-5, (self.level, n, a, m, b))


class DynamicWeightConformance(TermConformance):
    """Field `correction`, as a term: a detached weight for each unit."""

    field = "correction"

    def seen(self, library: ArrayLibrary, batch: Batch, leaves: dict[Any, Any]) -> Array:
        """The weight of every trainable unit as core uses it: through a view that masks."""
        from miles_core.numerics.objective import summands

        view = self.view(library, batch, leaves)
        bound = BoundTerm(name="term", term=self.term(), coef=1.0, dynamic=True)
        [found] = summands(view.at, [bound], lambda unit: batch.trajectory_ids[int(batch.trajectory_of_unit[unit])])
        return library.numbers(found.values)[batch.columns["trainable"]]

    def test_weights(self) -> None:
        library, batch = self.library(), self.batch()
        check("a dynamic weight is one number per unit", self.term().level == "unit", self.term().level)
        value = self.term()(self.view(library, batch, self.leaves(library, batch))).value
        check("a dynamic weight is detached", not library.attached(value), value)
        numbers = library.numbers(value)[batch.columns["trainable"]]
        sane = bool(np.isfinite(numbers).all() and (numbers >= 0).all())
        check("weights are finite and at least 0", sane, numbers)
        same = batch.columns["proximal_logprobs"].astype(np.float64)
        numbers = self.seen(library, batch, {o: library.leaf(same) for o in self.term().outputs})
        check("on-policy tokens weigh 1", np.allclose(numbers, 1.0, atol=1e-6), numbers)

    def test_far_apart(self) -> None:
        library, batch = self.library(), self.batch()
        moved = False
        for sign in (1.0, -1.0):
            far = batch.columns["proximal_logprobs"] + sign * FAR
            try:
                with np.errstate(over="raise", invalid="raise"):
                    numbers = self.seen(library, batch, {o: library.leaf(far) for o in self.term().outputs})
            except FloatingPointError as error:
                raise CheckError("nothing overflows, however far apart", str(error)) from error
            sane = bool(np.isfinite(numbers).all() and (numbers >= 0).all())
            check("weights stay finite and at least 0, however far apart", sane, numbers)
            moved = moved or bool((np.abs(numbers - 1.0) > 1e-3).any())
        check("what is far off-policy does not stay as it is", moved)

    def test_rejected_tokens_count(self) -> None:
        library, batch = self.library(), self.batch()
        half = batch.columns["trainable"] & (np.arange(batch.units) % 2 == 0)
        fewer = batch.with_columns({"rejected": half}, [CORE_COLUMNS["rejected"]])
        start = {o: self.start(batch, o) - 0.3 * (np.arange(batch.units) % 3) for o in self.term().outputs}
        a, b = (self.seen(library, x, {o: library.leaf(v) for o, v in start.items()}) for x in (batch, fewer))
        check("a rejected token counts in dynamic weights as before", np.allclose(a, b, atol=1e-9), (a, b))

    def test_masked_garbage(self) -> None:
        library, batch = self.library(), self.batch()
        dead = ~batch.columns["trainable"]
        results = []
        for garbage in (0.0, np.nan):
            columns = {}
            for name in self.term().needs | {"proximal_logprobs"}:
                column = batch.columns[name]
                if column.dtype.kind == "f" and len(column) == batch.units:
                    columns[name] = np.where(dead, garbage, column).astype(column.dtype)
            leaves = {o: library.leaf(np.where(dead, garbage, self.start(batch, o))) for o in self.term().outputs}
            results.append(self.seen(library, batch.with_columns(columns, ()), leaves))
        same = np.allclose(results[0], results[1], atol=1e-9)
        check("what is masked changes nothing, not even as NaN", same, results)
