"""PPO: Schulman et al., "Proximal Policy Optimization Algorithms", arXiv 1707.06347, with the advantage of
"High-Dimensional Continuous Control Using Generalized Advantage Estimation", arXiv 1506.02438.

Deviations from the papers: γ = λ = 1 by default (episodes are short and rewarded once, at their end); advantages are
whitened over all trainable tokens of the step, as the reference implementation does over a batch; the value loss is
clipped like that implementation's, with `coef` .5 as its usual ½; entropy and KL have coefficient 0 unless set.
"""

from __future__ import annotations

from typing import Any

EXPLAIN = """\
loss = mean over tokens of max(−ρA, −clip(ρ, .8, 1.2)A) + .5 · mean over tokens of the clipped value error
A = whitened GAE (γ 1, λ 1) of the role `critic`; ρ = exp(π − π_p)
Paper: Schulman et al., arXiv 1707.06347; advantage: arXiv 1506.02438
Deviations: γ = λ = 1 unless set; advantages whitened over the step; KL (loss or reward) and entropy only if set."""


def tree() -> dict[str, Any]:
    """The section `algorithm`."""
    return {
        "episodes": "sampled",
        "aggregation": "token_mean",
        "reward_kl": {"use": "reward_kl", "estimator": "k1", "coef": 0.0},
        "advantage": {"use": "gae", "gamma": 1.0, "lam": 1.0},
        "whiten": {"use": "whiten"},
        "loss": {"use": "clip", "lo": 0.2, "hi": 0.2},
        "value": {"use": "value", "clip": 0.2, "coef": 0.5},
        "kl": {"use": "kl", "estimator": "k3", "coef": 0.0},
        "entropy": {"use": "entropy", "coef": 0.0},
    }
