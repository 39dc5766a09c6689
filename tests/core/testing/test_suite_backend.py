"""The backend suite: passes on the toy, and every assertion sees the backend that is broken for it."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from miles_core.contracts.learning import UpdateResult
from miles_core.errors import CheckpointError, LearnerError
from miles_core.testing import BackendConformance
from miles_core.testing.toys import adapter as toy_adapter
from miles_core.testing.toys import backend as toy
from miles_core.testing.toys.adapter import ToyAdapter
from miles_core.testing.toys.autodiff import Var
from miles_core.testing.toys.backend import ToyBackend
from miles_core.testing.toys.config import BackendConfig

from .mutants import broken_suite, must_fail, own_labels, plugin


def suite_for(backend=ToyBackend, **changes):
    return broken_suite(
        BackendConformance, plugin(lambda config, context: backend(rank=context.rank), config=BackendConfig), **changes
    )


def backend(**methods):
    return {"backend": type("Broken", (ToyBackend,), methods)}


def model(**methods):
    """A backend suite whose model adapter is broken."""
    made = type("Adapter", (ToyAdapter,), methods)
    return {"adapter": lambda self, source: made(15)}


def scores(edit):
    def score(self, batch, outputs):
        return edit(batch, dict(ToyBackend.score(self, batch, outputs)))

    return backend(score=score)


def column(edit):
    return scores(lambda batch, found: {k: edit(batch, v) for k, v in found.items()})


def result(edit):
    return backend(update=lambda self, batch, terms: edit(ToyBackend.update(self, batch, terms)))


def metrics(**edits):
    def edit(found):
        changed = {k: edits[k](v) if k in edits else v for k, v in found.metrics.items()}
        return replace(found, metrics=changed)

    return result(edit)


def before_update(edit):
    return backend(update=lambda self, batch, terms: ToyBackend.update(self, *edit(self, batch, terms)))


def noisy(self, batch, outputs):
    self.calls = getattr(self, "calls", 0) + 1
    return {
        k: (v - np.float32(self.calls * 1e-7) * (v < -1)) for k, v in ToyBackend.score(self, batch, outputs).items()
    }


def drops_temperature(self, module, micro, want):
    return ToyAdapter.outputs(self, module, replace_column(micro, "temperature", 1.0), want)


def replace_column(batch, name, value):
    return batch.with_columns({name: np.full_like(batch.columns[name], value)}, ())


def drops_kept_ids(self, module, micro, want):
    columns = {k: v for k, v in micro.columns.items() if k != "keep_counts"}
    return ToyAdapter.outputs(self, module, replace(micro, columns=columns), want)


def not_normalised(self, module, micro, want):
    found = ToyAdapter.outputs(self, module, micro, want)
    return {k: v * 0.5 for k, v in found.items()}


def looks_at_neighbours(batch, scores):
    return (scores - 0.01 * np.arange(len(scores)) * (scores < 0)).astype(np.float32)


def scores_first_tokens(batch, found):
    found = found.copy()
    found[batch.offsets[:-1]] = -1.0
    return found


def no_move(self, batch, terms):
    saved = {name: role.module.weights() for name, role in self._roles[batch.policy].items()}
    done = ToyBackend.update(self, batch, terms)
    for name, role in self._roles[batch.policy].items():
        role.module.load(saved[name])
    return done


def uphill(self, batch, terms):
    return batch, [replace(t, term=Negative(t.term)) for t in terms]


class Negative:
    """The same value, the opposite gradient."""

    def __init__(self, term):
        self._term = term

    def __getattr__(self, name):
        return getattr(self._term, name)

    def __call__(self, view):
        found = self._term(view)
        value = found.value
        return replace(found, value=Var(value.value, [(value, lambda g: -g)]))


def first_group_counts_more(self, batch, terms):
    boost = np.where(batch.group_of[batch.episode_of_unit] == 0, 2.0, 1.0)
    weights = {k: (v * boost).astype(v.dtype) for k, v in batch.columns.items() if k.startswith("weight.")}
    return batch.with_columns(weights, ()), terms


def averages(self, batch, terms):
    """Divides by the number of groups, as one micro-batch each and their mean would."""
    weights = {k: v / np.float32(batch.n_groups) for k, v in batch.columns.items() if k.startswith("weight.")}
    return batch.with_columns(weights, ()), terms


def moves_by_order(self, batch, terms):
    done = ToyBackend.update(self, batch, terms)
    var = toy.parameters(self, batch.policy)["bias"]
    toy.parameters(self, batch.policy)["bias"] = Var(var.value + 0.01 * batch.lengths[0])
    return done


def masks_by_zero(self, batch, terms):
    """0 · NaN is NaN: multiplies in place of selecting."""
    dirty = batch.columns["advantages"]
    total = float((dirty * 0.0).sum())
    if np.isnan(total) and batch.columns["trainable"].any() and not np.isnan(dirty[batch.columns["trainable"]]).any():
        batch = batch.with_columns({"advantages": np.nan_to_num(dirty) * 2.0}, ())
    return batch, terms


def never_skips(found):
    return replace(found, skipped="")


def skips_and_moves(self, batch, terms):
    done = ToyBackend.update(self, batch, terms)
    if done.skipped:
        toy.parameters(self, batch.policy)["bias"] = Var(toy.parameters(self, batch.policy)["bias"].value * 0.99 + 0.1)
    return done


def nan_is_skipped(self, batch, terms):
    try:
        return ToyBackend.update(self, batch, terms)
    except LearnerError:
        return UpdateResult(metrics={"loss": (0.0, 1.0)}, grad_norm=0.0, skipped="NaN")


def nan_without_name(self, batch, terms):
    try:
        return ToyBackend.update(self, batch, terms)
    except LearnerError:
        raise LearnerError("something is NaN", fix="look") from None


def stale_proximal(self, batch, terms):
    if "proximal_logprobs" not in batch.columns:
        zeros = np.zeros(batch.units, np.float32)
        spec = toy_spec("proximal_logprobs")
        batch = batch.with_columns({"proximal_logprobs": zeros}, [spec])
    return batch, terms


def toy_spec(name):
    from miles_core.columns import CORE_COLUMNS

    return CORE_COLUMNS[name]


class AttachedProximal(ToyBackend):
    """Serves π itself as π_p, with its gradient."""

    def update(self, batch, terms):
        from miles_core.numerics import objective

        original, objective._detach = objective._detach, lambda x: x
        try:
            if "proximal_logprobs" in batch.columns or not any("Ratio" in type(t.term).__name__ for t in terms):
                objective._detach = original
                return super().update(batch, terms)
            objective._detach = original
            done = super().update(batch, terms)
            return replace(done, grad_norm=0.0)
        finally:
            objective._detach = original


class NoDecay(ToyBackend):
    def build(self, policies, total_updates):
        super().build(policies, {name: 10**9 for name in total_updates})


def reports_clipped(self, batch, terms):
    done = ToyBackend.update(self, batch, terms)
    limit = self._roles[batch.policy]["actor"].spec.optimizer.max_grad_norm
    return done if limit is None else replace(done, grad_norm=min(done.grad_norm, limit))


class NeverClips(ToyBackend):
    def _apply(self, role):
        role.optimizer.config = replace(role.optimizer.config, max_grad_norm=None)
        return super()._apply(role)


class UpdatesEverybody(ToyBackend):
    def update(self, batch, terms):
        done = super().update(batch, terms)
        for policy in self._roles:
            if policy != batch.policy:
                bias = toy.parameters(self, policy)["bias"]
                toy.parameters(self, policy)["bias"] = Var(bias.value + 0.5)
        return done


def anybody(self, policy, layout, meta=False):
    return ToyBackend.export(self, policy if policy in self._roles else next(iter(self._roles)), layout, meta)


def any_output(self, module, micro, want):
    known = [w if w.name in ("logprobs", "entropy", "values") else replace(w, name="entropy") for w in want]
    found = ToyAdapter.outputs(self, module, micro, known)
    return {w.name: found[k.name] for w, k in zip(want, known, strict=True)}


class OwnWeights(ToyBackend):
    """Roles that should start from the actor start from their own seed."""

    def _build_role(self, policy, spec, built, total):
        return super()._build_role(policy, replace(spec, init="") if spec.name == "reference" else spec, built, total)


class MovesReference(ToyBackend):
    def update(self, batch, terms):
        done = super().update(batch, terms)
        if "reference" in self._roles[batch.policy]:
            super().blend(batch.policy, "reference", "actor", 0.5)
        return done


class SharesModules(ToyBackend):
    """The reference is the actor itself."""

    def score(self, batch, outputs):
        found = super().score(batch, [replace(o, role="actor") for o in outputs])
        self.first = getattr(self, "first", found)
        return {o.column: self.first["proximal_logprobs"] for o in outputs}


def blend(edit):
    return backend(blend=lambda self, policy, dst, src, decay: ToyBackend.blend(self, policy, dst, src, edit(decay)))


def exported(edit):
    def export(self, policy, layout, meta=False):
        return edit(self, ToyBackend.export(self, policy, layout, meta), meta)

    return backend(export=export)


def twice(self, stream, meta):
    for item in stream:
        yield item
        yield item


def transposed(self, stream, meta):
    for spec, tensor in stream:
        yield spec, tensor.reshape(-1)


def fewer_when_dry(self, stream, meta):
    return iter(list(stream)[1:]) if meta else stream


def counted(self, stream, meta):
    self.exports = getattr(self, "exports", 0) + 1
    return ((spec, tensor + np.float32(1e-6 * self.exports)) for spec, tensor in stream)


def any_layout(self, policy, layout, meta=False):
    return ToyBackend.export(self, policy, "full", meta)


def strange_layout_error(self, policy, layout, meta=False):
    if layout == "shards":
        raise RuntimeError("no")
    return ToyBackend.export(self, policy, layout, meta)


def unseeded(self, source, seed, *, head="lm"):
    return ToyAdapter.build(self, source, int(np.random.default_rng().integers(2**31)), head=head)


def one_seed(self, source, seed, *, head="lm"):
    return ToyAdapter.build(self, source, 1, head=head)


CALLS = itertools.count(1)


def random_updates(self, batch, terms):
    done = ToyBackend.update(self, batch, terms)
    bias = toy.parameters(self, batch.policy)["bias"]
    toy.parameters(self, batch.policy)["bias"] = Var(bias.value + 1e-3 * next(CALLS))
    return done


def loads(edit):
    def load(self, folder):
        ToyBackend.load(self, folder)
        for name, role in self._roles["main"].items():
            edit(name, role)

    return backend(load=load)


def half_precision(name, role):
    if name == "actor":
        role.module.load({k: v.value.astype(np.float16) for k, v in role.module.params.items()})


def other_reference(name, role):
    if name == "reference":
        role.module.load({k: v.value * 1.5 for k, v in role.module.params.items()})


def restarts_schedule(name, role):
    if role.optimizer is not None:
        role.optimizer.count = 0


def forgets_moments(name, role):
    if role.optimizer is not None:
        role.optimizer.second = {k: v * 0.5 for k, v in role.optimizer.second.items()}


def loads_nothing(self, folder):
    try:
        ToyBackend.load(self, folder)
    except CheckpointError:
        return


def without_config(self, policy, folder):
    ToyBackend.save_model(self, policy, folder)
    (folder / "config.json").unlink()


def saves_other_weights(self, policy, folder):
    ToyBackend.save_model(self, policy, folder)
    other = ToyAdapter(15).build(self._roles[policy]["actor"].spec.source, 77)
    toy_adapter.save_model(ToyAdapter(15), other, other.weights(), folder)
    json.loads((folder / "config.json").read_text())


def offloads_badly(self, tags):
    ToyBackend.onload(self, tags)
    bias = toy.parameters(self, "main")["bias"]
    toy.parameters(self, "main")["bias"] = Var(bias.value.astype(np.float16))


MUTANTS = {
    "the actor's scores are named proximal_logprobs": scores(lambda b, f: dict.fromkeys(["logprobs"], *f.values())),
    "scores are float32, one per unit": column(lambda b, v: v.astype(np.float64)),
    "scores are log-probabilities": column(lambda b, v: -v),
    "the first token of a trajectory scores 0": column(scores_first_tokens),
    "scores do not depend on neighbours or order": column(looks_at_neighbours),
    "scoring twice gives the same bits": backend(score=noisy),
    "probabilities of the next token sum to 1": model(outputs=not_normalised),
    "the trajectory's temperature is applied": model(outputs=drops_temperature),
    "kept ids renormalise": model(outputs=drops_kept_ids),
    "a term's metric is Σ weight · value": metrics(loss_term=lambda m: (m[0] * 2, m[1])),
    "the loss is Σ coef · weight · value": metrics(loss=lambda m: (m[0] / 2, m[1])),
    "an update reports its gradient norm": result(lambda r: replace(r, grad_norm=0.0)),
    "an update reports its learning rate": metrics(lr=lambda m: (0.5, 1.0)),
    "an update moves the weights": backend(update=no_move),
    "an update lowers its loss": before_update(uphill),
    "gradients of micro-batches are summed, never averaged": before_update(averages),
    "the gradient does not depend on the order of groups": before_update(first_group_counts_more),
    "weights after an update do not depend on the order of groups": backend(update=moves_by_order),
    "what is masked changes nothing, not even as NaN": before_update(masks_by_zero),
    "a zero denominator skips the update and says so": result(never_skips),
    "a skipped update moves nothing": backend(update=skips_and_moves),
    "a NaN at a trainable unit raises LearnerError": backend(update=nan_is_skipped),
    "the error of a NaN names the trajectory": backend(update=nan_without_name),
    "without a proximal column views serve the current log-probabilities": before_update(stale_proximal),
    "the served proximal log-probabilities are detached": {"backend": AttachedProximal},
    "the learning rate warms up by updates": metrics(lr=lambda m: (0.02, 1.0)),
    "the learning rate decays by updates": {"backend": NoDecay},
    "the reported gradient norm is the one before clipping": backend(update=reports_clipped),
    "max_grad_norm clips the gradient": {"backend": NeverClips},
    "an update leaves other policies alone": {"backend": UpdatesEverybody},
    "an unknown policy is refused": backend(export=anybody),
    "an unknown output is refused with CapabilityError": model(outputs=any_output),
    "scores of another role carry its name": scores(
        lambda b, f: {k.removeprefix("reference."): v for k, v in f.items()}
    ),
    "a role that starts from the actor scores as the actor does": {"backend": OwnWeights},
    "a frozen role does not move": {"backend": MovesReference},
    "the actor moves away from a frozen role": {"backend": SharesModules},
    "a blend with decay 1 keeps what is there": blend(lambda decay: 0.0 if decay == 1.0 else decay),
    "a blend is decay · dst + (1 − decay) · src": blend(lambda decay: 1 - decay if 0 < decay < 1 else decay),
    "a blend with decay 0 copies": blend(lambda decay: 0.5 if decay == 0 else decay),
    "every tensor is exported once": exported(twice),
    "exported tensors have the shapes of their specs": exported(transposed),
    "the dry pass gives the same specs": exported(fewer_when_dry),
    "exporting twice gives the same bits": exported(counted),
    "a layout that is not there is refused with CapabilityError": backend(export=strange_layout_error),
    "an unknown layout is refused": backend(export=any_layout),
    "the same seed builds the same bits": model(build=unseeded),
    "another seed builds another model": model(build=one_seed),
    "the same updates give the same bits": backend(update=random_updates),
    "load restores the weights bit for bit": loads(half_precision),
    "load restores every role": loads(other_reference),
    "load restores the position of the schedule": loads(restarts_schedule),
    "a resumed update equals the uninterrupted one bit for bit": loads(forgets_moments),
    "a folder that is no checkpoint is refused": backend(load=loads_nothing),
    "a saved model has a config.json": backend(save_model=without_config),
    "a saved model loads and scores the same": backend(save_model=saves_other_weights),
    "offloading and onloading changes nothing": backend(onload=offloads_badly),
}


def test_every_label_has_a_mutant():
    assert own_labels(BackendConformance) == set(MUTANTS)


@pytest.mark.parametrize("label", MUTANTS)
def test_a_broken_backend_is_seen(label):
    must_fail(label, suite_for(**MUTANTS[label]))


class TestToy(BackendConformance):
    name = "toy"


class TestToyInMicroBatches(BackendConformance):
    """Every group a micro-batch of its own."""

    name = "toy"
    options = {"micro_groups": 1}  # noqa: RUF012
