"""Stages, a term, a filter and a preset."""

import numpy as np

from acme_miles_first.config import Nothing, Scaled
from miles_core import hookimpl
from miles_core.columns import CORE_COLUMNS, ColumnSpec, Level
from miles_core.contracts.learning import LOGPROBS, StageOutput, TermOutput
from miles_core.provider import Provider


class Centred:
    needs = frozenset({"reward"})
    gives = (CORE_COLUMNS["advantages"],)

    def __init__(self, config):
        self.scale = config.scale

    def __call__(self, batch, rng):
        reward = batch.columns["reward"]
        known = ~np.isnan(reward)
        count = np.bincount(batch.group_of[known], minlength=batch.n_groups)
        total = np.bincount(batch.group_of[known], weights=reward[known], minlength=batch.n_groups)
        mean = total / np.maximum(count, 1)
        centred = np.where(known, np.where(known, reward, 0.0) - mean[batch.group_of], 0.0)
        centred = np.where(np.abs(centred) > 1e-6 * np.maximum(1.0, np.abs(mean[batch.group_of])), centred, 0.0)
        column = np.where(batch.columns["trainable"], self.scale * centred[batch.episode_of_unit], 0.0)
        return StageOutput(
            columns={"advantages": column.astype(np.float32)},
            metrics={"size": (float(np.abs(centred).sum()), float(len(centred)))},
        )


class Length:
    needs = frozenset({"trainable"})
    gives = (ColumnSpec(name="reward.first", level=Level.EPISODE, dtype="float64"),)

    def __init__(self, config):
        self.scale = config.scale

    def __call__(self, batch, rng):
        tokens = np.bincount(batch.episode_of_unit, weights=batch.columns["trainable"], minlength=batch.n_episodes)
        return StageOutput(columns={"reward.first": -0.001 * self.scale * tokens})


class Reinforce:
    level = "unit"
    mask = "kept"
    weighted = True
    aggregation = None
    outputs = (LOGPROBS,)
    needs = frozenset({"advantages"})

    def __call__(self, view):
        return TermOutput(value=-view["advantages"] * view.out(LOGPROBS))


def mixed(group):
    rewards = [e.reward for e in group.episodes if e.reward is not None]
    return None if rewards and max(rewards) - min(rewards) > 1e-9 else "all rewards are equal"


@hookimpl
def miles_stage():
    return [
        Provider(
            name="first",
            config=Scaled,
            build=lambda config, context: Centred(config),
            field="advantage",
            requires=("siblings",),
            summary="reward minus the mean of the group",
        ),
        Provider(
            name="first-penalty",
            config=Scaled,
            build=lambda config, context: Length(config),
            field="penalty",
            summary="a little off for every token",
        ),
    ]


@hookimpl
def miles_term():
    return Provider(
        name="first", config=Nothing, build=lambda config, context: Reinforce(), field="loss", summary="REINFORCE"
    )


@hookimpl
def miles_filter():
    return Provider(name="first", config=Nothing, build=lambda config, context: mixed, summary="groups that differ")


@hookimpl
def miles_algorithm():
    def tree(config, context):
        return {
            "penalties": {"first-penalty": {"scale": 1.0}},
            "advantage": {"use": "first"},
            "loss": {"use": "first"},
            "filters": {"first": {}},
            "aggregation": "token_mean",
        }

    return Provider(name="first", config=Nothing, build=tree, summary="all of these parts together")
