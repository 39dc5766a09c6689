"""Weights drawn from a seed, with a generator of their own: same seed, same bits, and no global state is touched."""

from __future__ import annotations

import torch
from torch import nn


def fill(module: nn.Module, seed: int, std: float, vocabulary: int) -> None:
    """Draw every parameter of `module` in place, in the order of their names in the module (tied ones once).

    Norm weights are 1, biases 0, all else normal with `std`, which is what the verified architectures do themselves;
    the embedding of a padding id is 0, and so is a value head. Rows past `vocabulary` are padding: 0, and without
    influence on the draw.
    """
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    norms = {id(p) for m in module.modules() if "norm" in type(m).__name__.lower() for p in m.parameters(recurse=False)}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if id(parameter) in norms:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            elif name.endswith("bias") or name == "value.weight":
                parameter.zero_()
            elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
                parameter.zero_()[:vocabulary].normal_(0.0, std, generator=generator)
            else:
                parameter.normal_(0.0, std, generator=generator)
        for child in module.modules():
            if isinstance(child, nn.Embedding) and child.padding_idx is not None:
                child.weight[child.padding_idx].zero_()
