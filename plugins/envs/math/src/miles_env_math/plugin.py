"""Provider of the environment `math`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core import hookimpl
from miles_core.provider import BuildContext, Provider
from miles_env_math.config import MathConfig

if TYPE_CHECKING:
    from miles_env_math.environment import MathEnvironment


def _build(config: MathConfig, context: BuildContext) -> MathEnvironment:
    from miles_env_math.environment import build

    return build(config, context)


@hookimpl
def miles_env() -> Provider[MathConfig, MathEnvironment]:
    return Provider(
        name="math",
        config=MathConfig,
        build=_build,
        summary="mathematics problems from a file, answers checked by math-verify",
    )
