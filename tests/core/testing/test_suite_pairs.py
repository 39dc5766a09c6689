"""The suite of losses on pairs: every assertion of its own sees the term that is broken for it."""

from dataclasses import replace

import numpy as np
import pytest

from miles_core.contracts.learning import LOGPROBS, TermOutput
from miles_core.testing import LossConformance, PairConformance
from miles_core.testing.suite import run_class
from miles_core.testing.toys.autodiff import value_of

from .mutants import broken_suite, must_fail, own_labels, plugin


class Pair:
    """(1 − h)², h = (π − π_ref)(chosen) − (π − π_ref)(rejected)."""

    level = "group"
    mask = "trainable"
    weighted = False
    aggregation = None
    outputs = (LOGPROBS,)
    needs = frozenset({"preference", "reference.logprobs"})

    def sign(self, view):
        return view["preference"].astype(np.float64)

    def h(self, view):
        return view.atom_sum(self.log_ratio(view), self.sign(view))

    def log_ratio(self, view):
        return (view.out(LOGPROBS) - value_of(view["reference.logprobs"])).masked_fill(~view["trainable"], 0.0)

    def __call__(self, view):
        h = self.h(view)
        return TermOutput(value=(1.0 - h) * (1.0 - h), metrics={"margin": value_of(h)})


class Inverted(Pair):
    def sign(self, view):
        return -view["preference"].astype(np.float64)


class ByPosition(Pair):
    """Takes the first answer as the chosen one."""

    def sign(self, view):
        episode = view.micro.episode_of_unit if hasattr(view, "micro") else view._view.micro.episode_of_unit
        return np.where(episode % 2 == 0, 1.0, -1.0)


class FirstCounts(Pair):
    """Of two answers that are chosen by their preference, the first weighs more."""

    def __call__(self, view):
        found = super().__call__(view)
        episode = view.micro.episode_of_unit if hasattr(view, "micro") else view._view.micro.episode_of_unit
        first = view.atom_sum((episode % 2 == 0) * value_of(view.out(LOGPROBS)))
        return replace(found, value=found.value + value_of(first))


class PerTrajectory(Pair):
    level = "trajectory"


def suite(kind):
    return broken_suite(PairConformance, plugin(lambda config, context: kind(), field="loss"))


TABLE = {
    "a pair is one atom: level is group": suite(PerTrajectory),
    "a chosen answer rises and a rejected one falls": suite(Inverted),
    "the column preference says which answer is chosen": suite(ByPosition),
    "the order of the answers changes nothing": suite(FirstCounts),
}


def test_every_label_has_a_mutant():
    assert own_labels(PairConformance) - own_labels(LossConformance) == set(TABLE)


@pytest.mark.parametrize("label", TABLE)
def test_a_broken_pair_is_seen(label):
    must_fail(label, TABLE[label])


def test_an_intact_pair_passes():
    assert not [r for r in run_class(suite(Pair)) if not r.passed]
