"""AdamW over the local shards of one role, its learning-rate schedule, and the true gradient norm.

Everything here works on plain local tensors: AdamW is element-wise, so that a shard's update needs nothing of other
shards, and fused kernels see no DTensor. Only the norm is summed over ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from miles_core.errors import NEW_RUN, BackendError

if TYPE_CHECKING:
    from miles_core.config.schema import OptimizerConfig


def local(tensor: Tensor) -> Tensor:
    """The part of a parameter or gradient that this rank holds: the same memory, no graph."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def learning_rate(config: OptimizerConfig, update: int, total: int) -> float:
    """The rate of optimizer update number `update` (from 0) of `total`.

    Warm-up: lr · (update + 1) / warmup_updates. After it the share of the way p = (update − warmup) / (total − warmup)
    goes from 0 towards 1: `linear` 1 − (1 − r)·p, `cosine` r + (1 − r)·(1 + cos πp)/2, with r = min_lr_ratio.
    """
    warmup = config.warmup_updates
    if update < warmup:
        return config.lr * (update + 1) / warmup
    p = min(1.0, (update - warmup) / max(1, total - warmup))
    ratio = config.min_lr_ratio
    shape = {
        "constant": 1.0,
        "linear": 1.0 - (1.0 - ratio) * p,
        "cosine": ratio + (1.0 - ratio) * 0.5 * (1.0 + math.cos(math.pi * p)),
    }
    return config.lr * shape[config.decay.value]


class RoleOptimizer:
    """AdamW for the trainable parameters of one module, after sharding."""

    def __init__(self, module: nn.Module, config: OptimizerConfig, total: int, ranks: int) -> None:
        self.config = config
        self.total = total
        self.updates = 0
        self._ranks = ranks
        self._named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._locals = [local(p) for _, p in self._named]
        self._adamw = torch.optim.AdamW(
            self._locals,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    @property
    def lr(self) -> float:
        """The rate of the next update."""
        return learning_rate(self.config, self.updates, self.total)

    def step(self, what: str) -> float:
        """One update from the accumulated gradients, which are then dropped. Returns the norm before clipping.

        Raises `BackendError` where the norm is not finite, and nothing is changed then; and where a weight is not
        finite behind the update, so that it is neither saved nor published.
        """
        grads = []
        for (_, parameter), shard in zip(self._named, self._locals, strict=True):
            shard.grad = None if parameter.grad is None else local(parameter.grad)
            if shard.grad is not None and shard.grad.numel():
                grads.append(shard.grad)
        norm = self._norm(grads)
        if not math.isfinite(norm):
            self.drop_gradients()
            raise BackendError(
                f"the gradient norm of {what} is {norm} at optimizer update {self.updates}; nothing was changed",
                fix=f"look at the step's rollouts (`miles show`), or take a lower optimizer.lr {NEW_RUN}",
            )
        limit = self.config.max_grad_norm
        if limit is not None and norm > limit:
            torch._foreach_mul_(grads, limit / norm)
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
        self._adamw.step()
        self.drop_gradients()
        if self._broken():
            raise BackendError(
                f"optimizer update {self.updates} (lr {self.lr:g}, gradient norm {norm:g}) left weights of {what} that "
                "are not finite",
                fix=f"take a lower optimizer.lr, or an optimizer.eps above 0, {NEW_RUN}",
            )
        self.updates += 1
        return norm

    def _broken(self) -> bool:
        """Whether a weight of any rank is not finite. The norm is one pass; of huge weights it overflows alone."""
        if math.isfinite(self._norm(self._locals)):
            return False
        bad = any(not bool(shard.isfinite().all()) for shard in self._locals)
        found = torch.tensor(float(bad), device=self._locals[0].device)
        if self._ranks > 1:
            dist.all_reduce(found)
        return bool(found)

    def _norm(self, shards: list[Tensor]) -> float:
        total = torch.nn.utils.get_total_norm(shards).double() ** 2 if shards else torch.zeros((), dtype=torch.float64)
        if self._ranks > 1:
            dist.all_reduce(total)
        return math.sqrt(float(total)) if math.isfinite(float(total)) else float(total)

    def drop_gradients(self) -> None:
        """Forget accumulated gradients."""
        for (_, parameter), shard in zip(self._named, self._locals, strict=True):
            parameter.grad = None
            shard.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The moments as `exp_avg/<name>` and `exp_avg_sq/<name>`, local; made (as zeros) where there was no update."""
        found: dict[str, Tensor] = {}
        for (name, _), shard in zip(self._named, self._locals, strict=True):
            state: dict[str, Any] = self._adamw.state[shard]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
                state["exp_avg"] = torch.zeros_like(shard)
                state["exp_avg_sq"] = torch.zeros_like(shard)
            found[f"exp_avg/{name}"] = state["exp_avg"]
            found[f"exp_avg_sq/{name}"] = state["exp_avg_sq"]
        return found

    def restored(self, updates: int) -> None:
        """Say that `tensors()` were filled with the state after so many updates."""
        self.updates = updates
        for shard in self._locals:
            self._adamw.state[shard]["step"].fill_(float(updates))
