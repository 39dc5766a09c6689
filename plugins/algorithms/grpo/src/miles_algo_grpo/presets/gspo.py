"""GSPO: Zheng et al., "Group Sequence Policy Optimization", arXiv 2507.18071.

The ratio is that of the whole answer, geometrically averaged over its tokens, and it is clipped as one: an answer is
inside the trust region or outside it as a whole.

Deviations from the paper: the group's standard deviation is the sample's (ddof 1) with eps 1e-6, which the paper leaves
open. The ratio is of one trajectory: an episode with several has several. With one update a step the ratio is 1 and the
gradient is that of `grpo`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EXPLAIN = """\
s = exp(Σ m(π − π_p) / Σ m) over the trajectory; max(−sA, −clip(s, 1 − 3e-4, 1 + 4e-4)A); mean of \
each answer, then of the answers.
A = (R − mean of the group)/(std + 1e-6).
Paper: Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071.
Deviations: ddof 1 and eps 1e-6, which the paper leaves open."""


@dataclass(frozen=True, kw_only=True)
class GspoPreset:
    """Preset `gspo` (arXiv 2507.18071): group advantage with std, sequence ratio clipped at 3e-4/4e-4, episode mean.

    No options of its own. Deviations from the paper: ddof 1, eps 1e-6.
    """


def tree() -> dict[str, Any]:
    """The section `algorithm`."""
    return {
        "episodes": "sampled",
        "aggregation": "episode_mean",
        "advantage": {"use": "group", "scale": "std", "ddof": 1, "eps": 1e-6},
        "loss": {"use": "clip", "level": "sequence", "lo": 3e-4, "hi": 4e-4},
        "kl": {"use": "kl", "estimator": "k3", "coef": 0.0},
        "entropy": {"use": "entropy", "coef": 0.0},
    }
