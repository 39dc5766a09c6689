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
    return Provider(
        name="sft",
        config=SftPreset,
        build=_preset,
        summary="maximum likelihood of demonstrations",
        explain="loss = Σ −π / Σ 1 over the demonstration tokens of an update (of a chat: the assistant's turns)\n"
        "Paper: textbook maximum likelihood; in this use Ouyang et al., arXiv 2203.02155, step 1\nDeviations: none.",
    )


@hookimpl
def miles_term() -> Provider:
    return Provider(
        name="sft",
        config=SftConfig,
        build=_term,
        field="loss",
        summary="−π",
        explain="−π per demonstration token; every document is an episode of its own, however rows are packed\n"
        "Paper: textbook maximum likelihood; in this use Ouyang et al., arXiv 2203.02155, step 1\nDeviations: none.",
    )
