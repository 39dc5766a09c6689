"""CISPO: MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", arXiv 2506.13585.

The importance weight is bounded and detached, and multiplies plain REINFORCE: no token loses its gradient, as tokens do
in a clipped objective.

Deviations from the paper: it tunes the upper bound and names no value, so `algorithm.loss.hi` must be given; there is
no lower bound (lo 1.0), as in the paper's runs; the group's standard deviation is the sample's (ddof 1) with eps 1e-6;
the mean over tokens runs over the whole minibatch (paper: over each group, then over groups).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EXPLAIN = """\
−sg(clip(ρ, 0, 1 + hi))·A·π, hi from the run file; Σ over all tokens / their number.
A = (R − mean of the group)/(std + 1e-6).
Paper: MiniMax-M1, arXiv 2506.13585.
Deviations: ddof 1 and eps 1e-6; hi has no default; the token mean is over the minibatch, not over each group."""


@dataclass(frozen=True, kw_only=True)
class CispoPreset:
    """Preset `cispo` (arXiv 2506.13585): group advantage with std, REINFORCE under a bounded weight, token mean.

    No options of its own; `algorithm.loss.hi` must be given. Deviations from the paper: ddof 1, eps 1e-6.
    """


def tree() -> dict[str, Any]:
    """The section `algorithm`."""
    return {
        "episodes": "sampled",
        "aggregation": "token_mean",
        "advantage": {"use": "group", "scale": "std", "ddof": 1, "eps": 1e-6},
        "loss": {"use": "cispo", "lo": 1.0},
        "kl": {"use": "kl", "estimator": "k3", "coef": 0.0},
        "entropy": {"use": "entropy", "coef": 0.0},
    }
