"""The term `sft`: −π per unit (the negative log-likelihood of a demonstration token)."""

from __future__ import annotations

from miles_core.contracts.learning import LOGPROBS, Output, TermLevel, TermMask, TermOutput, View


class Sft:
    """−π. Each demonstration is its own episode, so packing never changes a denominator."""

    level: TermLevel = "unit"
    mask: TermMask = "trainable"
    weighted = False
    aggregation: str | None = None
    outputs: tuple[Output, ...] = (LOGPROBS,)
    needs: frozenset[str] = frozenset()

    def __call__(self, view: View) -> TermOutput:
        return TermOutput(value=-view.out(LOGPROBS).masked_fill(~view["trainable"], 0.0))
