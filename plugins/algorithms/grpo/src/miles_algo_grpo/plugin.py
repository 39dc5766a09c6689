"""What this distribution offers: presets `grpo`, `dr_grpo`, `rloo`, their stages and their terms."""

from __future__ import annotations

from typing import Any

from miles_algo_grpo import config as c
from miles_algo_grpo.presets import dr_grpo, grpo, rloo
from miles_core import hookimpl
from miles_core.provider import BuildContext, Provider


def _group(config: c.GroupConfig, context: BuildContext) -> Any:
    from miles_algo_grpo.stages import group

    return group(config)


def _leave_one_out(config: c.LeaveOneOutConfig, context: BuildContext) -> Any:
    from miles_algo_grpo.stages import leave_one_out

    return leave_one_out()


def _clip(config: c.ClipConfig, context: BuildContext) -> Any:
    from miles_algo_grpo.terms import clip_term

    return clip_term(config)


def _reinforce(config: c.ReinforceConfig, context: BuildContext) -> Any:
    from miles_algo_grpo.terms import reinforce_term

    return reinforce_term()


def _kl(config: c.KlConfig, context: BuildContext) -> Any:
    from miles_algo_grpo.terms import kl_term

    return kl_term(config)


def _entropy(config: c.EntropyConfig, context: BuildContext) -> Any:
    from miles_algo_grpo.terms import entropy_term

    return entropy_term()


@hookimpl
def miles_algorithm() -> list[Provider]:
    def preset(name: str, config: type, tree: Any, summary: str) -> Provider:
        return Provider(name=name, config=config, build=lambda options, context: tree(), summary=summary)

    return [
        preset("grpo", grpo.GrpoPreset, grpo.tree, "group advantage with std, clip, mean over answers"),
        preset("dr_grpo", dr_grpo.DrGrpoPreset, dr_grpo.tree, "centred group advantage, clip, constant length"),
        preset("rloo", rloo.RlooPreset, rloo.tree, "leave-one-out baseline, REINFORCE, sums over answers"),
    ]


@hookimpl
def miles_stage() -> list[Provider]:
    return [
        Provider(
            name="group",
            config=c.GroupConfig,
            build=_group,
            field="advantage",
            summary="(R − mean of the group) / (std of the group + eps)",
        ),
        Provider(
            name="leave_one_out",
            config=c.LeaveOneOutConfig,
            build=_leave_one_out,
            field="advantage",
            summary="R − mean of the others in the group",
        ),
    ]


@hookimpl
def miles_term() -> list[Provider]:
    return [
        Provider(name="clip", config=c.ClipConfig, build=_clip, field="loss", summary="PPO's clipped ratio"),
        Provider(name="reinforce", config=c.ReinforceConfig, build=_reinforce, field="loss", summary="−A·π"),
        Provider(name="kl", config=c.KlConfig, build=_kl, field="kl", summary="KL to the role `reference`, as a loss"),
        Provider(name="entropy", config=c.EntropyConfig, build=_entropy, field="entropy", summary="−H"),
    ]
