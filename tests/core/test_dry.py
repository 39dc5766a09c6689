"""Modules without numbers: as many parameters as with them, and no memory for them."""

import pytest
import torch
from torch import nn

from miles_core.numerics import _dry as dry


def build(size=8):
    """What adapters do: a meta module is emptied on the CPU, filled from a generator and from files, given a buffer."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Embedding(5, size), nn.Linear(size, size), nn.LayerNorm(size), nn.Linear(size, 5))
    module = module.to_empty(device="cpu")
    module[3].weight = module[0].weight
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.1, generator=generator)
        module[0].weight[:2].copy_(torch.ones(2, size, device=torch.device("cpu")))
    module[1].requires_grad_(False)
    module[2].register_buffer("steps", torch.arange(size, device="cpu").float() / size)
    return module


def test_the_same_parameters_and_none_of_the_numbers():
    real = build()
    with dry.without_numbers():
        made = build()
        huge = build(1 << 20)  # 4 TiB for the first linear layer
    assert dry.is_module(made) and not dry.is_module(real) and not dry.is_module(object())
    assert dry.parameters(made) == dry.parameters(real)
    assert dry.parameters(made)["1.weight"] == (64, False) and "3.weight" not in dry.parameters(made)  # tied
    assert dry.parameters(huge)["1.weight"][0] == 1 << 40
    shapes = [(name, tuple(p.shape)) for name, p in real.named_parameters()]
    found = list(dry.stream(made, "bfloat16"))
    assert [(name, tuple(t.shape)) for name, t in found] == shapes
    assert all(t.is_meta and t.dtype == torch.bfloat16 for _, t in found)


def test_outside_everything_is_as_it_was():
    with pytest.raises(RuntimeError, match="meta"), dry.without_numbers():
        build()[1].weight.sum().item()
    assert torch.zeros(2).device.type == "cpu" and build()[1].weight.device.type == "cpu"
