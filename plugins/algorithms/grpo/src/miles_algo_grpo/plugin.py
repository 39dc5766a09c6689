"""What this distribution offers: presets of group-relative policy gradients, their stages, filter and terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles_algo_grpo import config as c
from miles_algo_grpo import explain
from miles_algo_grpo.presets import cispo, dapo, dr_grpo, grpo, gspo, reinforce_pp, reinforce_pp_baseline, rloo
from miles_core import hookimpl
from miles_core.provider import BuildContext, Provider

SIBLINGS = ("siblings",)  # compares the episodes of a group: nothing to learn from a group of one
REFERENCE = ("role:reference",)


@hookimpl
def miles_algorithm() -> list[Provider]:
    def preset(name: str, module: Any, config: type, summary: str) -> Provider:
        def build(options: Any, context: Any) -> dict[str, Any]:
            tree: dict[str, Any] = module.tree()
            return tree

        return Provider(name=name, config=config, build=build, summary=summary, explain=module.EXPLAIN)

    return [
        preset("grpo", grpo, grpo.GrpoPreset, "group advantage with std, clip, mean over answers"),
        preset("dr_grpo", dr_grpo, dr_grpo.DrGrpoPreset, "centred group advantage, clip, constant length"),
        preset("rloo", rloo, rloo.RlooPreset, "leave-one-out baseline, REINFORCE, sums over answers"),
        preset("dapo", dapo, dapo.DapoPreset, "clip-higher, token mean, over-long penalty, dynamic sampling"),
        preset("gspo", gspo, gspo.GspoPreset, "group advantage with std, sequence ratio, mean over answers"),
        preset("cispo", cispo, cispo.CispoPreset, "group advantage with std, bounded detached weight, token mean"),
        preset("reinforce_pp", reinforce_pp, reinforce_pp.ReinforcePpPreset, "returns whitened over the step, clip"),
        preset(
            "reinforce_pp_baseline",
            reinforce_pp_baseline,
            reinforce_pp_baseline.ReinforcePpBaselinePreset,
            "centred in the group, whitened over the step, clip",
        ),
    ]


# --- stages ---------------------------------------------------------------------------------------------------------


def _reads_reward_kl(context: BuildContext) -> bool:
    """Whether the policy takes KL off the reward: whether the column `reward_kl` will be there."""
    policy = context.run.policies.get(context.policy)
    part = None if policy is None else policy.algorithm.one("reward_kl")
    return part is not None and getattr(part.options, "coef", 1.0) != 0


def _stage(name: str) -> Callable[[Any, BuildContext], Any]:
    """Builds the stage that is made from its options alone."""

    def build(config: Any, context: BuildContext) -> Any:
        from miles_algo_grpo import stages

        return getattr(stages, name)(config)

    return build


def _leave_one_out(config: c.LeaveOneOutConfig, context: BuildContext) -> Any:
    from miles_algo_grpo.stages import leave_one_out

    return leave_one_out()


def _centred(config: c.CentredConfig, context: BuildContext) -> Any:
    from miles_algo_grpo.stages import centred

    return centred(_reads_reward_kl(context))


def _returns(config: c.ReturnsConfig, context: BuildContext) -> Any:
    from miles_algo_grpo.stages import returns

    return returns(config, _reads_reward_kl(context))


def _overlong(config: c.OverlongConfig, context: BuildContext) -> Any:
    from miles_algo_grpo.stages import Overlong
    from miles_core.errors import CombinationError

    engine = next(iter(context.run.engines.values()), None)
    longest = config.max_length or (engine.core.max_new_tokens if engine is not None else None)
    if longest is None:
        raise CombinationError(
            f"the penalty {context.name!r} (overlong) has no max_length, and there is no rollout whose max_new_tokens "
            "could be it",
            fix=f"add algorithm.penalties.{context.name}.max_length",
        )
    buffer = longest / 5 if config.buffer is None else config.buffer
    if buffer > longest:
        raise CombinationError(
            f"the penalty {context.name!r} (overlong) has a buffer of {buffer:g} tokens, and answers end at {longest}",
            fix=f"give algorithm.penalties.{context.name}.buffer at most {longest}",
        )
    return Overlong(max_length=longest, buffer=buffer, penalty=config.penalty)


@hookimpl
def miles_stage() -> list[Provider]:
    def stage(name: str, config: type, build: Any, field: str, summary: str, requires: Any = ()) -> Provider:
        return Provider(
            name=name,
            config=config,
            build=build,
            field=field,
            summary=summary,
            requires=requires,
            explain=explain.STAGES[name],
        )

    return [
        stage(
            "group",
            c.GroupConfig,
            _stage("group"),
            "advantage",
            "(R − mean of the group) / (std of the group + eps)",
            SIBLINGS,
        ),
        stage(
            "leave_one_out",
            c.LeaveOneOutConfig,
            _leave_one_out,
            "advantage",
            "R − mean of the others in the group",
            SIBLINGS,
        ),
        stage("batch", c.BatchConfig, _stage("batch"), "advantage", "(R − mean) / (std + eps) over the step"),
        stage(
            "centred",
            c.CentredConfig,
            _centred,
            "advantage",
            "(R − mean of the group) − reward_kl.coef·kl_t",
            SIBLINGS,
        ),
        stage("returns", c.ReturnsConfig, _returns, "advantage", "per-token rewards summed to the right"),
        stage("whiten", c.WhitenConfig, _stage("Whiten"), "whiten", "(A − mean) / √(var + 1e-8) over the step"),
        stage(
            "reward_kl",
            c.RewardKlConfig,
            _stage("RewardKl"),
            "reward_kl",
            "KL to the role `reference`, taken off the reward",
            REFERENCE,
        ),
        stage("overlong", c.OverlongConfig, _overlong, "penalty", "a slope before the longest answer (DAPO)"),
    ]


@hookimpl
def miles_filter() -> Provider:
    def build(config: c.DynamicSamplingConfig, context: BuildContext) -> Any:
        from miles_algo_grpo.filters import dynamic_sampling

        return dynamic_sampling

    return Provider(
        name="dynamic_sampling",
        config=c.DynamicSamplingConfig,
        build=build,
        summary="keeps a group unless its rewards are all equal",
        requires=SIBLINGS,  # a group of one is all equal: none would ever be kept
        explain=explain.FILTERS["dynamic_sampling"],
    )


# --- terms ----------------------------------------------------------------------------------------------------------


def _clip(config: c.ClipConfig, context: BuildContext) -> Any:
    from miles_algo_grpo.terms import clip_term

    return clip_term(config)


def _clip_requires(config: c.ClipConfig) -> tuple[str, ...]:
    # A ratio of whole answers under a mean over tokens weighs long answers more: that must be said, not defaulted.
    return ("aggregation",) if config.level is c.Level.sequence else ()


def _cispo(config: c.CispoConfig, context: BuildContext) -> Any:
    from miles_algo_grpo.terms import cispo_term

    return cispo_term(config)


def _reinforce(config: c.ReinforceConfig, context: BuildContext) -> Any:
    from miles_algo_grpo.terms import reinforce_term

    return reinforce_term()


def _kl(config: c.KlConfig, context: BuildContext | None) -> Any:
    from miles_algo_grpo.terms import kl_term

    # Of itself core scores π_p for several updates only where a policy term is weighted.
    policy = None if context is None else context.run.policies.get(context.policy)
    return kl_term(config, several=policy is not None and policy.schedule.updates_per_step > 1)


def _entropy(config: c.EntropyConfig, context: BuildContext) -> Any:
    from miles_algo_grpo.terms import entropy_term

    return entropy_term()


@hookimpl
def miles_term() -> list[Provider]:
    def term(name: str, config: type, build: Any, field: str, summary: str, requires: Any = ()) -> Provider:
        return Provider(
            name=name,
            config=config,
            build=build,
            field=field,
            summary=summary,
            requires=requires,
            explain=explain.TERMS[name],
        )

    return [
        term("clip", c.ClipConfig, _clip, "loss", "PPO's clipped ratio, of tokens or of answers", _clip_requires),
        term("cispo", c.CispoConfig, _cispo, "loss", "−sg(clip(ρ))·A·π"),
        term("reinforce", c.ReinforceConfig, _reinforce, "loss", "−A·π"),
        term("kl", c.KlConfig, _kl, "kl", "KL to the role `reference`, as a loss", REFERENCE),
        term("entropy", c.EntropyConfig, _entropy, "entropy", "−H"),
    ]
