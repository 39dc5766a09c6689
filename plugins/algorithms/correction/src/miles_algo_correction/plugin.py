"""What this distribution offers: static corrections `tis`, `icepop`, `mis`, `bypass`; the dynamic weight `opsm`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from miles_algo_correction import config as c
from miles_core import hookimpl
from miles_core.provider import BuildContext, Provider

BEHAVIOUR = "behaviour_logprobs"
W = (
    "w = exp(π_p − π_b), detached, the argument clamped to ±20; level sequence: exp(Σ m log w) of the trajectory, "
    "geometric: exp(Σ m log w / max(Σ m, 1)); m is the trainable mask before any rejection."
)


def _lines(*lines: str) -> str:
    return "\n".join(lines)


EXPLAIN = {
    "tis": _lines(
        "weight = clamp(w, 0, high) on the policy term",
        W,
        'Paper: Ionides 2008, truncated importance sampling; between engine and trainer: Yao et al. 2025, "Your '
        'efficient RL framework secretly brings you off-policy RL training".',
        "Deviations: published at token level; the other levels are ours.",
    ),
    "icepop": _lines(
        "weight = w where low ≤ w ≤ high, else 0, on the policy term; m, KL and entropy keep the token",
        W,
        "Paper: Ring-1T, arXiv 2510.18855.",
        "Deviations: published at token level; the other levels are ours.",
    ),
    "mis": _lines(
        "truncate: clamp(w, 0, high); clip: clamp(w, low, high); mask: w, and what is outside [low, high] is rejected",
        "reject: what lies outside its own [low, high] at its own level is rejected; veto: any token with w < τ "
        "rejects the trajectory",
        "normalize batch: divided by Σ m w / Σ m over the step, after this rule's own rejection; at level sequence "
        "by the mean over trajectories",
        W,
        'Paper: Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference '
        'mismatch".',
        "Deviations: rejected tokens leave the numerators, and denominators keep them unless "
        "algorithm.reject_denominator is kept; the mean weight is that of the whole step, never of a micro-batch.",
    ),
    "bypass": _lines(
        "π_p := π_b: the ratio of the policy term is exp(π − π_b) and carries the whole off-policyness",
        "With one update a step nothing is scored beforehand; mismatch is measured against the trainer all the same.",
        "Deviations: none; there is no paper.",
    ),
    "opsm": _lines(
        "weight = 0 where A < 0 and Σ m(base − π)/max(Σ m, 1) > δ over the trajectory, else 1; π detached, "
        "base π_b or π_p; with π_b, m is the trainable tokens that an engine sampled",
        "Paper: off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556.",
        "Deviations: none.",
    ),
}


def _tis(config: c.TisConfig, context: BuildContext) -> Any:
    from miles_algo_correction.stages import tis

    return tis(config)


def _icepop(config: c.IcepopConfig, context: BuildContext) -> Any:
    from miles_algo_correction.stages import icepop

    return icepop(config)


def _mis(config: c.MisConfig, context: BuildContext) -> Any:
    from miles_algo_correction.stages import mis

    return mis(config)


def _bypass(config: c.BypassConfig, context: BuildContext) -> Any:
    from miles_algo_correction.stages import Bypass

    return Bypass()


def _opsm(config: c.OpsmConfig, context: BuildContext) -> Any:
    from miles_algo_correction.term import opsm

    return opsm(config)


def _opsm_requires(config: c.OpsmConfig) -> Iterable[str]:
    return (BEHAVIOUR,) if config.base is c.Base.behaviour else ("several_updates",)


def _provider(name: str, config: type, build: Any, summary: str, requires: Any = (BEHAVIOUR,)) -> Provider[Any, Any]:
    return Provider(
        name=name,
        config=config,
        build=build,
        requires=requires,
        field="correction",
        summary=summary,
        explain=EXPLAIN[name],
    )


@hookimpl
def miles_stage() -> list[Provider[Any, Any]]:
    return [
        _provider("tis", c.TisConfig, _tis, "clamp(w, 0, high), w = exp(π_p − π_b)"),
        _provider("icepop", c.IcepopConfig, _icepop, "w within [low, high], else 0"),
        _provider("mis", c.MisConfig, _mis, "bounded importance weights with rejection, veto and normalisation"),
        _provider("bypass", c.BypassConfig, _bypass, "π_p := π_b, so that the ratio carries the whole off-policyness"),
    ]


@hookimpl
def miles_term() -> list[Provider[Any, Any]]:
    return [_provider("opsm", c.OpsmConfig, _opsm, "0 where A < 0 and the trajectory left its base", _opsm_requires)]
