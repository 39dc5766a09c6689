"""Every number of the numerics reference that the core's formulas give, recomputed in float64."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_core.aggregation import compile_weights, cut, with_weights
from miles_core.columns import CORE_COLUMNS, Batch, ColumnSpec
from miles_core.config.schema import Aggregation, AlgorithmKeys, RejectDenominator
from miles_core.contracts.learning import LOGPROBS, TermInfo
from miles_core.errors import CombinationError
from miles_core.measures import mismatch
from miles_core.numerics import host
from miles_core.numerics.kl import kl, kl_loss
from miles_core.numerics.ratios import clip
from miles_core.records import Origin


def batch_of(groups, masks=None, **columns):
    """`groups`: per group, per episode, the lengths of its trajectories. `masks`: per trajectory, what is trainable."""
    lengths, episode_of, group_of = [], [], []
    for g, episodes in enumerate(groups):
        for rows in episodes:
            episode_of += [len(group_of)] * len(rows)
            group_of.append(g)
            lengths += rows
    units = sum(lengths)
    trainable = np.ones(units, bool) if masks is None else np.concatenate([np.array(m, bool) for m in masks])
    specs = dict(CORE_COLUMNS)
    for name in columns:
        specs.setdefault(name, ColumnSpec(name=name, level="unit", dtype="float64"))
    return Batch(
        policy="main",
        step=0,
        trajectory_ids=tuple(f"t{i}" for i in range(len(lengths))),
        episode_ids=tuple(f"e{i}" for i in range(len(group_of))),
        group_ids=tuple(f"g{i}" for i in range(len(groups))),
        lengths=np.array(lengths, np.int64),
        episode_of=np.array(episode_of, np.int64),
        group_of=np.array(group_of, np.int64),
        columns={"trainable": trainable, **columns},
        specs=specs,
        items={},
    )


def term(name="t", level="unit", mask="kept", aggregation=None, weighted=False, dynamic=False, needs=(), outputs=None):
    return TermInfo(
        name=name,
        coef=1.0,
        role="actor",
        dynamic=dynamic,
        level=level,
        mask=mask,
        weighted=weighted,
        aggregation=aggregation,
        outputs=(LOGPROBS,) if outputs is None else outputs,
        needs=frozenset(needs),
    )


def keys(how, **more):
    return AlgorithmKeys(aggregation=Aggregation(how), **more)


def loss(batch, x, how, level="unit", **more):
    weight = compile_weights(batch, term(level=level), keys(how, **more)).astype(np.float64)
    return float((weight * np.asarray(x, np.float64)).sum())


# --- aggregation ----------------------------------------------------------------------------------------------------


def test_two_micro_batches_share_one_token_mean():
    assert loss(batch_of([[[1]], [[3]]]), [3, 1, 1, 1], "token_mean") == pytest.approx(1.5)


def test_two_ranks_share_one_token_mean():
    assert loss(batch_of([[[1]], [[4]]]), [4, 0.5, 0.5, 0.5, 0.5], "token_mean") == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("how", "value"), [("token_mean", 4 / 3), ("episode_mean", 1.5), ("episode_sum", 4.0), ("constant", 0.5)]
)
def test_the_four_aggregations(how, value):
    batch = batch_of([[[2], [4]]])
    assert loss(batch, [2, 2, 1, 1, 1, 1], how, constant_length=8) == pytest.approx(value, abs=1e-6)


def test_siblings_are_one_unit_in_every_denominator():
    batch = batch_of([[[1, 3], [2]]])  # episode 0 has two trajectories
    x = [4, 1, 1, 1, 5, 5]
    assert loss(batch, x, "episode_mean") == pytest.approx((7 / 4 + 5) / 2)
    assert loss(batch, x, "episode_sum") == pytest.approx((7 + 10) / 2)


def test_an_episode_without_trainable_units_contributes_nothing_and_counts():
    batch = batch_of([[[2], [2]]], masks=[[1, 1], [0, 0]])
    assert loss(batch, [3, 3, 9, 9], "episode_mean") == pytest.approx(1.5)
    assert loss(batch, [3, 3, 9, 9], "episode_sum") == pytest.approx(3.0)
    assert loss(batch, [3, 3, 9, 9], "token_mean") == pytest.approx(3.0)


def test_rejection_keeps_or_shrinks_the_denominator():
    rejected = np.array([False, True, False, False])
    batch = batch_of([[[4]]], rejected=rejected)
    assert loss(batch, [1, 100, 2, 3], "token_mean") == pytest.approx(6 / 4)
    kept = {"reject_denominator": RejectDenominator.kept}
    assert loss(batch, [1, 100, 2, 3], "token_mean", **kept) == pytest.approx(6 / 3)
    assert loss(batch, [1, 100, 2, 3], "episode_mean", **kept) == pytest.approx(6 / 3)
    trainable = compile_weights(batch, term(mask="trainable"), keys("token_mean", **kept))
    np.testing.assert_allclose(trainable, 0.25)


def test_a_zero_denominator_gives_zeros():
    batch = batch_of([[[2]]], masks=[[0, 0]])
    for how in Aggregation:
        weight = compile_weights(batch, term(), keys(how), max_new_tokens=4)
        assert weight.dtype == np.float32 and not weight.any()


def test_atoms_carry_their_weight_on_all_their_units():
    batch = batch_of([[[2, 1], [3]]], masks=[[0, 1], [0], [1, 1, 1]])
    by_trajectory = compile_weights(batch, term(level="trajectory"), keys("token_mean"))
    np.testing.assert_allclose(by_trajectory, [0.5, 0.5, 0, 0.5, 0.5, 0.5])  # the masked one is not counted
    by_episode = compile_weights(batch, term(level="episode"), keys("episode_mean"))
    np.testing.assert_allclose(by_episode, 0.5)
    pairs = batch_of([[[1], [2]], [[1], [1]]])
    np.testing.assert_allclose(compile_weights(pairs, term(level="group"), keys("episode_mean")), 0.5)


def test_constant_needs_a_length():
    batch = batch_of([[[2]]])
    with pytest.raises(CombinationError, match="constant_length"):
        compile_weights(batch, term(), keys("constant"))
    np.testing.assert_allclose(compile_weights(batch, term(), keys("constant"), max_new_tokens=8), 1 / 8)


def test_a_term_may_override_the_aggregation_and_dynamic_weights_have_no_column():
    batch = batch_of([[[2], [4]]])
    ready = with_weights(batch, [term("a", aggregation="episode_sum"), term("w", dynamic=True)], keys("token_mean"))
    np.testing.assert_allclose(ready.columns["weight.a"], 0.5)
    assert "weight.w" not in ready.columns


def test_minibatches_are_runs_of_whole_groups_and_keep_episodes_without_trajectories():
    batch = batch_of([[[2], []], [[1]], [[3]], [[1], [1]], [[2]]])
    assert [b.group_ids for b in cut(batch, 2)] == [("g0", "g1", "g2"), ("g3", "g4")]
    assert [b.n_groups for b in cut(batch, 9)] == [1, 1, 1, 1, 1]
    first = cut(batch, 5)[0]
    assert first.episode_ids == ("e0", "e1") and first.trajectory_ids == ("t0",)
    assert batch.select_groups(np.array([0, 3])).episode_ids == ("e0", "e1", "e4", "e5")
    assert [int(e) for e in batch.select_groups(np.array([0, 3])).episode_of] == [0, 2, 3]


# --- advantages and whitening ---------------------------------------------------------------------------------------


def by_step(reward, group):
    return host.batch_advantages(reward)


PER_EPISODE = [host.group_advantages, host.leave_one_out_advantages, host.centred_advantages, by_step]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    ("values", "equal"),
    [([], True), ([1.0, 1.0 + 1e-7], True), ([0.0, 2e-6], False), ([1.0, np.nan], False), ([np.nan, 1.0], False)],
)
def test_a_group_without_a_signal(values, equal, dtype):
    assert host.all_equal(values) == host.all_equal(np.array(values, dtype)) == equal
    assert not host.all_equal(np.array([1, 1000], np.uint64))


def test_group_advantages():
    zeros = np.zeros(4, int)
    got = host.group_advantages(np.array([1.0, 0, 0, 0]), zeros, eps=0)
    np.testing.assert_allclose(got, [1.5, -0.5, -0.5, -0.5], rtol=1e-15)
    population = host.group_advantages(np.array([1.0, 0, 0, 0]), zeros, ddof=0, eps=0)
    np.testing.assert_allclose(population, np.array([0.75, -0.25, -0.25, -0.25]) / math.sqrt(0.1875))
    with_eps = host.group_advantages(np.array([1.0, 0, 0, 0]), zeros)
    np.testing.assert_allclose(with_eps, np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-6), rtol=1e-15)


def test_groups_may_differ_in_size_and_order_does_not_matter():
    reward, group = np.array([1.0, 0, 1, 1, 0]), np.array([0, 0, 1, 1, 1])
    want = np.array([0.5, -0.5, 1 / 3, 1 / 3, -2 / 3])
    np.testing.assert_allclose(host.group_advantages(reward, group, scale="none"), want, rtol=1e-15)


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(0, 3)), min_size=1, max_size=24), st.randoms())
def test_the_order_of_episodes_changes_no_bit(episodes, random):
    order = list(range(len(episodes)))
    random.shuffle(order)
    reward, group = np.array([r for r, _ in episodes]), np.array([g for _, g in episodes])
    for formula in PER_EPISODE:
        np.testing.assert_array_equal(formula(reward[order], group[order]), formula(reward, group)[order])


def test_leave_one_out():
    got = host.leave_one_out_advantages(np.array([1.0, 0, 0, 0]), np.zeros(4, int))
    np.testing.assert_allclose(got, [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-15)


@pytest.mark.parametrize("formula", PER_EPISODE)
def test_one_alone_and_identical_rewards_give_exactly_zero(formula):
    assert formula(np.array([7.0]), np.array([0])).tolist() == [0.0]
    assert formula(np.full(7, 0.7), np.zeros(7, int)).tolist() == [0.0] * 7  # the sum of seven .7 is rounded


def test_rewards_that_are_nearly_equal_give_exactly_zero_under_group():
    nearly = np.array([1000.0, 1000.0 + 5e-4, 1000.0])  # within 1e-6 * max(1, max|R|)
    for scale in ("std", "none"):
        assert host.group_advantages(nearly, np.zeros(3, int), scale=scale).tolist() == [0.0, 0.0, 0.0]
        assert host.group_advantages(np.array([0.1, 0.1 + 1.1e-6]), np.zeros(2, int), scale=scale).any()


@pytest.mark.parametrize(
    "reward", [[1e6, 1e6 + 0.5], [1000.0, 1000.0 + 5e-4, 1000.0], [0.3, 0.1 + 0.2], [0.7, 0.7 - 5e-8]]
)
def test_the_other_advantages_have_no_such_rule(reward):
    """Against exact fractions: only `group` says what nearly equal rewards give."""
    n, exact = len(reward), [Fraction(r) for r in reward]
    group, given = np.zeros(n, int), np.array(reward)
    centred = [r - sum(exact) / n for r in exact]
    np.testing.assert_allclose(host.centred_advantages(given, group), [float(a) for a in centred], rtol=1e-14)
    others = [float(r - (sum(exact) - r) / (n - 1)) for r in exact]
    np.testing.assert_allclose(host.leave_one_out_advantages(given, group), others, rtol=1e-14)
    std = math.sqrt(sum(a * a for a in centred) / (n - 1))
    scaled = [float(a) / (std + 1e-6) for a in centred]
    np.testing.assert_allclose(host.batch_advantages(given), scaled, rtol=1e-12)


@pytest.mark.parametrize("formula", PER_EPISODE)
def test_an_episode_without_a_reward_is_in_no_statistic(formula):
    got = formula(np.array([1.0, np.nan, 0.0]), np.zeros(3, int))
    want = formula(np.array([1.0, 0.0]), np.zeros(2, int))
    assert got[[0, 2]].tolist() == want.tolist() and np.isnan(got[1])


def test_whitening():
    x, mask = np.array([1.0, 2, 3, 99, np.nan]), np.array([True, True, True, False, False])
    np.testing.assert_allclose(host.whiten(x, mask), [-1 / math.sqrt(1 + 1e-8), 0, 1 / math.sqrt(1 + 1e-8), 0, 0])
    np.testing.assert_allclose(host.whiten(x, mask, shift_mean=False)[:3].mean(), 2.0)
    assert host.whiten(np.array([5.0]), np.array([True])).tolist() == [0.0]
    big = 1e8 + np.array([0.0, 1.0, 2.0])  # one pass in float32 would lose this
    np.testing.assert_allclose(host.whiten(big, np.ones(3, bool))[2], 1.0, rtol=1e-7)


def test_batch_advantages():
    got = host.batch_advantages(np.array([1.0, np.nan, 0, 0, 0]), eps=0)
    np.testing.assert_array_equal(got, [1.5, np.nan, -0.5, -0.5, -0.5])
    population = host.batch_advantages(np.array([1.0, 0, 0, 0]), ddof=0, eps=0)
    np.testing.assert_allclose(population, np.array([0.75, -0.25, -0.25, -0.25]) / math.sqrt(0.1875))
    assert host.batch_advantages(np.array([5.0]), eps=0).tolist() == [0.0]


def test_token_rewards_and_their_sums_to_the_right():
    masks = [[0, 1, 1, 0], [1, 0, 1], [0]]  # two siblings of one episode, and an episode where nothing is trained
    batch = batch_of([[[4, 3]], [[1]]], masks, reward=np.array([2.0, 7.0]))
    penalty = np.array([np.nan, 0.25, 0.5, np.nan, 1.0, np.nan, 0.125, np.nan])
    rewards = host.token_rewards(batch, penalty)
    assert rewards.tolist() == [0, -0.25, 1.5, 0, -1, 0, 1.875, 0]
    mask, row = batch.columns["trainable"], batch.trajectory_of_unit
    assert host.token_rewards(batch)[mask].tolist() == [0, 2, 0, 2]
    assert host.discounted_sums(rewards, mask, row, 1.0).tolist() == [0, 1.25, 1.5, 0, 0.875, 0, 1.875, 0]
    assert host.discounted_sums(rewards, mask, row, 0.5).tolist() == [0, 0.5, 1.5, 0, -0.0625, 0, 1.875, 0]
    assert not host.discounted_sums(rewards, np.zeros(8, bool), row, 0.5).any()


# --- KL, ratios, mismatch -------------------------------------------------------------------------------------------


def f64(*values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


@pytest.mark.parametrize(
    ("estimator", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.10653066), ("low_var", 0.10653066)]
)
def test_kl_estimators(estimator, value):
    assert kl(f64(0.5), estimator).item() == pytest.approx(value, abs=5e-9)
    assert host.kl(np.array([0.5]), estimator)[0] == pytest.approx(value, abs=5e-9)


def test_the_gradient_of_k3():
    current = f64(-1.0, grad=True)
    kl_loss(current, f64(-1.5), "k3").sum().backward()
    assert current.grad.item() == pytest.approx(0.39346934, abs=5e-9)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var"])
def test_host_and_torch_agree_in_float64(estimator):
    d = np.concatenate([np.linspace(-30, 30, 61), np.random.default_rng(0).normal(size=50)])
    np.testing.assert_allclose(
        host.kl(d, estimator), kl(torch.from_numpy(d), estimator).numpy(), rtol=1e-14, atol=1e-16
    )


def test_k3_keeps_its_digits_near_zero_in_float32():
    d = torch.tensor([1e-3, -1e-4])
    want = host.kl(d.double().numpy(), "k3")
    np.testing.assert_allclose(kl(d, "k3").numpy(), want, rtol=1e-3)


def test_only_the_argument_of_exp_is_clamped():
    far = f64(-30.0, grad=True)
    value = kl(far, "k3")
    value.sum().backward()
    assert value.item() == pytest.approx(math.exp(20) - 1 - 30) and far.grad.item() == 1.0
    assert kl(f64(-30.0), "low_var").item() == 10.0
    assert kl(f64(30.0), "low_var").item() == 10.0 and kl(f64(9.0), "low_var").item() == pytest.approx(8 + math.exp(-9))


@pytest.mark.parametrize(("estimator", "gradient"), [("k1", 1.5), ("k3", 0.5)])
def test_unbiased_estimators_have_the_gradient_of_kl_at_ratio_one(estimator, gradient):
    current = f64(-1.0, grad=True)  # d = .5: gradients d + 1 and d
    kl_loss(current, f64(-1.5), estimator, proximal=f64(-1.0)).sum().backward()
    assert current.grad.item() == pytest.approx(gradient, abs=1e-15)


def test_expectations_and_gradients_under_sampling_from_the_policy():
    logits, reference = f64(0.3, -0.4, 1.1, grad=True), torch.log_softmax(f64(-0.2, 0.5, 0.1), 0)
    policy = torch.log_softmax(logits, 0)
    true = (policy.exp() * (policy - reference)).sum()
    (want,) = torch.autograd.grad(true, logits, retain_graph=True)
    weight = policy.exp().detach()
    for estimator in ("k1", "k3"):
        assert (weight * kl(policy.detach() - reference, estimator)).sum().item() == pytest.approx(true.item())
        exact = (weight * kl_loss(policy, reference, estimator, proximal=policy.detach())).sum()
        torch.testing.assert_close(torch.autograd.grad(exact, logits, retain_graph=True)[0], want)
    k2 = torch.autograd.grad((weight * kl(policy - reference, "k2")).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(k2, want)
    k1 = torch.autograd.grad((weight * kl(policy - reference, "k1")).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(k1, torch.zeros_like(k1), atol=1e-15, rtol=0)


def test_clip_and_its_dual():
    rho, a = f64(4.0), f64(-1.0)
    assert clip(rho, a, 0.2, 0.2).value.item() == 4.0
    dual = clip(rho, a, 0.2, 0.2, dual=3.0)
    assert dual.value.item() == 3.0 and dual.dual.item() and not dual.high.item()
    assert not clip(f64(2.0), a, 0.2, 0.2, dual=3.0).dual.item()
    assert clip(rho, -a, 0.2, 0.2, dual=3.0).value.item() == pytest.approx(-1.2)  # only where A < 0


def test_clip_fractions():
    rho, a = f64(0.7, 0.7, 1.3, 1.3, 0.8, 1.2), f64(-1, 1, 1, -1, -1, 1)
    got = clip(rho, a, 0.2, 0.2)
    assert got.low.tolist() == [True, False, False, False, False, False]
    assert got.high.tolist() == [False, False, True, False, False, False]


def test_at_ratio_one_clip_is_minus_a_with_gradient_minus_a():
    for a in (2.0, -3.0):
        log_ratio = f64(0.0, grad=True)
        value = clip(log_ratio.exp(), f64(a), 0.2, 0.2, dual=3.0).value
        value.sum().backward()
        assert value.item() == -a and log_ratio.grad.item() == -a


def test_mismatch():
    proximal, behaviour = np.array([-1.0, -2.0, np.nan]), np.array([-1.5, -2.0, np.nan])
    got = mismatch(proximal, behaviour, np.array([True, True, False]))
    w = math.exp(0.5)
    assert got["mismatch/abs"] == (0.5, 2.0) and got["mismatch/max_abs"] == (0.5, 1.0)
    num, den = got["mismatch/k3"]
    assert num / den == pytest.approx((w - 1 - 0.5) / 2)
    num, den = got["mismatch/ess"]
    assert num / den == pytest.approx((w + 1) ** 2 / (2 * (w * w + 1)))
    assert mismatch(proximal, behaviour, np.zeros(3, bool)) == {}


def test_mismatch_of_a_step_leaves_demonstrations_out():
    behaviour = np.array([-1.5, -2.0, 0.0, np.nan])  # the third was not sampled: its column says nothing
    columns = {"proximal_logprobs": np.array([-1.0, -2.0, -9.0, np.nan]), "behaviour_logprobs": behaviour}
    origin = np.array([Origin.SAMPLED, Origin.SAMPLED, Origin.DEMONSTRATION, Origin.PROMPT], np.uint8)
    batch = batch_of([[[4]]], [[1, 1, 1, 0]], origin=origin, **columns)
    sampled = mismatch(columns["proximal_logprobs"], behaviour, np.array([True, True, False, False]))
    assert host.batch_mismatch(batch) == sampled and sampled["mismatch/abs"] == (0.5, 2.0)


def test_zeros_have_no_sign_and_rewards_that_all_but_agree_no_scale():
    group = np.zeros(2, np.int64)
    for rewards in ([0.0, -0.0], [-0.0, 0.0]):
        reward = np.array(rewards)
        for found in (
            host.centred_advantages(reward, group),
            host.leave_one_out_advantages(reward, group),
            host.batch_advantages(reward, eps=0.0),
        ):
            assert np.signbit(found).tolist() == [False, False]
    assert host.batch_advantages(np.array([0.0, 3e-162]), eps=0.0).tolist() == pytest.approx([-1.5e-162, 1.5e-162])
