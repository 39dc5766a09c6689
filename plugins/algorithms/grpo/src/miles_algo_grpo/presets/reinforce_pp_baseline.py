"""REINFORCE++ with a group baseline: Hu et al., "REINFORCE++", arXiv 2501.03262, for several answers a task.

The baseline is the mean of the group, the scale that of the whole batch: a group whose rewards hardly differ is not
blown up to the size of the others, as dividing by its own standard deviation would.

Deviations from the paper: KL is in the reward, per token (later versions of the paper use a k2 loss: that is
`algorithm.kl: {use: kl, estimator: k2, coef: …}`), and its coefficient is 0 unless set; whitening runs over the
trainable tokens of the step, ddof 1, with 1e-8 inside the root, so a long answer counts as often as it has tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EXPLAIN = """\
A = (R − mean of the group) − reward_kl.coef · kl_t, then (A − mean)/√(var + 1e-8) over the step's trainable tokens; \
clip(ρ, 0.8, 1.2); Σ over all tokens / their number.
Paper: Hu et al., REINFORCE++, arXiv 2501.03262 (with baseline).
Deviations: KL in the reward per token instead of a k2 loss, reward_kl.coef 0 unless set."""


@dataclass(frozen=True, kw_only=True)
class ReinforcePpBaselinePreset:
    """Preset `reinforce_pp_baseline` (arXiv 2501.03262): group mean as baseline, whitened over the step, clip .2/.2.

    No options of its own. Deviations from the paper: KL in the reward, not as a k2 loss; coefficient 0 unless set.
    """


def tree() -> dict[str, Any]:
    """The section `algorithm`."""
    return {
        "episodes": "sampled",
        "aggregation": "token_mean",
        "reward_kl": {"use": "reward_kl", "estimator": "k1", "coef": 0.0},
        "advantage": {"use": "centred"},
        "whiten": {"use": "whiten", "shift_mean": True},
        "loss": {"use": "clip", "lo": 0.2, "hi": 0.2},
        "entropy": {"use": "entropy", "coef": 0.0},
    }
