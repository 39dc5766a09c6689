"""The stage `opd`: the sampled-token form of on-policy distillation, as a part of the advantage."""

from __future__ import annotations

import numpy as np

from miles_algo_opd.config import OpdConfig
from miles_core.columns import CORE_COLUMNS, Batch
from miles_core.contracts.learning import StageOutput

TEACHER = "teacher.logprobs"


class Opd:
    """A_t ← A_t − coef·(π_p − π_T)_t on trainable tokens, in float64.

    With `mixes`, A is what the run's advantage stage wrote; otherwise A is 0 (distillation alone). Nothing is clamped:
    only an argument of exp is, and there is none. Metrics: `reverse_kl`, the mean of π_p − π_T over trainable tokens
    (in expectation over the student's samples KL(student‖teacher) per token), and `agree`, the share of tokens that
    the teacher finds at least as likely.
    """

    gives = (CORE_COLUMNS["advantages"],)

    def __init__(self, config: OpdConfig, *, mixes: bool) -> None:
        self._coef = config.coef
        self._mixes = mixes
        self.needs = frozenset({"proximal_logprobs", TEACHER} | ({"advantages"} if mixes else set()))

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput:
        m = batch.columns["trainable"]
        gap = _selected(batch, "proximal_logprobs") - _selected(batch, TEACHER)
        base = _selected(batch, "advantages") if self._mixes else 0.0
        count = float(m.sum())
        return StageOutput(
            columns={"advantages": (base - self._coef * gap).astype(np.float32)},
            metrics={"reverse_kl": (float(gap.sum()), count), "agree": (float((m & (gap <= 0)).sum()), count)},
        )


def _selected(batch: Batch, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.where(batch.columns["trainable"], batch.columns[name], 0.0).astype(np.float64)
