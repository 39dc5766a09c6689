"""`compose`, `rank` and `duplicates` by hand, and in whole runs with a scorer in the learner."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_algo_rewards import config as c
from miles_algo_rewards.plugin import miles_stage
from miles_algo_rewards.stages import Compose, Duplicates, Rank, ranks

from miles_core.columns import Level, collate
from miles_core.errors import LearnerError
from miles_core.records import Episode, Status
from miles_core.testing.suites import batches

RNG = np.random.default_rng(0)


def batch_of(rewards, answers=None, siblings=(), **components):
    """One group; `siblings`: trajectories of each episode; `components`: name -> value of each episode."""
    answers = answers or [[2 + i] for i in range(len(rewards))]
    group = batches.group(0, answers, rewards, [5])
    episodes = []
    for i, episode in enumerate(group.episodes):
        told = {name: values[i] for name, values in components.items()}
        rows = [replace(episode.trajectories[0], id=f"{episode.id}/{n}") for n in range(dict(siblings).get(i, 1))]
        episodes.append(replace(episode, components=told, trajectories=tuple(rows)))
    return batches.batch_of([replace(group, episodes=tuple(episodes))])


def scored(batch, name, values):
    return batches.with_column(batch, name, np.array(values, np.float32), level=Level.TRAJECTORY)


def added(stage, batch):
    found = stage(batch, RNG)
    [(name, column)] = found.columns.items()
    assert name == stage.gives[0].name and column.dtype == np.float64
    return column.tolist(), found.metrics


# --- compose ---------------------------------------------------------------------------------------------------------


def test_weights_and_base():
    batch = scored(batch_of([1.0, 0.0, 1.0], tidy=[0.0, 1.0, 1.0]), "judge.reward", [0.5, 0.25, -1.0])
    stage = Compose("mix", c.ComposeConfig(weights={"tidy": 0.2, "judge.reward": 2.0}, base=0.5))
    assert stage.needs == {"reward", "judge.reward"}  # what an environment reports is there without asking
    values, metrics = added(stage, batch)
    assert values == pytest.approx([-0.5 + 0 + 1.0, 0 + 0.2 + 0.5, -0.5 + 0.2 - 2.0])
    assert metrics == {"tidy": (2.0, 3.0), "judge": (pytest.approx(-0.25), 3.0)}


def test_base_zero_leaves_the_components():
    values, _ = added(Compose("m", c.ComposeConfig(weights={"tidy": 3.0}, base=0.0)), batch_of([1.0, 4.0], tidy=[1, 2]))
    assert np.array([1.0, 4.0]) + values == pytest.approx([3.0, 6.0])


@pytest.mark.parametrize(("siblings", "want"), [("mean", 2.0), ("last", 4.0), ("min", 0.0), ("max", 4.0)])
def test_a_scorers_reward_of_several_trajectories(siblings, want):
    batch = scored(batch_of([1.0, 1.0], siblings=[(0, 3)]), "judge.reward", [2.0, 0.0, 4.0, 7.0])
    config = c.ComposeConfig(weights={"judge.reward": 1.0}, siblings=c.Siblings(siblings))
    assert added(Compose("m", config), batch)[0] == [want, 7.0]


def failed_in(batch_size):
    group = batches.group(0, [[2]] * batch_size, [1.0] * batch_size, [5])
    dead = Episode(id=group.episodes[0].id, member=0, trajectories=(), status=Status.FAILED, error="x")
    return batches.batch_of([replace(group, episodes=(dead, *group.episodes[1:]))])


@pytest.mark.parametrize(
    "stage",
    [
        Compose("m", c.ComposeConfig(weights={"judge.reward": 1.0}, base=0.5)),
        Rank("m", c.RankConfig(of="judge.reward")),
        Rank("m", c.RankConfig()),
        Duplicates("m", c.DuplicatesConfig()),
    ],
)
def test_a_failed_episode_gains_nothing_and_is_compared_with_nobody(stage):
    batch = scored(failed_in(3), "judge.reward", [1.0, 2.0])
    values, _ = added(stage, batch)
    assert values[0] == 0.0 and np.isfinite(values).all()
    if isinstance(stage, Rank):
        assert values[1:] == ([0.0, 1.0] if "judge.reward" in stage.needs else [0.5, 0.5])
    if isinstance(stage, Duplicates):
        assert values[1:] == [-0.5, -0.5]


def test_a_component_that_nobody_reports():
    stage = Compose("m", c.ComposeConfig(weights={"tydy": 1.0}))
    with pytest.raises(LearnerError, match="no episode reports the component 'tydy'; reported: tidy") as caught:
        stage(batch_of([1.0], tidy=[1.0]), RNG)
    assert "absent: zero" in caught.value.fix and "tydy.reward" in caught.value.fix
    sometimes = Compose("m", c.ComposeConfig(weights={"tydy": 1.0}, absent=c.Absent.zero))
    assert added(sometimes, batch_of([1.0], tidy=[1.0]))[0] == [0.0]
    assert stage(failed_in(1), RNG).columns["reward.m"].tolist() == [0.0]  # all failed: nobody could report


# --- rank and duplicates ---------------------------------------------------------------------------------------------


def test_ranks_by_hand():
    assert ranks(np.array([3.0, 1.0, 2.0])).tolist() == [1.0, 0.0, 0.5]
    assert ranks(np.array([1.0, 1.0, 5.0, 1.0])).tolist() == pytest.approx([1 / 3, 1 / 3, 1.0, 1 / 3])
    assert ranks(np.array([7.0])).tolist() == [0.5] and ranks(np.array([2.0, 2.0])).tolist() == [0.5, 0.5]


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), st.randoms())
def test_ranks_are_a_permutation_of_even_steps_and_follow_the_order(values, random):
    found = ranks(np.array(values))
    assert found.sum() == pytest.approx(len(values) / 2) and (found >= 0).all() and (found <= 1).all()
    shuffled = list(range(len(values)))
    random.shuffle(shuffled)
    assert ranks(np.array(values)[shuffled]).tolist() == found[shuffled].tolist()
    assert ranks(2 * np.array(values) + 1).tolist() == pytest.approx(found.tolist()) or len(set(values)) > 1


def test_rank_is_within_the_group_and_by_what_is_asked():
    one = batches.group(0, [[2], [3]], [1.0, 1.0], [5])
    two = batches.group(1, [[2], [3], [4]], [0.0, 1.0, 2.0], [5])
    batch = scored(collate("main", 0, [one, two], batches.CORE_COLUMNS), "judge.reward", [9.0, 8.0, 1.0, 2.0, 3.0])
    config = c.RankConfig(of="judge.reward", weight=2.0, base=0.0)
    values, _ = added(Rank("r", config), batch)
    assert (batch.columns["reward"] + values).tolist() == [2.0, 0.0, 0.0, 1.0, 2.0]


def test_duplicates_by_hand():
    """Answers a a b a: each a has two of three others like it."""
    values, metrics = added(
        Duplicates("d", c.DuplicatesConfig(weight=0.3)), batch_of([0.0] * 4, [[2, 3], [2, 3], [2], [2, 3]])
    )
    assert values == pytest.approx([-0.2, -0.2, 0.0, -0.2]) and metrics["share"] == (pytest.approx(2.0), 4.0)
    assert added(Duplicates("d", c.DuplicatesConfig()), batch_of([1.0]))[0] == [0.0]


def test_every_penalty_explains_itself():
    for provider in miles_stage():
        assert provider.field == "penalty" and "R =" in provider.explain and "Deviations" in provider.explain


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (c.ComposeConfig, {}, "nothing would be composed"),
        (c.FormatConfig, {}, "pattern is empty"),
        (c.FormatConfig, {"pattern": "("}, "no regular expression"),
        (c.GroupRewardConfig, {"function": "rewards"}, "must be module:function"),
        (c.GroupRewardConfig, {"function": ":f"}, "must be module:function"),
        (c.HttpRewardConfig, {}, "must be http://HOST"),
        (c.HttpRewardConfig, {"url": "ftp://x/"}, "must be http://HOST"),
        (c.HttpRewardConfig, {"url": "http://me:secret@x/"}, "use token_file"),
        (c.RewardModelConfig, {}, "source is empty"),
    ],
)
def test_options_that_mean_nothing_are_refused(kind, values, message):
    with pytest.raises(ValueError, match=message):
        kind(**values)
