"""Gradient checkpointing block by block, with the extensions' micro-batch context re-entered on recomputation.

The recomputation of a block runs in the backward pass, when the context around the forward is long gone; and with
several micro-batches in flight it must be the context of *its* micro-batch. `contexts` therefore captures the factory
that is current when a block runs forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Factory = Callable[[], AbstractContextManager[None]]


class Recompute:
    """The context in which a role's forward runs now, and blocks that re-enter it."""

    def __init__(self) -> None:
        self._current: Factory = nullcontext

    @contextmanager
    def inside(self, factory: Factory) -> Iterator[None]:
        """Run a forward within a fresh context of `factory`."""
        before, self._current = self._current, factory
        try:
            with factory():
                yield
        finally:
            self._current = before

    def wrap(self, block: nn.Module) -> None:
        """Make `block` keep its inputs only, and recompute the rest in the backward pass."""
        forward = block.forward

        def contexts() -> tuple[Any, Any]:
            return nullcontext(), self._current()

        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs
            )

        block.forward = checkpointed
