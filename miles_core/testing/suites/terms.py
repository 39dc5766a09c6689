"""What every term promises, by field: declared inputs, values per unit or atom, exact gradients, harmless masks.

Terms are tried on the toys' arrays first, and on torch where they are written for torch (then torch must be installed).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from miles_core.columns import CORE_COLUMNS, Batch, ColumnSpec, Level
from miles_core.contracts.learning import BoundTerm, Output, TermOutput
from miles_core.provider import Place
from miles_core.records import Group
from miles_core.testing.suite import Conformance, check
from miles_core.testing.suites import batches
from miles_core.testing.suites.worked import TermExample, near
from miles_core.testing.toys.autodiff import Var, value_of
from miles_core.testing.toys.view import ToyView

Array = np.ndarray[Any, Any]

#: Columns that a view serves whatever a term says it needs.
ALWAYS = frozenset(
    ("tokens", "origin", "trainable", "behaviour_logprobs", "proximal_logprobs", "temperature", "reward", "preference")
)


class ArrayLibrary:
    """Leaves and views of the toys."""

    def leaf(self, value: Array) -> Any:
        return Var(value)

    def view(self, batch: Batch, outputs: Callable[[Output], Any]) -> Any:
        return ToyView(batch, outputs)

    def numbers(self, x: Any) -> Array:
        return np.asarray(value_of(x), np.float64)

    def constant(self, x: Array) -> Any:
        return np.asarray(x, np.float64)

    def attached(self, x: Any) -> bool:
        return isinstance(x, Var)

    def backward(self, loss: Any, leaf: Any) -> Array:
        loss.backward()
        return np.zeros(leaf.shape) if leaf.grad is None else np.asarray(leaf.grad)


class TorchLibrary(ArrayLibrary):
    """Leaves and views of torch."""

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        self._view = importlib.import_module("miles_core.numerics.views").MicroView

    def leaf(self, value: Array) -> Any:
        return self._torch.tensor(value, dtype=self._torch.float64, requires_grad=True)

    def view(self, batch: Batch, outputs: Callable[[Output], Any]) -> Any:
        return self._view(batch, outputs)

    def numbers(self, x: Any) -> Array:
        return np.asarray(x.detach().double().numpy())

    def constant(self, x: Array) -> Any:
        return self._torch.tensor(x, dtype=self._torch.float64)

    def attached(self, x: Any) -> bool:
        return bool(x.requires_grad)

    def backward(self, loss: Any, leaf: Any) -> Array:
        found = None
        if self.attached(loss):  # nothing accumulates, so that several leaves may be asked of one loss
            (found,) = self._torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)
        return np.zeros(tuple(leaf.shape)) if found is None else np.asarray(found.numpy())


class Watched:
    """A view that writes down what is read."""

    def __init__(self, view: Any, columns: set[str], outputs: set[Output]) -> None:
        self._view = view
        self._columns = columns
        self._outputs = outputs

    def __getitem__(self, name: str) -> Any:
        self._columns.add(name)
        return self._view[name]

    def __contains__(self, name: str) -> bool:
        return name in self._view

    def out(self, output: Output) -> Any:
        self._outputs.add(output)
        return self._view.out(output)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


class TermConformance(Conformance):
    """Override `fill` where a term needs columns with a meaning of their own.

    `examples` are worked by hand. A term whose gradient is not that of its value on purpose (a stop-gradient) sets
    `gradient_of_value` to false, and has examples with gradients instead.
    """

    kind = "term"
    field: ClassVar[str] = ""
    places: ClassVar[tuple[Place, ...]] = (Place.TRAINER,)
    examples: ClassVar[Sequence[TermExample]] = ()
    gradient_of_value: ClassVar[bool] = True
    off_policy = 0.05  # how far π lies from π_p in the tests, as a standard deviation

    def example(self, place: Place) -> Any:
        return self.build(place)

    def term(self) -> Any:
        return self.build(Place.TRAINER)

    def library(self) -> ArrayLibrary:
        """What the term computes with."""
        library = ArrayLibrary()
        try:
            self.term()(self.view(library, self.batch(), self.leaves(library, self.batch())))
        except (TypeError, AttributeError):
            return TorchLibrary()
        return library

    def fill(self, batch: Batch, name: str) -> Batch:
        """The batch with the needed column `name`."""
        if name in batch.columns:
            return batch
        spec = CORE_COLUMNS.get(name) or ColumnSpec(name=name, level=Level.UNIT, dtype="float32")
        rng = np.random.default_rng(len(name))
        column = rng.standard_normal(batch.rows(spec.level))
        return batch.with_columns({name: -np.abs(column) if name.endswith("logprobs") else column}, [spec])

    def groups(self) -> list[Group]:
        """What the term is tried on."""
        return batches.groups()

    def batch(self) -> Batch:
        batch = batches.batch_of(self.groups())
        rng = np.random.default_rng(8)
        proximal = -np.abs(rng.standard_normal(batch.units)).astype(np.float32)
        given = {"proximal_logprobs": proximal, "behaviour_logprobs": proximal}
        batch = batch.with_columns(given, [CORE_COLUMNS[n] for n in given])
        for name in sorted(self.term().needs):
            batch = self.fill(batch, name)
        share = (batch.kept / batch.kept.sum()).astype(np.float32)
        spec = ColumnSpec(name="weight.term", level=Level.UNIT, dtype="float32")
        return batch.with_columns({"weight.term": share}, [spec])

    def start(self, batch: Batch, output: Output) -> Array:
        """The numbers that stand for a model output."""
        rng = np.random.default_rng(17 + len(output.role))
        if output.name == "logprobs":
            near = batch.columns["proximal_logprobs"].astype(np.float64)
            return near + self.off_policy * rng.standard_normal(batch.units)
        return np.abs(rng.standard_normal(batch.units))

    def leaves(self, library: ArrayLibrary, batch: Batch) -> dict[Output, Any]:
        return {output: library.leaf(self.start(batch, output)) for output in self.term().outputs}

    def view(self, library: ArrayLibrary, batch: Batch, leaves: dict[Output, Any]) -> Any:
        def serve(output: Output) -> Any:
            for known, leaf in leaves.items():
                if (known.name, known.role) == (output.name, output.role):
                    return leaf if output.grad else leaf.detach()
            return library.leaf(self.start(batch, output))  # undeclared: `test_inputs` says so

        return library.view(batch, serve).at(self.term().level)

    def loss(self, library: ArrayLibrary, batch: Batch, leaves: dict[Output, Any]) -> Any:
        """The objective of this term alone, through the code that backends call."""
        from miles_core.numerics.objective import evaluate

        term = self.term()
        view = self.view(library, batch, leaves)
        bound = BoundTerm(name="term", term=term, coef=1.0)
        loss, _ = evaluate(view.at, [bound], lambda unit: batch.trajectory_ids[int(batch.trajectory_of_unit[unit])])
        return loss

    def atoms(self, batch: Batch) -> int:
        levels = {"unit": batch.units, "trajectory": batch.n_trajectories, "episode": batch.n_episodes}
        return levels.get(self.term().level, batch.n_groups)

    @property
    def dynamic(self) -> bool:
        return self.field == "correction"

    # --- tests -------------------------------------------------------------------------------------------------------

    def test_declaration(self) -> None:
        term = self.term()
        provider = self.the_provider()
        check("the provider says its field", provider.field == self.field, provider.field)
        level = term.level in ("unit", "trajectory", "episode", "group")
        check("level is unit, trajectory, episode or group", level, term.level)
        check("mask is kept or trainable", term.mask in ("kept", "trainable"), term.mask)
        known = (None, "token_mean", "episode_mean", "episode_sum", "constant")
        check("aggregation is known or None", term.aggregation in known, term.aggregation)
        weighted = not (term.weighted and self.field in ("kl", "entropy", "value", "correction"))
        check("only policy terms are weighted", weighted, term.weighted)

    def test_inputs(self) -> None:
        library, batch, term = self.library(), self.batch(), self.term()
        columns: set[str] = set()
        outputs: set[Output] = set()
        view = Watched(self.view(library, batch, self.leaves(library, batch)), columns, outputs)
        found = term(view)
        check("a term returns a TermOutput", isinstance(found, TermOutput), repr(found))
        undeclared = {(o.name, o.role) for o in outputs} - {(o.name, o.role) for o in term.outputs}
        check("a term asks only for outputs that it declares", not undeclared, undeclared)
        unneeded = columns - term.needs - ALWAYS
        check("a term reads only columns that it needs", not unneeded, unneeded)
        shape = library.numbers(found.value).shape
        check("a term gives one value per unit or atom", shape == (self.atoms(batch),), (shape, term.level))
        for name, metric in found.metrics.items():
            check("metrics are detached", not library.attached(metric), name)
            same = library.numbers(metric).shape == shape
            check("metrics have one number per unit or atom", same, (name, library.numbers(metric).shape))
        again = term(view)
        same = np.array_equal(library.numbers(found.value), library.numbers(again.value), equal_nan=True)
        check("the same view gives the same values", same)

    def test_locality(self) -> None:
        library, batch, term = self.library(), self.batch(), self.term()
        leaves = self.leaves(library, batch)
        plain = library.numbers(term(self.view(library, batch, leaves)).value)
        group = batch.group_of[batch.episode_of_unit]
        last = group == batch.n_groups - 1
        moved = {o: library.leaf((x := self.start(batch, o)) + 0.3 * _beside(last, x)) for o in leaves}
        other = library.numbers(term(self.view(library, batch, moved)).value)
        per_unit = {"unit": ~last, "trajectory": group[batch.offsets[:-1]] != batch.n_groups - 1}
        keep = per_unit.get(term.level)
        if keep is None:
            keep = np.arange(self.atoms(batch)) < self.atoms(batch) - int(term.level == "group")
            if term.level == "episode":
                keep = batch.group_of != batch.n_groups - 1
        check("a value depends on its own group only", np.allclose(plain[keep], other[keep], atol=1e-9), (plain, other))

    def test_examples(self) -> None:
        library, term = self.library(), self.term()
        worked = self.gradient_of_value or any(e.gradient for e in self.examples)
        check("a gradient that is not the value's is worked by hand", worked, "no example has a gradient")
        for example in self.examples:
            batch = example.batch()
            leaves = {o: library.leaf(np.array(example.outputs[_key(o)], np.float64)) for o in term.outputs}
            value = term(self.view(library, batch, leaves)).value
            live = np.asarray(batch.columns["trainable"]) if term.level == "unit" else np.ones(self.atoms(batch), bool)
            found = library.numbers(value)
            same = near(found[live], np.asarray(example.value, np.float64)[live])
            check("values are those worked by hand", same, (example, found))
            leaf = {_key(o): leaf for o, leaf in leaves.items()}
            for name, expected in example.gradient.items():
                gradient = library.backward((value * library.constant(live)).sum(), leaf[name])
                check("gradients are those worked by hand", near(gradient, expected), (example, gradient))

    def test_split(self) -> None:
        library, batch, term = self.library(), self.batch(), self.term()
        starts = {o: self.start(batch, o) for o in term.outputs}
        whole = library.numbers(term(self.view(library, batch, {o: library.leaf(s) for o, s in starts.items()})).value)
        piece = {"unit": batch.trajectory_of_unit, "trajectory": batch.trajectory_of_unit}
        piece["episode"] = batch.episode_of_unit
        of_unit = piece.get(term.level, batch.group_of[batch.episode_of_unit])
        parts = []
        for index in np.unique(of_unit):
            units = of_unit == index
            alone = batch.select(np.unique(batch.trajectory_of_unit[units]))
            leaves = {o: library.leaf(s[units]) for o, s in starts.items()}
            parts.append(library.numbers(term(self.view(library, alone, leaves)).value))
        same = np.allclose(whole, np.concatenate(parts), rtol=1e-6, atol=1e-7)
        check("values do not depend on the split into micro-batches", same, (whole, parts))

    def test_rejection(self) -> None:
        library, batch, term = self.library(), self.batch(), self.term()
        if term.level != "unit":
            return
        rejected = batch.columns["trainable"] & (np.arange(batch.units) % 3 == 0)
        fewer = batch.with_columns({"rejected": rejected}, [CORE_COLUMNS["rejected"]])
        a, b = (
            library.numbers(term(self.view(library, one, self.leaves(library, batch))).value) for one in (batch, fewer)
        )
        check("rejecting a token changes no other token's value", np.allclose(a[~rejected], b[~rejected]), (a, b))

    def test_extremes(self) -> None:
        library, batch = self.library(), self.batch()
        for far in (100.0, -100.0):
            leaves = {
                o: library.leaf(self.start(batch, o) + far * (_key(o) == "logprobs")) for o in self.term().outputs
            }
            found = [library.numbers(self.term()(self.view(library, batch, leaves)).value)]
            if not self.dynamic and np.isfinite(found[0]).all():
                loss = self.loss(library, batch, leaves)
                found += [library.backward(loss, x) for o, x in leaves.items() if o.grad]
            check("log-ratios of ±100 stay finite", all(np.isfinite(x).all() for x in found), (far, found))
        if self.dynamic:
            return
        zeros = np.zeros(batch.units)
        nothing = batch.with_columns({"trainable": zeros.astype(bool), "weight.term": zeros}, ())
        leaves = self.leaves(library, nothing)
        loss = self.loss(library, nothing, leaves)
        found = [library.numbers(loss), *(library.backward(loss, x) for o, x in leaves.items() if o.grad)]
        check("where nothing is trainable, loss and gradient are 0", not any(x.any() for x in found), found)

    def test_gradient(self) -> None:
        if self.dynamic or not self.gradient_of_value:
            return
        library, batch = self.library(), self.batch()
        for output in self.term().outputs:
            if not output.grad:
                continue
            leaves = self.leaves(library, batch)
            gradient = library.backward(self.loss(library, batch, leaves), leaves[output])
            base = {o: self.start(batch, o) for o in leaves}
            for unit in np.flatnonzero(batch.columns["trainable"])[::4]:
                at = (int(unit), *(int(unit) % n for n in base[output].shape[1:]))
                step = np.zeros(base[output].shape)
                step[at] = 1e-5
                ends = []
                for sign in (1.0, -1.0):
                    moved = {o: library.leaf(v + sign * step if o == output else v) for o, v in base.items()}
                    ends.append(float(library.numbers(self.loss(library, batch, moved))))
                numeric = (ends[0] - ends[1]) / 2e-5
                near = abs(numeric - gradient[at]) < 1e-6 + 1e-4 * abs(numeric)
                check("the gradient is that of the value", near, (output.name, at, numeric, gradient[at]))

    def test_masked_garbage(self) -> None:
        if self.dynamic:
            return
        library, batch = self.library(), self.batch()
        dead = ~batch.columns["trainable"]
        results: list[tuple[float, list[Array]]] = []
        for garbage in (0.0, np.nan):
            columns = {}
            for name in self.term().needs | {"proximal_logprobs", "behaviour_logprobs"}:
                column = batch.columns[name]
                if batch.specs[name].level == Level.UNIT and column.dtype.kind == "f":
                    columns[name] = np.where(_beside(dead, column), garbage, column).astype(column.dtype)
            dirty = batch.with_columns(columns, ())
            starts = {o: self.start(batch, o) for o in self.term().outputs}
            leaves = {o: library.leaf(np.where(_beside(dead, x), garbage, x)) for o, x in starts.items()}
            loss = self.loss(library, dirty, leaves)
            grads = [library.backward(loss, leaf) for o, leaf in leaves.items() if o.grad]
            results.append((float(library.numbers(loss)), [g[~dead] for g in grads]))
        (a, ga), (b, gb) = results
        same = abs(a - b) < 1e-9 and all(np.allclose(x, y, atol=1e-9) for x, y in zip(ga, gb, strict=True))
        check("what is masked changes nothing, not even as NaN", same, (a, b))


def _beside(mask: Array, x: Array) -> Array:
    """A mask of units, shaped to broadcast against a column or output with inner dimensions."""
    return mask.reshape(-1, *[1] * (x.ndim - 1))


def _key(output: Output) -> str:
    """The name of an output in a worked example."""
    return output.name if output.role == "actor" else f"{output.role}.{output.name}"


class LossConformance(TermConformance):
    """Field `loss`."""

    field = "loss"

    def test_direction(self) -> None:
        if "advantages" not in self.term().needs:
            return
        library, batch = self.library(), self.batch()
        for sign in (1.0, -1.0):
            column = np.where(batch.columns["trainable"], sign, 0.0).astype(np.float32)
            pushed = batch.with_columns({"advantages": column}, ())
            leaves = self.leaves(library, pushed)
            output = next(o for o in leaves if o.name == "logprobs" and o.role == "actor")
            gradient = library.backward(self.loss(library, pushed, leaves), leaves[output])[batch.columns["trainable"]]
            towards = bool((sign * gradient <= 1e-12).all() and (sign * gradient.sum()) < 0)
            check("a positive advantage raises the log-probability, a negative lowers it", towards, (sign, gradient))


class KLConformance(TermConformance):
    """Field `kl`: to the role `reference`, as an output or as a column."""

    field = "kl"

    def test_equal_policies(self) -> None:
        library, batch = self.library(), self.batch()
        same = batch.columns["proximal_logprobs"]
        if "reference.logprobs" in batch.columns:
            batch = batch.with_columns({"reference.logprobs": same}, ())
        leaves = {o: library.leaf(same.astype(np.float64)) for o in self.term().outputs}
        value = library.numbers(self.term()(self.view(library, batch, leaves)).value)
        check("a policy that is the reference costs nothing", np.allclose(value, 0.0, atol=1e-7), value)


class EntropyConformance(TermConformance):
    """Field `entropy`: its value falls as entropy rises, so that a positive coefficient raises entropy."""

    field = "entropy"

    def test_direction(self) -> None:
        library, batch = self.library(), self.batch()
        leaves = self.leaves(library, batch)
        output = next((o for o in leaves if o.name == "entropy"), None)
        check("an entropy term asks for the output entropy", output is not None, list(leaves))
        assert output is not None
        gradient = library.backward(self.loss(library, batch, leaves), leaves[output])[batch.columns["trainable"]]
        check("a positive coefficient raises entropy", bool((gradient < 0).all()), gradient)


class ValueConformance(TermConformance):
    """Field `value`."""

    field = "value"

    def test_sign(self) -> None:
        library, batch = self.library(), self.batch()
        outputs = [(o.name, o.grad) for o in self.term().outputs]
        check("a value term trains the output values", ("values", True) in outputs, outputs)
        value = library.numbers(self.term()(self.view(library, batch, self.leaves(library, batch))).value)
        check("an error is never below 0", bool((value[batch.columns["trainable"]] >= 0).all()), value)
