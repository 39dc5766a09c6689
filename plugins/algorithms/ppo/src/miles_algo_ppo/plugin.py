"""What this distribution offers: the preset `ppo`, its stage `gae` and its term `value`."""

from __future__ import annotations

from typing import Any

from miles_algo_ppo import preset
from miles_algo_ppo.config import GaeConfig, PpoPreset, ValueConfig
from miles_core import hookimpl
from miles_core.provider import BuildContext, Provider

CRITIC = frozenset({"role:critic"})


def _gae(config: GaeConfig, context: BuildContext | None) -> Any:
    from miles_algo_ppo.stage import Gae

    return Gae(config=config, reads_kl=_reward_kl(context))


def _reward_kl(context: BuildContext | None) -> bool:
    """Whether the run takes a KL from the reward: the stage `reward_kl` is then built and writes its column."""
    policy = None if context is None else context.run.policies.get(context.policy)
    part = None if policy is None else policy.algorithm.one("reward_kl")
    return part is not None and getattr(part.options, "coef", 1.0) != 0


def _value(config: ValueConfig, context: BuildContext | None) -> Any:
    from miles_algo_ppo.term import ClippedValue

    return ClippedValue(config=config)


@hookimpl
def miles_algorithm() -> Provider[PpoPreset, dict[str, Any]]:
    return Provider(
        name="ppo",
        config=PpoPreset,
        build=lambda config, context: preset.tree(),
        summary="GAE with a critic, whitening, clip, clipped value loss",
        explain=preset.EXPLAIN,
    )


@hookimpl
def miles_stage() -> Provider[GaeConfig, Any]:
    return Provider(
        name="gae",
        config=GaeConfig,
        build=_gae,
        requires=CRITIC,
        field="advantage",
        summary="generalised advantage estimation from the critic's values",
        explain=(
            "A_t = δ_t + γλ·A_t', δ_t = r_t + γ·V_t' − V_t, t' the next trainable token; G = A + V\n"
            "r_t = −reward_kl (coef · kl_t), plus R at the last trainable token of each sibling; masked: skipped\n"
            "Paper: Schulman et al., arXiv 1506.02438\n"
            "Deviations: none; V beyond the last token is 0, or V at it where the answer was cut (bootstrap_truncated)."
        ),
    )


@hookimpl
def miles_term() -> Provider[ValueConfig, Any]:
    return Provider(
        name="value",
        config=ValueConfig,
        build=_value,
        requires=CRITIC,
        field="value",
        summary="clipped squared error of the critic",
        explain=(
            "max((V − G)², (V_old + clamp(V − V_old, ±clip) − G)²) per trainable token, G and V_old detached\n"
            "Paper: Schulman et al., arXiv 1707.06347 (its reference code)\n"
            "Deviations: no factor ½ (coef .5 is the usual one); rejected tokens are kept."
        ),
    )
