"""What the kit does not know: metrics, the mean over pairs, extremes, options that mean nothing, the preset."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_algo_dpo import plugin
from miles_algo_dpo.config import DpoConfig, Form, Smoothing

from miles_core.aggregation import with_weights
from miles_core.columns import ColumnSpec
from miles_core.config.schema import AlgorithmKeys
from miles_core.contracts.learning import BoundTerm, Term
from miles_core.numerics import objective
from miles_core.numerics.views import MicroView
from miles_core.testing.suites import batches

REFERENCE = ColumnSpec(name="reference.logprobs", level="unit", dtype="float64")


def term(**options):
    provider = plugin.miles_term()
    return provider.build(provider.config(**options), None)


def pairs_of(chosen, rejected):
    """One pair a (chosen, rejected), each a list of π − π_ref per token, and the batch around them."""
    made, log_ratio = [], []
    for index, answers in enumerate(zip(chosen, rejected, strict=True)):
        group = batches.group(index, [[2] * len(a) for a in answers], [None, None], [3])
        two = tuple(replace(e, preference=p) for e, p in zip(group.episodes, (1, -1), strict=True))
        made.append(replace(group, episodes=two))
        log_ratio += [x for a in answers for x in (math.nan, *a)]
    batch = batches.batch_of(made)
    reference = np.linspace(-3, -1, batch.units)
    return batch.with_columns({"reference.logprobs": reference}, [REFERENCE]), reference + np.array(log_ratio)


def evaluate(built, batch, logprobs, aggregation="episode_mean"):
    bound = BoundTerm(name="dpo", term=built, coef=1.0)
    ready = with_weights(batch, [bound.info], AlgorithmKeys(aggregation=aggregation))
    leaf = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    loss, sums = objective.evaluate(MicroView(ready, lambda output: leaf).at, [bound], str)
    loss.backward()
    return loss.item(), leaf.grad.numpy(), objective.finish(sums)


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def test_the_mean_is_over_pairs_whatever_their_length():
    batch, logprobs = pairs_of([[0.5, 0.0], [0.1] * 9], [[-0.5], [2.0, 1.0]])
    want = -(log_sigmoid(0.1 * 1.0) + log_sigmoid(0.1 * (0.9 - 3.0))) / 2
    for how in ("episode_mean", "token_mean"):
        loss, gradient, metrics = evaluate(term(), batch, logprobs, how)
        assert loss == pytest.approx(want, rel=1e-6)
        assert np.count_nonzero(gradient) == 2 + 1 + 9 + 2
    assert metrics["dpo/margin"] == (pytest.approx(0.1 * (1.0 - 2.1)), 2.0)
    assert metrics["dpo/accuracy"] == (1.0, 2.0)
    assert metrics["dpo/chosen"] == (pytest.approx(0.1 * 1.4), 2.0)
    assert metrics["dpo/rejected"] == (pytest.approx(0.1 * 2.5), 2.0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([{}, {"form": Form.ipo}, {"length_normalised": True}]))
def test_the_gradient_is_that_of_finite_differences(seed, options):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, (2, 2))
    batch, logprobs = pairs_of(*[[rng.normal(size=n).tolist() for n in side] for side in sizes.T])
    built = term(**options)
    _, gradient, _ = evaluate(built, batch, logprobs)
    for unit in np.flatnonzero(batch.columns["trainable"]):
        ends = [evaluate(built, batch, logprobs + s * 1e-6 * (np.arange(batch.units) == unit))[0] for s in (1, -1)]
        assert gradient[unit] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("far", [100.0, -100.0, 1e4, -1e4])
def test_extremes_stay_finite(far):
    batch, logprobs = pairs_of([[far, far]], [[-far]])
    h = 3 * far
    loss, gradient, _ = evaluate(term(), batch, logprobs)
    assert loss == pytest.approx(max(0.0, -0.1 * h), rel=1e-6, abs=1e-12) and np.isfinite(gradient).all()
    for options in ({"smoothing": Smoothing.robust, "epsilon": 0.1}, {"form": Form.ipo}):
        loss, gradient, _ = evaluate(term(**options), batch, logprobs)
        assert np.isfinite(loss) and np.isfinite(gradient).all()


def test_a_pair_with_nothing_to_train_has_no_gradient_and_counts_once():
    batch, logprobs = pairs_of([[0.5], [0.5]], [[-0.5], [-0.5]])
    trainable = batch.columns["trainable"] & (batch.episode_of_unit < 2)
    loss, gradient, _ = evaluate(term(), batch.with_columns({"trainable": trainable}, ()), logprobs)
    assert loss == pytest.approx(-log_sigmoid(0.1) / 2, rel=1e-6) and not gradient[4:].any()
    none = batch.with_columns({"trainable": np.zeros(batch.units, bool)}, ())
    assert evaluate(term(), none, logprobs)[0] == 0


def test_smoothing_undoes_wrong_labels():
    """Robust: its mean under labels that are flipped with probability ε is the loss under right labels."""
    right, wrong = pairs_of([[0.7]], [[-0.4]]), pairs_of([[-0.4]], [[0.7]])
    robust = term(smoothing=Smoothing.robust, epsilon=0.2)
    mean = 0.8 * evaluate(robust, *right)[0] + 0.2 * evaluate(robust, *wrong)[0]
    assert mean == pytest.approx(evaluate(term(), *right)[0], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta is 0.0; it must be above 0"),
        ({"form": Form.ipo, "smoothing": Smoothing.robust, "epsilon": 0.1}, "smoothing is 'robust' with form 'ipo'"),
        ({"smoothing": Smoothing.conservative}, "with epsilon 0.0; give both, or neither"),
        ({"epsilon": 0.1}, "smoothing is 'none' with epsilon 0.1"),
        ({"smoothing": Smoothing.robust, "epsilon": 0.5}, "from 0.5 on the labels say nothing"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DpoConfig(**options)


def test_what_is_needed():
    assert isinstance(term(), Term) and term().level == "group" and not term().weighted
    assert term().needs == {"preference", "reference.logprobs"}
    assert term(reference_free=True).needs == {"preference"}
    provider = plugin.miles_term()
    assert provider.required(DpoConfig()) == {"preference", "role:reference"}
    assert provider.required(DpoConfig(reference_free=True)) == {"preference"}
    assert DpoConfig(form=Form.ipo).means and not DpoConfig(form=Form.ipo, length_normalised=False).means
    assert not DpoConfig().means


def test_the_preset_reads_pairs():
    provider = plugin.miles_algorithm()
    tree = provider.build(None, None)
    assert tree == {"episodes": "demonstrations", "aggregation": "episode_mean", "loss": {"use": "dpo", "beta": 0.1}}
    for made in (provider, plugin.miles_term()):
        assert "σ(βh)" in made.explain and "arXiv" in made.explain and "Deviations" in made.explain.splitlines()[-1]
        for formula in ("(h − 1/(2β))²", "−(1−ε)·log σ(βh) − ε·log σ(−βh)", "/(1−2ε)", "reference_free: π_ref = 0"):
            assert formula in made.explain
