"""What estimators promise on average, over softmax policies small enough to sum exactly. Seeds fixed, five sigma.

Each check is seen failing by the estimator that does not keep the promise: without that it would prove nothing.
"""

import numpy as np
import pytest
import torch
from miles_algo_grpo import config as c
from miles_algo_grpo.terms import cispo_term, kl_term, reinforce_term

from miles_core.columns import CORE_COLUMNS, Batch, ColumnSpec
from miles_core.numerics import host
from miles_core.numerics.views import MicroView

N = 200_000
LOGITS = torch.tensor([0.3, -0.4, 0.1, 0.9, -1.2], dtype=torch.float64)
REFERENCE = torch.tensor([-0.2, 0.5, 0.4, 0.1, 0.0], dtype=torch.float64)
REWARD = np.array([1.0, 0.0, 2.0, -1.0, 0.5])
PI, REF = (torch.log_softmax(x, 0) for x in (LOGITS, REFERENCE))
P = PI.exp().numpy()
KL = float((PI.exp() * (PI - REF)).sum())


def draws(seed, shape, p=P):
    return np.random.default_rng(seed).choice(len(p), size=shape, p=p)


def near(samples, exact):
    """Whether the mean of `samples` [n, …] lies within five standard errors of `exact`."""
    error = samples.std(0, ddof=1) / np.sqrt(len(samples))
    return bool((np.abs(samples.mean(0) - exact) < 5 * error + 1e-12).all())


def score(tokens):
    """∇ log π of each token with respect to the logits: one-hot − p, [n, 5]."""
    return np.eye(len(P))[tokens] - P


# --- KL -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", True), ("k3", True), ("k2", False)])
def test_expectation_of_the_estimators(estimator, unbiased):
    d = (PI - REF).numpy()[draws(1, N)]
    assert near(host.kl(d, estimator), KL) is unbiased


def test_k3_varies_less_than_k1():
    d = (PI - REF).numpy()[draws(2, N)]
    assert host.kl(d, "k3").var() < 0.5 * host.kl(d, "k1").var()


def exact_gradient(of):
    logits = LOGITS.clone().requires_grad_()
    pi = torch.log_softmax(logits, 0)
    of(pi).backward()
    return logits.grad.numpy()


def units(**columns):
    """A batch of single-token trajectories in one group."""
    n = len(next(iter(columns.values())))
    names = (*columns, "trainable")
    specs = CORE_COLUMNS | {name: ColumnSpec(name=name, level="unit", dtype="float64") for name in names}
    return Batch(
        policy="main",
        step=0,
        trajectory_ids=tuple(map(str, range(n))),
        episode_ids=tuple(map(str, range(n))),
        group_ids=("g",),
        lengths=np.ones(n, np.int64),
        episode_of=np.arange(n),
        group_of=np.zeros(n, np.int64),
        columns={"trainable": np.ones(n, bool), **columns},
        specs=specs,
        items={},
    )


def gradients(term, tokens, **columns):
    """The term's gradient with respect to the logits, sample by sample: dvalue/dπ(token) · ∇ log π(token)."""
    logprobs = PI[torch.from_numpy(tokens)].clone().requires_grad_()
    value = term(MicroView(units(**columns), lambda output: logprobs)).value
    value.sum().backward()
    return logprobs.grad.numpy()[:, None] * score(tokens)


FORWARD = lambda pi: (pi.exp() * (pi - REF)).sum()  # noqa: E731
BACKWARD = lambda pi: (REF.exp() * (REF - pi)).sum()  # noqa: E731


@pytest.mark.parametrize(
    ("config", "target"),
    [
        (c.KlConfig(estimator=c.Estimator.k2), FORWARD),
        (c.KlConfig(estimator=c.Estimator.k1, unbiased=True), FORWARD),
        (c.KlConfig(estimator=c.Estimator.k3, unbiased=True), FORWARD),
        (c.KlConfig(estimator=c.Estimator.k3), BACKWARD),
    ],
)
def test_the_gradient_of_the_kl_loss(config, target):
    tokens = draws(3, N)
    found = gradients(
        kl_term(config),
        tokens,
        **{"proximal_logprobs": PI.numpy()[tokens], "reference.logprobs": REF.numpy()[tokens]},
    )
    assert near(found, exact_gradient(target))
    other = BACKWARD if target is FORWARD else FORWARD
    assert not near(found, exact_gradient(other))


def test_plain_k1_as_a_loss_has_no_gradient_which_is_why_it_is_refused():
    assert near(score(draws(4, N)), np.zeros(5))  # d k1 / d logits is the score itself
    with pytest.raises(ValueError, match="its gradient is 0 in expectation"):
        c.KlConfig(estimator=c.Estimator.k1)


# --- advantages -----------------------------------------------------------------------------------------------------

GROUPS, SIZE = 40_000, 4


def policy_gradients(advantages_of, seed):
    """Σ over a group of A · ∇ log π, divided by its size: [groups, 5]."""
    tokens = draws(seed, (GROUPS, SIZE))
    reward = REWARD[tokens].reshape(-1)
    advantage = advantages_of(reward, np.repeat(np.arange(GROUPS), SIZE))
    found = -gradients(reinforce_term(), tokens.reshape(-1), advantages=advantage)
    return found.reshape(GROUPS, SIZE, 5).mean(1)


def by_groups(formula):
    """The formula on every group at once, for groups of one size (the library's own loops over groups)."""

    def apply(reward, group_of):
        few = formula(reward[: 50 * SIZE], group_of[: 50 * SIZE])
        rows = reward.reshape(-1, SIZE)
        mean = rows.mean(1, keepdims=True)
        vector = {
            host.leave_one_out_advantages: (rows - mean) * SIZE / (SIZE - 1),
            host.group_advantages: (rows - mean) / (rows.std(1, ddof=1, keepdims=True) + 1e-6),
        }[formula].reshape(-1)
        np.testing.assert_allclose(few, vector[: 50 * SIZE], atol=1e-6)  # it is the same formula
        return vector

    return apply


EXACT = exact_gradient(lambda pi: (pi.exp() * torch.from_numpy(REWARD)).sum())


def test_leave_one_out_is_unbiased():
    assert near(policy_gradients(by_groups(host.leave_one_out_advantages), 5), EXACT)


def test_the_mean_of_the_whole_group_shrinks_the_gradient():
    """Its own reward is in the baseline: the expectation is (n − 1)/n of the gradient."""
    found = policy_gradients(lambda r, g: by_groups(host.leave_one_out_advantages)(r, g) * (SIZE - 1) / SIZE, 6)
    assert near(found, EXACT * (SIZE - 1) / SIZE) and not near(found, EXACT)


def test_the_standard_deviation_of_the_group_changes_the_direction():
    """Why Dr. GRPO leaves it out: no multiple of the gradient lies within the error bars."""
    found = policy_gradients(by_groups(host.group_advantages), 7)
    scale = float(found.mean(0) @ EXACT / (EXACT @ EXACT))
    assert not near(found, EXACT * scale)


def test_a_baseline_varies_less_than_none():
    with_baseline = policy_gradients(by_groups(host.leave_one_out_advantages), 8)
    without = policy_gradients(lambda r, g: r + 10.0, 8)  # rewards far from 0
    assert with_baseline.var(0).sum() < 0.1 * without.var(0).sum()


# --- importance weights ---------------------------------------------------------------------------------------------


def test_the_ratio_corrects_for_the_policy_that_sampled():
    tokens = draws(9, N, p=REF.exp().numpy())
    columns = {"advantages": REWARD[tokens], "proximal_logprobs": REF.numpy()[tokens]}
    wide = gradients(cispo_term(c.CispoConfig(hi=100.0)), tokens, **columns)  # a bound that nothing reaches
    plain = gradients(reinforce_term(), tokens, **columns)
    bounded = gradients(cispo_term(c.CispoConfig(hi=0.2)), tokens, **columns)
    assert near(-wide, EXACT) and not near(-plain, EXACT) and not near(-bounded, EXACT)
    assert bounded.var(0).sum() < wide.var(0).sum()  # what the bound's bias buys
    assert near(np.exp(PI.numpy() - REF.numpy())[tokens], 1.0)  # weights average to 1
