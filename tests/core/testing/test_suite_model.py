"""The suites of models, resolvers and extensions: every assertion sees what is broken for it."""

import shutil
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from miles_core.errors import ModelSourceError
from miles_core.testing import ExtensionConformance, ModelConformance, ResolverConformance
from miles_core.testing.toys.adapter import ToyAdapter, ToyResolver
from miles_core.testing.toys.autodiff import Var
from miles_core.testing.toys.config import ExtensionConfig
from miles_core.testing.toys.extension import DELTA, ToyExtension

from .mutants import broken_suite, must_fail, own_labels, plugin

# --- model adapters --------------------------------------------------------------------------------------------------


def model(**methods):
    kind = type("Broken", (ToyAdapter,), methods)
    return broken_suite(ModelConformance, plugin(lambda config, context: kind(15)))


def outputs(edit):
    def changed(self, module, micro, want):
        return edit(micro, dict(ToyAdapter.outputs(self, module, micro, want)))

    return model(outputs=changed)


def scaled(value, by):
    return value * by


def each(edit):
    return outputs(lambda micro, found: {k: edit(micro, k, v) for k, v in found.items()})


def detached(micro, name, value):
    return value.value if isinstance(value, Var) else value


def attached(micro, name, value):
    return value if isinstance(value, Var) else Var(value)


def first_token_too(micro, name, value):
    first = np.zeros(micro.units)
    first[micro.offsets[:-1]] = -1.0 if name == "logprobs" else 0.0
    return value + first


def by_position(micro, name, value):
    moved = np.where(np.arange(micro.units) > 10, 1.01, 1.0)
    return value * moved


def any_output(self, module, micro, want):
    known = [w if w.name in ("logprobs", "entropy") else replace(w, name="entropy") for w in want]
    found = ToyAdapter.outputs(self, module, micro, known)
    return {w.name: found[k.name] for w, k in zip(want, known, strict=True)}


def unseeded(self, source, seed, *, head="lm"):
    return ToyAdapter.build(self, source, int(np.random.default_rng().integers(2**31)), head=head)


def one_seed(self, source, seed, *, head="lm"):
    return ToyAdapter.build(self, source, 1, head=head)


def builds_anything(self, source, seed, *, head="lm"):
    with suppress(ModelSourceError):
        return ToyAdapter.build(self, source, seed, head=head)
    return ToyAdapter.build(self, ModelConformance().source(), seed, head=head)


def exports_twice(self, module, tensors):
    for spec, tensor in ToyAdapter.export(self, module, tensors):
        yield spec, tensor
        yield spec, tensor


def exports_torch_names(self, module, tensors):
    for spec, tensor in ToyAdapter.export(self, module, tensors):
        yield replace(spec, dtype="float32"), tensor


MODELS = {
    "the same seed builds the same bits": model(build=unseeded),
    "another seed builds another model": model(build=one_seed),
    "blocks are a sequence": model(blocks=lambda self, module: iter(())),
    "cost is float64, one per trajectory": model(cost=lambda self, lengths: lengths),
    "cost is above 0 and rises with length": model(cost=lambda self, lengths: np.ones(len(lengths))),
    "outputs come under their names": outputs(lambda micro, found: {k.upper(): v for k, v in found.items()}),
    "outputs have one row per unit": each(lambda m, k, v: v[1:]),
    "log-probabilities are at most 0": each(lambda m, k, v: scaled(v, -1.0) if k == "logprobs" else v),
    "the first token of a trajectory has log-probability 0": each(first_token_too),
    "entropy lies between 0 and that of chance": each(lambda m, k, v: scaled(v, 3.0) if k == "entropy" else v),
    "an output with grad carries it": each(detached),
    "an output without grad is detached": each(attached),
    "outputs do not depend on neighbours or order": each(by_position),
    "an unknown output is refused with CapabilityError": model(outputs=any_output),
    "every tensor is exported once": model(export=exports_twice),
    "specs say dtype and shape": model(export=exports_torch_names),
    "save_config writes config.json": model(save_config=lambda self, module, folder: None),
    "config.json says the model's type": model(
        save_config=lambda self, module, folder: (folder / "config.json").write_text("{}")
    ),
    "a folder that is not there is refused with ModelSourceError": model(build=builds_anything),
}

# --- resolvers -------------------------------------------------------------------------------------------------------


def resolver(resolve):
    kind = type("Broken", (ToyResolver,), {"resolve": resolve})
    return broken_suite(ResolverConformance, plugin(lambda config, context: kind()))


def converts_each_time(self, source, cache, deadline_s):
    found = ToyResolver.resolve(self, source, cache, deadline_s)
    fresh = Path(str(found) + f"-{len(list(cache.iterdir()))}")
    shutil.copytree(found, fresh)
    return fresh


def elsewhere(self, source, cache, deadline_s):
    return ToyResolver.resolve(self, source, cache.parent / "other", deadline_s)


def trusts_the_folder(self, source, cache, deadline_s):
    before = [p for p in cache.iterdir() if p.is_dir()] if cache.exists() and Path(source).exists() else []
    return before[0] if before else ToyResolver.resolve(self, source, cache, deadline_s)


def empty_folder(self, source, cache, deadline_s):
    cache.mkdir(exist_ok=True)
    return cache


def invents(self, source, cache, deadline_s):
    if not Path(source).exists():
        return cache
    return ToyResolver.resolve(self, source, cache, deadline_s)


RESOLVERS = {
    "a source becomes a folder with config.json": resolver(empty_folder),
    "a source is converted once": resolver(converts_each_time),
    "what is converted lies in the cache": resolver(elsewhere),
    "a half-written cache is made whole": resolver(trusts_the_folder),
    "a source that is not there is refused with ModelSourceError": resolver(invents),
}

# --- extensions ------------------------------------------------------------------------------------------------------


def extension(**members):
    kind = type("Broken", (ToyExtension,), members)
    return broken_suite(ExtensionConformance, plugin(lambda config, context: kind(ExtensionConfig(steps=9))))


def initialised(edit):
    def init(self, config):
        ToyExtension.__init__(self, config)
        edit(self)

    return extension(__init__=init)


def at_each_place():
    def build(config, context):
        made = ToyExtension(ExtensionConfig())
        if context.place == "sampler":
            made.columns = ()
        return made

    return broken_suite(ExtensionConformance, plugin(build))


def renamed(self):
    self.columns = tuple(replace(c, name="other.previous") for c in self.columns)


def nameless(self):
    self.name = ""


def edits_in_place(self, draft):
    draft["run"]["steps"] = 1
    return draft


def adds_up(self, draft):
    return {**draft, "run": {**draft["run"], "steps": draft["run"]["steps"] + 1}}


def requests(edit):
    return extension(request=lambda self, request: edit(ToyExtension.request(self, request)))


def collects(edit):
    return extension(collect=lambda self, raw, request: edit(self, raw, request))


def collects_everything(self, raw, request):
    return {**ToyExtension.collect(self, raw, request), "logprobs": raw["logprobs"]}


def collects_short(self, raw, request):
    return {k: v[1:] for k, v in ToyExtension.collect(self, raw, request).items()}


def collects_always(self, raw, request):
    return {"toy.previous": raw["toy.previous"]}


def collects_zeros(self, raw, request):
    return {"toy.previous": np.zeros(3, np.int32)}


def micro(around):
    return extension(micro=lambda self, view, role, purpose: around())


@contextmanager
def yields_something():
    yield 5


@contextmanager
def swallows():
    with suppress(RuntimeError):
        yield


@contextmanager
def wraps():
    try:
        yield
    except RuntimeError:
        raise RuntimeError("another") from None


def exports(edit):
    def export(self, stream, layout, policy):
        return edit(self, list(stream), layout, policy)

    return extension(export=export)


def good(self, items, layout, policy):
    return ToyExtension.export(self, iter(items), layout, policy)


def shifted(self, items, layout, policy):
    for spec, tensor in good(self, items, layout, policy):
        yield spec, tensor + np.float32(0.1)


def fewer_when_dry(self, items, layout, policy):
    found = list(good(self, items, layout, policy))
    return iter(found[1:] if 0 in getattr(items[0][1], "strides", (1,)) else found)


def counted(self, items, layout, policy):
    self.exports = getattr(self, "exports", 0) + 1
    for spec, tensor in good(self, items, layout, policy):
        yield spec, tensor + np.float32(1e-9 * self.exports)


EXTENSIONS = {
    "an extension has a name": initialised(nameless),
    "columns carry the extension's name": initialised(renamed),
    "columns are the same in every place": at_each_place(),
    "on_config leaves its argument alone": extension(on_config=edits_in_place),
    "on_config returns a run file": extension(on_config=lambda self, draft: None),
    "on_config twice is on_config once": extension(on_config=adds_up),
    "request returns a request": requests(lambda request: None),
    "request keeps id, policy, seed and sampling": requests(lambda request: replace(request, seed=0)),
    "request keeps wishes that were there": None,
    "request keeps the prompt's tokens": requests(
        lambda request: replace(request, prompt={"tokens": np.zeros(2, np.int32)})
    ),
    "collect gives declared columns only": collects(collects_everything),
    "collected columns have a row for each sampled token": collects(collects_short),
    "collect finds nothing where nothing was asked": collects(collects_always),
    "collect gives nothing that was not asked for": collects(collects_zeros),
    "micro gives a context manager": micro(lambda: None),
    "a micro context yields nothing": micro(yields_something),
    "a micro context lets errors through": micro(wraps),
    "a micro context swallows no error": micro(swallows),
    "model returns a module": None,
    "export gives the tensors of the plain model": exports(lambda self, items, layout, policy: iter(items)),
    "a fresh extension exports the model's own weights": exports(shifted),
    "export gives the same specs in the dry pass": exports(fewer_when_dry),
    "exporting twice gives the same bits": exports(counted),
    "export is a stream": exports(lambda self, items, layout, policy: list(good(self, items, layout, policy))),
    "a layout that is not supported is refused with CapabilityError": exports(
        lambda self, items, layout, policy: good(self, items, "full", policy)
    ),
}


class Wishes(ExtensionConformance):
    """The request that is edited has a wish already."""

    deadline_s = 3.0
    want: ClassVar = frozenset({"logprobs"})

    def request(self):
        return replace(super().request(), want=self.want)


EXTENSIONS["request keeps wishes that were there"] = broken_suite(
    Wishes,
    plugin(
        lambda config, context: type(
            "Broken", (ToyExtension,), {"request": lambda self, r: replace(r, want=frozenset({"toy.previous"}))}
        )(ExtensionConfig())
    ),
)
EXTENSIONS["model returns a module"] = extension(model=lambda self, module, role, policy: None)

TABLES = {ModelConformance: MODELS, ResolverConformance: RESOLVERS, ExtensionConformance: EXTENSIONS}


@pytest.mark.parametrize("suite", TABLES, ids=lambda s: s.__name__)
def test_every_label_has_a_mutant(suite):
    assert own_labels(suite) == set(TABLES[suite])


@pytest.mark.parametrize(
    ("suite", "label"),
    [(s, label) for s, table in TABLES.items() for label in table],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_broken_one_is_seen(suite, label):
    must_fail(label, TABLES[suite][label])


class TestToyModel(ModelConformance):
    name = "toy"


class TestToyResolver(ResolverConformance):
    name = ".toy"


class TestToyExtension(ExtensionConformance):
    name = "toy"


class TestToyExtensionWithoutDelta(ExtensionConformance):
    name = "toy"
    options: ClassVar = {"delta": False, "replay": False, "steps": 3}


def test_the_delta_is_named():
    assert DELTA.startswith("toy.")
