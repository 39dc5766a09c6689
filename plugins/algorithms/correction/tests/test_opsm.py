"""`opsm` as a run uses it: beside a policy term, through core's objective, in float64 (torch)."""

import numpy as np
import pytest
import torch
from miles_algo_correction import config as c
from miles_algo_correction.term import opsm

from miles_core.columns import CORE_COLUMNS, Batch, ColumnSpec
from miles_core.contracts.learning import LOGPROBS, BoundTerm, TermOutput
from miles_core.numerics import objective
from miles_core.numerics.ratios import ratio, select
from miles_core.numerics.views import MicroView
from miles_core.records import Origin


class Ratio:
    """−ρA, the plainest weighted term."""

    level, mask, weighted, aggregation, outputs = "unit", "kept", True, None, (LOGPROBS,)
    needs = frozenset({"advantages"})

    def __call__(self, view):
        m = view["trainable"]
        rho = ratio(view, select(m, view.out(LOGPROBS)), view["proximal_logprobs"])
        return TermOutput(value=-rho * view["advantages"])


def batch_of(lengths, **columns):
    specs = {
        n: ColumnSpec(name=n, level="unit", dtype="float64")
        for n in columns
        if n not in ("trainable", "rejected", "origin")
    }
    units = sum(lengths)
    given = {"trainable": np.ones(units, bool), "weight.ratio": np.ones(units)}
    specs["weight.ratio"] = ColumnSpec(name="weight.ratio", level="unit", dtype="float64")
    return Batch(
        policy="main",
        step=0,
        trajectory_ids=tuple(f"t{i}" for i in range(len(lengths))),
        episode_ids=tuple(f"e{i}" for i in range(len(lengths))),
        group_ids=("g",),
        lengths=np.array(lengths, np.int64),
        episode_of=np.arange(len(lengths)),
        group_of=np.zeros(len(lengths), np.int64),
        columns=given | {n: np.asarray(v) for n, v in columns.items()},
        specs=dict(CORE_COLUMNS) | specs,
        items={},
    )


def evaluate(batch, logprobs, config=None):
    """(loss, gradient, metrics) of −ρA under the weight."""
    leaf = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    terms = [
        BoundTerm(name="ratio", term=Ratio(), coef=1.0),
        BoundTerm(name="opsm", term=opsm(config or c.OpsmConfig()), coef=1.0, dynamic=True),
    ]
    loss, sums = objective.evaluate(MicroView(batch, lambda output: leaf).at, terms, str)
    loss.backward()
    return loss.item(), leaf.grad.tolist(), objective.finish(sums)


def test_only_negative_advantages_of_trajectories_that_left():
    """Means of π_b − π: .5, .5, 0. A < 0 at units 1 and 4; only the first trajectory has both."""
    batch = batch_of(
        [2, 1, 2],
        advantages=[1.0, -1.0, 1.0, 1.0, -1.0],
        behaviour_logprobs=[-1.0] * 5,
        proximal_logprobs=[-1.0] * 5,
    )
    loss, gradient, metrics = evaluate(batch, [-1.0, -2.0, -1.5, -1.5, -0.5])
    assert metrics["opsm/masked"] == (1.0, 5.0)
    rho = np.exp(np.array([0.0, -1.0, -0.5, -0.5, 0.5]))
    want = -rho * np.array([1.0, 0.0, 1.0, 1.0, -1.0])
    assert loss == pytest.approx(want.sum()) and gradient == pytest.approx(want.tolist())


def test_delta_is_a_strict_bound():
    given = {"advantages": [-1.0], "behaviour_logprobs": [-1.0], "proximal_logprobs": [-1.0]}
    assert evaluate(batch_of([1], **given), [-1.5], c.OpsmConfig(delta=0.5))[2]["opsm/masked"] == (0.0, 1.0)
    assert evaluate(batch_of([1], **given), [-1.5], c.OpsmConfig(delta=0.4999))[2]["opsm/masked"] == (1.0, 1.0)
    assert evaluate(batch_of([1], **given), [-1.0 - 9e-5])[2]["opsm/masked"] == (0.0, 1.0)
    assert evaluate(batch_of([1], **given), [-1.0 - 1.1e-4])[2]["opsm/masked"] == (1.0, 1.0)


def test_the_base_is_the_engine_or_the_start_of_the_step():
    given = {"advantages": [-1.0], "behaviour_logprobs": [-1.0], "proximal_logprobs": [-2.0]}
    assert evaluate(batch_of([1], **given), [-2.0])[1] == [0.0]
    assert evaluate(batch_of([1], **given), [-2.0], c.OpsmConfig(base=c.Base.proximal))[1] == [1.0]
    # without a score pass π_p is the current policy: nothing has moved yet, and nothing is masked
    alone = batch_of([1], advantages=[-1.0], behaviour_logprobs=[-1.0])
    assert evaluate(alone, [-2.0], c.OpsmConfig(base=c.Base.proximal))[1] == [1.0]
    assert evaluate(alone, [-2.0])[1] == [0.0]


def test_the_mean_is_over_m_before_rejection_and_ignores_what_is_masked():
    given = {"advantages": [-1.0] * 4, "proximal_logprobs": [-1.0] * 4, "rejected": [False, True, False, False]}
    trainable = np.array([True, True, False, True])
    behaviour = [-1.0, -1.0, np.nan, -1.0]
    batch = batch_of([4], behaviour_logprobs=behaviour, trainable=trainable, **given)
    # π_b − π: 0, .3, masked, −.29: the mean over the three is above 1e-4; without the rejected one it would be below
    loss, gradient, metrics = evaluate(batch, [-1.0, -1.3, np.nan, -0.71])
    assert loss == 0.0 and gradient == [0.0] * 4 and metrics["opsm/masked"] == (3.0, 3.0)


def test_a_demonstration_has_no_behaviour_and_is_left_alone():
    """Its column holds 0, which is no log-probability that anybody sampled from: 0 − π would pass for a policy that
    left by the whole size of π."""
    given = {"advantages": [-1.0] * 3, "behaviour_logprobs": [-1.0, -1.0, 0.0], "proximal_logprobs": [-1.0, -1.0, -4.0]}
    origin = np.array([Origin.SAMPLED, Origin.SAMPLED, Origin.DEMONSTRATION], np.uint8)
    near, far = [-1.0, -1.0, -4.0], [-1.5, -1.0, -4.0]  # π_b − π of the sampled tokens: 0, 0 and .5, 0
    batch = batch_of([3], origin=origin, **given)
    assert evaluate(batch, near)[1] == [1.0, 1.0, 1.0]
    assert evaluate(batch, far, c.OpsmConfig(delta=0.24))[2]["opsm/masked"] == (2.0, 3.0)  # the mean is .25
    _, gradient, metrics = evaluate(batch, far, c.OpsmConfig(delta=0.26))
    assert metrics["opsm/masked"] == (0.0, 3.0) and gradient == pytest.approx([np.exp(-0.5), 1.0, 1.0])
    alone = batch_of([2], advantages=[-1.0] * 2, behaviour_logprobs=[0.0] * 2, origin=origin[2:].repeat(2))
    assert evaluate(alone, [-3.0, -4.0])[2]["opsm/masked"] == (0.0, 2.0)


def test_a_demonstration_has_a_score_of_the_start_of_the_step():
    given = {"advantages": [-1.0] * 2, "behaviour_logprobs": [-1.0, 0.0], "proximal_logprobs": [-1.0, -4.0]}
    batch = batch_of([2], origin=np.array([Origin.SAMPLED, Origin.DEMONSTRATION], np.uint8), **given)
    config = c.OpsmConfig(base=c.Base.proximal)
    assert evaluate(batch, [-1.0, -4.0], config)[2]["opsm/masked"] == (0.0, 2.0)
    assert evaluate(batch, [-1.0, -4.1], config)[2]["opsm/masked"] == (2.0, 2.0)


def test_extremes():
    for far in (100.0, -100.0):
        given = {"advantages": [-1.0, 1.0], "behaviour_logprobs": [far, far], "proximal_logprobs": [0.0, 0.0]}
        loss, gradient, metrics = evaluate(batch_of([2], **given), [0.0, 0.0])
        assert np.isfinite([loss, *gradient]).all() and metrics["opsm/masked"] == (float(far > 0), 2.0)


def test_it_is_one_weight_however_the_step_is_split():
    rng = np.random.default_rng(2)
    lengths = [3, 1, 4, 2]
    columns = {k: rng.normal(size=10) for k in ("advantages", "behaviour_logprobs", "proximal_logprobs")}
    logprobs = rng.normal(size=10)
    whole = evaluate(batch_of(lengths, **columns), logprobs)
    parts, at = [], 0
    for n in lengths:
        piece = {k: v[at : at + n] for k, v in columns.items()}
        parts.append(evaluate(batch_of([n], **piece), logprobs[at : at + n]))
        at += n
    assert whole[0] == pytest.approx(sum(p[0] for p in parts))
    assert whole[1] == pytest.approx([g for p in parts for g in p[1]])
    assert whole[2]["opsm/masked"][0] == sum(p[2]["opsm/masked"][0] for p in parts) > 0
