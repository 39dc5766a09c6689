"""What prompts begin with in common is encoded once: where a new prompt may take its first entries from.

Two sources, both computed for one policy with the weights that serve now: prompts of requests that run (their entries
lie in the arena), and one *held* prefix, kept aside: what the prompts of one admission had in common. Chat templates
and instructions make all prompts of a run begin alike, and the answers of a group, who share a prompt, may join one
after another.

Not used in constant shapes (`batch_invariant`): how many tokens a prompt then computes would depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]
#: Computes ids [1, p] and returns their entries [layers, 1, 2 * kv heads, p, head dim].
Encode = Callable[[Array], torch.Tensor]
#: (row of the arena, the prompt whose entries lie there)
Running = Sequence[tuple[int, Array]]
#: Taking over less than this share of the tokens is not worth the copies and the mask that it costs.
_WORTH = 0.125


def common(a: Array, b: Array) -> int:
    """How many first ids `a` and `b` share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


class Prefixes:
    """The held prefix, and what of it and of running prompts new ones take over."""

    def __init__(self) -> None:
        self._owner: Any = None  # policy and version that the held prefix was computed for
        self._ids: Array = np.zeros(0, np.int64)
        self._entries: torch.Tensor | None = None

    def before(
        self, owner: Any, contexts: Sequence[Array], running: Running, arena: torch.Tensor | None, encode: Encode
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Entries [layers, b, 2 * kv heads, P, head dim] of the first tokens of each context, padded on the right to P,
        and how many int64 [b]; every context keeps at least one token to compute. `None` where that is not worth it.
        """
        if owner != self._owner:
            self._owner, self._ids, self._entries = owner, self._ids[:0], None
        worth = _WORTH * sum(map(len, contexts))
        shared = self._shared(contexts, running)
        if (len(contexts) - 1) * len(shared) > worth:
            self._ids, self._entries = shared.copy(), encode(shared)
        taken = [self._longest(context, running) for context in contexts]
        if sum(n for n, _ in taken) <= worth:
            return None
        sources = [self._entries if row < 0 else arena for _, row in taken]
        parts = [None if s is None else s[:, max(row, 0), :, :n] for s, (n, row) in zip(sources, taken, strict=True)]
        known = next(part for part in parts if part is not None)
        whole = known.new_zeros((known.shape[0], len(parts), known.shape[1], max(n for n, _ in taken), known.shape[3]))
        for i, part in enumerate(parts):
            if part is not None:
                whole[:, i, :, : part.shape[2]] = part
        return whole, torch.tensor([n for n, _ in taken])

    def _shared(self, contexts: Sequence[Array], running: Running) -> Array:
        """What all contexts begin with and no source holds; empty where there is nothing to gain."""
        first = contexts[0]
        n = min([common(first, other) for other in contexts[1:]] + [min(map(len, contexts)) - 1])
        known = max([common(self._ids, first), *(common(ids, first) for _, ids in running)])
        return first[:n] if n > known else first[:0]

    def _longest(self, context: Array, running: Running) -> tuple[int, int]:
        """How many tokens, and from which row of the arena (-1: the held prefix)."""
        most = len(context) - 1
        best, where = min(common(self._ids, context), most), -1
        for row, ids in running:
            if best < most and (n := min(common(ids, context), most)) > best:
                best, where = n, row
        return best, where
