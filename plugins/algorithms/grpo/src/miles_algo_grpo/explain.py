"""What `miles config show --explain` says of each part: formula, then paper, then deviations from it."""

STAGES = {
    "group": """\
A = (R − mean of the group)/(std of the group + eps), one number per episode; `scale: none` only centres.
Paper: DeepSeekMath, arXiv 2402.03300; centred only: Dr. GRPO, arXiv 2503.20783.
Deviations: a group of one gives 0; rewards equal within 1e-6·max(1, max|R|) give exactly 0.""",
    "leave_one_out": """\
A = R − mean of the others in the group, one number per episode.
Paper: Kool et al. 2019; Ahmadian et al., arXiv 2402.14740.
Deviations: a group of one gives 0.""",
    "batch": """\
A = (R − mean)/(std + eps) over all episodes of the step, whatever their groups.
Paper: none; the usual batch baseline.
Deviations: one episode gives 0.""",
    "centred": """\
A_t = (R − mean of the group) − reward_kl.coef · kl_t.
Paper: REINFORCE++ with baseline, arXiv 2501.03262.
Deviations: kl_t is that of the token alone, not of what follows.""",
    "returns": """\
A_t = Σ over later trainable tokens of gamma^n · r, n counted in trainable tokens; r = −reward_kl.coef · kl_t, and R \
at the last trainable token of each trajectory.
Paper: REINFORCE++, arXiv 2501.03262.
Deviations: none.""",
    "whiten": """\
A ← (A − mean)/√(variance + 1e-8) over all trainable tokens of the step on all ranks, ddof 1, before rejections; \
`shift_mean: false` adds the mean back.
Paper: the usual step of PPO implementations; REINFORCE++, arXiv 2501.03262.
Deviations: none.""",
    "reward_kl": """\
reward_kl_t = coef · estimator(π_p, π_ref); with d = π_p − π_ref: k1 = d, k2 = d²/2, k3 = e^(−d) − 1 + d, low_var = k3 \
with d within ±20 and the result within ±10.
Paper: Ziegler et al., arXiv 1909.08593; estimators: Schulman, "Approximating KL Divergence" (2020).
Deviations: none.""",
    "overlong": """\
reward.overlong = −penalty · clamp((len − (L_max − L_buf))/L_buf, 0, 1), len = sampled tokens of the longest \
trajectory, L_max = max_new_tokens, L_buf = L_max/5 unless given.
Paper: DAPO, arXiv 2503.14476.
Deviations: none.""",
}

FILTERS = {
    "dynamic_sampling": """\
A group is kept unless its rewards are equal within 1e-6·max(1, max|R|); the reward is that before \
penalties.
Paper: DAPO, arXiv 2503.14476.
Deviations: rewards other than 0 and 1 are judged by equality, not by accuracy.""",
}

TERMS = {
    "clip": """\
max(−ρA, −clip(ρ, 1 − lo, 1 + hi)A), ρ = exp(π − π_p); `dual: c`: where A<0, min(that, −cA); `level: sequence`: \
the exponent is its mean over the trajectory's trainable tokens.
Paper: PPO, arXiv 1707.06347; dual: arXiv 1912.09729; sequence: GSPO, arXiv 2507.18071.
Deviations: the argument of exp is clamped to ±20.""",
    "cispo": """\
−sg(clip(ρ, 1 − lo, 1 + hi))·A·π, ρ = exp(π − π_p); lo 1.0 is no lower bound.
Paper: MiniMax-M1, arXiv 2506.13585.
Deviations: the argument of exp is clamped to ±20.""",
    "reinforce": """\
−A·π.
Paper: Williams 1992.
Deviations: none.""",
    "kl": """\
With d = π − π_ref: k2 = d²/2, k3 = e^(−d) − 1 + d, low_var = k3 with d within ±20 and the result within ±10; \
`unbiased` multiplies k1 = d or k3 by ρ with its gradient.
Paper: Schulman, "Approximating KL Divergence" (2020); k3 as a loss: DeepSeekMath, arXiv 2402.03300.
Deviations: plain k1 is refused (its gradient is 0 in expectation). On-policy k2 and `unbiased` have the gradient of \
KL(π‖π_ref), plain k3 that of KL(π_ref‖π).""",
    "entropy": """\
−H of the full tempered vocabulary: a positive coefficient raises entropy.
Paper: Williams and Peng 1991.
Deviations: none.""",
}
