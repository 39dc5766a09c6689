"""RLOO: Ahmadian et al., "Back to Basics", arXiv 2402.14740, after Kool et al., "Buy 4 REINFORCE samples" (2019).

The baseline of an answer is the mean reward of the others; the gradient is plain REINFORCE of the whole answer, hence
the sum over its tokens.

Deviations from the paper: the paper subtracts a KL penalty from the reward; here the KL term is a loss, with
coefficient 0 unless set. No ratio: with several updates a step it stays the gradient at the sampled policy's data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EXPLAIN = """\
A = R − mean of the others in the group; −A·π; Σ over each answer's tokens, mean over the answers.
Paper: Ahmadian et al., Back to Basics, arXiv 2402.14740; Kool et al. 2019.
Deviations: KL is a loss with coefficient 0 unless set, where the paper takes it off the reward."""


@dataclass(frozen=True, kw_only=True)
class RlooPreset:
    """Preset `rloo` (arXiv 2402.14740): leave-one-out advantage, REINFORCE, mean over episodes of token sums.

    No options of its own. Deviations from the paper: KL is a loss (coefficient 0 unless set), not part of the reward.
    """


def tree() -> dict[str, Any]:
    """The section `algorithm`."""
    return {
        "episodes": "sampled",
        "aggregation": "episode_sum",
        "advantage": {"use": "leave_one_out"},
        "loss": {"use": "reinforce"},
        "kl": {"use": "kl", "estimator": "k3", "coef": 0.0},
        "entropy": {"use": "entropy", "coef": 0.0},
    }
