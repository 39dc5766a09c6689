"""Stages, penalty and filter as the learner calls them: numbers, properties, extremes."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_algo_grpo import config as c
from miles_algo_grpo import plugin, stages
from miles_algo_grpo.filters import dynamic_sampling

from miles_core.errors import CombinationError
from miles_core.numerics import host
from miles_core.provider import Place
from miles_core.testing import StageExample, minimal_context
from miles_core.testing.suites import batches

RNG = np.random.default_rng(0)


def build(name, config=None, **context):
    found = next(p for p in plugin.miles_stage() if p.name == name)
    run = minimal_context(Place.CONTROLLER, name).run
    made = minimal_context(Place.CONTROLLER, name, run=replace(run, **context))
    return found.build(config or found.config(), made)


def engines(max_new_tokens):
    return {"engines": {"main": SimpleNamespace(core=SimpleNamespace(max_new_tokens=max_new_tokens))}}


@st.composite
def steps(draw):
    """A batch of groups with siblings and masks, and a KL column with garbage where nothing is trained."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    episodes = sum(sizes)
    siblings = draw(st.lists(st.integers(1, 2), min_size=episodes, max_size=episodes))
    rows = [
        draw(st.lists(st.integers(0, 1), min_size=1, max_size=6).filter(lambda r: len(r) > 0))
        for _ in range(sum(siblings))
    ]
    rewards = iter(draw(st.lists(st.floats(-3, 3), min_size=episodes, max_size=episodes)))
    units = sum(map(len, rows))
    kl = np.array(draw(st.lists(st.floats(-2, 2, width=32), min_size=units, max_size=units)), np.float32)
    live = np.concatenate(rows).astype(bool)
    example = StageExample(
        rewards=[[next(rewards) for _ in range(n)] for n in sizes],
        siblings=siblings,
        trainable=rows,
        columns={"reward_kl": np.where(live, kl, np.nan)},
        expect={},
    )
    return example.batch()


@given(steps(), st.floats(0, 1), st.booleans())
def test_returns_are_the_recursion_over_trainable_tokens(batch, gamma, reads_kl):
    found = stages.returns(c.ReturnsConfig(gamma=gamma), reads_kl)(batch, RNG).columns["advantages"]
    want = np.zeros(batch.units)
    for row in range(batch.n_trajectories):
        units = np.arange(*batch.offsets[row : row + 2])
        later, last = 0.0, True
        for unit in units[batch.columns["trainable"][units]][::-1]:
            reward = batch.columns["reward"][batch.episode_of[row]] if last else 0.0
            later = reward - (float(batch.columns["reward_kl"][unit]) if reads_kl else 0.0) + gamma * later
            want[unit], last = later, False
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


@given(steps())
def test_centred_is_the_group_mean_and_the_kl_of_the_token(batch):
    found = stages.centred(reads_kl=True)(batch, RNG).columns["advantages"]
    reward, group = batch.columns["reward"], batch.group_of
    for unit in range(batch.units):
        episode = batch.episode_of[batch.trajectory_of_unit[unit]]
        if not batch.columns["trainable"][unit]:
            assert found[unit] == 0
        else:
            mine = reward[group == group[episode]]
            want = reward[episode] - mine.mean() - batch.columns["reward_kl"][unit]
            assert found[unit] == pytest.approx(want, abs=2e-6)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30), st.randoms())
def test_whitening_depends_on_no_order(values, random):
    mask = np.ones(len(values), bool)
    order = list(range(len(values)))
    random.shuffle(order)
    one, other = (host.whiten(np.array(values)[i], mask) for i in (slice(None), order))
    assert one[order].tolist() == other.tolist()  # to the bit: sums are exactly rounded


def test_whitening_is_over_the_whole_step_and_its_metrics_say_what_came_in():
    batch = StageExample(
        rewards=[[0, 0], [0]],
        trainable=[[1, 0], [1, 1], [1]],
        columns={"advantages": [1.0, 77.0, 2.0, 3.0, 6.0]},
        expect={},
    ).batch()
    result = build("whiten")(batch, RNG)
    std = math.sqrt(14 / 3)
    np.testing.assert_allclose(result.columns["advantages"], np.array([-2, 0, -1, 0, 3]) / std, rtol=1e-6)
    assert result.metrics == {"mean": (12.0, 4.0), "std": (pytest.approx(std), 1.0)}
    kept = build("whiten", c.WhitenConfig(shift_mean=False))(batch, RNG).columns["advantages"]
    np.testing.assert_allclose(kept, [3 - 2 / std, 0, 3 - 1 / std, 3, 3 + 3 / std], rtol=1e-6)


def test_centred_then_whitened_is_reinforce_pp_baseline():
    batch = StageExample(rewards=[[1, 0], [5, 5]], trainable=[[1], [1], [1], [1, 1]], expect={}).batch()
    centred = build("centred")(batch, RNG)
    batch = batch.with_columns(centred.columns, stages.Whiten.gives)
    white = build("whiten")(batch, RNG).columns["advantages"]
    scale = math.sqrt(0.5 / 4 + 1e-8)
    np.testing.assert_allclose(white, [0.5 / scale, -0.5 / scale, 0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("scale", list(c.Scale))
def test_rewards_equal_up_to_float_noise_give_exactly_nothing_under_group(scale):
    rewards = [[0.1 + 0.2, 0.3, 0.3 + 1e-12], [0.3, 0.3 - 5e-8], [1e6, 1e6 + 0.5]]
    stage = build("group", c.GroupConfig(scale=scale))
    assert not stage(StageExample(rewards=rewards, expect={}).batch(), RNG).columns["advantages"].any()


@pytest.mark.parametrize(
    ("name", "expect"),
    [
        ("leave_one_out", [-2.5e-7, 2.5e-7, -0.5, 0.5, 0]),
        ("centred", [-1.25e-7, 1.25e-7, -0.25, 0.25, 0]),
    ],
)
def test_small_differences_count_under_the_other_advantages(name, expect):
    rewards = [[1.0, 1.0 + 2.5e-7], [1e6, 1e6 + 0.5], [7]]
    found = build(name)(StageExample(rewards=rewards, expect={}).batch(), RNG).columns["advantages"]
    np.testing.assert_allclose(found, expect, rtol=1e-6)


def test_small_differences_count_over_the_step():
    found = build("batch")(StageExample(rewards=[[1e6], [1e6 + 0.5]], expect={}).batch(), RNG).columns["advantages"]
    size = 0.25 / (math.sqrt(0.125) + 1e-6)
    np.testing.assert_allclose(found, [-size, size], rtol=1e-6)


@pytest.mark.parametrize("name", ["group", "leave_one_out", "batch", "centred", "returns"])
def test_an_episode_without_reward_is_in_no_statistic(name):
    with_none = build(name)(StageExample(rewards=[[1, 0, None], [2, 0]], expect={}).batch(), RNG).columns["advantages"]
    without = build(name)(StageExample(rewards=[[1, 0], [2, 0]], expect={}).batch(), RNG).columns["advantages"]
    assert np.isnan(with_none[2])  # core refuses it by name where it is trainable
    np.testing.assert_array_equal(np.delete(with_none, 2), without)


@pytest.mark.parametrize("far", [100.0, -100.0])
@pytest.mark.parametrize("estimator", list(c.Estimator))
def test_kl_in_the_reward_far_away(estimator, far):
    example = StageExample(
        trainable=[[0, 1]],
        columns={"proximal_logprobs": [np.nan, far - 1], "reference.logprobs": [np.nan, -1]},
        expect={},
    )
    stage = build("reward_kl", c.RewardKlConfig(estimator=estimator, coef=0.5))
    result = stage(example.batch(), RNG)
    exp = math.exp(20 if far < 0 else -20)
    want = {"k1": far, "k2": far**2 / 2, "k3": exp - 1 + far, "low_var": 10.0}[estimator]
    assert result.columns["reward_kl"].tolist() == [0.0, pytest.approx(0.5 * want, rel=1e-6)]
    assert result.metrics["kl"] == (pytest.approx(want), 1.0)


def test_kl_of_nothing_trainable():
    empty = {"proximal_logprobs": [np.nan], "reference.logprobs": [np.nan]}
    batch = StageExample(trainable=[[0]], columns=empty, expect={}).batch()
    assert build("reward_kl", c.RewardKlConfig(coef=1.0))(batch, RNG).metrics["kl"] == (0.0, 0.0)


# --- the over-long penalty ------------------------------------------------------------------------------------------


def test_overlong_takes_its_length_from_the_rollout():
    stage = build("overlong", **engines(20))
    assert (stage.max_length, stage.buffer, stage.penalty) == (20, 4.0, 1.0)
    rows = [[1] * n for n in (10, 16, 17, 20)]
    batch = StageExample(rewards=[[1, 1, 1, 1]], trainable=rows, expect={}).batch()
    result = stage(batch, RNG)
    assert result.columns["reward.overlong"].tolist() == [0.0, 0.0, -0.25, -1.0]
    assert not np.signbit(result.columns["reward.overlong"][:2]).any()
    assert result.metrics["episodes"] == (2.0, 4.0)
    assert build("overlong", c.OverlongConfig(max_length=10, buffer=5), **engines(20)).buffer == 5


def test_overlong_counts_what_is_masked_and_takes_episodes_without_trajectories():
    first, *_ = batches.groups(sizes=(2,))
    failed = replace(first, episodes=(first.episodes[0], replace(first.episodes[1], trajectories=(), reward=None)))
    batch = batches.batch_of([failed]).with_columns(
        {"trainable": np.zeros(first.episodes[0].trajectories[0].length)}, ()
    )
    sampled = int((batch.columns["origin"] == 1).sum())
    stage = build("overlong", c.OverlongConfig(max_length=sampled, buffer=sampled))
    assert stage(batch, RNG).columns["reward.overlong"].tolist() == [-1.0, 0.0]


def test_overlong_without_a_length_is_refused():
    with pytest.raises(CombinationError, match="no max_length, and there is no rollout") as error:
        build("overlong")
    assert "algorithm.penalties.overlong.max_length" in str(error.value)
    with pytest.raises(CombinationError, match="buffer of 30 tokens, and answers end at 20"):
        build("overlong", c.OverlongConfig(buffer=30), **engines(20))
    for bad in (0.0, -1.0, 11.0):
        with pytest.raises(ValueError, match="buffer is"):
            c.OverlongConfig(max_length=10, buffer=bad)


# --- dynamic sampling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([1, 0, 0, 0], True),
        ([1, 1, 1], False),
        ([0, 0], False),
        ([0.3, 0.1 + 0.2], False),  # equal up to float noise
        ([1e6, 1e6 + 0.5], False),  # 1e-6 of the largest
        ([0.0, 2e-6], True),
        ([None, 1, 0], True),
        ([None, 1, 1], False),
        ([1], False),
        ([None], False),
        ([], False),
    ],
)
def test_dynamic_sampling_keeps_groups_with_a_signal(rewards, kept):
    group = batches.group(0, [[2]] * len(rewards), rewards, [3])
    assert dynamic_sampling(group) == (None if kept else "all rewards are equal")
