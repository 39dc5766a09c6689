"""KL estimators per unit, differentiable, from log-probabilities of the sampled token (torch).

d = π − π_ref. k1 = d; k2 = d²/2; k3 = e^{−d} − 1 + d with only the argument of exp clamped to ±20; `low_var` = k3 with
d clamped to ±20 in the linear term too, and the result to ±10. As a loss only k2 has the gradient of KL on-policy:
plain k1's is 0 in expectation, plain k3's is that of the other direction. `unbiased` multiplies k1 or k3 by the token
ratio ρ with its gradient, which makes both exact.
"""

from __future__ import annotations

from typing import Literal

import torch

from miles_core.numerics.objective import EXP_LIMIT

Estimator = Literal["k1", "k2", "k3", "low_var"]


def kl(d: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """[units] -> [units]. Raises `ValueError` for an unknown estimator."""
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2
    if estimator == "k3":
        return (-d).clamp(-EXP_LIMIT, EXP_LIMIT).expm1() + d
    if estimator == "low_var":
        clamped = d.clamp(-EXP_LIMIT, EXP_LIMIT)
        return ((-clamped).expm1() + clamped).clamp(-10.0, 10.0)
    raise ValueError(f"estimator is {estimator!r}; choose k1, k2, k3 or low_var")


def kl_loss(
    current: torch.Tensor,
    reference: torch.Tensor,
    estimator: Estimator,
    proximal: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss form: `kl(π − π_ref)`, times ρ = exp(π − π_p) with gradient where `proximal` is given (`unbiased`)."""
    value = kl(current - reference.detach(), estimator)
    if proximal is None:
        return value
    return (current - proximal.detach()).clamp(-EXP_LIMIT, EXP_LIMIT).exp() * value
