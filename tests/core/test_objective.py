"""The objective: one number and one gradient, whatever the split, the order and the garbage at masked positions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.aggregation import with_weights
from miles_core.columns import CORE_COLUMNS, Batch, ColumnSpec
from miles_core.config.schema import Aggregation, AlgorithmKeys
from miles_core.contracts.learning import ENTROPY, LOGPROBS, BoundTerm, Output, TermOutput
from miles_core.errors import LearnerError
from miles_core.numerics import objective
from miles_core.numerics.ratios import clip, ratio
from miles_core.numerics.views import MicroView

VOCAB = 7


class UnitTerm:
    level, mask, aggregation, outputs, needs = "unit", "kept", None, (LOGPROBS,), frozenset()

    def __init__(self, formula, weighted=False, metrics=None, **more):
        self.formula, self.weighted, self.metrics = formula, weighted, metrics or {}
        for name, value in more.items():
            setattr(self, name, value)

    def __call__(self, view):
        return TermOutput(value=self.formula(view), metrics={k: f(view) for k, f in self.metrics.items()})


def clip_formula(level):
    def formula(view):
        rho = ratio(view, view.out(LOGPROBS), view["proximal_logprobs"], level)
        return clip(rho, view["advantages"], 0.2, 0.2, 3.0).value

    return formula


def pair_formula(view):
    """A DPO-like atom: −log σ of the signed sum over the group."""
    sign = torch.where(view["preference"] > 0, 1.0, -1.0).to(view.out(LOGPROBS).dtype)
    margin = view.atom_sum((view.out(LOGPROBS) - view["reference.logprobs"]) * view["trainable"], sign)
    return -torch.nn.functional.logsigmoid(0.1 * margin)


def terms():
    return [
        BoundTerm(name="clip", coef=1.0, term=UnitTerm(clip_formula("token"), weighted=True)),
        BoundTerm(
            name="gspo", coef=0.5, term=UnitTerm(clip_formula("sequence"), weighted=True, aggregation="token_mean")
        ),
        BoundTerm(
            name="entropy", coef=0.1, term=UnitTerm(lambda v: -v.out(ENTROPY), outputs=(ENTROPY,), mask="trainable")
        ),
        BoundTerm(name="pair", coef=0.3, term=UnitTerm(pair_formula, level="group")),
        BoundTerm(
            name="opsm",
            coef=1.0,
            dynamic=True,
            term=UnitTerm(lambda v: torch.where(v["advantages"] < 0, 0.5, 1.0).double()),
        ),
    ]


def infos(bound):
    return [b.info for b in bound]


def random_batch(rng, sizes, drop=()):
    """`sizes`: per group, the lengths of its two episodes' trajectories."""
    lengths = [n for pair in sizes for n in pair]
    units = sum(lengths)
    specs = {name: spec for name, spec in CORE_COLUMNS.items()}
    specs["reference.logprobs"] = ColumnSpec(name="reference.logprobs", level="unit", dtype="float64")
    for name in ("behaviour_logprobs", "proximal_logprobs", "advantages", "correction_weight"):
        specs[name] = ColumnSpec(name=name, level="unit", dtype="float64")
    trainable = rng.random(units) < 0.7
    trainable[np.cumsum([0, *lengths[:-1]])] = False  # first tokens are prompts
    columns = {
        "tokens": rng.integers(0, VOCAB, units).astype(np.int32),
        "trainable": trainable,
        "origin": np.where(trainable, 1, 0).astype(np.uint8),
        "rejected": rng.random(units) < 0.1,
        "behaviour_logprobs": -rng.random(units) * 3,
        "proximal_logprobs": -rng.random(units) * 3,
        "advantages": rng.normal(size=units),
        "correction_weight": rng.random(units) * 2,
        "reference.logprobs": -rng.random(units) * 3,
        "preference": np.tile(np.array([1, -1], np.int8), len(sizes)),
    }
    for name in drop:
        columns.pop(name)
    return Batch(
        policy="main",
        step=0,
        trajectory_ids=tuple(f"t{i}" for i in range(len(lengths))),
        episode_ids=tuple(f"e{i}" for i in range(len(lengths))),
        group_ids=tuple(f"g{i}" for i in range(len(sizes))),
        lengths=np.array(lengths, np.int64),
        episode_of=np.arange(len(lengths), dtype=np.int64),
        group_of=np.repeat(np.arange(len(sizes)), 2).astype(np.int64),
        columns=columns,
        specs=specs,
        items={},
    )


def with_garbage(batch):
    """NaN, infinity and huge numbers wherever nothing is trainable."""
    columns = dict(batch.columns)
    for name in ("behaviour_logprobs", "proximal_logprobs", "advantages", "correction_weight", "reference.logprobs"):
        if name in columns:
            columns[name] = np.where(batch.columns["trainable"], columns[name], [np.nan, np.inf, -1e30][len(name) % 3])
    return batch.with_columns(columns, ())


def model_view(micro, weight, garbage=False):
    """A bigram model in float64: logits of the next token from a table."""
    tokens = torch.from_numpy(micro.columns["tokens"].astype(np.int64))
    first = torch.zeros(len(tokens), dtype=torch.bool)
    first[torch.from_numpy(micro.offsets[:-1])] = True
    previous = torch.where(first, 0, tokens.roll(1))
    table = torch.log_softmax(weight[previous], -1)
    made = {
        "logprobs": table.gather(1, tokens[:, None])[:, 0],
        "entropy": -(table.exp() * table).sum(-1),
    }
    if garbage:
        bad = ~torch.from_numpy(micro.columns["trainable"])
        made = {name: torch.where(bad, float("nan"), x) for name, x in made.items()}
    return MicroView(micro, lambda output: made[output.name])


def run(batch, bound, splits, garbage=False, keys=None):
    """(loss, gradient, metrics) with the batch cut into micro-batches of these groups, in this order."""
    keys = keys or AlgorithmKeys(aggregation=Aggregation.episode_mean)
    ready = with_weights(batch, infos(bound), keys)
    if garbage:
        ready = with_garbage(ready)
    weight = torch.from_numpy(np.random.default_rng(5).normal(size=(VOCAB, VOCAB))).requires_grad_()
    total, loss = {}, 0.0
    for groups in splits:
        rows = np.concatenate([np.flatnonzero(ready.group_of[ready.episode_of] == g) for g in groups])
        micro = ready.select(rows)
        part, sums = objective.evaluate(
            model_view(micro, weight, garbage).at, bound, lambda i, m=micro: m.trajectory_ids[m.trajectory_of_unit[i]]
        )
        part.backward()
        loss += part.item()
        objective.accumulate(total, sums)
    return loss, weight.grad.clone(), objective.finish(total)


def assert_same(a, b):
    assert a[0] == pytest.approx(b[0], rel=1e-12, abs=1e-13)
    torch.testing.assert_close(a[1], b[1], rtol=1e-10, atol=1e-13)
    assert a[2].keys() == b[2].keys()
    for name in a[2]:
        assert a[2][name] == pytest.approx(b[2][name], rel=1e-10, abs=1e-12), name


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_loss_and_its_gradient_do_not_depend_on_split_order_or_masked_garbage(data):
    count = data.draw(st.integers(1, 6))
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=count, max_size=count))
    drop = data.draw(st.sampled_from([(), ("proximal_logprobs",), ("rejected",), ("correction_weight", "rejected")]))
    batch = random_batch(np.random.default_rng(data.draw(st.integers(0, 999))), sizes, drop)
    order = data.draw(st.permutations(range(count)))
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    splits = [order[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    how = data.draw(st.sampled_from(list(Aggregation)))
    keys = AlgorithmKeys(aggregation=how, constant_length=16)
    whole = run(batch, terms(), [range(count)], keys=keys)
    assert_same(run(batch, terms(), splits, keys=keys), whole)
    assert_same(run(batch, terms(), splits, garbage=True, keys=keys), whole)
    assert torch.isfinite(whole[1]).all()


def test_the_gradient_is_that_of_finite_differences():
    batch = random_batch(np.random.default_rng(3), [(5, 4), (3, 6)])
    bound = [b for b in terms() if not b.dynamic]
    ready = with_weights(batch, infos(bound), AlgorithmKeys())
    weight = torch.from_numpy(np.random.default_rng(5).normal(size=(VOCAB, VOCAB))).requires_grad_()

    def loss(w):
        return objective.evaluate(model_view(ready, w).at, bound, str)[0]

    assert torch.autograd.gradcheck(loss, (weight,), eps=1e-6, atol=1e-7)


def test_terms_are_added_with_their_coefficients_and_reported_without():
    batch = random_batch(np.random.default_rng(1), [(5, 4)])
    _, _, metrics = run(batch, terms(), [[0]])
    want = sum(b.coef * metrics[b.name][0] for b in terms() if not b.dynamic)
    assert metrics["loss"] == (pytest.approx(want), 1.0)


def small(values, trainable, **columns):
    n = len(trainable)
    specs = dict(CORE_COLUMNS)
    specs["weight.t"] = ColumnSpec(name="weight.t", level="unit", dtype="float32")
    given = {"trainable": np.array(trainable), "weight.t": np.array(trainable, np.float32), **columns}
    batch = Batch(
        policy="main",
        step=0,
        trajectory_ids=("x", "y"),
        episode_ids=("e", "f"),
        group_ids=("g",),
        lengths=np.array([2, n - 2]),
        episode_of=np.array([0, 1]),
        group_of=np.array([0, 0]),
        columns=given,
        specs=specs,
        items={},
    )
    outputs = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    return batch, outputs, MicroView(batch, lambda output: outputs)


def bind(formula, **more):
    return [BoundTerm(name="t", coef=1.0, term=UnitTerm(formula, **more))]


def test_correction_and_dynamic_weights_multiply_only_the_weighted_term():
    weights = np.array([1.0, 2.0, 4.0, np.nan], np.float32)
    _, _, view = small([-1.0, -1, -1, -1], [True, True, True, False], correction_weight=weights)
    dynamic = BoundTerm(name="w", coef=1.0, dynamic=True, term=UnitTerm(lambda v: v.out(LOGPROBS) * 0 + 0.5))
    for weighted, want in ((True, 0.5 * (1 + 2 + 4)), (False, 1 + 1 + 1)):
        bound = [dynamic, *bind(lambda v: -v.out(LOGPROBS), weighted=weighted)]
        loss, _ = objective.evaluate(view.at, bound, str)
        assert loss.item() == want


def test_a_dynamic_weight_gives_no_gradient():
    _, outputs, view = small([-1.0, -2, -1, -1], [True] * 4)
    dynamic = BoundTerm(name="w", coef=1.0, dynamic=True, term=UnitTerm(lambda v: v.out(LOGPROBS) ** 2))
    loss, _ = objective.evaluate(view.at, [dynamic, *bind(lambda v: -v.out(LOGPROBS), weighted=True)], str)
    loss.backward()
    assert outputs.grad.tolist() == [-1.0, -4.0, -1.0, -1.0]


def test_without_a_score_pass_the_ratio_is_one_and_its_gradient_is_right():
    advantages = np.array([2.0, -3.0, 0.5, np.nan], np.float32)
    _, outputs, view = small([-1.0, -2, -1, float("nan")], [True, True, True, False], advantages=advantages)
    seen = {}

    def formula(v):
        seen["says"] = "proximal_logprobs" in v
        rho = ratio(v, v.out(LOGPROBS), v["proximal_logprobs"])
        seen["rho"] = rho.detach()
        seen["moves"] = v["proximal_logprobs"].requires_grad
        return clip(rho, v["advantages"], 0.2, 0.2).value

    loss, _ = objective.evaluate(view.at, bind(formula), str)
    loss.backward()
    assert seen["says"] is False and seen["moves"] is False and seen["rho"].tolist() == [1.0] * 4
    assert outputs.grad.tolist() == [-2.0, 3.0, -0.5, 0.0]


def test_a_pair_is_one_value_and_pairs_are_averaged():
    """Two pairs: −log σ(0.1·h), h the signed sum of π − π_ref over trainable units."""
    batch = random_batch(np.random.default_rng(2), [(3, 4), (2, 5)])
    (pair,) = [b for b in terms() if b.name == "pair"]
    weight = torch.from_numpy(np.random.default_rng(5).normal(size=(VOCAB, VOCAB)))
    view = model_view(batch, weight)
    margin = (view.out(LOGPROBS).numpy() - batch.columns["reference.logprobs"]) * batch.columns["trainable"]
    h = [margin[0:3].sum() - margin[3:7].sum(), margin[7:9].sum() - margin[9:14].sum()]
    want = sum(math.log1p(math.exp(-0.1 * x)) for x in h) / 2
    assert batch.columns["trainable"][:7].any() and batch.columns["trainable"][7:].any()
    loss, _, metrics = run(batch.with_columns({"rejected": np.zeros(14, bool)}, ()), [pair], [[0, 1]])
    assert metrics["pair"] == (pytest.approx(want, rel=1e-7), 1.0) and loss == pytest.approx(0.3 * want, rel=1e-7)


def test_a_ratio_reads_no_masked_unit():
    values = [float("nan"), -1.0, -2.0, float("inf")]
    batch, outputs, view = small(values, [False, True, True, False])
    for level, want in (
        ("token", [1, math.exp(0.5), math.exp(-0.1), 1]),
        ("sequence", [1, math.exp(0.5), math.exp(-0.1), 1]),
    ):
        rho = ratio(view, outputs, torch.tensor([float("nan"), -1.5, -1.9, 0.0], dtype=torch.float64), level)
        assert rho.tolist() == pytest.approx(want)
    rho.sum().backward()
    assert outputs.grad[[0, 3]].tolist() == [0, 0] and batch.n_trajectories == 2


def test_mismatch_comes_from_the_update_where_there_is_no_score_pass():
    behaviour = np.array([-1.5, -2.0, 0.0, np.nan], np.float32)
    origin = np.array([1, 1, 3, 0], np.uint8)  # the third is a demonstration: no behaviour
    values = [-1.0, -2, -9, -1]
    batch, _, view = small(values, [True, True, True, False], behaviour_logprobs=behaviour, origin=origin)
    _, sums = objective.evaluate(view.at, bind(lambda v: -v.out(LOGPROBS)), str)
    metrics = objective.finish(sums)
    w = math.exp(0.5)
    assert metrics["mismatch/abs"] == (0.5, 2.0) and metrics["mismatch/max_abs"] == (0.5, 1.0)
    assert metrics["mismatch/k3"] == (pytest.approx(w - 1.5), 2.0)
    assert metrics["mismatch/ess"] == (pytest.approx((w + 1) ** 2), pytest.approx(2 * (w * w + 1)))
    bypassed = batch.with_columns({"proximal_logprobs": behaviour}, ())  # π_b in place of π_p: measured all the same
    _, sums = objective.evaluate(MicroView(bypassed, view.out).at, bind(lambda v: -v.out(LOGPROBS)), str)
    assert objective.finish(sums) == metrics


def test_metrics_are_means_over_the_mask_and_maxima_are_maxima():
    _, _, view = small([-1.0, -2, -3, -50], [True, True, True, False], rejected=np.array([False, True, False, False]))
    metrics = {"x": lambda v: v.out(LOGPROBS).detach(), "max_x": lambda v: -v.out(LOGPROBS).detach()}
    total = {}
    for _ in range(2):
        objective.accumulate(
            total, objective.evaluate(view.at, bind(lambda v: v.out(LOGPROBS), metrics=metrics), str)[1]
        )
    found = objective.finish(total)
    assert found["t/x"] == (-8.0, 4.0) and found["t/max_x"] == (3.0, 1.0)
    everything = objective.evaluate(view.at, bind(lambda v: v.out(LOGPROBS), metrics=metrics, mask="trainable"), str)[1]
    assert objective.finish(everything)["t/x"] == (-6.0, 3.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_output_names_its_trajectory(bad):
    batch, _, view = small([-1.0, -1, bad, -1], [True] * 4)
    with pytest.raises(LearnerError, match=r"output 'logprobs' of role 'actor' is not finite.* y"):
        objective.evaluate(
            view.at, bind(lambda v: -v.out(LOGPROBS)), lambda i: batch.trajectory_ids[batch.trajectory_of_unit[i]]
        )


def test_a_bad_value_names_its_term_and_trajectory():
    batch, _, view = small([-1.0, 0.0, -1, -1], [True] * 4)
    with pytest.raises(LearnerError, match=r"value of term 't' is not finite.* x"):
        objective.evaluate(
            view.at, bind(lambda v: 1 / v.out(LOGPROBS)), lambda i: batch.trajectory_ids[batch.trajectory_of_unit[i]]
        )


def test_outputs_with_inner_dimensions_are_selected_too():
    batch, _, _ = small([-1.0] * 4, [True, False, True, True])
    wide = torch.ones(4, 3, dtype=torch.float64)
    wide[1] = float("nan")
    wide.requires_grad_()
    asked = Output(name="token_logprobs", inputs=("ids",), grad=True)
    views = MicroView(batch, lambda output: wide)
    loss, _ = objective.evaluate(views.at, bind(lambda v: (v.out(asked) ** 2).sum(-1), outputs=(asked,)), str)
    loss.backward()
    assert loss.item() == 9.0 and wide.grad[1].tolist() == [0.0, 0.0, 0.0]


def test_what_makes_no_sense_is_refused():
    _, _, view = small([-1.0] * 4, [True] * 4)
    with pytest.raises(LearnerError, match="without terms"):
        objective.evaluate(view.at, [], str)
    with pytest.raises(LearnerError, match="named 'loss'"):
        objective.evaluate(view.at, [BoundTerm(name="loss", coef=1.0, term=UnitTerm(lambda v: v.out(LOGPROBS)))], str)
    with pytest.raises(LearnerError, match="correction weights are per unit"):
        objective.evaluate(view.at, bind(lambda v: v.owns, level="group", weighted=True), str)
    with pytest.raises(LearnerError, match="does not have"):
        objective.evaluate(view.at, bind(lambda v: v["nothing"]), str)
    with pytest.raises(LearnerError, match="asked for atoms"):
        objective.evaluate(view.at, bind(lambda v: v.atom_sum(v.out(LOGPROBS))), str)


def test_a_zero_denominator_is_said_before_the_step():
    batch, _, _ = small([-1.0] * 4, [False] * 4)
    bound = bind(lambda v: v.out(LOGPROBS))
    assert "zero denominator" in objective.skip_reason(batch, bound)
    live, _, _ = small([-1.0] * 4, [True] * 4)
    assert objective.skip_reason(live, bound) == ""
    assert objective.skip_reason(live, bound, role="critic") != ""


def test_numpy_arrays_give_the_same_numbers_as_tensors():
    columns = {
        "behaviour_logprobs": np.array([-1.5, -2.0, -1.0, np.nan], np.float32),
        "origin": np.array([1, 1, 1, 0], np.uint8),
        "correction_weight": np.array([0.5, 1.0, 2.0, np.nan], np.float32),
    }
    batch, outputs, view = small([-1.0, -2, -3, float("nan")], [True, True, True, False], **columns)
    metrics = {"max_x": lambda v: abs(v.out(LOGPROBS)), "x": lambda v: v.out(LOGPROBS) * 2}
    bound = bind(lambda v: -v.out(LOGPROBS) * 3, weighted=True, metrics=metrics)

    class NumpyView:
        def __getitem__(self, name):
            return batch.per_unit(name)

        def __contains__(self, name):
            return name in batch.columns

        def out(self, output):
            return outputs.detach().numpy()

    loss, sums = objective.evaluate(view.at, bound, str)
    host_loss, host_sums = objective.evaluate(lambda level: NumpyView(), bound, str)
    assert host_loss == pytest.approx(loss.item()) and isinstance(host_loss, np.floating)
    ours, theirs = objective.finish(host_sums), objective.finish(sums)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-6), name
    (summand,) = objective.summands(lambda level: NumpyView(), bound, str)
    assert summand.values.sum() == pytest.approx(host_loss) and summand.values[3] == 0
