"""Torch modules without their numbers: what a model adapter builds, and what extensions make of it, on the meta device.

For `miles plan`, which says how large things are and must not need the memory for them. Inside `without_numbers` every
tensor that torch makes is a meta tensor, whatever device it was meant for; what draws or copies numbers does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: Bytes of an element, as safetensors spells its type.
WIDTHS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I8": 1, "U8": 1}


class _Meta(TorchFunctionMode):
    """Sends to the meta device what names a device, and lets no generator draw there."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {name: value for name, value in (kwargs or {}).items() if name != "generator"}
        if given.get("device") is not None:
            given["device"] = "meta"
        return func(*args, **given)


@contextmanager
def without_numbers() -> Iterator[None]:
    """See the module. What asks for a number inside (`.item()`, a comparison) raises as meta tensors do."""
    with torch.device("meta"), _Meta():
        yield


def is_module(built: Any) -> bool:
    """Whether `built` is a torch module all of whose parameters have no numbers."""
    return isinstance(built, torch.nn.Module) and all(p.is_meta for p in built.parameters())


def parameters(module: torch.nn.Module) -> dict[str, tuple[int, bool]]:
    """Name -> (elements, whether it is trained); tied parameters once."""
    return {name: (p.numel(), p.requires_grad) for name, p in module.named_parameters()}


def stream(module: torch.nn.Module, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and meta tensor of every parameter in torch's type `dtype`: what a backend's dry export pass begins with."""
    for name, parameter in module.named_parameters():
        yield name, torch.empty(parameter.shape, dtype=getattr(torch, dtype), device="meta")
