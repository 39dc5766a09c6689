"""Terms of the objective (torch): `clip`, `cispo`, `reinforce`, `kl`, `entropy`. Values per unit, never reduced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from miles_algo_grpo.config import CispoConfig, ClipConfig, KlConfig
from miles_core.contracts.learning import ENTROPY, LOGPROBS, Output, TermLevel, TermMask, TermOutput, View
from miles_core.numerics import kl as estimators
from miles_core.numerics.ratios import clip, ratio, select

REFERENCE = "reference.logprobs"


@dataclass(frozen=True, kw_only=True)
class UnitTerm:
    """A term with one value per unit, from a function of the view."""

    formula: Callable[[View], TermOutput]
    outputs: tuple[Output, ...] = (LOGPROBS,)
    needs: frozenset[str] = frozenset()
    weighted: bool = False
    level: TermLevel = "unit"
    mask: TermMask = "kept"
    aggregation: str | None = None

    def __call__(self, view: View) -> TermOutput:
        return self.formula(view)


def clip_term(config: ClipConfig) -> UnitTerm:
    """max(−ρA, −clip(ρ, 1 − lo, 1 + hi)A), with an optional dual bound (PPO, arXiv 1707.06347; dual, 1912.09729).

    Reads `proximal_logprobs`, which the view always serves: it does not ask for a score pass of its own.
    Metrics: clip_low, clip_high, clip_dual (shares of units); with a score pass also ratio and approx_kl (π_p − π).
    """
    hi = config.lo if config.hi is None else config.hi

    def formula(view: View) -> TermOutput:
        m = view["trainable"]
        current = select(m, view.out(LOGPROBS))
        proximal = select(m, view["proximal_logprobs"])
        rho = ratio(view, current, proximal, config.level.value)
        clipped = clip(rho, select(m, view["advantages"]), config.lo, hi, config.dual)
        metrics = {"clip_low": clipped.low, "clip_high": clipped.high}
        if config.dual is not None:
            metrics["clip_dual"] = clipped.dual
        if "proximal_logprobs" in view:
            metrics |= {"ratio": rho.detach(), "approx_kl": (proximal - current).detach()}
        return TermOutput(value=clipped.value, metrics=metrics)

    return UnitTerm(formula=formula, weighted=True, needs=frozenset({"advantages"}))


def cispo_term(config: CispoConfig) -> UnitTerm:
    """−sg(clip(ρ, 1 − lo, 1 + hi))·A·π: REINFORCE under a bounded, detached importance weight (arXiv 2506.13585).

    No token loses its gradient. Metrics as `clip`: clip_low, clip_high; with a score pass also ratio and approx_kl.
    """

    def formula(view: View) -> TermOutput:
        m = view["trainable"]
        current = select(m, view.out(LOGPROBS))
        proximal = select(m, view["proximal_logprobs"])
        a = select(m, view["advantages"]).detach()
        rho = ratio(view, current, proximal).detach()
        weight = rho.clamp(1 - config.lo, 1 + config.hi)
        metrics = {"clip_low": (rho < 1 - config.lo) & (a < 0), "clip_high": (rho > 1 + config.hi) & (a > 0)}
        if "proximal_logprobs" in view:
            metrics |= {"ratio": rho, "approx_kl": (proximal - current).detach()}
        return TermOutput(value=-weight * a * current, metrics=metrics)

    return UnitTerm(formula=formula, weighted=True, needs=frozenset({"advantages"}))


def reinforce_term() -> UnitTerm:
    """−A·π."""

    def formula(view: View) -> TermOutput:
        m = view["trainable"]
        return TermOutput(value=-select(m, view["advantages"]).detach() * select(m, view.out(LOGPROBS)))

    return UnitTerm(formula=formula, weighted=True, needs=frozenset({"advantages"}))


def kl_term(config: KlConfig, *, several: bool = False) -> UnitTerm:
    """An estimator of KL(π‖π_ref) per unit, as a loss. Metric: k1, the mean of π − π_ref.

    `several`: a step has several updates, so that ρ of `unbiased` needs a π_p from before the first of them.
    """
    needs = {REFERENCE, "proximal_logprobs"} if config.unbiased and several else {REFERENCE}

    def formula(view: View) -> TermOutput:
        m = view["trainable"]
        current, reference = select(m, view.out(LOGPROBS)), select(m, view[REFERENCE])
        proximal = select(m, view["proximal_logprobs"]) if config.unbiased else None
        value = estimators.kl_loss(current, reference, config.estimator.value, proximal)
        return TermOutput(value=value, metrics={"k1": (current - reference).detach()})

    return UnitTerm(formula=formula, needs=frozenset(needs))


def entropy_term() -> UnitTerm:
    """−H of the full tempered vocabulary, so that the objective is … − coef · H. Metric: H in nats."""

    def formula(view: View) -> TermOutput:
        entropy = select(view["trainable"], view.out(ENTROPY))
        return TermOutput(value=-entropy, metrics={"nats": entropy.detach()})

    return UnitTerm(formula=formula, outputs=(ENTROPY,))
