"""GRPO: Shao et al., "DeepSeekMath", arXiv 2402.03300.

Advantage (R − mean)/(std + eps) within the group; PPO's clip; each answer's tokens averaged, then the answers.

Deviations from the paper: the KL loss (k3, as in the paper) has coefficient 0 unless set (paper: 0.04); the standard
deviation is the sample's (ddof 1) with eps 1e-6, which the paper leaves open; the average over answers runs over the
whole minibatch of an optimizer update, which for groups of equal size is the paper's; a group whose rewards are all
equal gives exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EXPLAIN = """\
A = (R − mean of the group)/(std + 1e-6); max(−ρA, −clip(ρ, 0.8, 1.2)A); mean of each answer's \
tokens, then of the answers.
Paper: Shao et al., DeepSeekMath, arXiv 2402.03300.
Deviations: KL coefficient 0 unless set (paper: 0.04); ddof 1 and eps 1e-6, which the paper leaves open."""


@dataclass(frozen=True, kw_only=True)
class GrpoPreset:
    """Preset `grpo` (arXiv 2402.03300): group advantage with std, clip .2/.2, mean over answers of token means.

    No options of its own: every number is a key of the part that it belongs to. Deviations from the paper: KL
    coefficient 0 unless set, ddof 1, eps 1e-6.
    """


def tree() -> dict[str, Any]:
    """The section `algorithm`."""
    return {
        "episodes": "sampled",
        "aggregation": "episode_mean",
        "advantage": {"use": "group", "scale": "std", "ddof": 1, "eps": 1e-6},
        "loss": {"use": "clip", "lo": 0.2, "hi": 0.2},
        "kl": {"use": "kl", "estimator": "k3", "coef": 0.0},
        "entropy": {"use": "entropy", "coef": 0.0},
    }
