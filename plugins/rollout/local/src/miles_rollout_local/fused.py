"""Forward of the Llama family (Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE) over a KV arena, one kernel where it can be.

Same mathematics as the model's own forward, without its per-call Python: q, k, v in one matrix product, norms of
queries and keys together, rotary embedding from a table, keys and values written by one copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from miles_rollout_local.adapters import Adapters, Mix


class FusedForward:
    """Runs a verified model. Keys and values lie head by head ([…, 2 * kv heads, tokens, head dim], keys first):
    attention reads each head's tokens in one run of memory."""

    takes_past = True

    def __init__(self, model: Any, max_length: int, *, invariant: bool = False) -> None:
        settings = model.config
        self.body, self.head = model.model, model.lm_head
        self.layers = list(model.model.layers)
        attention = self.layers[0].self_attn
        self.heads = settings.num_attention_heads
        self.kv_heads = settings.num_key_value_heads
        self.head_dim = attention.head_dim
        self.scaling = attention.scaling
        self.hidden = settings.hidden_size
        self.eps = settings.rms_norm_eps
        self.normed = hasattr(attention, "q_norm")
        self.invariant = invariant
        self.adapters: Adapters | None = None  # set where policies have adapters over this model
        positions = torch.arange(-(-max_length // 16) * 16)  # constant shapes pad to whole blocks
        cos, sin = model.model.rotary_emb(self.head.weight[:1, None], positions[None])
        # rotate_half(x) * sin == roll(x) * signed sin, with the first half's sign turned.
        half = self.head_dim // 2
        self.cos = cos[0, :, None]  # [positions, 1, head_dim]
        self.sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)[:, None]

    def prefill(
        self,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        which: Any = None,
        past: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`ids` int64 [b, t], padded on the right to t; `lengths` int64 [b]; `which` int64 [b]: each row's adapter;
        `past`: entries [layers, b, 2 * kv heads, P, head dim] of what stands before, padded on the right, and how many.

        Returns logits float32 [b, vocabulary] after each row's last token, and keys and values
        [layers, b, 2 * kv heads, t, head dim] of `ids`; entries beyond a row's length are meaningless.
        """
        b, t = ids.shape
        shape = (len(self.layers), b, 2 * self.kv_heads, t, self.head_dim)
        entries = torch.empty(shape, dtype=self.head.weight.dtype)

        def attend(index: int, heads: torch.Tensor) -> torch.Tensor:
            heads = heads.view(b, t, -1, self.head_dim).transpose(1, 2)
            entries[index] = heads[:, self.heads :]
            q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
            if past is not None:
                k, v = torch.cat([past[0][index], heads[:, self.heads :]], 2).chunk(2, 1)
            # Padding stands on the right, so a causal mask already hides it from every real token.
            out = F.scaled_dot_product_attention(
                *(q, k, v, mask), is_causal=mask is None, scale=self.scaling, enable_gqa=self.heads != self.kv_heads
            )
            return out.transpose(1, 2).reshape(b * t, -1)

        positions, mask = torch.arange(t).repeat(b), None
        if past is not None:
            positions = (torch.arange(t) + past[1][:, None]).view(-1)
            before = torch.arange(past[0].shape[3]) < past[1][:, None]  # [b, P]
            own = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)
            mask = torch.cat([before[:, None].expand(b, t, -1), own], -1)[:, None]
        mix = None if which is None else self._mix(np.repeat(which, t))
        x = self._layers(ids.reshape(-1), positions, attend, mix)
        last = torch.arange(b) * t + lengths - 1
        return self._logits(x[last]), entries

    def decode(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        arena: torch.Tensor,
        span: int,
        mask: torch.Tensor | None,
        which: Any = None,
    ) -> torch.Tensor:
        """One token for rows 0 … n-1 of `arena` [layers, rows, 2 * kv heads, capacity, head dim].

        `ids`, `positions` int64 [n]; entries are written at `positions`; `mask` bool [n, 1, 1, span] says which of the
        first `span` entries a row may see (`None`: all); `which` int64 [n]: each row's adapter. Returns
        logits float32 [n, vocabulary].
        """
        n = len(ids)
        place = places(arena, positions)

        def attend(index: int, heads: torch.Tensor) -> torch.Tensor:
            cache = arena[index]
            cache.view(-1, self.head_dim).index_copy_(0, place, heads[:, self.heads :].reshape(-1, self.head_dim))
            seen = cache[:n, :, :span]
            q = heads[:, : self.heads].view(n, self.kv_heads, -1, self.head_dim)
            k, v = seen[:, : self.kv_heads], seen[:, self.kv_heads :]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scaling).reshape(n, -1)

        mix = None if which is None else self._mix(which)
        return self._logits(self._layers(ids, positions, attend, mix))

    def every(self, ids: torch.Tensor, which: Any = None) -> Callable[[torch.Tensor], torch.Tensor]:
        """As `prefill`, keeping no entries. Returns a function of flat places (int64 [n], row * t + token): the logits
        float32 [n, vocabulary] that follow them."""
        b, t = ids.shape

        def attend(index: int, heads: torch.Tensor) -> torch.Tensor:
            heads = heads.view(b, t, -1, self.head_dim).transpose(1, 2)
            q = heads[:, : self.heads]
            k, v = heads[:, self.heads :].chunk(2, 1)
            out = F.scaled_dot_product_attention(
                *(q, k, v), is_causal=True, scale=self.scaling, enable_gqa=self.heads != self.kv_heads
            )
            return out.transpose(1, 2).reshape(b * t, -1)

        mix = None if which is None else self._mix(np.repeat(which, t))
        x = self._layers(ids.reshape(-1), torch.arange(t).repeat(b), attend, mix)
        return lambda places: self._logits(x[places])

    def _mix(self, which: Any) -> Mix | None:
        return None if self.adapters is None else self.adapters.mix(which)

    def _layers(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Callable[[int, torch.Tensor], torch.Tensor],
        mix: Mix | None,
    ) -> torch.Tensor:
        x = F.embedding(ids, self.body.embed_tokens.weight)
        cos, sin = self.cos[positions], self.sin[positions]
        shape, half, mixed = (self.hidden,), self.head_dim // 2, self.heads + self.kv_heads
        for index, layer in enumerate(self.layers):
            attention = layer.self_attn
            h = F.rms_norm(x, shape, layer.input_layernorm.weight, self.eps)
            heads = F.linear(h, layer.qkv_weight, layer.qkv_bias)
            if mix is not None:
                heads = mix.add(index, "qkv", h, heads)
            heads = heads.view(len(x), -1, self.head_dim)
            turned = qk = heads[:, :mixed]
            if self.normed:
                scale = torch.cat(
                    [
                        attention.q_norm.weight.expand(self.heads, -1),
                        attention.k_norm.weight.expand(self.kv_heads, -1),
                    ]
                )
                turned = F.rms_norm(qk, (self.head_dim,), None, self.eps) * scale
            torch.addcmul(turned * cos, turned.roll(half, -1), sin, out=qk)
            seen = attend(index, heads)
            x = _project(x, seen, attention.o_proj)
            if mix is not None:
                x = mix.add(index, "o", seen, x)
            h = F.rms_norm(x, shape, layer.post_attention_layernorm.weight, self.eps)
            x = self._mlp(x, h, layer, index, mix)
        return x

    def _mlp(self, x: torch.Tensor, h: torch.Tensor, layer: Any, index: int, mix: Mix | None) -> torch.Tensor:
        mlp = layer.mlp
        if not hasattr(mlp, "experts"):
            both = F.linear(h, layer.gate_up_weight, layer.gate_up_bias)
            if mix is not None:
                both = mix.add(index, "gate_up", h, both)
            gate, up = both.chunk(2, -1)
            active = mlp.act_fn(gate) * up
            x = _project(x, active, mlp.down_proj)
            return x if mix is None else mix.add(index, "down", active, x)
        if self.invariant:
            return x + _all_experts(h, mlp)
        return x + mlp(h[None])[0]

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.rms_norm(x, (self.hidden,), self.body.norm.weight, self.eps)).float()


def places(arena: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 [n * heads]: where token `positions[row]` of every head of rows 0 … n-1 lies among a layer's entries."""
    heads, capacity = arena.shape[2:4]
    first = torch.arange(len(positions) * heads).view(-1, heads) * capacity
    return (first + positions[:, None]).view(-1)


def _project(x: torch.Tensor, y: torch.Tensor, linear: Any) -> torch.Tensor:
    """x + linear(y), in one product where there is no bias."""
    if linear.bias is None:
        return torch.addmm(x, y, linear.weight.t())
    return x + F.linear(y, linear.weight, linear.bias)


def _all_experts(h: torch.Tensor, mlp: Any) -> torch.Tensor:
    """A mixture of experts in constant shapes: every expert sees every row, and unrouted ones weigh 0.

    Dispatching rows to experts makes matrix shapes depend on the neighbours' routing, and so their bits.
    """
    _, weights, chosen = mlp.gate(h)
    experts = mlp.experts
    gate, up = torch.matmul(h, experts.gate_up_proj.transpose(1, 2)).chunk(2, -1)  # [experts, n, intermediate]
    out = torch.matmul(experts.act_fn(gate) * up, experts.down_proj.transpose(1, 2))
    share = torch.zeros(len(h), len(out), dtype=out.dtype).scatter_(1, chosen, weights.to(out.dtype))
    return (out * share.t()[:, :, None]).sum(0)
