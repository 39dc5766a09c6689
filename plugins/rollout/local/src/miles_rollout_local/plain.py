"""Forward through the model's own code, for architectures that nobody verified here (`unverified: true`).

Keys and values pass through a small cache object that the model calls as it would call a transformers cache; masks are
handed over ready-made (four dimensions), which transformers passes on as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from miles_core.errors import EngineError
from miles_rollout_local.fused import places


class _Recorder:
    """A cache that keeps what each layer hands it (prefill)."""

    is_compileable = False

    def __init__(self) -> None:
        self.entries: list[torch.Tensor] = []

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if key.shape != value.shape or layer_idx != len(self.entries):
            raise EngineError(
                f"layer {layer_idx} caches keys {tuple(key.shape)} and values {tuple(value.shape)}; this engine keeps "
                "keys and values of one shape, one pair a layer, in order",
                fix="choose another engine for this architecture",
            )
        self.entries.append(torch.cat([key, value], 1))  # [b, 2 * kv heads, t, head dim]
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class _Slots(_Recorder):
    """A cache over the arena (decode): writes one entry a row, returns what is seen."""

    def __init__(self, arena: torch.Tensor, positions: torch.Tensor, span: int) -> None:
        super().__init__()
        self.arena, self.span, self.rows = arena, span, len(positions)
        self.place = places(arena, positions)

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        cache = self.arena[layer_idx]
        width = key.shape[-1]
        cache.view(-1, width).index_copy_(0, self.place, torch.cat([key, value], 1).reshape(-1, width))
        return cache[: self.rows, :, : self.span].chunk(2, 1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.span - 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.span - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.span, 0


class PlainForward:
    """Same interface as `FusedForward`, on any decoder that takes ready-made masks and positions."""

    takes_past = False

    def __init__(self, model: Any) -> None:
        self.model = model
        self.adapters: Any = None
        takes = inspect.signature(inspect.unwrap(type(model).forward)).parameters
        self.keyword = "cache" if "cache" in takes else "past_key_values"

    def prefill(
        self, ids: torch.Tensor, lengths: torch.Tensor, which: Any = None, past: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FusedForward.prefill`; there are neither adapters here nor a past."""
        b, t = ids.shape
        recorder = _Recorder()
        mask = torch.ones(t, t, dtype=torch.bool).tril().expand(b, 1, t, t)
        logits = self._run(ids, torch.arange(t).expand(b, -1), mask, recorder)
        if not recorder.entries:
            raise EngineError(
                f"{type(self.model).__name__} cached nothing: it keeps another kind of state",
                fix="choose another engine for this architecture",
            )
        return logits[torch.arange(b), lengths - 1].float(), torch.stack(recorder.entries)

    def decode(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        arena: torch.Tensor,
        span: int,
        mask: torch.Tensor | None,
        which: Any = None,
    ) -> torch.Tensor:
        """See `FusedForward.decode`."""
        if mask is None:
            mask = torch.ones(len(ids), 1, 1, span, dtype=torch.bool)
        return self._run(ids[:, None], positions[:, None], mask, _Slots(arena, positions, span))[:, -1].float()

    def every(self, ids: torch.Tensor, which: Any = None) -> Callable[[torch.Tensor], torch.Tensor]:
        """See `FusedForward.every`. The head may scale or cap: the model makes the logits of all tokens at once."""
        b, t = ids.shape
        mask = torch.ones(t, t, dtype=torch.bool).tril().expand(b, 1, t, t)
        logits = self._run(ids, torch.arange(t).expand(b, -1), mask, _Recorder()).flatten(0, 1)
        return lambda places: logits[places].float()

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: _Recorder) -> torch.Tensor:
        result = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **{self.keyword: cache}
        )
        return result.logits
