"""Provider of the environment `arithmetic`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core import hookimpl
from miles_core.provider import BuildContext, Provider
from miles_env_arithmetic.config import ArithmeticConfig

if TYPE_CHECKING:
    from miles_env_arithmetic.environment import Arithmetic


def _build(config: ArithmeticConfig, context: BuildContext) -> Arithmetic:
    from miles_env_arithmetic.environment import Arithmetic

    return Arithmetic(config, name=context.name, seed=context.seed, policy=context.policy)


@hookimpl
def miles_env() -> Provider[ArithmeticConfig, Arithmetic]:
    return Provider(
        name="arithmetic",
        config=ArithmeticConfig,
        build=_build,
        summary="small procedural tasks with exact verifiers",
    )
