"""The environment and scorer suites: pass on toys, and every assertion sees what is broken for it."""

from dataclasses import replace

import numpy as np
import pytest

from miles_core.errors import CapabilityError
from miles_core.records import Score
from miles_core.testing import EnvironmentConformance, ScorerConformance
from miles_core.testing.toys.config import EnvConfig
from miles_core.testing.toys.envs import EchoEnvironment, EchoTasks
from miles_core.testing.toys.scorer import UniformScorer

from .mutants import broken_suite, must_fail, own_labels, plugin


def env(**methods):
    kind = type("Broken", (EchoEnvironment,), methods)
    return broken_suite(EnvironmentConformance, plugin(lambda config, context: kind(context.name, EnvConfig())))


def tasks(edit):
    """An environment whose tasks go through `edit(task, position)`."""

    class Edited(EchoTasks):
        def task(self, position):
            return edit(super().task(position), position)

    def source(self, split):
        made = EchoEnvironment.tasks(self, split)
        return Edited(made._name, made._split, made._items, made._seed)

    return env(tasks=source)


def scores(edit):
    async def score(self, task, context):
        return edit(await EchoEnvironment.score(self, task, context))

    return env(score=score)


def lazy_split(self, split):
    return EchoEnvironment.tasks(self, split if split in self.task_splits else "train")


def empty_eval(self, split):
    made = EchoEnvironment.tasks(self, split)
    if split == "eval":
        made._items, made.size = [], 0
    return made


def same_split(self, split):
    EchoEnvironment.tasks(self, split)
    made = EchoEnvironment.tasks(self, "train")
    made._split = split
    return made


def negative_size(self, split):
    made = EchoEnvironment.tasks(self, split)
    made.size = -1 if split == "eval" else made.size
    return made


class Counting(EchoTasks):
    """A task depends on how many were asked for before."""

    asked = 0

    def task(self, position):
        self.asked += 1
        return super().task(position + self.asked // 3)


class Repeating(EchoTasks):
    def task(self, position):
        return super().task(position - position % 2)


class Ending(EchoTasks):
    def task(self, position):
        return super().task(position if position < self.size else position + self.size // 2 + position % 7)


class Epochs(EchoTasks):
    def task(self, position):
        found = super().task(position)
        return replace(found, prompt=found.prompt + "?" * (position // self.size))


def source(kind):
    def made(self, split):
        plain = EchoEnvironment.tasks(self, split)
        return kind(plain._name, plain._split, plain._items, plain._seed)

    return env(tasks=made)


async def fickle(self, task, context):
    self.turn = getattr(self, "turn", 0) + 1
    return Score(reward=self.turn * 0.01 + (1.0 if context.text == task.answer else 0.0))


async def pays_everybody(self, task, context):
    return Score(reward=1.0)


ENVS = {
    "there is a split named train": env(task_splits=("eval",)),
    "an unknown split is refused": env(tasks=lazy_split),
    "a split has tasks": env(tasks=empty_eval),
    "a task is a Task": tasks(lambda t, p: type("Thing", (), {n: getattr(t, n) for n in t.__slots__})()),
    "ids are <env>:<split>:<index>": tasks(lambda t, p: replace(t, id=t.id.replace(":", "/"))),
    "splits share no id": tasks(lambda t, p: replace(t, id=SameId(t.id))),
    "splits share no task": env(tasks=same_split),
    "a prompt is a string or messages": tasks(lambda t, p: replace(t, prompt=["3>"])),
    "demonstrations are strings or messages": tasks(lambda t, p: replace(t, demonstrations=["3"])),
    "metadata is JSON": tasks(lambda t, p: replace(t, metadata={"item": np.int64(3)})),
    "size is None or above 0": env(tasks=negative_size),
    "a position gives the same task, whatever was asked before": source(Counting),
    "an epoch hands out every item once": source(Repeating),
    "positions beyond the size wrap round": source(Ending),
    "one id is one task": source(Epochs),
    "a score is a Score": scores(lambda s: s.reward),
    "a reward is a number or None": scores(lambda s: replace(s, reward=str(s.reward))),
    "a reward is finite": scores(lambda s: replace(s, reward=float("nan"))),
    "components are finite numbers": scores(lambda s: replace(s, components={"first": None})),
    "info is text": scores(lambda s: replace(s, info={"answer": 3})),
    "the same answer scores the same": env(score=fickle),
    "the right answer earns more than a wrong one": env(score=pays_everybody),
}


class SameId(str):
    """An id of either split."""

    def __new__(cls, text):
        return super().__new__(cls, text.replace(":eval:", ":train:"))

    def startswith(self, prefix):
        return True


def scorer(**methods):
    kind = type("Broken", (UniformScorer,), methods)
    return broken_suite(ScorerConformance, plugin(lambda config, context: kind(15)))


def scored(edit):
    async def score(self, trajectories, want):
        return edit(dict(await UniformScorer.score(self, trajectories, want)), trajectories)

    return scorer(score=score)


async def knows_everything(self, trajectories, want):
    known = [w for w in want if w.endswith(".logprobs")]
    found = await UniformScorer.score(self, trajectories, known)
    return {w: found.get(w, []) for w in want}


async def needs_one(self, trajectories, want):
    found = await UniformScorer.score(self, trajectories, want)
    return found if trajectories else {}


def by_position(found, trajectories):
    return {k: [v - 0.01 * i for i, v in enumerate(values)] for k, values in found.items()}


def writes_back(found, trajectories):
    for trajectory in trajectories:
        trajectory.columns["behaviour_logprobs"][...] = 0
    return found


SCORERS = {
    "every wanted column comes back, and no other": scored(lambda f, t: {**f, "more": next(iter(f.values()))}),
    "a column has one entry per trajectory": scored(lambda f, t: {k: v[:1] for k, v in f.items()}),
    "unit columns have one row per unit": scored(lambda f, t: {k: [x[1:] for x in v] for k, v in f.items()}),
    "scores are finite": scored(lambda f, t: {k: [x / 0.0 for x in v] for k, v in f.items()}),
    "scores do not depend on the order of trajectories": scored(by_position),
    "a scorer changes nothing that it is given": scored(writes_back),
    "no trajectories give empty columns": scorer(score=needs_one),
    "a column that it does not have is refused with CapabilityError": scorer(score=knows_everything),
}


def test_every_label_has_a_mutant():
    assert own_labels(EnvironmentConformance) == set(ENVS)
    assert own_labels(ScorerConformance) == set(SCORERS)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("label", [*ENVS, *SCORERS])
def test_a_broken_one_is_seen(label):
    must_fail(label, {**ENVS, **SCORERS}[label])


class TestToy(EnvironmentConformance):
    name = "toy"


class TestToyMultiTurn(EnvironmentConformance):
    name = "toy-multiturn"


class TestToyScorer(ScorerConformance):
    name = "toy"


def test_the_scorer_has_lengths_too():
    class Lengths(ScorerConformance):
        name = "toy"
        want = ("toy.length",)
        per_unit = ()

    Lengths().test_scores()


def test_a_broken_scorer_uses_the_documented_error():
    assert issubclass(CapabilityError, Exception)
