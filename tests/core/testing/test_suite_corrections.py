"""The suites of corrections: every assertion sees the correction that is broken for it; known defects are rejected."""

from dataclasses import replace

import numpy as np
import pytest

from miles_core.columns import CORE_COLUMNS, ColumnSpec, Level
from miles_core.contracts.learning import LOGPROBS, StageOutput, TermOutput
from miles_core.testing import CorrectionConformance, DynamicWeightConformance
from miles_core.testing.suite import labels, run_class
from miles_core.testing.suites.stages import StageConformance
from miles_core.testing.suites.terms import TermConformance
from miles_core.testing.toys import parts
from miles_core.testing.toys.autodiff import value_of
from miles_core.testing.toys.config import TermConfig

from .mutants import broken_suite, must_fail, own_labels, plugin


class Plain:
    """A correction in the clear, with a hook for each step that can go wrong."""

    needs = frozenset({"proximal_logprobs", "behaviour_logprobs"})
    level, low, high = "token", 0.0, 2.0
    mask = False  # reject outside [low, high] instead of clamping
    normalised = False
    limit = 20.0

    def __init__(self):
        names = ("correction_weight", "rejected") if self.rejecting() else ("correction_weight",)
        self.gives = tuple(CORE_COLUMNS[name] for name in names)

    def rejecting(self):
        return self.mask

    def log_w(self, batch):
        gap = batch.columns["proximal_logprobs"].astype(np.float64) - batch.columns["behaviour_logprobs"]
        return np.where(self.m(batch), gap, 0.0)

    def m(self, batch):
        return batch.columns["trainable"]

    def divisor(self, batch, count):
        return np.maximum(count, 1) if self.level == "geometric" else 1

    def rows(self, batch):
        return batch.trajectory_of_unit, batch.n_trajectories

    def w(self, batch):
        x = self.log_w(batch)
        if self.level != "token":
            row, n = self.rows(batch)
            total = np.bincount(row, weights=x, minlength=n)
            count = np.bincount(row[self.m(batch)], minlength=n)
            x = (total / self.divisor(batch, count))[row]
        return np.exp(np.clip(x, -self.limit, self.limit))

    def normalise(self, batch, weight, kept):
        return weight / max(weight[kept].mean(), 1e-9) if kept.any() else weight

    def out(self, batch, w):
        outside = (w < self.low) | (w > self.high)
        return (w, outside) if self.mask else (np.clip(w, self.low, self.high), np.zeros(len(w), bool))

    def __call__(self, batch, rng):
        weight, rejected = self.out(batch, self.w(batch))
        live = batch.columns["trainable"]
        rejected = rejected & live
        if self.normalised:
            weight = self.normalise(batch, weight, live & ~rejected)
        columns = {"correction_weight": np.where(live, weight, 1.0).astype(np.float32)}
        if self.rejecting():
            columns["rejected"] = rejected
        return StageOutput(columns={spec.name: columns[spec.name] for spec in self.gives})


def suite(base=Plain, told=None, **methods):
    """The suite around a variation of `base`, told what the variation claims to be."""
    kind = type("Broken", (base,), methods)
    claims = {"level": kind.level, "normalised": kind.normalised} if told is None else told
    return broken_suite(CorrectionConformance, plugin(lambda config, context: kind(), field="correction"), **claims)


def edited(edit, **more):
    """The weights go through `edit(batch, weight)`."""

    def call(self, batch, rng):
        found = Plain.__call__(self, batch, rng)
        weight = edit(batch, found.columns["correction_weight"].astype(np.float64)).astype(np.float32)
        return replace(found, columns={**found.columns, "correction_weight": weight})

    return suite(__call__=call, **more)


class Bypass:
    needs = frozenset({"behaviour_logprobs"})
    gives = (CORE_COLUMNS["proximal_logprobs"],)
    factor = 1.0

    def __call__(self, batch, rng):
        column = np.where(batch.columns["trainable"], batch.columns["behaviour_logprobs"] * np.float32(self.factor), 0)
        return StageOutput(columns={"proximal_logprobs": column.astype(np.float32)})


def row_of(batch):
    return batch.trajectory_of_unit


GOOD = {
    "token": suite(),
    "token mask": suite(mask=True, low=0.5),
    "token normalised": suite(normalised=True),
    "sequence": suite(level="sequence"),
    "sequence mask": suite(
        level="sequence", mask=True, low=0.5, told={"level": "sequence", "rejects": "trajectory", "normalised": False}
    ),
    "geometric": suite(level="geometric"),
    "geometric mask": suite(
        level="geometric", mask=True, low=0.5, told={"level": "geometric", "rejects": "trajectory"}
    ),
    "untold": suite(level="geometric", told={}),
    "bypass": broken_suite(CorrectionConformance, plugin(lambda config, context: Bypass(), field="correction")),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_passes(name):
    assert [r.detail for r in run_class(GOOD[name]) if not r.passed] == []


# --- every assertion has been seen failing ---------------------------------------------------------------------------


OTHER = ColumnSpec(name="toy.other", level=Level.UNIT, dtype="float32")


class WritesOther(Plain):
    def __init__(self):
        super().__init__()
        self.gives = (*self.gives, OTHER)

    def __call__(self, batch, rng):
        columns = {"correction_weight": np.ones(batch.units, np.float32), "toy.other": np.zeros(batch.units, "f4")}
        return StageOutput(columns=columns)


class RejectsAll(Plain):
    mask = True

    def out(self, batch, w):
        return w, np.ones(len(w), bool)


class RejectsTokens(Plain):
    """Claims to reject trajectories and rejects the token that left."""

    mask, low = True, 0.5


def only_own_group(self, batch, weight, kept):
    group = batch.group_of[batch.episode_of_unit]
    total = np.bincount(group[kept], weights=weight[kept], minlength=batch.n_groups)
    return weight / (total / np.maximum(np.bincount(group[kept], minlength=batch.n_groups), 1))[group]


STATIC = {
    "a correction writes weights, rejections, or π_p": suite(WritesOther),
    "a correction that replaces π_p puts π_b in its place": broken_suite(
        CorrectionConformance, plugin(lambda c, x: type("B", (Bypass,), {"factor": 0.5})(), field="correction")
    ),
    "on-policy tokens weigh 1": edited(lambda b, w: w * 0.5),
    "on-policy tokens are not rejected": suite(RejectsAll),
    "nothing overflows, however far apart": suite(
        w=lambda self, batch: np.exp(7.5 * self.log_w(batch)) ** (1 / 7.5), high=2.0
    ),
    "weights stay finite and at least 0, however far apart": edited(lambda b, w: np.where(w > 1.99, -1.0, w)),
    "the argument of exp is clamped to ±20": suite(limit=40.0, mask=True, low=0.5),
    "what is far off-policy does not stay as it is": edited(lambda b, w: np.ones_like(w)),
    "a token that the trainer finds likelier never weighs less": suite(
        log_w=lambda self, batch: -Plain.log_w(self, batch)
    ),
    "only the difference of π_p and π_b counts": edited(
        lambda b, w: np.where(b.columns["proximal_logprobs"] < -1.0, 1.0, w)
    ),
    "a correction looks at its own trajectory only": edited(
        lambda b, w: w / max(w[b.columns["trainable"]].mean(), 1e-9)
    ),
    "the same mismatch is corrected alike wherever it stands": suite(normalised=True, normalise=only_own_group),
    "a normalised weight has the mean 1 over the step": suite(
        normalised=True, normalise=lambda self, batch, weight, kept: weight / max(weight.mean(), 1e-9)
    ),
    "a rejected trajectory is rejected as a whole": suite(RejectsTokens, told={"rejects": "trajectory"}),
    "at level token, a weight depends on its own token only": suite(level="sequence", told={"level": "token"}),
    "at levels sequence and geometric, a trajectory has one weight": suite(told={"level": "sequence"}),
    "every trainable token counts in its trajectory's weight, a rejected one too": suite(
        level="geometric", log_w=lambda self, b: np.where(abs(x := Plain.log_w(self, b)) > 4, 0.0, x)
    ),
    "at level sequence log w adds up, at level geometric length does not count": suite(
        level="sequence", told={"level": "geometric"}
    ),
}


def test_every_label_has_a_mutant():
    assert own_labels(CorrectionConformance) - labels(StageConformance) == set(STATIC)
    assert own_labels(DynamicWeightConformance) - labels(TermConformance) == set(DYNAMIC) - INHERITED


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("label", STATIC)
def test_a_broken_correction_is_seen(label):
    must_fail(label, STATIC[label])


# --- the defects that frameworks have had ----------------------------------------------------------------------------


def after_rejection(self, batch):
    """The trajectory's mean over what its own token rule leaves: outliers vanish from the statistic."""
    x = Plain.log_w(self, batch)
    return np.where(np.abs(x) > 1.0, 0.0, x)


def halves(self, batch, weight, kept):
    """Each micro-batch (or rank) divides by its own mean."""
    out = weight.copy()
    for part in np.array_split(np.arange(batch.n_trajectories), 2):
        mine = np.isin(row_of(batch), part)
        out[mine] /= max(weight[mine & kept].mean(), 1e-9) if (mine & kept).any() else 1.0
    return out


def unmasked_log_w(self, batch):
    return batch.columns["proximal_logprobs"].astype(np.float64) - batch.columns["behaviour_logprobs"]


def multiplied_mask(self, batch):
    return unmasked_log_w(self, batch) * batch.columns["trainable"]


def shifted(self, batch):
    return np.roll(Plain.log_w(self, batch), 1)


def half_precision(self, batch):
    proximal, behaviour = (batch.columns[f"{n}_logprobs"].astype(np.float16) for n in ("proximal", "behaviour"))
    return np.where(batch.columns["trainable"], proximal.astype(np.float64) - behaviour, 0.0)


DEFECTS = {
    "the mask after rejection": suite(level="geometric", log_w=after_rejection),
    "the wrong direction, π_b − π_p": suite(log_w=lambda self, b: -Plain.log_w(self, b)),
    "exp without a clamp": suite(limit=np.inf, mask=True, low=0.5),
    "a geometric mean that is not divided": suite(level="geometric", divisor=lambda self, batch, count: 1),
    "divided by the padded length": suite(
        level="geometric", divisor=lambda self, batch, count: np.maximum(batch.lengths, 1)
    ),
    "normalised over each group": suite(normalised=True, normalise=only_own_group),
    "normalised over each rank": suite(normalised=True, normalise=halves),
    "normalised over masked tokens too": suite(
        normalised=True, normalise=lambda self, batch, weight, kept: weight / max(weight.mean(), 1e-9)
    ),
    "tokens rejected instead of trajectories": suite(RejectsTokens, told={"level": "token", "rejects": "trajectory"}),
    "a masked NaN in a trajectory's sum": suite(level="sequence", log_w=unmasked_log_w),
    "a masked NaN times 0": suite(level="sequence", log_w=multiplied_mask),
    "one token off": suite(log_w=shifted),
    "trajectories told apart by position": suite(
        level="sequence", rows=lambda self, b: (np.arange(b.units) // 4, b.units // 4 + 1)
    ),
    "a siblings' average": suite(level="geometric", rows=lambda self, b: (b.group_of[b.episode_of_unit], b.n_groups)),
    "float16 log-probabilities": suite(log_w=half_precision),
    "one token off, the other way": suite(log_w=lambda self, b: np.roll(Plain.log_w(self, b), -1)),
    "the constant 1": edited(lambda b, w: np.ones_like(w)),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", DEFECTS)
def test_a_known_defect_is_rejected(name):
    assert not all(r.passed for r in run_class(DEFECTS[name]))


# --- dynamic weights -------------------------------------------------------------------------------------------------


def dynamic(**methods):
    kind = type("Broken", (parts.Weight,), methods)
    made = plugin(lambda config, context: kind(TermConfig()), field="correction")
    return broken_suite(DynamicWeightConformance, made)


def weight(edit):
    """The toy's weight goes through `edit(view, value)`."""

    def call(self, view):
        found = parts.Weight.__call__(self, view)
        return replace(found, value=edit(view, found.value))

    return dynamic(__call__=call)


def unclamped(self, view):
    ratio = np.exp(8.0 * (value_of(view.out(LOGPROBS)) - value_of(view["proximal_logprobs"])))
    return TermOutput(value=(np.abs(ratio - 1.0) <= 3.0).astype(np.float64))


def peeks(view, value):
    """Reads the raw view, past the one that masks."""
    inner = getattr(view, "_inputs", None)
    raw = view["proximal_logprobs"] if inner is None else inner.view["proximal_logprobs"]
    return value + float(np.isnan(np.asarray(raw, np.float64)).sum())


INHERITED = {"what is masked changes nothing, not even as NaN"}
DYNAMIC = {
    "a dynamic weight is one number per unit": dynamic(level="trajectory"),
    "a dynamic weight is detached": dynamic(
        __call__=lambda self, view: TermOutput(value=np.exp(view.out(LOGPROBS) - value_of(view["proximal_logprobs"])))
    ),
    "weights are finite and at least 0": weight(lambda view, found: found - 2.0),
    "on-policy tokens weigh 1": weight(lambda view, found: found * 0.5),
    "nothing overflows, however far apart": dynamic(__call__=unclamped),
    "weights stay finite and at least 0, however far apart": dynamic(
        __call__=lambda self, view: TermOutput(
            value=1.0 - 0.1 * np.abs(value_of(view.out(LOGPROBS)) - value_of(view["proximal_logprobs"]))
        )
    ),
    "what is far off-policy does not stay as it is": weight(lambda view, found: np.ones_like(found)),
    "a rejected token counts in dynamic weights as before": weight(
        lambda view, found: found * (1.0 - 0.5 * view["rejected"]) if "rejected" in view else found
    ),
    "what is masked changes nothing, not even as NaN": weight(peeks),
}


@pytest.mark.parametrize("label", DYNAMIC)
def test_a_broken_dynamic_weight_is_seen(label):
    must_fail(label, DYNAMIC[label])


def test_a_rejecting_toy_passes():
    class Rejecting(CorrectionConformance):
        name = "toy-correction"
        options = {"reject": True}  # noqa: RUF012
        level = "token"

    assert all(r.passed for r in run_class(Rejecting))
