"""The term `value` (torch): the critic's clipped squared error per unit."""

from __future__ import annotations

from dataclasses import dataclass

from miles_algo_ppo.config import ValueConfig
from miles_core.contracts.learning import Output, TermLevel, TermMask, TermOutput, View
from miles_core.numerics.ratios import select

VALUES = Output(name="values", role="critic", grad=True)


@dataclass(frozen=True, kw_only=True)
class ClippedValue:
    """max((V−G)², (V_old + clamp(V−V_old, ±c) − G)²), no ½; V_old and G detached (arXiv 1707.06347's code).

    Over every trainable unit, rejected or not. Metrics: `clipped`, the share of units where the second branch is the
    larger one (no gradient there); `abs_error`, the mean of |V−G|.
    """

    config: ValueConfig
    level: TermLevel = "unit"
    mask: TermMask = "trainable"
    weighted: bool = False
    aggregation: str | None = None
    outputs: tuple[Output, ...] = (VALUES,)
    needs: frozenset[str] = frozenset({"values", "returns"})

    def __call__(self, view: View) -> TermOutput:
        m = view["trainable"]
        value = select(m, view.out(VALUES))
        target = select(m, view["returns"]).detach()
        error = value - target
        metrics = {"abs_error": error.detach().abs()}
        loss = error.square()
        c = self.config.clip
        if c is not None:
            old = select(m, view["values"]).detach()
            held = (old + (value - old).clamp(-c, c) - target).square()
            metrics["clipped"] = (held > loss).detach()
            loss = loss.maximum(held)
        return TermOutput(value=loss, metrics=metrics)
