"""The suites of stages, terms, filters and presets: every assertion sees the part that is broken for it."""

import copy
from dataclasses import replace

import numpy as np
import pytest

from miles_core.columns import ColumnSpec, Level
from miles_core.contracts.learning import ENTROPY, LOGPROBS, Output, TermOutput
from miles_core.testing import (
    AdvantageConformance,
    DistillConformance,
    EntropyConformance,
    FilterConformance,
    KLConformance,
    LossConformance,
    PenaltyConformance,
    PresetConformance,
    RewardKLConformance,
    StageExample,
    TermExample,
    ValueConformance,
    WhitenConformance,
)
from miles_core.testing.toys import parts
from miles_core.testing.toys.autodiff import Var, value_of
from miles_core.testing.toys.config import StageConfig, TermConfig
from miles_core.testing.toys.plugin import STAGES, TERMS

from .mutants import broken_suite, must_fail, own_labels, plugin

# --- stages ----------------------------------------------------------------------------------------------------------


HALVES = {"advantages": [0.5, -0.25]}  # the second is wrong


def worked(*examples):
    return {"examples": examples}


def stage(suite, base, field=None, examples=(), **methods):
    kind = type("Broken", (base,), methods)
    made = plugin(lambda config, context: kind(StageConfig()), field=suite.field if field is None else field)
    return broken_suite(suite, made, examples=examples)


def advantage(**methods):
    return stage(AdvantageConformance, parts.CentredAdvantage, **methods)


def columns(edit, suite=AdvantageConformance, base=parts.CentredAdvantage):
    """A stage whose columns go through `edit(batch, name, column)`."""

    def call(self, batch, rng):
        found = base.__call__(self, batch, rng)
        return replace(found, columns={k: edit(batch, k, v) for k, v in found.columns.items()})

    return stage(suite, base, __call__=call)


def touches_batch(self, batch, rng):
    found = parts.CentredAdvantage.__call__(self, batch, rng)
    batch.columns["reward"][...] = 0.5
    return found


def random_advantage(self, batch, rng):
    found = parts.CentredAdvantage.__call__(self, batch, rng)
    noise = np.random.default_rng().standard_normal(batch.units).astype(np.float32)
    return replace(found, columns={"advantages": found.columns["advantages"] + noise})


def running_mean(self, batch, rng):
    """Remembers the last step's mean."""
    found = parts.CentredAdvantage.__call__(self, batch, rng)
    last = getattr(self, "last", 0.0) if getattr(self, "units", batch.units) != batch.units else 0.0
    self.last, self.units = 1.0, batch.units
    return replace(found, columns={"advantages": found.columns["advantages"] + np.float32(last)})


def by_position(batch, name, column):
    position = np.arange(batch.n_groups)[batch.group_of[batch.episode_of_unit]]
    return (column * (1 + position)).astype(np.float32)


def by_member(batch, name, column):
    start = np.searchsorted(batch.group_of, batch.group_of)
    rank = np.arange(batch.n_episodes) - start
    return (column * (1 + rank[batch.episode_of_unit])).astype(np.float32)


def inverse(batch, name, column):
    return -column


def sees_masked(batch, name, column):
    return (column + np.float32(np.nansum(np.isnan(batch.columns["proximal_logprobs"])))).astype(np.float32)


def turned_round(batch, name, column):
    """The right numbers at the wrong tokens."""
    live = batch.columns["trainable"]
    column[live] = column[live][::-1]
    return column


def lonely_nan(self, batch, rng):
    found = parts.CentredAdvantage.__call__(self, batch, rng)
    alone = np.bincount(batch.group_of)[batch.group_of][batch.episode_of_unit] == 1
    return replace(
        found, columns={"advantages": np.where(alone, np.nan, found.columns["advantages"]).astype(np.float32)}
    )


def needs_units(self, batch, rng):
    if not batch.columns["trainable"].any():
        raise ZeroDivisionError
    return parts.CentredAdvantage.__call__(self, batch, rng)


def nan_spreads(self, batch, rng):
    found = parts.CentredAdvantage.__call__(self, batch, rng)
    if np.isnan(batch.columns["reward"]).any():
        return replace(found, columns={"advantages": np.full(batch.units, np.nan, np.float32)})
    return found


OTHER = ColumnSpec(name="toy.other", level=Level.UNIT, dtype="float32")

STAGE_TABLE = {
    AdvantageConformance: {
        "the provider says its field": stage(AdvantageConformance, parts.CentredAdvantage, field="penalty"),
        "a stage returns a StageOutput": advantage(
            __call__=lambda self, b, r: parts.CentredAdvantage.__call__(self, b, r).columns
        ),
        "a stage writes exactly what it gives": advantage(gives=(parts.ADVANTAGES, OTHER)),
        "columns have a row for each of their level": columns(lambda b, n, c: c[1:]),
        "columns have the dtype of their spec": columns(lambda b, n, c: c.astype(np.float64)),
        "columns are finite where they are trained on": columns(lambda b, n, c: c * np.float32(np.inf)),
        "metrics are pairs of numerator and denominator": advantage(
            __call__=lambda self, b, r: replace(
                parts.CentredAdvantage.__call__(self, b, r), metrics={"x": (float("nan"), 1.0)}
            )
        ),
        "a stage changes nothing of the batch": advantage(__call__=touches_batch),
        "the same batch gives the same columns": advantage(__call__=random_advantage),
        "a stage remembers nothing of other steps": advantage(__call__=running_mean),
        "values do not depend on the order of groups": columns(by_position),
        "values do not depend on the order within a group": columns(by_member),
        "what is masked changes nothing, not even as NaN": stage(
            AdvantageConformance,
            parts.CentredAdvantage,
            needs=frozenset({"reward", "proximal_logprobs"}),
            __call__=lambda self, b, r: replace(
                parts.CentredAdvantage.__call__(self, b, r),
                columns={
                    "advantages": sees_masked(b, "", parts.CentredAdvantage.__call__(self, b, r).columns["advantages"])
                },
            ),
        ),
        "a group of one gives finite values": advantage(__call__=lonely_nan),
        "a batch without trainable units is fine": advantage(__call__=needs_units),
        "an episode without reward leaves the others finite": advantage(__call__=nan_spreads),
        "columns are those worked by hand": stage(
            AdvantageConformance, parts.CentredAdvantage, **worked(StageExample(rewards=[[1, 0]], expect=HALVES))
        ),
        "log-ratios of ±100 stay finite": stage(
            AdvantageConformance,
            parts.CentredAdvantage,
            needs=frozenset({"reward", "proximal_logprobs"}),
            __call__=lambda self, b, r: replace(
                parts.CentredAdvantage.__call__(self, b, r),
                columns={"advantages": np.exp(b.columns["proximal_logprobs"].astype(np.float32) * 10)},
            ),
        ),
        "a step of one token is fine": advantage(
            __call__=lambda self, b, r: replace(
                parts.CentredAdvantage.__call__(self, b, r),
                columns={"advantages": np.float32(np.std(b.columns["reward"], ddof=1)) * np.ones(b.units, np.float32)},
            )
        ),
        "rewards equal up to float noise give equal advantages": columns(
            lambda b, n, c: (c / max(float(np.abs(c).max()), 1e-12)).astype(np.float32)
        ),
        "an advantage gives the column advantages": stage(AdvantageConformance, parts.LengthPenalty),
        "a higher reward never has a lower advantage in its group": columns(inverse),
        "different rewards give different advantages": columns(lambda b, n, c: np.zeros_like(c)),
    },
    PenaltyConformance: {
        "a penalty writes reward.<name> per episode": stage(PenaltyConformance, parts.CentredAdvantage),
    },
    RewardKLConformance: {
        "a policy that is the reference costs nothing": columns(
            lambda b, n, c: c + np.float32(0.1), RewardKLConformance, parts.RewardKL
        ),
    },
    WhitenConformance: {
        "whitened advantages have variance 1": columns(
            lambda b, n, c: c * np.float32(2), WhitenConformance, parts.Whiten
        ),
        "one mean and one scale serve all trainable tokens": columns(
            turned_round,
            WhitenConformance,
            parts.Whiten,
        ),
    },
    DistillConformance: {
        "a teacher that agrees changes no advantage": columns(
            lambda b, n, c: c + np.float32(0.1), DistillConformance, parts.Distill
        ),
    },
}


STAGE_BASE = own_labels(PenaltyConformance) - {"a penalty writes reward.<name> per episode"}


@pytest.mark.parametrize("suite", STAGE_TABLE, ids=lambda s: s.__name__)
def test_every_stage_label_has_a_mutant(suite):
    inherited = set() if suite is AdvantageConformance else STAGE_BASE
    assert own_labels(suite) - inherited == set(STAGE_TABLE[suite])
    assert STAGE_BASE <= set(STAGE_TABLE[AdvantageConformance])


STAGE_ROWS = [(s, label) for s, table in STAGE_TABLE.items() for label in table]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("suite", "label"), STAGE_ROWS, ids=lambda x: getattr(x, "__name__", x))
def test_a_broken_stage_is_seen(suite, label):
    must_fail(label, STAGE_TABLE[suite][label])


# --- terms -----------------------------------------------------------------------------------------------------------


def term(suite, base=parts.Policy, field=None, changes=None, **methods):
    kind = type("Broken", (base,), methods)
    made = plugin(lambda config, context: kind(TermConfig()), field=suite.field if field is None else field)
    return broken_suite(suite, made, **(changes or {}))


def loss(**methods):
    return term(LossConformance, **methods)


def value(edit, suite=LossConformance, base=parts.Policy):
    """A term whose value goes through `edit(view, value)`."""

    def call(self, view):
        found = base.__call__(self, view)
        return replace(found, value=edit(view, found.value))

    return term(suite, base, __call__=call)


def wrong_gradient(view, found):
    return Var(found.value, [(found, lambda g: 2 * g)])


def across_groups(view, found):
    return found + found.sum() * 0.1


def masked_matters(self, view):
    """Counts NaNs that it should never see, through the raw view."""
    found = parts.Policy.__call__(self, view)
    inner = getattr(view, "_inputs", None)
    nans = 0 if inner is None else int(np.isnan(np.asarray(inner.view["advantages"], np.float64)).sum())
    return replace(found, value=found.value + float(nans))


def counting(self, view):
    self.calls = getattr(self, "calls", 0) + 1
    return replace(parts.Policy.__call__(self, view), value=parts.Policy.__call__(self, view).value + float(self.calls))


AT_ONE = TermExample(
    outputs={"logprobs": [-1.0]}, columns={"advantages": [1.0], "proximal_logprobs": [-1.0]}, value=[-1.0]
)


def counts_kept(self, view):
    """Divides by the share of tokens that are not rejected."""
    found = parts.Policy.__call__(self, view)
    kept = 1.0 - np.mean(view["rejected"]) if "rejected" in view else 1.0
    return replace(found, value=found.value * (1.0 / kept))


def unclamped(self, view):
    with np.errstate(over="ignore", invalid="ignore"):
        ratio = np.exp((view.out(LOGPROBS) - value_of(view["proximal_logprobs"])) * 10.0)
        return TermOutput(value=ratio * view["advantages"] * -1.0)


def never_nothing(self, view):
    found = parts.Policy.__call__(self, view)
    with np.errstate(divide="ignore", invalid="ignore"):
        return replace(found, value=found.value * (1.0 / np.float64(view["trainable"].any())))


TERM_TABLE = {
    LossConformance: {
        "the provider says its field": term(LossConformance, field="kl"),
        "level is unit, trajectory, episode or group": loss(level="token"),
        "mask is kept or trainable": loss(mask="all"),
        "aggregation is known or None": loss(aggregation="mean"),
        "a term returns a TermOutput": loss(__call__=lambda self, view: parts.Policy.__call__(self, view).value),
        "a term asks only for outputs that it declares": loss(
            __call__=lambda self, view: (view.out(LOGPROBS), parts.Policy.__call__(self, view))[1], outputs=(ENTROPY,)
        ),
        "a term reads only columns that it needs": loss(
            __call__=lambda self, view: (view["weight.term"], parts.Policy.__call__(self, view))[1]
        ),
        "a term gives one value per unit or atom": value(lambda view, found: found.sum()),
        "metrics are detached": loss(
            __call__=lambda self, view: TermOutput(
                value=parts.Policy.__call__(self, view).value, metrics={"x": view.out(LOGPROBS)}
            )
        ),
        "metrics have one number per unit or atom": loss(
            __call__=lambda self, view: TermOutput(
                value=parts.Policy.__call__(self, view).value, metrics={"x": np.zeros(1)}
            )
        ),
        "the same view gives the same values": loss(__call__=counting),
        "a value depends on its own group only": value(across_groups),
        "the gradient is that of the value": value(wrong_gradient),
        "what is masked changes nothing, not even as NaN": loss(__call__=masked_matters),
        "values are those worked by hand": loss(changes=worked(replace(AT_ONE, value=[-2.0]))),
        "gradients are those worked by hand": loss(changes=worked(replace(AT_ONE, gradient={"logprobs": [-2.0]}))),
        "a gradient that is not the value's is worked by hand": loss(changes={"gradient_of_value": False}),
        "values do not depend on the split into micro-batches": value(lambda view, found: found * (1.0 / len(found))),
        "rejecting a token changes no other token's value": loss(__call__=counts_kept),
        "log-ratios of ±100 stay finite": loss(__call__=unclamped),
        "where nothing is trainable, loss and gradient are 0": loss(__call__=never_nothing),
        "a positive advantage raises the log-probability, a negative lowers it": value(lambda view, found: -found),
    },
    KLConformance: {
        "only policy terms are weighted": term(KLConformance, parts.ReferenceKL, weighted=True),
        "a policy that is the reference costs nothing": value(
            lambda view, found: found + 0.1, KLConformance, parts.ReferenceKL
        ),
    },
    EntropyConformance: {
        "a positive coefficient raises entropy": value(lambda view, found: -found, EntropyConformance, parts.Entropy),
        "an entropy term asks for the output entropy": term(EntropyConformance, parts.Supervised, weighted=False),
    },
    ValueConformance: {
        "a value term trains the output values": term(ValueConformance, parts.Supervised, weighted=False),
        "an error is never below 0": value(lambda view, found: -found, ValueConformance, parts.Value),
    },
}
TERM_BASE = set(TERM_TABLE[LossConformance]) - {
    "a positive advantage raises the log-probability, a negative lowers it"
} | {"only policy terms are weighted"}


@pytest.mark.parametrize("suite", TERM_TABLE, ids=lambda s: s.__name__)
def test_every_term_label_has_a_mutant(suite):
    assert own_labels(suite) - TERM_BASE == set(TERM_TABLE[suite]) - TERM_BASE
    assert own_labels(suite) >= TERM_BASE


TERM_ROWS = [(s, label) for s, table in TERM_TABLE.items() for label in table]


@pytest.mark.parametrize(("suite", "label"), TERM_ROWS, ids=lambda x: getattr(x, "__name__", x))
def test_a_broken_term_is_seen(suite, label):
    must_fail(label, TERM_TABLE[suite][label])


# --- filters and presets ---------------------------------------------------------------------------------------------


def filter_suite(function):
    return broken_suite(FilterConformance, plugin(lambda config, context: function))


class Moody:
    def __init__(self):
        self.calls = 0

    def __call__(self, group):
        self.calls += 1
        return None if self.calls % 2 else "the other"


def preset(tree, field=""):
    build = tree if callable(tree) else lambda config, context: copy.deepcopy(tree)
    return broken_suite(PresetConformance, plugin(build))


SHARED = {"loss": {"use": "toy"}}
CALLS = []


def changing(config, context):
    CALLS.append(1)
    return {"loss": {"use": "toy"}, "constant_length": len(CALLS)}


FILTERS = {
    "a filter takes every group": filter_suite(lambda group: None if group.episodes[0].reward > 0 else "no"),
    "a verdict is None or a short reason": filter_suite(lambda group: False),
    "a verdict depends on its group only": filter_suite(Moody()),
    "a verdict does not depend on the order of episodes": filter_suite(
        lambda group: "first" if group.episodes and (group.episodes[0].member == 0) else None
    ),
}
PRESETS = {
    "a preset is a tree of fields": preset(lambda config, context: ["loss"]),
    "a preset is plain data": preset({"loss": {"use": object()}}),
    "a preset is JSON as it stands": preset({"loss": {"use": "toy", 3: "x"}}),
    "a preset names known fields only": preset({"loss": {"use": "toy"}, "losses": {}}),
    "a preset is the same each time": preset(changing),
    "a preset hands out a new tree each time": preset(lambda config, context: SHARED),
    "a preset trains something": preset({"advantage": {"use": "toy"}}),
    "a part is a mapping": preset({"loss": 3}),
    "every part is installed": preset({"loss": {"use": "conformance-nothing"}}),
    "every part stands in its field": preset({"loss": {"use": "toy-kl"}}),
    "every option of a part exists": preset({"loss": {"use": "toy", "clipp": 0.1}}),
}


def test_every_filter_and_preset_label_has_a_mutant():
    assert own_labels(FilterConformance) == set(FILTERS)
    assert own_labels(PresetConformance) == set(PRESETS)


@pytest.mark.parametrize("label", [*FILTERS, *PRESETS])
def test_a_broken_filter_or_preset_is_seen(label):
    must_fail(label, {**FILTERS, **PRESETS}[label])


# --- the toys themselves ---------------------------------------------------------------------------------------------


def failures(kind, name):
    from miles_core.testing import run_suite

    return [r for r in run_suite(kind, name) if not r.passed]


@pytest.mark.parametrize("name", STAGES)
def test_toy_stages_pass(name):
    assert not failures("stage", name)


@pytest.mark.parametrize("name", TERMS)
def test_toy_terms_pass(name):
    assert not failures("term", name)


@pytest.mark.parametrize("name", ["toy", "toy-sft", "toy-everything"])
def test_toy_presets_pass(name):
    assert not failures("algorithm", name)


def test_the_toy_filter_passes():
    assert not failures("filter", "toy")


def test_outputs_compare_by_value():
    assert Output(name="logprobs", grad=True) == LOGPROBS
