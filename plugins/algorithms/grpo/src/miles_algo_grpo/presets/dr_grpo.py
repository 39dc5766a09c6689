"""Dr. GRPO: Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv 2503.20783.

GRPO without its two biases: rewards are only centred (no division by the group's std), and token losses are divided by
a constant length instead of the answer's own.

Deviations from the paper: none in the formulas. L is `max_new_tokens` unless `constant_length` is set; give it when an
episode has several turns. The KL term is there with coefficient 0, as the paper uses none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EXPLAIN = """\
A = R − mean of the group; max(−ρA, −clip(ρ, 0.8, 1.2)A); Σ over all tokens / (answers · L), L = max_new_tokens.
Paper: Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783.
Deviations: none."""


@dataclass(frozen=True, kw_only=True)
class DrGrpoPreset:
    """Preset `dr_grpo` (arXiv 2503.20783): centred group advantage, clip .2/.2, sum over tokens / (episodes · L).

    No options of its own. L is `algorithm.constant_length`, and `max_new_tokens` where that is null. Deviations: none.
    """


def tree() -> dict[str, Any]:
    """The section `algorithm`."""
    return {
        "episodes": "sampled",
        "aggregation": "constant",
        "advantage": {"use": "group", "scale": "none"},
        "loss": {"use": "clip", "lo": 0.2, "hi": 0.2},
        "kl": {"use": "kl", "estimator": "k3", "coef": 0.0},
        "entropy": {"use": "entropy", "coef": 0.0},
    }
