"""A correction may put π_b in place of π_p: what is scored then, what the ratio sees, and what mismatch means."""

import asyncio
import math

import numpy as np
import pytest
import torch

from miles_core.columns import CORE_COLUMNS, ColumnSpec
from miles_core.config.schema import Algorithm, AlgorithmKeys, Part, Policy, RoleConfig, RoleUpdate, ScheduleConfig
from miles_core.contracts.learning import LOGPROBS, BoundTerm, Output, StageOutput, TermOutput, UpdateResult
from miles_core.learner import Learner
from miles_core.numerics import objective
from miles_core.numerics.ratios import ratio
from miles_core.numerics.views import MicroView
from miles_core.testing.suites import batches

BEHAVIOUR, SCORED, CURRENT = -1.0, -1.5, -0.5  # what `batches.group` samples with; what the fake trainer says


class Bypass:
    needs, gives = frozenset({"behaviour_logprobs"}), (CORE_COLUMNS["proximal_logprobs"],)

    def __call__(self, batch, rng):
        return StageOutput(columns={"proximal_logprobs": batch.columns["behaviour_logprobs"]})


class Ones:
    """Advantage 1 everywhere; with `peek`, it also needs π_p, and remembers it."""

    gives = (CORE_COLUMNS["advantages"],)

    def __init__(self, peek=False):
        self.needs, self.seen = frozenset({"proximal_logprobs"} if peek else ()), None

    def __call__(self, batch, rng):
        self.seen = batch.columns.get("proximal_logprobs")
        return StageOutput(columns={"advantages": batch.columns["trainable"].astype(np.float32)})


class Ratio:
    """−ρA."""

    level, mask, weighted, aggregation, outputs = "unit", "kept", True, None, (LOGPROBS,)
    needs, scores = frozenset({"advantages"}), {}

    def __call__(self, view):
        return TermOutput(value=-ratio(view, view.out(LOGPROBS), view["proximal_logprobs"]) * view["advantages"])


BYPASS = (("bypass", Bypass()),)


class Trainer:
    """Scores −1.5 at first, and computes the objective with π = −0.5."""

    def __init__(self):
        self.scored, self.losses = [], []

    async def score(self, batch, outputs):
        self.scored.append(tuple(outputs))
        return {"proximal_logprobs": np.full(batch.units, SCORED, np.float32)}

    async def update(self, minibatch):
        view = MicroView(minibatch, lambda output: torch.full((minibatch.units,), CURRENT, requires_grad=True))
        loss, sums = objective.evaluate(view.at, [BoundTerm(name="ratio", term=Ratio(), coef=1.0)], str)
        self.losses.append(loss.item())
        return UpdateResult(metrics=objective.finish(sums), grad_norm=1.0)


def step(advantage, corrections=BYPASS, **schedule):
    part = Part(kind="model", name="m", use="m", options=None)
    policy = Policy(
        name="main",
        share=1,
        model=part,
        renderer=part,
        envs={},
        algorithm=Algorithm(preset="", keys=AlgorithmKeys(), parts={}),
        schedule=ScheduleConfig(**schedule),
        roles={"actor": RoleConfig(update=RoleUpdate.trained)},
    )
    info = BoundTerm(name="ratio", term=Ratio(), coef=1.0).info
    stages = {"advantage": [("ones", advantage)], "corrections": list(corrections)}
    specs = dict(CORE_COLUMNS) | {"weight.ratio": ColumnSpec(name="weight.ratio", level="unit", dtype="float32")}
    trainer = Trainer()
    made = Learner(policy, 7, stages, [info], trainer, specs)
    metrics = asyncio.run(made.step(0, batches.groups(sizes=(2, 2))))
    return trainer, metrics


def mean(pair):
    return pair[0] / pair[1]


def test_without_a_pass_the_ratio_takes_the_engines_numbers_and_mismatch_is_the_trainers():
    """π_b = −1, π = −0.5: ρ = e^.5 with no score pass at all. 1.0 is the classic bug."""
    trainer, metrics = step(Ones())
    assert trainer.scored == [] and trainer.losses == [pytest.approx(-math.exp(0.5))]
    assert mean(metrics["train/mismatch/abs"]) == pytest.approx(0.5)  # |π − π_b| of this forward, not |π_b − π_b|


def test_with_several_updates_the_pass_is_for_the_mismatch_of_the_step():
    trainer, metrics = step(Ones(), updates_per_step=2)
    assert trainer.scored == [(Output(name="logprobs"),)]
    assert trainer.losses == [pytest.approx(-math.exp(CURRENT - BEHAVIOUR))] * 2
    assert metrics["train/mismatch/max_abs"] == (0.5, 1.0)  # |π_p − π_b|, whatever the updates saw
    assert mean(metrics["train/mismatch/k3"]) == pytest.approx(math.exp(-0.5) - 1 + 0.5)


def test_what_comes_before_still_sees_the_trainers_score():
    advantage = Ones(peek=True)
    trainer, _ = step(advantage)
    assert trainer.scored == [(Output(name="logprobs"),)] and set(advantage.seen.tolist()) == {SCORED}
    assert trainer.losses == [pytest.approx(-math.exp(CURRENT - BEHAVIOUR))]


def test_without_a_bypass_the_ratio_is_that_of_the_trainer():
    trainer, _ = step(Ones(peek=True), corrections=())
    assert trainer.losses == [pytest.approx(-math.exp(CURRENT - SCORED))]
    assert step(Ones(), corrections=())[0].losses == [-1.0]
