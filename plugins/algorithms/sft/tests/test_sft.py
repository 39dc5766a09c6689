"""The term and the preset `sft`."""

import numpy as np
import pytest
import torch
from miles_algo_sft import plugin

from miles_core.aggregation import with_weights
from miles_core.columns import CORE_COLUMNS, Batch
from miles_core.config.schema import AlgorithmKeys
from miles_core.contracts.learning import BoundTerm, Term
from miles_core.numerics import objective
from miles_core.numerics.views import MicroView


def batch_of(lengths, trainable, episode_of=None):
    episode_of = list(range(len(lengths))) if episode_of is None else episode_of
    return Batch(
        policy="main",
        step=0,
        trajectory_ids=tuple(f"t{i}" for i in range(len(lengths))),
        episode_ids=tuple(f"e{i}" for i in range(max(episode_of) + 1)),
        group_ids=tuple(f"g{i}" for i in range(max(episode_of) + 1)),
        lengths=np.array(lengths, np.int64),
        episode_of=np.array(episode_of),
        group_of=np.arange(max(episode_of) + 1),
        columns={"trainable": np.array(trainable)},
        specs=dict(CORE_COLUMNS),
        items={},
    )


def built():
    provider = plugin.miles_term()
    return provider.build(provider.config(), None)


def evaluate(batch, logprobs, how="token_mean"):
    bound = BoundTerm(name="sft", term=built(), coef=1.0)
    ready = with_weights(batch, [bound.info], AlgorithmKeys(aggregation=how))
    outputs = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    view = MicroView(ready, lambda output: outputs)
    loss, _ = objective.evaluate(view.at, [bound], str)
    loss.backward()
    return loss.item(), outputs.grad.tolist()


def test_only_demonstration_tokens_are_trained():
    nan = float("nan")
    loss, gradient = evaluate(batch_of([3, 2], [False, True, True, False, True]), [nan, -1.0, -2.0, nan, -6.0])
    assert loss == pytest.approx(3.0) and gradient == pytest.approx([0, -1 / 3, -1 / 3, 0, -1 / 3])
    by_episode, _ = evaluate(
        batch_of([3, 2], [False, True, True, False, True]), [nan, -1.0, -2.0, nan, -6.0], "episode_mean"
    )
    assert by_episode == pytest.approx((1.5 + 6) / 2)


@pytest.mark.parametrize(("how", "want"), [("token_mean", (1 + 2 + 3 + 9) / 4), ("episode_mean", (2 + 9) / 2)])
def test_packing_changes_no_denominator(how, want):
    """A document of three tokens and one of one: together, apart, in the other order, or in a batch with others."""
    logprobs = [-1.0, -2.0, -3.0, -9.0]
    assert evaluate(batch_of([3, 1], [True] * 4), logprobs, how)[0] == pytest.approx(want)
    assert evaluate(batch_of([1, 3], [True] * 4), [-9.0, -1.0, -2.0, -3.0], how)[0] == pytest.approx(want)
    padded = batch_of([5, 2], [True, True, True, False, False, True, False])
    nan = float("nan")
    assert evaluate(padded, [-1.0, -2.0, -3.0, nan, nan, -9.0, nan], how)[0] == pytest.approx(want)
    # in two micro-batches: weights are those of the whole update, and the parts add up
    bound = BoundTerm(name="sft", term=built(), coef=1.0)
    whole = with_weights(batch_of([3, 1], [True] * 4), [bound.info], AlgorithmKeys(aggregation=how))
    total = 0.0
    for rows, part in (([0], logprobs[:3]), ([1], logprobs[3:])):
        values = torch.tensor(part, dtype=torch.float64)
        view = MicroView(whole.select(rows), lambda output, values=values: values)
        total += objective.evaluate(view.at, [bound], str)[0].item()
    assert total == pytest.approx(want)


def test_explanations_give_formula_paper_and_deviations():
    for provider in (plugin.miles_algorithm(), plugin.miles_term()):
        first, paper, last = provider.explain.splitlines()
        assert "−π" in first and "arXiv" in paper and last.startswith("Deviations")


def test_the_term_keeps_the_contract():
    term = built()
    assert isinstance(term, Term) and not term.weighted and term.needs == frozenset()
    raw = torch.tensor([float("nan"), -1.0])
    view = MicroView(batch_of([2], [False, True]), lambda output: raw)
    assert term(view).value.tolist() == [0.0, 1.0]


def test_the_preset_needs_no_engine():
    provider = plugin.miles_algorithm()
    tree = provider.build(provider.config(), None)
    assert tree == {"episodes": "demonstrations", "aggregation": "token_mean", "loss": {"use": "sft"}}
    AlgorithmKeys(episodes=tree["episodes"], aggregation=tree["aggregation"])
