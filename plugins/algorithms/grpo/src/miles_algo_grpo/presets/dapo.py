"""DAPO: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv 2503.14476.

GRPO with four changes: a higher upper bound of the clip, groups without a signal are sampled again, every token of the
batch weighs the same, and answers close to the length limit lose reward.

Deviations from the paper: the standard deviation is the sample's (ddof 1) with eps 1e-6, as in `grpo`; the mean over
tokens runs over the whole minibatch (paper: over each group, then over groups); "dynamic sampling" drops groups whose
rewards are equal, which for the paper's rewards is "all right or all wrong"; the slope of the length penalty is the
last fifth of `max_new_tokens` (paper: 4096 of 20480 tokens, the same fifth) and the penalty enters the reward after the
filter. The paper has no KL: the term is there with coefficient 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EXPLAIN = """\
A = (R − mean of the group)/(std + 1e-6), R = reward + reward.overlong; clip(ρ, 0.8, 1.28); \
Σ over all tokens / their number.
Groups whose rewards are all equal are not trained on; their slots are sampled again.
Paper: Yu et al., DAPO, arXiv 2503.14476.
Deviations: ddof 1 and eps 1e-6; the length penalty's slope is the last fifth of max_new_tokens, its size 1; the \
token mean is over the minibatch, not over each group."""


@dataclass(frozen=True, kw_only=True)
class DapoPreset:
    """Preset `dapo` (arXiv 2503.14476): clip .2/.28, token mean, over-long penalty, dynamic sampling, no KL.

    No options of its own. Deviations from the paper: ddof 1, eps 1e-6; L_buf is a fifth of `max_new_tokens`.
    """


def tree() -> dict[str, Any]:
    """The section `algorithm`."""
    return {
        "episodes": "sampled",
        "aggregation": "token_mean",
        "filters": {"dynamic_sampling": {"use": "dynamic_sampling"}},
        "penalties": {"overlong": {"use": "overlong", "penalty": 1.0}},
        "advantage": {"use": "group", "scale": "std", "ddof": 1, "eps": 1e-6},
        "loss": {"use": "clip", "lo": 0.2, "hi": 0.28},
        "kl": {"use": "kl", "estimator": "k3", "coef": 0.0},
        "entropy": {"use": "entropy", "coef": 0.0},
    }
