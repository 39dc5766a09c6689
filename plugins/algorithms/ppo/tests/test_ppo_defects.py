"""Defects that implementations of GAE and of value clipping have had: the shipped suites reject each."""

from dataclasses import replace

import numpy as np
import pytest
from miles_algo_ppo import conformance, plugin
from miles_algo_ppo.config import GaeConfig
from miles_algo_ppo.stage import Gae
from miles_algo_ppo.term import ClippedValue

from miles_core.contracts.learning import StageOutput, TermOutput
from miles_core.numerics import host
from miles_core.testing.suite import run_class


def faulty(suite, right, build):
    return type(suite.__name__, (suite,), {"provider": replace(right, build=build), "name": ""})


def gae(suite, advantages):
    """The stage with A from `advantages(config, batch, rewards)`; returns are A + V unless it gives them too."""

    class Faulty(Gae):
        def __call__(self, batch, rng):
            kl = batch.columns["reward_kl"] if self.reads_kl else None
            found = advantages(self.config, batch, host.token_rewards(batch, kl))
            a, g = found if isinstance(found, tuple) else (found, found + batch.columns["values"])
            live = batch.columns["trainable"]
            columns = {"advantages": np.where(live, a, 0), "returns": np.where(live, g, 0)}
            return StageOutput(columns={k: v.astype(np.float32) for k, v in columns.items()})

    reads = suite is conformance.WithRewardKlConformance
    return faulty(suite, plugin.miles_stage(), lambda config, context: Faulty(config=config, reads_kl=reads))


def right(config, batch, rewards, *, mask=None, values=None, row=None, lam=None, bootstrap=None):
    truncated = batch.columns.get("truncated")
    end = None
    if config.bootstrap_truncated:
        end = np.where(truncated, batch.columns["bootstrap_value"], 0.0)
    return host.gae(
        rewards,
        batch.columns["values"] if values is None else values,
        batch.columns["trainable"] if mask is None else mask,
        batch.trajectory_of_unit if row is None else row,
        gamma=config.gamma,
        lam=config.lam if lam is None else lam,
        bootstrap=end if bootstrap is None else bootstrap,
    )


def shifted(batch):
    """V at the token itself, not before it."""
    return np.append(batch.columns["values"][1:], 0.0)


def without_kl(config, batch, rewards):
    return right(config, batch, host.token_rewards(batch, None))


def at_the_first_sibling(config, batch, rewards):
    first = np.zeros(batch.n_trajectories, bool)
    first[np.unique(batch.episode_of, return_index=True)[1]] = True
    return right(config, batch, np.where(first[batch.trajectory_of_unit], rewards, 0.0))


PLAIN, DISCOUNTED = conformance.GaeConformance, conformance.DiscountedConformance
CUT = conformance.BootstrappedConformance
STAGES = {
    "decay over masked tokens": (DISCOUNTED, lambda c, b, r: right(c, b, r, mask=np.ones(b.units, bool))),
    "values off by one": (PLAIN, lambda c, b, r: right(c, b, r, values=shifted(b))),
    "γ where γλ belongs": (DISCOUNTED, lambda c, b, r: right(c, b, r, lam=1.0)),
    "returns without the value": (PLAIN, lambda c, b, r: (right(c, b, r)[0],) * 2),
    "returns are the rewards to come": (
        DISCOUNTED,
        lambda c, b, r: (
            right(c, b, r)[0],
            host.discounted_sums(r, b.columns["trainable"], b.trajectory_of_unit, c.gamma),
        ),
    ),
    "no end between trajectories": (PLAIN, lambda c, b, r: right(c, b, r, row=np.zeros(b.units, int))),
    "reward at one sibling": (PLAIN, at_the_first_sibling),
    "everything is bootstrapped": (CUT, lambda c, b, r: right(c, b, r, bootstrap=b.columns["bootstrap_value"])),
    "nothing is bootstrapped": (CUT, lambda c, b, r: right(c, b, r, bootstrap=np.zeros(b.n_trajectories))),
    "the bootstrap is not discounted": (
        CUT,
        lambda c, b, r: right(c, b, r, bootstrap=b.columns["bootstrap_value"] * b.columns["truncated"] / c.gamma),
    ),
    "the KL is forgotten": (conformance.WithRewardKlConformance, without_kl),
}


def value(formula):
    """The term with `formula(V, V_old, G, c)`."""

    class Faulty(ClippedValue):
        def __call__(self, view):
            m = view["trainable"]
            v, old, target = (
                x.masked_fill(~m, 0.0) for x in (view.out(self.outputs[0]), view["values"], view["returns"])
            )
            return TermOutput(value=formula(v, old, target, self.config.clip))

    suite = conformance.ClippedConformance
    return faulty(suite, plugin.miles_term(), lambda config, context: Faulty(config=config))


def clipped(v, old, target, c):
    return (old + (v - old).clamp(-c, c) - target).square()


TERMS = {
    "a factor of a half": lambda v, old, g, c: 0.5 * (v - g).square().maximum(clipped(v, old, g, c)),
    "the smaller of both": lambda v, old, g, c: (v - g).square().minimum(clipped(v, old, g, c)),
    "always clipped": clipped,
    "never clipped": lambda v, old, g, c: (v - g).square(),
    "clipped as a ratio": lambda v, old, g, c: (
        (v - g).square().maximum((old * (v / old).clamp(1 - c, 1 + c) - g).square())
    ),
    "clipped around the return": lambda v, old, g, c: (v - g).square().maximum((v - g).clamp(-c, c).square()),
    "an absolute error": lambda v, old, g, c: (v - g).abs().maximum(clipped(v, old, g, c).sqrt()),
}


@pytest.mark.parametrize("name", STAGES)
def test_a_broken_advantage_is_rejected(name):
    suite, call = STAGES[name]
    assert [r.label for r in run_class(gae(suite, call), only="test_examples")] == ["columns are those worked by hand"]


@pytest.mark.parametrize("suite", [PLAIN, DISCOUNTED, CUT, conformance.WithRewardKlConformance])
def test_the_wrapper_alone_changes_nothing(suite):
    made = gae(suite, lambda c, b, r: right(c, b, r))
    assert all(result.passed for result in run_class(made, only="test_examples"))
    assert GaeConfig().lam == GaeConfig().gamma == 1.0


@pytest.mark.parametrize("name", TERMS)
def test_a_broken_value_loss_is_rejected(name):
    label = run_class(value(TERMS[name]), only="test_examples")[0].label
    assert label in ("values are those worked by hand", "gradients are those worked by hand")


def test_the_right_value_loss_passes():
    made = value(lambda v, old, g, c: (v - g).square().maximum(clipped(v, old, g, c)))
    assert all(result.passed for result in run_class(made, only="test_examples"))
