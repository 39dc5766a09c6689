"""The part of weight transports that touches tensors: bytes without copies, digests, and buckets by bytes.

Works on torch tensors and NumPy arrays alike and imports torch only where a torch tensor (or torch memory) is asked
for, so that transports stay usable with engines and backends that have no torch. Sizes are bytes; digests are those of
`weights.py` (xxh3-128 over a piece's little-endian contiguous bytes).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from miles_core.contracts.weights import Tensor, TensorSpec
from miles_core.errors import WeightError
from miles_core.weights import array_bytes, digest, piece_of

if TYPE_CHECKING:
    from miles_core.records import Array

Library = Literal["numpy", "torch"]

#: Safetensors dtype -> (bytes an element, NumPy dtype or "", torch dtype).
DTYPES: dict[str, tuple[int, str, str]] = {
    "F64": (8, "float64", "float64"),
    "F32": (4, "float32", "float32"),
    "F16": (2, "float16", "float16"),
    "BF16": (2, "", "bfloat16"),
    "F8_E4M3": (1, "", "float8_e4m3fn"),
    "F8_E5M2": (1, "", "float8_e5m2"),
    "I64": (8, "int64", "int64"),
    "I32": (4, "int32", "int32"),
    "I16": (2, "int16", "int16"),
    "I8": (1, "int8", "int8"),
    "U8": (1, "uint8", "uint8"),
    "BOOL": (1, "bool", "bool"),
}
_BY_NUMPY = {numpy: name for name, (_, numpy, _) in DTYPES.items() if numpy}
_BY_TORCH = {torch: name for name, (_, _, torch) in DTYPES.items()}


def library_of(tensor: Tensor) -> Library:
    """Whose tensor this is; `WeightError` for anything but torch and NumPy."""
    if isinstance(tensor, np.ndarray):
        return "numpy"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return "torch"
    raise WeightError(
        f"a weight stream holds {type(tensor).__name__}, neither a torch tensor nor a NumPy array",
        fix="export torch tensors or NumPy arrays",
    )


def dtype_name(tensor: Tensor) -> str:
    """The dtype as safetensors spells it (`F32`, `BF16`, …)."""
    library = library_of(tensor)
    own = str(tensor.dtype).removeprefix("torch.")
    name = (_BY_NUMPY if library == "numpy" else _BY_TORCH).get(own)
    if name is None:
        raise WeightError(f"a weight tensor has dtype {own}, which no transport carries", fix=f"use {sorted(DTYPES)}")
    return name


def itemsize(dtype: str) -> int:
    """Bytes an element of a safetensors dtype."""
    if dtype not in DTYPES:
        raise WeightError(f"unknown dtype {dtype!r} in a tensor spec", fix=f"use one of {sorted(DTYPES)}")
    return DTYPES[dtype][0]


def nbytes(spec: TensorSpec) -> int:
    """Bytes of the whole tensor."""
    total = itemsize(spec.dtype)
    for n in spec.shape:
        total *= n
    return total


def as_bytes(tensor: Tensor) -> Array:
    """The contiguous bytes of a tensor as uint8 [nbytes]: a view where it is contiguous in host memory, else a copy."""
    if library_of(tensor) == "numpy":
        return array_bytes(tensor)
    import torch

    if not tensor.numel():
        return np.zeros(0, np.uint8)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if sys.byteorder != "little" and flat.element_size() > 1:
        return array_bytes(flat.numpy())
    return flat.view(torch.uint8).numpy()  # type: ignore[no-any-return]


def check_spec(spec: TensorSpec, tensor: Tensor) -> None:
    """Raise `WeightError` where shape or dtype of `tensor` are not those of `spec`."""
    found = (tuple(tensor.shape), dtype_name(tensor))
    if found != (tuple(spec.shape), spec.dtype):
        raise WeightError(
            f"tensor {spec.name!r} is {found[1]} {list(found[0])}; its spec says {spec.dtype} {list(spec.shape)}",
            fix="export the shape and dtype that the dry pass announced",
        )


def piece_digests(spec: TensorSpec, tensor: Tensor) -> tuple[str, ...]:
    """One digest per piece of `spec`, from the whole tensor (host or device)."""
    check_spec(spec, tensor)
    if not spec.pieces:
        return (digest(as_bytes(tensor)),)
    return tuple(digest(as_bytes(piece_of(tensor, piece))) for piece in spec.pieces)


def pack(specs: Sequence[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Cut a stream into buckets of at most `limit` bytes, in its own order.

    A tensor larger than `limit` is a bucket of its own: tensors are never split.
    """
    buckets: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        size = nbytes(spec)
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(spec)
        room -= size
    return buckets


def take(stream: Iterator[tuple[TensorSpec, Tensor]], bucket: Sequence[TensorSpec]) -> list[tuple[TensorSpec, Tensor]]:
    """The next tensors of `stream`, which must be those that `bucket` planned."""
    taken = []
    for spec in bucket:
        found = next(stream, None)
        if found is None or found[0].name != spec.name:
            name = "its end" if found is None else repr(found[0].name)
            raise WeightError(
                f"the weight stream gave {name} where the plan expects {spec.name!r}",
                fix="export the same tensors in the same order in every pass",
            )
        check_spec(spec, found[1])
        taken.append((spec, found[1]))
    return taken


#: Tensors inside a bucket's memory start at multiples of this many bytes.
ALIGN = 64


def offsets(bucket: Iterable[TensorSpec]) -> tuple[list[int], int]:
    """Where each tensor of a bucket starts in the bucket's memory, and how many bytes the bucket needs."""
    at, found = 0, []
    for spec in bucket:
        found.append(at)
        at += -(-nbytes(spec) // ALIGN) * ALIGN
    return found, at


def write(memory: Array, offset: int, tensor: Tensor) -> int:
    """Copy a tensor's bytes into uint8 `memory` from `offset` on; the number of bytes."""
    size = int(tensor.nbytes)
    if not size:
        return 0
    target = memory[offset : offset + size]
    if library_of(tensor) == "torch" and not tensor.is_contiguous():
        import torch

        shaped = torch.from_numpy(target).view(tensor.dtype).view(tensor.shape)
        shaped.copy_(tensor.detach())  # one pass, also from a device
    else:
        np.copyto(target, as_bytes(tensor))
    return size


def view(memory: Array, offset: int, spec: TensorSpec, library: Library) -> Tensor:
    """The tensor that lies at `offset` of uint8 `memory`, sharing it."""
    raw = memory[offset : offset + nbytes(spec)]
    if library == "torch":
        import torch

        dtype = getattr(torch, DTYPES[spec.dtype][2])
        if not len(raw):  # empty arrays have strides that torch does not reinterpret
            return torch.empty(spec.shape, dtype=dtype)
        return torch.from_numpy(raw).view(dtype).view(spec.shape)
    if not DTYPES[spec.dtype][1]:
        raise WeightError(f"NumPy has no dtype {spec.dtype} ({spec.name!r})", fix="export torch tensors")
    return raw.view(DTYPES[spec.dtype][1]).reshape(spec.shape)
