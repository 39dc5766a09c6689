"""Low-rank adapters over one base: many policies in one batch, each row with its own.

Every place where a layer multiplies (q, k and v together; the output; gate and up together; down) keeps the A of all
adapters stacked, and their B stacked transposed. One product with each serves the whole batch: what a row's low-rank
values would owe to another row's adapter is set to 0 in between, and a row without adapter gets exactly + 0. Cost
grows with the number of policies, which is small. Names are PEFT's; the scale is inside B (y = W x + B A x).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from miles_core.contracts.weights import TensorSpec
from miles_core.errors import WeightError
from miles_rollout_local.weights import DTYPES, SPELLED, digest

Array = np.ndarray[Any, Any]
PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"


def is_adapter(name: str) -> bool:
    """Whether a stream's tensor belongs to an adapter."""
    return name.startswith(PREFIX) or name.endswith((A, B)) or ".lora_" in name


@dataclass(frozen=True, slots=True)
class Place:
    """Where a projection is computed: layer, product, its first output there, outputs and inputs."""

    layer: int
    product: str
    first: int
    out: int
    inside: int


@dataclass(slots=True)
class Stack:
    """The adapters of one product. `a` [R, in], `b` [R, out] (B transposed), `owner`: whose each row is.

    `runs`: adapter -> its rows; `rows`: (adapter, projection) -> its rows.
    """

    a: torch.Tensor
    b: torch.Tensor
    owner: tuple[int, ...]
    runs: dict[int, slice] = field(default_factory=dict)
    rows: dict[tuple[int, str], slice] = field(default_factory=dict)


class Adapters:
    """The adapters of every policy that a lane serves. Runs in the worker's thread, but for `digests`."""

    def __init__(self, model: Any) -> None:
        self.places: dict[str, Place] = {}  # projection, by its Hugging Face name
        for index, layer in enumerate(model.model.layers):
            joined = {"qkv": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",)}
            if hasattr(layer.mlp, "gate_proj"):
                joined |= {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
            for product, names in joined.items():
                first = 0
                for name in names:
                    home = "self_attn" if product in ("qkv", "o") else "mlp"
                    out, inside = getattr(getattr(layer, home), name).weight.shape
                    self.places[f"model.layers.{index}.{home}.{name}"] = Place(index, product, first, out, inside)
                    first += out
        self.widths = {(p.layer, p.product): p.first + p.out for p in self.places.values()}  # the last one's end
        self.dtype: torch.dtype = model.dtype
        self.number: dict[str, int] = {}  # policy -> its adapter
        self.live: set[int] = set()  # adapters that do anything: some B is not 0
        self.held: dict[int, dict[str, torch.Tensor]] = {}
        self.stacks: dict[tuple[int, str], Stack] = {}
        self.incoming: dict[str, torch.Tensor] = {}

    # --- weights -----------------------------------------------------------------------------------------------------

    def load(self, bucket: Sequence[tuple[TensorSpec, Any]]) -> None:
        """Take tensors of the coming version. Raises `WeightError` for a wrong name, shape, dtype, or a second copy."""
        for spec, value in bucket:
            tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
            place, last = self._place(spec)
            if DTYPES.get(spec.dtype) != self.dtype or tensor.dtype != self.dtype:
                raise WeightError(
                    f"tensor {spec.name!r} is {spec.dtype} ({SPELLED.get(tensor.dtype, tensor.dtype)} came); the "
                    f"engine computes in {SPELLED[self.dtype]}",
                    fix="set rollout.dtype to what the trainer publishes",
                )
            wide = place.inside if last == A else place.out
            axis = 1 if last == A else 0
            if tensor.shape != tuple(spec.shape) or tensor.dim() != 2 or tensor.shape[axis] != wide:
                raise WeightError(
                    f"tensor {spec.name!r} has shape {list(tensor.shape)} (announced as {list(spec.shape)}); axis "
                    f"{axis} must be {wide}",
                    fix="publish adapters of the model that the engine runs",
                )
            if spec.name in self.incoming:
                raise WeightError(
                    f"tensor {spec.name!r} came twice in one version", fix="send every tensor once a version"
                )
            self.incoming[spec.name] = tensor.detach().clone()

    def _place(self, spec: TensorSpec) -> tuple[Place, str]:
        last = next((last for last in (A, B) if spec.name.endswith(last)), "")
        name = spec.name.removeprefix(PREFIX).removesuffix(last)
        place = self.places.get(name)
        if not last or place is None:
            raise WeightError(
                f"the engine has no place for the adapter tensor {spec.name!r}; it runs plain LoRA (`lora_A`, `lora_B`)"
                f" on {', '.join(dict.fromkeys(n.rpartition('.')[2] for n in self.places))} of every layer",
                fix="choose these as extensions.lora.targets, without dora, or set extensions.lora.export: merged",
            )
        return place, last

    def activate(self, policy: str) -> None:
        """What was loaded becomes the adapter of `policy`, whole. Raises `WeightError` for one that is not complete or
        not finite: in a batch it would reach rows of other policies."""
        self._check_complete(policy)
        number = self.number.setdefault(policy, len(self.number))
        self.held[number], self.incoming = self.incoming, {}
        self.live.discard(number)
        if any(bool(tensor.any()) for name, tensor in self.held[number].items() if name.endswith(B)):
            self.live.add(number)
        self.stacks = {
            key: self._stack(key) for key in dict.fromkeys(self._key(n) for h in self.held.values() for n in h)
        }

    def _check_complete(self, policy: str) -> None:
        for name, tensor in self.incoming.items():
            other = name.removesuffix(A) + B if name.endswith(A) else name.removesuffix(B) + A
            mate = self.incoming.get(other)
            ranks = (
                tensor.shape[0 if name.endswith(A) else 1],
                mate is not None and mate.shape[0 if other.endswith(A) else 1],
            )
            if ranks[0] != ranks[1]:
                raise WeightError(
                    f"the adapter of policy {policy!r} has {name!r} of rank {ranks[0]}, and "
                    + (f"no {other!r}" if mate is None else f"{other!r} of rank {ranks[1]}"),
                    fix="send A and B of every adapted layer between begin and end",
                )
            if not bool(tensor.isfinite().all()):
                raise WeightError(
                    f"the adapter of policy {policy!r} is not finite: {name!r}",
                    fix="look for a learning rate that is too high; the version before still serves",
                )

    def _key(self, name: str) -> tuple[int, str]:
        place = self.places[name.removeprefix(PREFIX).removesuffix(A).removesuffix(B)]
        return place.layer, place.product

    def _stack(self, key: tuple[int, str]) -> Stack:
        parts_a, parts_b, owner = [], [], []
        runs: dict[int, slice] = {}
        rows: dict[tuple[int, str], slice] = {}
        count = 0
        for number, tensors in sorted(self.held.items()):
            begun = count
            for name, a in tensors.items():
                if not name.endswith(A) or self._key(name) != key:
                    continue
                layer = name.removesuffix(A)
                place = self.places[layer.removeprefix(PREFIX)]
                wide = a.new_zeros(a.shape[0], self.widths[key])
                wide[:, place.first : place.first + place.out] = tensors[layer + B].t()
                parts_a.append(a)
                parts_b.append(wide)
                rows[number, layer] = slice(count, count + a.shape[0])
                count += a.shape[0]
            owner += [number] * (count - begun)
            if count > begun:
                runs[number] = slice(begun, count)
        return Stack(torch.cat(parts_a), torch.cat(parts_b), tuple(owner), runs, rows)

    def digests(self, policy: str, specs: Sequence[TensorSpec]) -> Mapping[str, tuple[str, ...]]:
        """xxh3-128 of each piece, read from the stacks that the engine computes with."""
        number = self.number[policy]
        found = {}
        for spec in specs:
            place, last = self._place(spec)
            stack = self.stacks.get((place.layer, place.product))
            rows = None if stack is None else stack.rows.get((number, spec.name.removesuffix(last)))
            if stack is None or rows is None:
                raise WeightError(
                    f"policy {policy!r} has no adapter tensor {spec.name!r} here", fix="ask for what was loaded"
                )
            view = stack.a[rows] if last == A else stack.b[rows, place.first : place.first + place.out].t()
            boxes = [tuple(slice(o, o + n) for o, n in zip(p.offsets, p.shape, strict=True)) for p in spec.boxes()]
            found[spec.name] = tuple(digest(view[box]) for box in boxes)
        return found

    # --- a forward ---------------------------------------------------------------------------------------------------

    def mix(self, which: Array) -> Mix | None:
        """What a forward over rows with the adapters `which` (int64 [n]) adds; `None` where it is nothing."""
        present = np.unique(which).tolist()
        live = [number for number in present if number in self.live]
        if not live:
            return None
        if len(present) == 1:
            return Mix(self.stacks, live[0], None)
        return Mix(self.stacks, -1, torch.from_numpy(which))


class Mix:
    """The adapters of one forward's rows: all rows have adapter `only`, or row i has `which[i]`."""

    def __init__(self, stacks: Mapping[tuple[int, str], Stack], only: int, which: torch.Tensor | None) -> None:
        self._stacks, self._only, self._which = stacks, only, which
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}

    def add(self, layer: int, product: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """y + B A x, in place; `x` [n, in], `y` [n, out]."""
        stack = self._stacks.get((layer, product))
        if stack is None:
            return y
        if self._which is None:
            run = stack.runs.get(self._only)
            return y if run is None else y.addmm_(x @ stack.a[run].t(), stack.b[run])
        low = (x @ stack.a.t()).mul_(self._mask(stack.owner, self._which, x.dtype))
        return y.addmm_(low, stack.b)

    def _mask(self, owner: tuple[int, ...], which: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[n, R] of 1 where the row of the stack is the row's own, else 0; most layers share one."""
        if owner not in self._masks:
            self._masks[owner] = (which[:, None] == torch.tensor(owner)).to(dtype)
        return self._masks[owner]
