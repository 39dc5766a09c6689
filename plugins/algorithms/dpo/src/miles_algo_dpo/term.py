"""The term `dpo`: one value per pair of answers (a group of a chosen and a rejected episode), never reduced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from miles_algo_dpo.config import DpoConfig
from miles_core.contracts.learning import LOGPROBS, Output, TermLevel, TermMask, TermOutput, View
from miles_core.numerics.ratios import select

REFERENCE = "reference.logprobs"


@dataclass(frozen=True, kw_only=True)
class Dpo:
    """−log σ(βh), h = (π−π_ref)(chosen) − (π−π_ref)(rejected), or the form that `config` names.

    DPO: arXiv 2305.18290; conservative smoothing: its author's note; robust: 2403.00409; IPO: 2310.12036. A pair whose
    answers have no trainable token has h = 0 and no gradient. Metrics: `margin` βh, `accuracy` h > 0, `chosen` and
    `rejected`, β times each side of h.
    """

    config: DpoConfig
    level: TermLevel = "group"
    mask: TermMask = "trainable"
    weighted: bool = False
    aggregation: str | None = None
    outputs: tuple[Output, ...] = (LOGPROBS,)
    needs: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        needs = {"preference"} if self.config.reference_free else {"preference", REFERENCE}
        object.__setattr__(self, "needs", frozenset(needs))

    def __call__(self, view: View) -> TermOutput:
        c = self.config
        m = view["trainable"]
        log_ratio = select(m, view.out(LOGPROBS))
        if not c.reference_free:
            log_ratio = log_ratio - select(m, view[REFERENCE]).detach()
        if c.means:
            log_ratio = log_ratio / view.seq_sum(m.to(log_ratio.dtype)).clamp(min=1)
        preference = view["preference"].to(log_ratio.dtype)
        h = view.atom_sum(log_ratio, preference)
        chosen = view.atom_sum(log_ratio, (preference > 0).to(log_ratio.dtype)).detach()
        metrics = {
            "margin": c.beta * h.detach(),
            "accuracy": (h.detach() > 0).to(h.dtype),
            "chosen": c.beta * chosen,
            "rejected": c.beta * (chosen - h.detach()),
        }
        return TermOutput(value=self._value(h), metrics=metrics)

    def _value(self, h: Any) -> Any:
        from torch.nn.functional import logsigmoid

        c = self.config
        if c.form == "ipo":
            return (h - 1 / (2 * c.beta)).square()
        right, wrong = logsigmoid(c.beta * h), logsigmoid(-c.beta * h)
        if c.smoothing == "conservative":
            return -(1 - c.epsilon) * right - c.epsilon * wrong
        if c.smoothing == "robust":
            return (-(1 - c.epsilon) * right + c.epsilon * wrong) / (1 - 2 * c.epsilon)
        return -right
