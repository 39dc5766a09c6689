"""Causal attention over rows, as a Hugging Face attention function: `miles_rows`.

Models built by this package call it in every block. In the padded layout rows are the rows of the grid. In the packed
layout (`rows` is given) each bucket of trajectories is gathered out of the packed tokens, attended as right-padded
causal rows, and put back: linear layers then see no padding, and no mask is needed to keep trajectories apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

NAME = "miles_rows"


@dataclass(frozen=True, slots=True)
class Rows:
    """The packed rows of one forward, on the model's device (see `layout.Layout`)."""

    buckets: tuple[Tensor, ...]
    inverse: Tensor


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    miles_rows: Rows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[rows, heads, width, d] three times -> [rows, width, heads, d]."""
    if attention_mask is not None or dropout or kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise NotImplementedError("attention `miles_rows` knows plain causal attention, without mask, dropout or sinks")
    if miles_rows is None:
        return _causal(query, key, value, scaling, sliding_window).transpose(1, 2).contiguous(), None
    height, heads, width, d = query.shape
    flat = [x.transpose(1, 2).reshape(height * width, x.shape[1], d) for x in (query, key, value)]
    outs = []
    for index in miles_rows.buckets:
        q, k, v = (x.index_select(0, index.view(-1)).view(*index.shape, -1, d).transpose(1, 2) for x in flat)
        outs.append(_causal(q, k, v, scaling, sliding_window).transpose(1, 2).reshape(-1, heads, d))
    joined = outs[0] if len(outs) == 1 else torch.cat(outs)
    return joined.index_select(0, miles_rows.inverse).view(height, width, heads, d), None


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    length = query.shape[2]
    if window is None or length <= window:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    at = torch.arange(length, device=query.device)
    distance = at[:, None] - at[None, :]
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=(distance >= 0) & (distance < window), scale=scaling, enable_gqa=grouped
    )


AttentionInterface.register(NAME, attend)
