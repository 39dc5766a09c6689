"""Providers of the model resolvers `.gguf` (a file) and `gguf:` (a file inside an installed package)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core import hookimpl
from miles_core.provider import BuildContext, Provider
from miles_model_gguf.config import GgufConfig

if TYPE_CHECKING:
    from miles_model_gguf.resolver import GgufResolver


def _build(config: GgufConfig, context: BuildContext) -> GgufResolver:
    from miles_model_gguf.resolver import GgufResolver

    return GgufResolver()


@hookimpl
def miles_model() -> list[Provider[GgufConfig, GgufResolver]]:
    return [
        Provider(name=".gguf", config=GgufConfig, build=_build, summary="a GGUF file, converted once"),
        Provider(
            name="gguf:",
            config=GgufConfig,
            build=_build,
            summary="a GGUF file inside an installed package, converted once",
        ),
    ]
