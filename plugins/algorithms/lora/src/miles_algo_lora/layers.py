"""The adapted linear layer: y = W x + b + s·B(A x), with W frozen (arXiv 2106.09685), and its DoRA form.

A linear layer becomes an `AdaptedLinear` *in place*: its class changes, its parameters keep their names, and `lora_A`
and `lora_B` stand beside them under the names that PEFT uses. So weights load, export and blend as if nothing had
happened, and code that reads `q_proj.weight` still finds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from miles_core.seeds import derive

A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"


@dataclass
class Switch:
    """What the layers of one module are told between forwards: whether they adapt, and the key of their dropout masks
    (`None`: nothing is dropped)."""

    off: bool = False
    key: int | None = None
    layers: list[AdaptedLinear] = field(default_factory=list)


class AdaptedLinear(nn.Linear):
    """Made by `adapt`, never by its constructor."""

    scale: float
    dropout: float
    number: int
    switch: Switch
    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_magnitude_vector: nn.Parameter | None

    def forward(self, input: Tensor) -> Tensor:
        """[…, in] -> […, out]. With adapters off, bit for bit what the plain layer gives."""
        if self.switch.off:
            return functional.linear(input, self.weight, self.bias)
        x = input
        if self.switch.key is not None:
            x = x * self._mask(x, self.switch.key)
        low = functional.linear(x, self.lora_A.weight) * self.scale
        if self.lora_magnitude_vector is None:
            return functional.linear(input, self.weight, self.bias) + functional.linear(low, self.lora_B.weight)
        y = functional.linear(input, self.weight) + functional.linear(low, self.lora_B.weight)
        with torch.no_grad():  # the length is a constant of the gradient (arXiv 2402.09353, §4.3)
            length = direction(self.weight, self.lora_A.weight, self.lora_B.weight, self.scale).norm(dim=1)
        y = torch.mul(y, self.lora_magnitude_vector / length)
        return y if self.bias is None else y + self.bias

    def _mask(self, x: Tensor, key: int) -> Tensor:
        """0 with probability `dropout`, else 1 / (1 - dropout); the same in a recomputation, which has the same key."""
        generator = torch.Generator(x.device).manual_seed(derive(key, "", "mask", self.number))
        kept = torch.rand(x.shape, generator=generator, device=x.device) >= self.dropout
        return kept.to(x.dtype) / (1.0 - self.dropout)


def direction(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + s·B A, [out, in], in the type of `weight`."""
    return torch.addmm(weight, b.to(weight.dtype), a.to(weight.dtype), alpha=scale)


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor | None = None) -> Tensor:
    """The one matrix that computes what the adapted layer does: computed in float32, in the type of `weight`.

    W + s·B A, and under DoRA each row scaled to its magnitude.
    """
    whole = direction(weight.float(), a.float(), b.float(), scale)
    if magnitude is not None:
        whole = whole * (magnitude.float() / whole.norm(dim=1))[:, None]
    return whole.to(weight.dtype)


def adapt(
    linear: nn.Linear, *, rank: int, scale: float, dora: bool, dropout: float, seed: int, number: int, switch: Switch
) -> None:
    """Turn `linear` into an `AdaptedLinear`. A is drawn uniformly in ±1/sqrt(in) (PEFT's Kaiming draw), B is 0."""
    weight = linear.weight
    device, dtype = weight.device, weight.dtype
    linear.__class__ = AdaptedLinear
    assert isinstance(linear, AdaptedLinear)
    linear.lora_A = _empty(linear.in_features, rank, device, dtype)
    linear.lora_B = _empty(rank, linear.out_features, device, dtype)
    linear.lora_magnitude_vector = None
    with torch.no_grad():
        bound = 1.0 / math.sqrt(linear.in_features)
        drawn = torch.empty(rank, linear.in_features)
        drawn.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
        linear.lora_A.weight.copy_(drawn)
        linear.lora_B.weight.zero_()
        if dora:
            linear.lora_magnitude_vector = nn.Parameter(weight.detach().norm(dim=1))
    linear.scale, linear.dropout, linear.number, linear.switch = scale, dropout, number, switch
    switch.layers.append(linear)


def _empty(inside: int, outside: int, device: torch.device, dtype: torch.dtype) -> nn.Linear:
    """A linear layer that drew no number of the global stream."""
    return nn.Linear(inside, outside, bias=False, device="meta", dtype=dtype).to_empty(device=device)
