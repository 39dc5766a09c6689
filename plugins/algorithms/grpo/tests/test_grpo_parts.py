"""The parts as a run uses them: built by their providers, summed by core's objective, in float64."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from miles_algo_grpo import config as c
from miles_algo_grpo import plugin

from miles_core.aggregation import with_weights
from miles_core.columns import CORE_COLUMNS, Batch, ColumnSpec
from miles_core.config.schema import AlgorithmKeys
from miles_core.contracts.learning import BoundTerm, Stage, Term
from miles_core.numerics import objective
from miles_core.numerics.views import MicroView


def provider(hook, name):
    return next(p for p in hook() if p.name == name)


def term(name, config=None):
    found = provider(plugin.miles_term, name)
    return found.build(config or (c.CispoConfig(hi=0.2) if name == "cispo" else found.config()), None)


def stage(name, config=None):
    found = provider(plugin.miles_stage, name)
    return found.build(config or found.config(), None)


def batch_of(lengths, groups, trainable=None, **columns):
    """One trajectory an episode; `groups`: the group of each episode."""
    specs = dict(CORE_COLUMNS)
    for name in ("proximal_logprobs", "advantages", "reference.logprobs"):
        specs[name] = ColumnSpec(name=name, level="unit", dtype="float64")
    trainable = np.ones(sum(lengths), bool) if trainable is None else np.array(trainable)
    return Batch(
        policy="main",
        step=0,
        trajectory_ids=tuple(f"t{i}" for i in range(len(lengths))),
        episode_ids=tuple(f"e{i}" for i in range(len(lengths))),
        group_ids=tuple(f"g{i}" for i in range(max(groups) + 1)),
        lengths=np.array(lengths, np.int64),
        episode_of=np.arange(len(lengths)),
        group_of=np.array(groups, np.int64),
        columns={"trainable": trainable, **columns},
        specs=specs,
        items={},
    )


def evaluate(built, batch, coef=1.0, aggregation="token_mean", **outputs):
    """(loss, gradients by output, metrics) through the objective."""
    bound = BoundTerm(name="t", term=built, coef=coef)
    ready = with_weights(batch, [bound.info], AlgorithmKeys(aggregation=aggregation))
    made = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in outputs.items()}
    view = MicroView(ready, lambda output: made[output.name])
    loss, sums = objective.evaluate(view.at, [bound], str)
    loss.backward()
    return (
        loss.item(),
        {k: None if v.grad is None else v.grad.tolist() for k, v in made.items()},
        objective.finish(sums),
    )


def one(**columns):
    return batch_of([1], [0], **{k: np.array([v]) for k, v in columns.items()})


# --- stages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config", "reward", "groups", "want"),
    [
        ("group", c.GroupConfig(eps=0.0), [1, 0, 0, 0], [0] * 4, [1.5, -0.5, -0.5, -0.5]),
        (
            "group",
            c.GroupConfig(scale=c.Scale.none),
            [1, 0, 1, 1, 0],
            [0, 0, 1, 1, 1],
            [0.5, -0.5, 1 / 3, 1 / 3, -2 / 3],
        ),
        ("group", c.GroupConfig(), [1, 0], [0, 0], [0.5 / (math.sqrt(0.5) + 1e-6), -0.5 / (math.sqrt(0.5) + 1e-6)]),
        ("group", c.GroupConfig(ddof=0, eps=0.0), [1, 0], [0, 0], [1, -1]),
        ("group", c.GroupConfig(), [5], [0], [0]),
        ("group", c.GroupConfig(), [3, 3, 3], [0, 0, 0], [0, 0, 0]),
        ("leave_one_out", None, [1, 0, 0, 0], [0] * 4, [1, -1 / 3, -1 / 3, -1 / 3]),
        ("leave_one_out", None, [5], [0], [0]),
    ],
)
def test_advantages(name, config, reward, groups, want):
    batch = batch_of([2] * len(reward), groups, [False, True] * len(reward), reward=np.array(reward, float))
    built = stage(name, config)
    assert isinstance(built, Stage) and [s.name for s in built.gives] == ["advantages"] and built.needs == {"reward"}
    result = built(batch, np.random.default_rng(0))
    np.testing.assert_array_equal(result.columns["advantages"][1::2], np.float32(want))
    assert not result.columns["advantages"][0::2].any()
    assert result.metrics["zero"] == (float(sum(w == 0 for w in want)), float(len(want)))


# --- terms ----------------------------------------------------------------------------------------------------------


def test_clip_and_dual():
    batch = one(advantages=-1.0, proximal_logprobs=-1.0)
    lp = [-1.0 + math.log(4)]
    assert evaluate(term("clip"), batch, logprobs=lp)[0] == pytest.approx(4)
    loss, gradient, metrics = evaluate(term("clip", c.ClipConfig(dual=3.0)), batch, logprobs=lp)
    assert loss == pytest.approx(3) and gradient["logprobs"] == [0.0] and metrics["t/clip_dual"] == (1.0, 1.0)


def test_clip_ranges_and_fractions():
    rho = [0.7, 0.7, 1.25, 1.25]
    advantages = np.array([-1.0, 1.0, 1.0, -1.0])
    batch = batch_of([4], [0], advantages=advantages, proximal_logprobs=np.zeros(4))
    log = [math.log(r) for r in rho]
    _, gradient, metrics = evaluate(term("clip"), batch, logprobs=log)
    np.testing.assert_allclose(gradient["logprobs"], [0, -0.7 / 4, 0, 1.25 / 4])
    assert metrics["t/clip_low"] == (1.0, 4.0) and metrics["t/clip_high"] == (1.0, 4.0)
    assert metrics["t/ratio"] == (pytest.approx(sum(rho)), 4.0)
    assert metrics["t/approx_kl"] == (pytest.approx(-sum(log)), 4.0)
    higher = evaluate(term("clip", c.ClipConfig(hi=0.28)), batch, logprobs=log)[2]
    assert higher["t/clip_high"] == (0.0, 4.0)
    assert evaluate(term("clip", c.ClipConfig(lo=0.4)), batch, logprobs=log)[2]["t/clip_high"] == (0.0, 4.0)  # hi = lo


@pytest.mark.parametrize("name", ["clip", "cispo", "reinforce"])
@pytest.mark.parametrize("scored", [True, False])
def test_at_ratio_one_the_gradient_is_minus_a(name, scored):
    columns = {"advantages": 2.5} | ({"proximal_logprobs": -1.25} if scored else {})
    loss, gradient, metrics = evaluate(term(name), one(**columns), logprobs=[-1.25])
    assert gradient["logprobs"] == [-2.5] and loss == (-2.5 if name == "clip" else 2.5 * 1.25)
    assert ("t/ratio" in metrics) is (scored and name != "reinforce")


def test_cispo_bounds_the_weight_and_drops_no_token():
    rho = [0.4, 1.25, 1.25, math.e**100]
    advantages = np.array([-1.0, 1.0, -1.0, 1.0])
    batch = batch_of([4], [0], advantages=advantages, proximal_logprobs=np.array([-1.0, -1, -1, -101]))
    log = [-1 + math.log(r) for r in rho[:3]] + [-1.0]
    _, gradient, metrics = evaluate(term("cispo"), batch, logprobs=log)
    np.testing.assert_allclose(gradient["logprobs"], np.array([0.4, -1.2, 1.2, -1.2]) / 4)
    assert metrics["t/clip_low"] == (0.0, 4.0) and metrics["t/clip_high"] == (2.0, 4.0)
    bounded = evaluate(term("cispo", c.CispoConfig(hi=0.2, lo=0.2)), batch, logprobs=log)
    np.testing.assert_allclose(bounded[1]["logprobs"], np.array([0.8, -1.2, 1.2, -1.2]) / 4)
    assert bounded[2]["t/clip_low"] == (1.0, 4.0)


def test_the_gradient_of_cispo_is_that_of_finite_differences_under_a_fixed_weight():
    rng = np.random.default_rng(3)
    columns = {k: rng.normal(size=6) for k in ("advantages", "proximal_logprobs")}
    batch, at = batch_of([3, 3], [0, 0], **columns), rng.normal(size=6)
    leaf = torch.from_numpy(at.copy()).requires_grad_()
    built = term("cispo")
    built(MicroView(batch, lambda output: leaf)).value.sum().backward()
    weight = np.minimum(np.exp(at - columns["proximal_logprobs"]), 1.2)

    def value(x):
        return float((-weight * columns["advantages"] * x).sum())

    for unit in range(6):
        step = 1e-6 * (np.arange(6) == unit)
        assert leaf.grad[unit].item() == pytest.approx((value(at + step) - value(at - step)) / 2e-6, rel=1e-6)


def test_sequence_level_is_the_mean_log_ratio_of_the_trajectory():
    trainable = [False, True, True, True, True]
    rejected = np.array([False, False, True, False, False])  # m before rejection enters the ratio
    columns = {
        "advantages": np.ones(5),
        "proximal_logprobs": np.array([np.nan, -1, -1, -1, -1.0]),
        "rejected": rejected,
    }
    batch = batch_of([4, 1], [0, 0], trainable, **columns)
    log = [float("nan"), -1 + 0.01, -1 + 0.05, -1.0, -1 + 0.1]
    config = c.ClipConfig(level=c.Level.sequence, lo=0.5)
    loss, gradient, metrics = evaluate(term("clip", config), batch, logprobs=log)
    rho, other = math.exp(0.06 / 3), math.exp(0.1)
    assert loss == pytest.approx(-(2 * rho + other) / 4, abs=1e-7)
    want = [0, *[-2 * rho / 3 / 4] * 3, -other / 4]  # the rejected unit still moves the mean
    np.testing.assert_allclose(gradient["logprobs"], want, rtol=1e-6)
    assert metrics["t/approx_kl"] == (pytest.approx(-(0.01 + 0 + 0.1)), 3.0)


@pytest.mark.parametrize(("estimator", "value"), [("k2", 0.125), ("k3", 0.10653066), ("low_var", 0.10653066)])
def test_kl(estimator, value):
    built = term("kl", c.KlConfig(estimator=c.Estimator(estimator)))
    batch = one(**{"reference.logprobs": -1.5})
    loss, gradient, metrics = evaluate(built, batch, coef=2.0, logprobs=[-1.0])
    assert loss == pytest.approx(2 * value, abs=1e-8) and metrics["t"] == (pytest.approx(value, abs=1e-8), 1.0)
    assert metrics["t/k1"] == (0.5, 1.0)
    if estimator == "k3":
        assert gradient["logprobs"][0] == pytest.approx(2 * 0.39346934, abs=1e-8)


@pytest.mark.parametrize(("estimator", "gradient"), [("k1", 1.5), ("k3", 0.5)])
@pytest.mark.parametrize("scored", [True, False])
def test_unbiased_kl(estimator, gradient, scored):
    columns = {"reference.logprobs": -1.5} | ({"proximal_logprobs": -1.0} if scored else {})
    built = term("kl", c.KlConfig(estimator=c.Estimator(estimator), unbiased=True))
    assert evaluate(built, one(**columns), logprobs=[-1.0])[1]["logprobs"] == [pytest.approx(gradient)]


@pytest.mark.parametrize("updates", [1, 2])
def test_unbiased_kl_has_a_proximal_policy_of_its_own_over_several_updates(updates):
    """Beside a loss that is no policy term core scores none, and ρ would be 1 in every update."""
    policy = SimpleNamespace(schedule=SimpleNamespace(updates_per_step=updates))
    context = SimpleNamespace(run=SimpleNamespace(policies={"main": policy}), policy="main")
    for unbiased in (True, False):
        config = c.KlConfig(estimator=c.Estimator.k3, unbiased=unbiased)
        needs = provider(plugin.miles_term, "kl").build(config, context).needs
        assert ("proximal_logprobs" in needs) is (unbiased and updates > 1)


def test_entropy_lowers_the_loss():
    loss, gradient, metrics = evaluate(term("entropy"), batch_of([2], [0]), coef=0.5, entropy=[1.0, 3.0])
    assert loss == -1.0 and gradient["entropy"] == [-0.25, -0.25] and metrics["t/nats"] == (4.0, 2.0)


NAMES = ["clip", "cispo", "reinforce", "kl", "entropy"]


@pytest.mark.parametrize("name", NAMES)
def test_masked_garbage_changes_no_bit(name):
    rng = np.random.default_rng(0)
    trainable = np.array([False, True, True, False, True, True])
    columns = {k: rng.normal(size=6) for k in ("advantages", "proximal_logprobs", "reference.logprobs")}
    outputs = {"logprobs": rng.normal(size=6), "entropy": rng.random(6)}
    clean = evaluate(term(name), batch_of([3, 3], [0, 0], trainable, **columns), **outputs)
    for bad in (np.nan, np.inf, -1e30):
        dirty = {k: np.where(trainable, v, bad) for k, v in columns.items()}
        made = {k: np.where(trainable, v, bad) for k, v in outputs.items()}
        assert evaluate(term(name), batch_of([3, 3], [0, 0], trainable, **dirty), **made) == clean
        # and by itself, under a view that masks nothing
        view = MicroView(batch_of([3, 3], [0, 0], trainable, **dirty), lambda o, m=made: torch.from_numpy(m[o.name]))
        assert torch.isfinite(term(name)(view).value).all()


@pytest.mark.parametrize("name", NAMES)
def test_masking_equals_filtering(name):
    rng = np.random.default_rng(1)
    trainable = np.array([False, True, True, False, True, True])
    columns = {k: rng.normal(size=6) for k in ("advantages", "proximal_logprobs", "reference.logprobs")}
    outputs = {"logprobs": rng.normal(size=6), "entropy": rng.random(6)}
    masked = evaluate(term(name), batch_of([3, 3], [0, 0], trainable, **columns), **outputs)
    short = batch_of([2, 2], [0, 0], **{k: v[trainable] for k, v in columns.items()})
    filtered = evaluate(term(name), short, **{k: v[trainable] for k, v in outputs.items()})
    assert masked[0] == pytest.approx(filtered[0], rel=1e-12) and masked[2].keys() == filtered[2].keys()


@pytest.mark.parametrize("name", NAMES)
def test_terms_keep_the_contract(name):
    built = term(name)
    assert isinstance(built, Term) and built.level == "unit" and built.mask == "kept" and built.aggregation is None
    assert built.weighted is (name in ("clip", "cispo", "reinforce"))  # corrections touch the policy term only
    assert "proximal_logprobs" not in built.needs  # no score pass for its own sake


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (c.KlConfig, {"estimator": c.Estimator.k1}, "gradient is 0 in expectation"),
        (c.KlConfig, {"estimator": c.Estimator.k2, "unbiased": True}, "corrects k1 and k3 only"),
        (c.KlConfig, {"estimator": c.Estimator.low_var, "unbiased": True}, "corrects k1 and k3 only"),
        (c.ClipConfig, {"dual": 1.0}, "must be above 1"),
    ],
)
def test_options_that_mean_nothing_are_refused(config, values, message):
    with pytest.raises(ValueError, match=message):
        config(**values)


# --- presets --------------------------------------------------------------------------------------------------------


GROUP = {"use": "group", "scale": "std", "ddof": 1, "eps": 1e-6}
RETURNS = {"use": "returns", "gamma": 1.0}
#: preset -> advantage, loss, aggregation, and what else it has beside `kl` and `entropy` with coefficient 0
PRESETS = {
    "grpo": (GROUP, {"use": "clip", "lo": 0.2, "hi": 0.2}, "episode_mean", {}),
    "dr_grpo": ({"use": "group", "scale": "none"}, {"use": "clip", "lo": 0.2, "hi": 0.2}, "constant", {}),
    "rloo": ({"use": "leave_one_out"}, {"use": "reinforce"}, "episode_sum", {}),
    "dapo": (
        GROUP,
        {"use": "clip", "lo": 0.2, "hi": 0.28},
        "token_mean",
        {
            "filters": {"dynamic_sampling": {"use": "dynamic_sampling"}},
            "penalties": {"overlong": {"use": "overlong", "penalty": 1.0}},
        },
    ),
    "gspo": (GROUP, {"use": "clip", "level": "sequence", "lo": 3e-4, "hi": 4e-4}, "episode_mean", {}),
    "cispo": (GROUP, {"use": "cispo", "lo": 1.0}, "token_mean", {}),
    "reinforce_pp": (RETURNS, {"use": "clip", "lo": 0.2, "hi": 0.2}, "token_mean", "reward_kl"),
    "reinforce_pp_baseline": ({"use": "centred"}, {"use": "clip", "lo": 0.2, "hi": 0.2}, "token_mean", "reward_kl"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_documented_parts_and_nothing_else(name):
    found = provider(plugin.miles_algorithm, name)
    tree = found.build(found.config(), None)
    advantage, loss, aggregation, rest = PRESETS[name]
    want = {"episodes": "sampled", "aggregation": aggregation, "advantage": advantage, "loss": loss}
    want["entropy"] = {"use": "entropy", "coef": 0.0}
    if rest == "reward_kl":
        want["reward_kl"] = {"use": "reward_kl", "estimator": "k1", "coef": 0.0}
        want["whiten"] = {"use": "whiten", "shift_mean": True}
    else:
        want |= {"kl": {"use": "kl", "estimator": "k3", "coef": 0.0}, **rest}
    assert tree == want
    assert "arXiv" in (found.config.__doc__ or "") and "eviations" in (found.config.__doc__ or "")
    AlgorithmKeys(**{k: v for k, v in tree.items() if isinstance(v, str)})


@pytest.mark.parametrize("hook", [plugin.miles_algorithm, plugin.miles_stage, plugin.miles_term, plugin.miles_filter])
def test_everything_explains_itself_formula_paper_deviations(hook):
    offered = hook()
    for found in offered if isinstance(offered, list) else [offered]:
        lines = found.explain.splitlines()
        starts = [line.partition(":")[0] for line in lines]
        assert lines[0] and starts.index("Paper") < starts.index("Deviations") and lines[-1].endswith("."), found.name


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("clip", c.ClipConfig()),
        ("clip", c.ClipConfig(dual=3.0, hi=0.4)),
        ("clip", c.ClipConfig(level=c.Level.sequence, lo=0.05)),
        ("reinforce", c.ReinforceConfig()),
        ("kl", c.KlConfig()),
        ("kl", c.KlConfig(estimator=c.Estimator.k1, unbiased=True)),
        ("kl", c.KlConfig(estimator=c.Estimator.low_var)),
        ("entropy", c.EntropyConfig()),
    ],
)
def test_gradients_are_those_of_finite_differences(name, config):
    rng = np.random.default_rng(7)
    trainable = np.array([False, True, True, False, True, True])
    columns = {k: rng.normal(size=6) for k in ("advantages", "proximal_logprobs", "reference.logprobs")}
    batch = batch_of([3, 3], [0, 0], trainable, **columns)
    built = term(name, config)

    def value(logprobs, entropy):
        made = {"logprobs": logprobs, "entropy": entropy}
        return built(MicroView(batch, lambda output: made[output.name])).value.sum()

    given = [torch.from_numpy(rng.normal(size=6)).requires_grad_() for _ in range(2)]
    assert torch.autograd.gradcheck(value, given, eps=1e-6, atol=1e-7)
