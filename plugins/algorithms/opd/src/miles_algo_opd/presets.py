"""The presets `opd` and `opd_topk`: papers, what they resolve to, and where they differ."""

from __future__ import annotations

from typing import Any

OPD_EXPLAIN = """\
A_t = −(π_p − π_T)_t on sampled tokens, detached; loss max(−ρA, −clip(ρ, .8, 1.2)A);
mean over all tokens of an update
Lu and Thinking Machines Lab, "On-Policy Distillation" (2025); arXiv 2306.13649
Deviations: the ratio is clipped (without effect at one update a step). With an advantage stage
given, A_t is added to that stage's: a task reward and a teacher together."""

OPD_TOPK_EXPLAIN = """\
KL(student‖teacher) at every sampled position, over the student's k most likely tokens and one
bucket for the rest; mean over all tokens of an update; gradient through the student's log-softmax
GKD, Agarwal et al., arXiv 2306.13649 (on-policy, λ = 1, reverse KL)
Deviations: k tokens and a bucket instead of the vocabulary; a lower bound of the KL."""


def opd() -> dict[str, Any]:
    """The section `algorithm` of `opd`. No advantage part: the stage `opd` then starts from 0."""
    return {
        "episodes": "sampled",
        "aggregation": "token_mean",
        "distill": {"use": "opd", "coef": 1.0},
        "loss": {"use": "clip", "lo": 0.2, "hi": 0.2},
    }


def opd_topk() -> dict[str, Any]:
    """The section `algorithm` of `opd_topk`. `distill.k` is for the user to give."""
    return {
        "episodes": "sampled",
        "aggregation": "token_mean",
        "distill": {"use": "topk_kl", "direction": "reverse", "support": "student", "tail": "bucket", "coef": 1.0},
    }
