"""AdamW over named parameters, in float64 with results rounded to float32, and its learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from miles_core.config.schema import Decay, OptimizerConfig
from miles_core.testing.toys.autodiff import Var

Array = np.ndarray[Any, Any]


def rate(config: OptimizerConfig, update: int, total: int) -> float:
    """The learning rate of update number `update` (from 0) of `total`."""
    if update < config.warmup_updates:
        return config.lr * (update + 1) / config.warmup_updates
    span = max(total - config.warmup_updates, 1)
    x = min((update - config.warmup_updates) / span, 1.0)
    if config.decay == Decay.constant:
        return config.lr
    shape = 1.0 - x if config.decay == Decay.linear else 0.5 * (1.0 + math.cos(math.pi * x))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)


class AdamW:
    """State of one role: first and second moments by parameter name, and the count of updates."""

    def __init__(self, config: OptimizerConfig, params: dict[str, Var], total: int) -> None:
        self.config = config
        self.total = total
        self.count = 0
        self.first = {name: np.zeros(var.shape) for name, var in params.items()}
        self.second = {name: np.zeros(var.shape) for name, var in params.items()}

    @property
    def lr(self) -> float:
        return rate(self.config, self.count, self.total)

    def step(self, params: dict[str, Var], frozen: frozenset[str], scale: float) -> None:
        """One update from `grad` of each parameter times `scale` (gradient clipping); clears the gradients."""
        c, lr = self.config, self.lr
        self.count += 1
        for name, var in params.items():
            grad = np.zeros(var.shape) if var.grad is None else var.grad * scale
            var.grad = None
            if name in frozen:
                continue
            self.first[name] = c.beta1 * self.first[name] + (1 - c.beta1) * grad
            self.second[name] = c.beta2 * self.second[name] + (1 - c.beta2) * grad * grad
            m = self.first[name] / (1 - c.beta1**self.count)
            v = self.second[name] / (1 - c.beta2**self.count)
            moved = var.value * (1 - lr * c.weight_decay) - lr * m / (np.sqrt(v) + c.eps)
            params[name] = Var(moved.astype(np.float32))
