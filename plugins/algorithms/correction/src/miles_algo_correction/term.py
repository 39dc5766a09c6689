"""The dynamic weight `opsm` (torch): it follows the policy through the updates of a step, and never rejects."""

from __future__ import annotations

from dataclasses import dataclass

from miles_algo_correction.config import Base, OpsmConfig
from miles_core.contracts.learning import LOGPROBS, Output, TermLevel, TermMask, TermOutput, View
from miles_core.numerics.ratios import select
from miles_core.records import Origin


@dataclass(frozen=True, kw_only=True)
class Opsm:
    """0 where A < 0 and the trajectory's mean of base − π over trainable tokens is above δ, else 1.

    The mean is over m before rejection; π is detached; A is the advantage as it enters the loss. Under `base:
    behaviour` m is what the engine sampled of it: a demonstration has no behaviour, is in no mean and keeps the
    weight 1. Metric: masked.
    """

    config: OpsmConfig
    needs: frozenset[str]
    outputs: tuple[Output, ...] = (LOGPROBS,)
    level: TermLevel = "unit"
    mask: TermMask = "trainable"
    weighted: bool = False
    aggregation: str | None = None

    def __call__(self, view: View) -> TermOutput:
        m = view["trainable"]
        if self.config.base is Base.behaviour and "origin" in view:  # the token axis
            m = m & (view["origin"] == Origin.SAMPLED)
        current = select(m, view.out(LOGPROBS).detach())
        base = select(m, view[f"{self.config.base.value}_logprobs"]).to(current.dtype)
        mean = view.seq_sum(base - current) / view.seq_sum(m.to(current.dtype)).clamp(min=1)
        masked = ((mean > self.config.delta) & (select(m, view["advantages"]) < 0)).to(current.dtype)
        return TermOutput(value=1.0 - masked, metrics={"masked": masked})


def opsm(config: OpsmConfig) -> Opsm:
    """π_p is asked of nobody: a view always serves it, as the detached π where nothing scored it."""
    needs = {"advantages"} | ({"behaviour_logprobs"} if config.base is Base.behaviour else set())
    return Opsm(config=config, needs=frozenset(needs))
