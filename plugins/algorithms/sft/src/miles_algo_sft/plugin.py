"""What this distribution offers: the preset `sft` and its term."""

from __future__ import annotations

from typing import Any

from miles_algo_sft.config import SftConfig, SftPreset
from miles_core import hookimpl
from miles_core.provider import BuildContext, Provider


def _preset(config: SftPreset, context: BuildContext | None) -> dict[str, Any]:
    return {"episodes": "demonstrations", "aggregation": "token_mean", "loss": {"use": "sft"}}


def _term(config: SftConfig, context: BuildContext) -> Any:
    from miles_algo_sft.term import Sft

    return Sft()


@hookimpl
def miles_algorithm() -> Provider:
    return Provider(name="sft", config=SftPreset, build=_preset, summary="maximum likelihood of demonstrations")


@hookimpl
def miles_term() -> Provider:
    return Provider(name="sft", config=SftConfig, build=_term, field="loss", summary="−π")
