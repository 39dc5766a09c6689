"""What every training backend promises, in numbers: scores, updates, roles, weights out, state in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from miles_core.columns import Batch, ColumnSpec, Level
from miles_core.config.schema import Decay, OptimizerConfig
from miles_core.contracts.backend import RoleSpec
from miles_core.contracts.learning import LOGPROBS, BoundTerm, Output, TermLevel, TermMask, TermOutput, View
from miles_core.contracts.model import ModelSource
from miles_core.errors import CapabilityError, LearnerError, MilesError
from miles_core.provider import Place
from miles_core.records import Episode, Group, Task
from miles_core.testing.suite import Conformance, check, refuses
from miles_core.testing.suites import batches
from miles_core.testing.suites.backend_state import BackendState

Array = np.ndarray[Any, Any]
SCORES = Output(name="logprobs")
REFERENCE = Output(name="logprobs", role="reference")


@dataclass(frozen=True)
class PlainTerm:
    """−A·π or −π, in operators that every tensor library has."""

    advantage: bool = True
    level: TermLevel = "unit"
    mask: TermMask = "kept"
    weighted: bool = True
    aggregation: str | None = None
    outputs: tuple[Output, ...] = (LOGPROBS,)
    needs: frozenset[str] = field(default_factory=lambda: frozenset({"advantages"}))

    def __call__(self, view: View) -> TermOutput:
        logprobs = view.out(LOGPROBS)
        return TermOutput(value=-(logprobs * view["advantages"]) if self.advantage else -logprobs)


@dataclass(frozen=True)
class RatioTerm(PlainTerm):
    """−A·(π − π_p): 0 in value where π_p is π, whatever the advantage; its gradient is that of `PlainTerm`."""

    def __call__(self, view: View) -> TermOutput:
        return TermOutput(value=-((view.out(LOGPROBS) - view["proximal_logprobs"]) * view["advantages"]))


def _copy(episode: Episode, index: int) -> Episode:
    """The same episode under another identity."""
    trajectories = tuple(replace(t, id=f"{index}/{t.id}") for t in episode.trajectories)
    return replace(episode, id=f"{index}/{episode.id}", trajectories=trajectories)


def bound(term: Any, name: str = "loss_term", coef: float = 1.0) -> BoundTerm:
    return BoundTerm(name=name, term=term, coef=coef)


class BackendConformance(BackendState, Conformance):
    """Override `source`, `adapter` and `vocab_size` for a backend that trains other models than toys."""

    kind = "backend"
    places: ClassVar[tuple[Place, ...]] = (Place.TRAINER,)
    vocab_size = 15
    close_to = 1e-5  # how far equal float32 numbers of different layouts may lie apart

    def source(self) -> ModelSource:
        architecture = {"model_type": "toy", "vocab_size": self.vocab_size, "order": 2, "scale": 1.0}
        return ModelSource(asked="conformance", architecture=architecture)

    def adapter(self, source: ModelSource) -> Any:
        from miles_core.testing.toys.adapter import ToyAdapter

        return ToyAdapter(self.vocab_size)

    def example(self, place: Place) -> Any:
        return self.build(place)

    def optimizer(self, **given: Any) -> OptimizerConfig:
        return OptimizerConfig(**{"lr": 0.01, "max_grad_norm": None, **given})

    def role(self, name: str = "actor", **given: Any) -> RoleSpec:
        source = given.pop("source", self.source())
        base: dict[str, Any] = {"source": source, "adapter": self.adapter(source), "seed": 5}
        if given.get("update", "trained") == "trained":
            base["optimizer"] = self.optimizer()
        return RoleSpec(name=name, **{**base, **given})

    def backend(
        self, roles: Mapping[str, RoleSpec] | None = None, policies: Sequence[str] = ("main",), total: int = 100
    ) -> Any:
        given = {"actor": self.role()} if roles is None else roles
        adapters = {f"{p}/{r.name}": r.adapter for p in policies for r in given.values()}
        made = self.build(Place.TRAINER, adapters=adapters, name="backend")
        made.build(dict.fromkeys(policies, given), dict.fromkeys(policies, total))
        return made

    def probe(self) -> None:
        self.backend().close()

    def batch(self, made: Sequence[Group] | None = None) -> Batch:
        batch = batches.batch_of(batches.groups(self.vocab_size) if made is None else made)
        return batches.with_column(batch, "advantages", batches.spread(batch, 1))

    def weighted(self, batch: Batch, *names: str) -> Batch:
        """The batch with `weight.<name>` of `token_mean`."""
        share = (batch.kept / max(int(batch.kept.sum()), 1)).astype(np.float32)
        specs = [ColumnSpec(name=f"weight.{n}", level=Level.UNIT, dtype="float32") for n in names]
        return batch.with_columns({spec.name: share for spec in specs}, specs)

    def weights(self, backend: Any, policy: str = "main") -> dict[str, Array]:
        """What is exported, as float32 copies."""
        return {spec.name: self.array(t) for spec, t in backend.export(policy, "full")}

    def array(self, tensor: Any) -> Array:
        host = tensor if isinstance(tensor, np.ndarray) else tensor.detach().float().cpu().numpy()
        return np.array(host, np.float32)

    def near(self, a: Mapping[str, Array], b: Mapping[str, Array], by: float | None = None) -> bool:
        by = self.close_to if by is None else by
        return set(a) == set(b) and all(np.allclose(a[n], b[n], rtol=0, atol=by) for n in a)

    def scores(self, backend: Any, batch: Batch, output: Output = SCORES, column: str = "proximal_logprobs") -> Array:
        return np.asarray(backend.score(batch, [output])[column])

    # --- scores ------------------------------------------------------------------------------------------------------

    def test_scores(self) -> None:
        backend = self.backend()
        batch = self.batch()
        found = backend.score(batch, [SCORES])
        named = set(found) == {"proximal_logprobs"}
        check("the actor's scores are named proximal_logprobs", named, sorted(found))
        scores = np.asarray(found["proximal_logprobs"])
        check("scores are float32, one per unit", scores.dtype == np.float32 and scores.shape == (batch.units,), scores)
        check("scores are log-probabilities", np.isfinite(scores).all() and (scores <= 1e-6).all(), scores)
        firsts = scores[batch.offsets[:-1]]
        check("the first token of a trajectory scores 0", not firsts.any(), firsts)
        backwards = batches.batch_of(list(reversed(batches.groups(self.vocab_size))))
        a = batches.by_trajectory(batch, scores)
        b = batches.by_trajectory(backwards, self.scores(backend, backwards))
        check("scores do not depend on neighbours or order", self.near(a, b), (a, b))
        again = self.scores(backend, batch)
        check("scoring twice gives the same bits", np.array_equal(scores, again), (scores, again))
        backend.close()

    def _one_step(self, temperature: float, **columns: Array) -> tuple[Batch, int]:
        """A batch with every token of the vocabulary once after the same prompt."""
        prompt = [3, 4]
        rows = []
        for token in range(self.vocab_size):
            extra = {name: values[token] for name, values in columns.items()}
            rows.append(batches.trajectory(f"t/{token}", prompt, [token], temperature=temperature, **extra))
        template = batches.groups(self.vocab_size)[0]
        episodes = tuple(
            replace(template.episodes[0], id=f"e/{i}", member=i, trajectories=(row,)) for i, row in enumerate(rows)
        )
        task = Task(id="conformance:train:0", prompt="?")
        return batches.batch_of([replace(template, task=task, episodes=episodes)]), len(prompt)

    def test_distribution(self) -> None:
        backend = self.backend()
        batch, prompt = self._one_step(1.0)
        plain = self.scores(backend, batch).reshape(self.vocab_size, -1)[:, prompt].astype(np.float64)
        total = float(np.exp(plain).sum())
        check("probabilities of the next token sum to 1", abs(total - 1) < 1e-4, total)
        cold, _ = self._one_step(0.5)
        half = self.scores(backend, cold).reshape(self.vocab_size, -1)[:, prompt].astype(np.float64)
        expected = 2 * plain - np.log(np.exp(2 * plain).sum())
        check("the trajectory's temperature is applied", np.allclose(half, expected, atol=1e-4), (half, expected))
        allowed = np.array(sorted({2, 5, 7}), np.int32)
        counts = [np.array([0] * prompt + [len(allowed)], np.int32)] * self.vocab_size
        kept, _ = self._one_step(1.0, keep_counts=np.array(counts), keep_ids=np.array([allowed] * self.vocab_size))
        cut = self.scores(backend, kept).reshape(self.vocab_size, -1)[allowed, prompt]
        wanted = plain[allowed] - np.log(np.exp(plain[allowed]).sum())
        check("kept ids renormalise", np.allclose(cut, wanted, atol=1e-4), (cut, wanted))
        backend.close()

    # --- updates -----------------------------------------------------------------------------------------------------

    def test_update(self) -> None:
        backend = self.backend()
        batch = self.weighted(self.batch(), "loss_term")
        before = self.weights(backend)
        scores = self.scores(backend, batch).astype(np.float64)
        terms = [bound(PlainTerm(), coef=2.0)]
        result = backend.update(batch, terms)
        weight = batch.columns["weight.loss_term"].astype(np.float64)
        expected = float((weight * -(scores * batch.columns["advantages"])).sum())
        num, den = result.metrics["loss_term"]
        check("a term's metric is Σ weight · value", abs(num / den - expected) < 1e-4, (num, den, expected))
        num, den = result.metrics["loss"]
        check("the loss is Σ coef · weight · value", abs(num / den - 2 * expected) < 1e-4, (num, den, 2 * expected))
        real = np.isfinite(result.grad_norm) and result.grad_norm > 0 and not result.skipped
        check("an update reports its gradient norm", real, result)
        rate = result.metrics["lr"][0] / result.metrics["lr"][1]
        check("an update reports its learning rate", abs(rate - 0.01) < 1e-9, result.metrics["lr"])
        check("an update moves the weights", not self.near(before, self.weights(backend), 1e-7))
        after = self.scores(backend, batch).astype(np.float64)
        lower = float((weight * -(after * batch.columns["advantages"])).sum())
        check("an update lowers its loss", lower < expected, (lower, expected))
        backend.close()

    def test_split_invariance(self) -> None:
        terms = [bound(PlainTerm())]
        results = []
        made = batches.groups(self.vocab_size)
        advantages = batches.by_trajectory(self.batch(made), self.batch(made).columns["advantages"])
        for order in (made, list(reversed(made))):
            backend = self.backend()
            batch = batches.batch_of(order)
            column = np.concatenate([advantages[name] for name in batch.trajectory_ids])
            batch = self.weighted(batches.with_column(batch, "advantages", column), "loss_term")
            results.append((backend.update(batch, terms), self.weights(backend)))
            backend.close()
        (a, wa), (b, wb) = results
        close = abs(a.grad_norm - b.grad_norm) < 1e-4 * max(a.grad_norm, 1.0)
        check("the gradient does not depend on the order of groups", close, (a.grad_norm, b.grad_norm))
        check("weights after an update do not depend on the order of groups", self.near(wa, wb, 1e-4), (a, b))

    def test_summing(self) -> None:
        """Copies of one group under one weight a unit: whatever the micro-batches, gradients only add up."""
        (one,) = batches.groups(self.vocab_size, sizes=(4,))
        norms = []
        for copies in (1, 6):
            made = [
                replace(one, id=f"{one.id}/{i}", slot=i, episodes=tuple(_copy(e, i) for e in one.episodes))
                for i in range(copies)
            ]
            batch = batches.batch_of(made)
            advantages = np.tile(batches.spread(batches.batch_of([one]), 1), copies)
            batch = self.weighted(batches.with_column(batch, "advantages", advantages), "loss_term")
            weight = batch.columns["weight.loss_term"] * copies
            backend = self.backend()
            found = backend.update(batch.with_columns({"weight.loss_term": weight}, ()), [bound(PlainTerm())])
            norms.append(found.grad_norm)
            backend.close()
        summed = abs(norms[1] - 6 * norms[0]) < 1e-3 * norms[1]
        check("gradients of micro-batches are summed, never averaged", summed, norms)

    def test_masked_garbage(self) -> None:
        found = []
        for garbage in (0.0, float("nan")):
            backend = self.backend()
            batch = self.batch()
            dirty = np.where(batch.columns["trainable"], batch.columns["advantages"], garbage).astype(np.float32)
            batch = self.weighted(batches.with_column(batch, "advantages", dirty), "loss_term")
            found.append((backend.update(batch, [bound(PlainTerm())]), self.weights(backend)))
            backend.close()
        (a, wa), (b, wb) = found
        same = self.near(wa, wb, 1e-7) and abs(a.grad_norm - b.grad_norm) < 1e-5
        check("what is masked changes nothing, not even as NaN", same, (a, b))

    def test_zero_denominator(self) -> None:
        backend = self.backend()
        batch = self.batch()
        nothing = batch.with_columns({"trainable": np.zeros(batch.units, bool)}, ())
        before = self.weights(backend)
        result = backend.update(self.weighted(nothing, "loss_term"), [bound(PlainTerm())])
        check("a zero denominator skips the update and says so", result.skipped, result)
        after = self.weights(backend)
        check("a skipped update moves nothing", self.near(before, after, 0.0))
        backend.close()

    def test_nonfinite(self) -> None:
        backend = self.backend()
        batch = self.batch()
        broken = batch.columns["advantages"].copy()
        unit = int(np.flatnonzero(batch.columns["trainable"])[-1])
        broken[unit] = np.nan
        name = batch.trajectory_ids[int(batch.trajectory_of_unit[unit])]
        batch = self.weighted(batches.with_column(batch, "advantages", broken), "loss_term")
        label = "a NaN at a trainable unit raises LearnerError"
        try:
            backend.update(batch, [bound(PlainTerm())])
        except LearnerError as error:
            check("the error of a NaN names the trajectory", name in str(error), str(error))
        except Exception as error:
            check(label, False, repr(error))
        else:
            check(label, False, "no error")
        backend.close()

    def test_proximal(self) -> None:
        backend = self.backend()
        batch = self.weighted(self.batch(), "loss_term")
        result = backend.update(batch, [bound(RatioTerm())])
        value = result.metrics["loss_term"][0]
        check("without a proximal column views serve the current log-probabilities", abs(value) < 1e-6, value)
        check("the served proximal log-probabilities are detached", result.grad_norm > 0, result.grad_norm)
        backend.close()

    def test_schedule(self) -> None:
        optimizer = self.optimizer(lr=0.02, warmup_updates=2, decay=Decay.linear)
        backend = self.backend({"actor": self.role(optimizer=optimizer)}, total=10)
        batch = self.weighted(self.batch(), "loss_term")
        rates = []
        for _ in range(4):
            num, den = backend.update(batch, [bound(PlainTerm())]).metrics["lr"]
            rates.append(num / den)
        up = rates[0] < rates[1] <= 0.02 + 1e-9
        check("the learning rate warms up by updates", up and abs(rates[0] - 0.01) < 1e-9, rates)
        check("the learning rate decays by updates", rates[3] < rates[2] - 1e-4 <= 0.02, rates)
        backend.close()

    def test_gradient_clipping(self) -> None:
        norms, moves = [], []
        for limit in (None, 1e-9):
            optimizer = self.optimizer(max_grad_norm=limit, eps=1e-3)
            backend = self.backend({"actor": self.role(optimizer=optimizer)})
            before = self.weights(backend)
            batch = self.weighted(self.batch(), "loss_term")
            norms.append(backend.update(batch, [bound(PlainTerm())]).grad_norm)
            after = self.weights(backend)
            moves.append(max(float(np.abs(after[n] - before[n]).max()) for n in before))
            backend.close()
        check(
            "the reported gradient norm is the one before clipping", abs(norms[0] - norms[1]) < 1e-4 * norms[0], norms
        )
        check("max_grad_norm clips the gradient", moves[1] < 0.1 * moves[0], moves)

    def test_policies(self) -> None:
        backend = self.backend(policies=("main", "other"))
        before = self.weights(backend, "other")
        backend.update(self.weighted(self.batch(), "loss_term"), [bound(PlainTerm())])
        check("an update leaves other policies alone", self.near(before, self.weights(backend, "other"), 0.0))
        refuses("an unknown policy is refused", MilesError, lambda: list(backend.export("nobody", "full")))
        backend.close()

    def test_unknown_output(self) -> None:
        backend = self.backend()
        odd = [Output(name="conformance_nonsense")]
        batch = self.batch()
        refuses("an unknown output is refused with CapabilityError", CapabilityError, lambda: backend.score(batch, odd))
        backend.close()
