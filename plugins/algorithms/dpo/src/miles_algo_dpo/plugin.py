"""What this distribution offers: the preset `dpo` and its term."""

from __future__ import annotations

from typing import Any

from miles_algo_dpo.config import DpoConfig, DpoPreset
from miles_core import hookimpl
from miles_core.provider import BuildContext, Provider

EXPLAIN = """\
−log σ(βh) per pair, h = (π − π_ref)(chosen) − (π − π_ref)(rejected), sums over trainable tokens
ipo: (h − 1/(2β))²; conservative: −(1−ε)·log σ(βh) − ε·log σ(−βh); robust: (−(1−ε)·log σ(βh) + ε·log σ(−βh))/(1−2ε)
length_normalised: means instead of sums; reference_free: π_ref = 0
Paper: Rafailov et al., arXiv 2305.18290; ipo: Azar et al., arXiv 2310.12036; robust: Chowdhury et al., arXiv 2403.00409
Deviations: none; ipo takes means over tokens unless length_normalised: false."""


def _preset(config: DpoPreset, context: BuildContext | None) -> dict[str, Any]:
    return {"episodes": "demonstrations", "aggregation": "episode_mean", "loss": {"use": "dpo", "beta": 0.1}}


def _term(config: DpoConfig, context: BuildContext | None) -> Any:
    from miles_algo_dpo.term import Dpo

    return Dpo(config=config)


def _requires(config: DpoConfig) -> frozenset[str]:
    return frozenset({"preference"} if config.reference_free else {"preference", "role:reference"})


@hookimpl
def miles_algorithm() -> Provider[DpoPreset, dict[str, Any]]:
    return Provider(
        name="dpo",
        config=DpoPreset,
        build=_preset,
        summary="preferences between two answers",
        explain="loss = mean over pairs of the term `dpo`, from demonstrations (chosen, rejected)\n" + EXPLAIN,
    )


@hookimpl
def miles_term() -> Provider[DpoConfig, Any]:
    return Provider(
        name="dpo",
        config=DpoConfig,
        build=_term,
        requires=_requires,
        field="loss",
        summary="−log σ(βh) of a pair, or IPO",
        explain=EXPLAIN,
    )
