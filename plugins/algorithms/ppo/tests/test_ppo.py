"""What the kit does not know: metrics, needs and requirements by option, the preset, and a whole step."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from miles_algo_ppo import plugin
from miles_algo_ppo.config import GaeConfig, ValueConfig

from miles_core.aggregation import with_weights
from miles_core.columns import CORE_COLUMNS
from miles_core.config.schema import Algorithm, AlgorithmKeys, Policy, RoleConfig, RoleUpdate, ScheduleConfig
from miles_core.contracts.learning import BoundTerm, Stage, Term, UpdateResult
from miles_core.errors import LearnerError
from miles_core.learner import Learner
from miles_core.numerics import objective
from miles_core.numerics.views import MicroView
from miles_core.records import Finish
from miles_core.testing.suites import batches
from miles_core.testing.suites.worked import StageExample

RNG = np.random.default_rng(0)


def gae(context=None, **options):
    provider = plugin.miles_stage()
    return provider.build(provider.config(**options), context)


def value(**options):
    provider = plugin.miles_term()
    return provider.build(provider.config(**options), None)


def context(coef):
    part = SimpleNamespace(options=SimpleNamespace(coef=coef))
    policy = SimpleNamespace(algorithm=SimpleNamespace(one=lambda field: part if coef is not None else None))
    return SimpleNamespace(run=SimpleNamespace(policies={"main": policy}), policy="main")


def test_needs_follow_the_options_and_the_run():
    assert isinstance(gae(), Stage) and [s.name for s in gae().gives] == ["advantages", "returns"]
    assert gae().needs == {"reward", "values"}
    assert gae(bootstrap_truncated=True).needs == {"reward", "values", "bootstrap_value", "truncated"}
    assert gae(context(0.1)).needs == {"reward", "values", "reward_kl"}
    assert gae(context(0.0)).needs == gae(context(None)).needs == {"reward", "values"}


def test_both_parts_ask_for_the_role():
    assert plugin.miles_stage().required(GaeConfig()) == plugin.miles_term().required(ValueConfig()) == {"role:critic"}


def test_explained_variance_and_means():
    example = StageExample(rewards=[[1, 3]], trainable=[[0, 1], [1]], columns={"values": [np.nan, 1.5, 2.5]}, expect={})
    metrics = gae()(example.batch(), RNG).metrics
    assert metrics["explained_variance"] == (pytest.approx(2 - 0.5), pytest.approx(2.0))  # G 1 and 3, errors ±½
    assert metrics["value"] == (4.0, 2.0) and metrics["return"] == (4.0, 2.0) and metrics["abs"] == (1.0, 2.0)


def test_the_value_loss_counts_rejected_tokens_and_its_clips():
    term = value()
    assert isinstance(term, Term) and term.mask == "trainable" and not term.weighted and term.level == "unit"
    batch = batches.batch_of([batches.group(0, [[2, 2, 2]], [0.0], [3])])
    columns = {
        "values": np.array([np.nan, 0.5, 0.5, 0.5]),
        "returns": np.array([np.nan, 1.0, 1.0, 0.0]),
        "rejected": np.array([False, True, False, False]),
    }
    batch = batch.with_columns(columns, [CORE_COLUMNS[name] for name in columns])
    bound = BoundTerm(name="value", term=term, coef=0.5, role="critic")
    ready = with_weights(batch, [bound.info], AlgorithmKeys(reject_denominator="kept"))
    given = torch.tensor([float("nan"), 0.5, 0.75, 1.5], dtype=torch.float64, requires_grad=True)
    view = MicroView(ready, lambda output: given)
    loss, sums = objective.evaluate(view.at, [bound], str)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (0.25 + 0.09 + 2.25) / 3, rel=1e-6)
    np.testing.assert_allclose(given.grad, [0, -0.5 / 3, 0, 0.5 * 3 / 3], rtol=1e-6)
    metrics = objective.finish(sums)
    assert metrics["value/clipped"] == (1.0, 3.0) and metrics["value/abs_error"] == (pytest.approx(2.25), 3.0)


def test_the_preset_is_the_documented_one():
    tree = plugin.miles_algorithm().build(None, None)
    assert tree["advantage"] == {"use": "gae", "gamma": 1.0, "lam": 1.0} and tree["whiten"] == {"use": "whiten"}
    assert tree["loss"] == {"use": "clip", "lo": 0.2, "hi": 0.2} and tree["aggregation"] == "token_mean"
    assert tree["value"] == {"use": "value", "clip": 0.2, "coef": 0.5}
    assert {name: tree[name]["coef"] for name in ("kl", "entropy", "reward_kl")} == dict.fromkeys(
        ("kl", "entropy", "reward_kl"), 0.0
    )
    AlgorithmKeys(episodes=tree["episodes"], aggregation=tree["aggregation"])


@pytest.mark.parametrize("provider", [plugin.miles_algorithm(), plugin.miles_stage(), plugin.miles_term()])
def test_explanations_give_formula_paper_and_deviations(provider):
    first, *rest = provider.explain.splitlines()
    assert any(sign in first for sign in "=·²") and "arXiv" in provider.explain and rest[-1].startswith("Deviations")


# --- a whole step ---------------------------------------------------------------------------------------------------


class Trainer:
    """Scores values 0, and V at the end 2; keeps what it was asked to update on."""

    def __init__(self):
        self.seen, self.asked = [], []

    async def score(self, batch, outputs):
        self.asked.append([o.column for o in outputs])
        return {o.column: np.full(batch.units, 2.0 * (o.name == "bootstrap_value"), np.float32) for o in outputs}

    async def update(self, minibatch):
        self.seen.append(minibatch)
        return UpdateResult(metrics={}, grad_norm=1.0)

    async def blend(self, policy, dst, src, decay):
        raise AssertionError


def learner(stage, from_step=0):
    term = value()
    roles = {
        "actor": RoleConfig(update=RoleUpdate.trained, from_step=from_step),
        "critic": RoleConfig(init="actor", update=RoleUpdate.trained, head="value"),
    }
    policy = Policy(
        name="main",
        share=1,
        model=None,
        renderer=None,
        envs={},
        algorithm=Algorithm(preset="ppo", keys=AlgorithmKeys(), parts={}),
        schedule=ScheduleConfig(group_size=1),
        roles=roles,
    )
    terms = [BoundTerm(name="value", coef=0.5, term=term, role="critic").info]
    policy_term = {"outputs": (), "needs": frozenset({"advantages"}), "weighted": True}
    terms.append(replace(terms[0], name="clip", coef=1.0, role="actor", **policy_term))
    trainer = Trainer()
    return Learner(policy, 0, {"advantage": [("gae", stage)]}, terms, trainer, CORE_COLUMNS), trainer


def cut_off(group):
    def edit(episode):
        return replace(episode, trajectories=tuple(replace(t, finish=Finish.LENGTH) for t in episode.trajectories))

    return replace(group, episodes=tuple(edit(e) for e in group.episodes))


def test_a_step_scores_values_once_and_bootstraps_what_was_cut_off():
    made, trainer = learner(gae(gamma=0.5, bootstrap_truncated=True))
    groups = [batches.group(0, [[2, 2]], [1.0], [3]), cut_off(batches.group(1, [[2, 2]], [1.0], [3]))]
    metrics = asyncio.run(made.step(0, groups))
    assert trainer.asked == [["critic.bootstrap_value", "critic.values"]] and len(trainer.seen) == 1
    np.testing.assert_allclose(trainer.seen[0].columns["returns"], [0, 0.5, 1, 0, 1, 2])
    assert metrics["train/gae/value"] == (0.0, 4.0) and made.changed


def test_the_policy_waits_while_the_critic_warms_up():
    made, trainer = learner(gae(), from_step=1)
    groups = [batches.group(0, [[2, 2]], [1.0], [3])]
    asyncio.run(made.step(0, groups))
    assert not made.changed  # engines keep what they serve
    asyncio.run(made.step(1, groups))
    assert made.changed
    waiting, later = (batch.columns for batch in trainer.seen)
    assert not waiting["weight.clip"].any() and later["weight.clip"].any()
    np.testing.assert_array_equal(waiting["weight.value"], later["weight.value"])


def test_an_episode_without_a_reward_is_refused_by_name():
    made, _ = learner(gae())
    with pytest.raises(LearnerError, match="'advantages' from the stage 'gae' is nan at token 1 of trajectory"):
        asyncio.run(made.step(0, [batches.group(0, [[2]], [None], [3])]))
