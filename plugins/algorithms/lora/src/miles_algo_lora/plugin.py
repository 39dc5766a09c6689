"""Entry point of `miles.extension.v1`: describes the extension; what trains imports torch inside `_build`."""

from __future__ import annotations

from typing import Any

from miles_algo_lora.config import Export, LoraConfig
from miles_core import hookimpl
from miles_core.provider import BuildContext, Place, Provider


def _build(config: LoraConfig, context: BuildContext) -> Any:
    if context.place == Place.TRAINER:
        from miles_algo_lora.trainer import LoraTrainer

        return LoraTrainer(config, context)
    from miles_algo_lora.draft import LoraDraft

    return LoraDraft(config, context)


def _requires(config: LoraConfig) -> tuple[str, ...]:
    return ("lora",) if config.export is Export.adapter else ()


def _offers(config: LoraConfig) -> tuple[str, ...]:
    return ("dropout",) if config.dropout > 0 else ()


@hookimpl
def miles_extension() -> Provider[LoraConfig, Any]:
    return Provider(
        name="lora",
        config=LoraConfig,
        build=_build,
        requires=_requires,
        offers=_offers,
        summary="low-rank adapters over a frozen base, which the reference shares",
    )
