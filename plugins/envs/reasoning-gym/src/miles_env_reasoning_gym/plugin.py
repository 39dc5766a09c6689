"""Provider of the environment `reasoning-gym`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core import hookimpl
from miles_core.provider import BuildContext, Provider
from miles_env_reasoning_gym.config import ReasoningGymConfig

if TYPE_CHECKING:
    from miles_env_reasoning_gym.environment import ReasoningGym


def _build(config: ReasoningGymConfig, context: BuildContext) -> ReasoningGym:
    from miles_env_reasoning_gym.environment import build

    return build(config, context)


@hookimpl
def miles_env() -> Provider[ReasoningGymConfig, ReasoningGym]:
    return Provider(
        name="reasoning-gym",
        config=ReasoningGymConfig,
        build=_build,
        summary="procedural data sets of reasoning-gym with their verifiers, mixtures and curricula",
    )
