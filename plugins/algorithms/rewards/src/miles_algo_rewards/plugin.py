"""What this distribution offers: penalties `compose`, `rank`, `duplicates`; scorers `format`, `group-reward`,
`http-reward`, `reward-model`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_algo_rewards import config as c
from miles_core import hookimpl
from miles_core.provider import BuildContext, Provider


def _folders(context: BuildContext) -> list[Path]:
    """Where relative paths are looked up: beside the run file, then where the command was given."""
    folder = context.run.run.folder
    return [*([Path(folder)] if folder else []), Path.cwd()]


def _compose(config: c.ComposeConfig, context: BuildContext) -> Any:
    from miles_algo_rewards.stages import Compose

    return Compose(context.name, config)


def _rank(config: c.RankConfig, context: BuildContext) -> Any:
    from miles_algo_rewards.stages import Rank

    return Rank(context.name, config)


def _duplicates(config: c.DuplicatesConfig, context: BuildContext) -> Any:
    from miles_algo_rewards.stages import Duplicates

    return Duplicates(context.name, config)


def _rater(context: BuildContext, rate: Any, turns: c.Turns) -> Any:
    from miles_algo_rewards.items import Rater

    return Rater(context.name, rate, context.need("renderer"), turns)


def _format(config: c.FormatConfig, context: BuildContext) -> Any:
    from miles_algo_rewards.raters import Format

    return _rater(context, Format(config), config.turns)


def _group(config: c.GroupRewardConfig, context: BuildContext) -> Any:
    from miles_algo_rewards.raters import GroupFunction

    return _rater(context, GroupFunction(config, _folders(context)), config.turns)


def _http(config: c.HttpRewardConfig, context: BuildContext) -> Any:
    from miles_algo_rewards.http import HttpRater

    return _rater(context, HttpRater(context.name, config, context.seed), config.turns)


def _model(config: c.RewardModelConfig, context: BuildContext) -> Any:
    from miles_algo_rewards.model import ModelRater

    return _rater(context, ModelRater(config, _folders(context)), config.turns)


EXPLAIN = {
    "compose": """\
R = base · Episode.reward + Σ weight · component (Σ over `weights`), written as reward.<instance>
Deviations: Episode.reward itself, and what filters and evaluations see, stay as the environment gave them.""",
    "rank": """\
R = base · Episode.reward + weight · rank within the group / (n − 1), ties averaged; .5 in a group of one
Deviations: none; there is no paper.""",
    "duplicates": """\
R = Episode.reward − weight · share of the group's other episodes that sampled the very same tokens
Deviations: none; there is no paper.""",
}


@hookimpl
def miles_stage() -> list[Provider[Any, Any]]:
    def penalty(
        name: str, config: type, build: Any, summary: str, requires: tuple[str, ...] = ()
    ) -> Provider[Any, Any]:
        return Provider(
            name=name,
            config=config,
            build=build,
            field="penalty",
            summary=summary,
            requires=requires,
            explain=EXPLAIN[name],
        )

    return [
        penalty("compose", c.ComposeConfig, _compose, "weighted sum of components and scorers' rewards"),
        penalty("rank", c.RankConfig, _rank, "rank within the group", ("siblings",)),
        penalty("duplicates", c.DuplicatesConfig, _duplicates, "cost of saying what the others say", ("siblings",)),
    ]


@hookimpl
def miles_scorer() -> list[Provider[Any, Any]]:
    return [
        Provider(
            name="format", config=c.FormatConfig, build=_format, summary="whether the answer's text fits a pattern"
        ),
        Provider(
            name="group-reward",
            config=c.GroupRewardConfig,
            build=_group,
            summary="a Python function that sees all answers of a group",
        ),
        Provider(
            name="http-reward",
            config=c.HttpRewardConfig,
            build=_http,
            summary="a remote service rates answers over HTTP",
        ),
        Provider(
            name="reward-model",
            config=c.RewardModelConfig,
            build=_model,
            summary="a sequence classifier of transformers rates answers",
        ),
    ]
