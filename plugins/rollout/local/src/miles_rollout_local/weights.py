"""Names of the weight stream and where their bytes live in the running model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from miles_core.contracts.weights import TensorSpec
from miles_core.errors import WeightError

#: safetensors' spelling of dtypes.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SPELLED = {dtype: name for name, dtype in DTYPES.items()}


class LiveWeights:
    """The parameters of a module under every Hugging Face name that a stream may use for them.

    Tied parameters are one parameter with several names. Experts that the module keeps stacked are reachable under
    their checkpoint names (`mlp.experts.3.up_proj.weight`) too. `load` copies in place; nothing is ever replaced.
    """

    def __init__(self, model: Any) -> None:
        self.owner: dict[str, str] = {}  # stream name -> parameter name
        self.views: dict[str, torch.Tensor] = {}
        self.sizes: dict[str, int] = {}
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            owner = first.setdefault(id(parameter), name)
            self.sizes[owner] = parameter.numel()
            self._add(name, owner, parameter.data)
            if parameter.dim() == 3 and name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
                self._add_experts(name, parameter.data)
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                self.sizes[name] = buffer.numel()
                self._add(name, name, buffer)
        self.loaded: dict[str, int] = {}
        self.seen: set[str] = set()

    def _add(self, name: str, owner: str, view: torch.Tensor) -> None:
        self.owner[name], self.views[name] = owner, view

    def _add_experts(self, name: str, stacked: torch.Tensor) -> None:
        stem, kind = name.rsplit(".", 1)
        for expert, block in enumerate(stacked):
            if kind == "down_proj":
                self._add(f"{stem}.{expert}.down_proj.weight", name, block)
                continue
            gate, up = block.chunk(2)
            self._add(f"{stem}.{expert}.gate_proj.weight", name, gate)
            self._add(f"{stem}.{expert}.up_proj.weight", name, up)

    def restart(self) -> None:
        """Forget what was loaded: a new version begins."""
        self.loaded, self.seen = {}, set()

    def load(self, bucket: Sequence[tuple[TensorSpec, Any]]) -> None:
        """Copy tensors into the live model. Raises `WeightError` for a wrong name, shape, dtype, or a second copy."""
        for spec, value in bucket:
            view = self._view(spec)
            tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
            if tensor.dtype != view.dtype or tuple(tensor.shape) != tuple(view.shape):
                raise WeightError(
                    f"tensor {spec.name!r} was announced as {spec.dtype} {list(spec.shape)}; what came is "
                    f"{SPELLED.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}",
                    fix="hand over the tensor that the spec describes",
                )
            if spec.name in self.seen:
                raise WeightError(
                    f"tensor {spec.name!r} came twice in one version", fix="send every tensor once a version"
                )
            with torch.no_grad():
                view.copy_(tensor)
            self.seen.add(spec.name)
            owner = self.owner[spec.name]
            self.loaded[owner] = self.loaded.get(owner, 0) + view.numel()

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor of the model's own folder, in whatever format it has there. Raises `KeyError` for a name that
        the model does not have."""
        if name not in self.views or self.views[name].shape != tensor.shape:
            raise KeyError(f"no parameter {name!r} of shape {list(tensor.shape)}")
        with torch.no_grad():
            self.views[name].copy_(tensor)

    def check_complete(self) -> None:
        """Raises `WeightError` naming what this version did not bring."""
        missing = [name for name, size in self.sizes.items() if self.loaded.get(name, 0) != size]
        if missing:
            raise WeightError(
                f"{len(missing)} of {len(self.sizes)} parameters did not come (or came in part, or twice): "
                f"{', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}",
                fix="send the whole weight stream between begin and end",
            )

    def digests(self, specs: Sequence[TensorSpec]) -> Mapping[str, tuple[str, ...]]:
        """xxh3-128 of each piece, over its little-endian contiguous bytes, read from the live parameters."""
        found = {}
        for spec in specs:
            view = self._view(spec)
            digests = []
            for piece in spec.boxes():
                box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.shape, strict=True))
                digests.append(digest(view[box]))
            found[spec.name] = tuple(digests)
        return found

    def _view(self, spec: TensorSpec) -> torch.Tensor:
        view = self.views.get(spec.name)
        if view is None:
            raise WeightError(
                f"the model has no tensor {spec.name!r}; it has {len(self.sizes)}, such as "
                f"{', '.join(list(self.sizes)[:3])}",
                fix="publish the architecture that the engine runs, under its Hugging Face names",
            )
        if tuple(spec.shape) != tuple(view.shape):
            raise WeightError(
                f"tensor {spec.name!r} has shape {list(spec.shape)}; the engine holds {list(view.shape)}",
                fix="publish the architecture that the engine runs",
            )
        if DTYPES.get(spec.dtype) != view.dtype:
            raise WeightError(
                f"tensor {spec.name!r} is {spec.dtype}; the engine computes in {SPELLED[view.dtype]}",
                fix="set rollout.dtype to what the trainer publishes",
            )
        return view


def digest(tensor: torch.Tensor) -> str:
    """xxh3-128 hex over the little-endian contiguous bytes."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    if sys.byteorder == "big":
        flat = flat.reshape(-1, tensor.element_size())[:, ::-1].copy()
    return xxhash.xxh3_128_hexdigest(flat)
