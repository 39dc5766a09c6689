"""Policy ratios and the policy terms built on them, per unit and before aggregation (torch).

ρ_t = exp(π − π_p), the argument clamped to ±20 (no gradient beyond). At level `sequence` (GSPO) the exponent is
Σ m(π − π_p) / max(Σ m, 1) over the trajectory, m before rejection, at each of its units, with gradients through the
mean. Masked inputs must already be selected to 0 (`select`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from miles_core.contracts.learning import View
from miles_core.numerics.objective import EXP_LIMIT


def select(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`x` where `mask`, else 0, for values and gradients alike: a masked NaN reaches neither."""
    return x.masked_fill(~mask, 0.0)


def ratio(
    view: View,
    current: torch.Tensor,
    proximal: torch.Tensor,
    level: Literal["token", "sequence"] = "token",
) -> torch.Tensor:
    """ρ [units], 1 where not trainable."""
    mask = view["trainable"]
    log_ratio = select(mask, current - proximal.detach())
    if level == "sequence":
        count = view.seq_sum(mask.to(log_ratio.dtype)).clamp(min=1)
        log_ratio = select(mask, view.seq_sum(log_ratio) / count)
    return log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT).exp()


@dataclass(frozen=True, slots=True)
class Clipped:
    """The clipped policy term [units] and where each of its branches was taken (bool [units])."""

    value: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    dual: torch.Tensor


def clip(rho: torch.Tensor, advantages: torch.Tensor, lo: float, hi: float, dual: float | None = None) -> Clipped:
    """max(−ρA, −clip(ρ, 1−lo, 1+hi)A); with `dual` c, where A<0: min(that, −cA)."""
    a = advantages.detach()
    value = torch.maximum(-rho * a, -rho.clamp(1 - lo, 1 + hi) * a)
    negative = a < 0
    capped = torch.zeros_like(negative)
    if dual is not None:
        bound = -dual * a
        capped = negative & (bound < value.detach())
        value = torch.where(negative, torch.minimum(value, bound), value)
    r = rho.detach()
    return Clipped(value, low=(r < 1 - lo) & negative, high=(r > 1 + hi) & (a > 0), dual=capped)
