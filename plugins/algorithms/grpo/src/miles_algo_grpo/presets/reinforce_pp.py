"""REINFORCE++: Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization", arXiv 2501.03262.

PPO without a critic: the return of each token is what the episode still earns, KL included, and returns are whitened
over the whole batch instead of within a group. It works with one answer a task.

Deviations from the paper: the KL in the reward has coefficient 0 unless set (`reward_kl.coef`; it then needs a role
`reference`); whitening runs over the trainable tokens of the step, ddof 1, with 1e-8 inside the root.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EXPLAIN = """\
G_t = R − reward_kl.coef · Σ_{s≥t} kl_s (gamma 1), A = (G − mean)/√(var + 1e-8) over the step's trainable tokens; \
clip(ρ, 0.8, 1.2); Σ over all tokens / their number.
Paper: Hu et al., REINFORCE++, arXiv 2501.03262.
Deviations: reward_kl.coef is 0 unless set."""


@dataclass(frozen=True, kw_only=True)
class ReinforcePpPreset:
    """Preset `reinforce_pp` (arXiv 2501.03262): returns, whitened over the step, clip .2/.2, token mean, KL in reward.

    No options of its own. Deviations from the paper: the KL coefficient is 0 unless set.
    """


def tree() -> dict[str, Any]:
    """The section `algorithm`."""
    return {
        "episodes": "sampled",
        "aggregation": "token_mean",
        "reward_kl": {"use": "reward_kl", "estimator": "k1", "coef": 0.0},
        "advantage": {"use": "returns", "gamma": 1.0},
        "whiten": {"use": "whiten", "shift_mean": True},
        "loss": {"use": "clip", "lo": 0.2, "hi": 0.2},
        "entropy": {"use": "entropy", "coef": 0.0},
    }
