"""From a GGUF file to a Hugging Face folder: dequantised tensors, `config.json`, tokenizer and chat template.

The weights are streamed: one tensor at a time is in memory. Quantised tensors become float32, exactly as the package
`gguf` (and transformers) dequantise them; float32, float16 and bfloat16 stay as they are.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from miles_core.errors import ModelSourceError
from miles_model_gguf import architectures, tokenizer
from miles_model_gguf.reader import Header, TensorInfo, damaged, read_header

Array = np.ndarray[Any, Any]

#: Raised whenever what is written for a given file changes: folders of older converters are then not used.
VERSION = 1
#: Name in safetensors and NumPy type of tensors that are written as they are (bfloat16 has none: its bits are moved).
_PLAIN: dict[str, tuple[str, Any]] = {
    "F32": ("F32", np.float32),
    "F16": ("F16", np.float16),
    "BF16": ("BF16", np.uint16),
}
_SIZES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A tensor as it lies in the file: `kind` is a `gguf.GGMLQuantizationType`, `nbytes` its size there."""

    info: TensorInfo
    kind: Any
    row_bytes: int
    nbytes: int

    @property
    def dtype(self) -> str:
        return str(_PLAIN[self.kind.name][0]) if self.kind.name in _PLAIN else "F32"


def convert(path: Path, folder: Path, progress: Callable[[int, int], None]) -> str:
    """Write the model of `path` into the existing `folder`; say through `progress(done, of)` in parameters how far.

    Returns what was left out, in words ("" where nothing was). Raises `ModelSourceError` (see the README).
    """
    header = read_header(path)
    settings = architectures.config(path, header)
    plan = architectures.tensors(path, header)
    stored = [_stored(path, info) for info in header.tensors]
    size = path.stat().st_size
    short = next((s for s in stored if s.info.offset + s.nbytes > size), None)
    if short is not None:
        raise damaged(
            path,
            f"it ends after {size} bytes, and tensor {short.info.name!r} reaches to {short.info.offset + short.nbytes}",
        )
    tokenizer.write(path, header.metadata, folder)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    _write_weights(path, folder / "model.safetensors", header, stored, plan, progress)
    return tokenizer.unconverted(header.metadata)


def _stored(path: Path, info: TensorInfo) -> _Stored:
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(info.kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if kind.name not in _PLAIN:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        name = next((k.name for k in gguf.GGMLQuantizationType if k == info.kind), f"number {info.kind}")
        raise ModelSourceError(
            f"tensor {info.name!r} of {path} has quantisation {name}, which the package gguf {_version()} cannot "
            "dequantise",
            fix="use another file of the model (Q4_K_M, Q8_0 or F16, for example), or a newer gguf package",
        ) from error
    if info.shape[-1] % block:
        raise damaged(path, f"rows of {info.name!r} have {info.shape[-1]} numbers; {kind.name} has blocks of {block}")
    row_bytes = info.shape[-1] // block * block_bytes
    rows = int(np.prod(info.shape[:-1], dtype=np.int64))
    return _Stored(info=info, kind=kind, row_bytes=row_bytes, nbytes=rows * row_bytes)


def _version() -> str:
    from importlib.metadata import version

    return version("gguf")


def _write_weights(
    path: Path,
    target: Path,
    header: Header,
    stored: list[_Stored],
    plan: dict[str, Any],
    progress: Callable[[int, int], None],
) -> None:
    """One safetensors file (8 bytes of header length, JSON header, data): written here, because the library takes whole
    models only."""
    index: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in stored:
        # Only shapes matter here: a broadcast zero stands for the tensor and takes no memory.
        stand_in = np.broadcast_to(np.zeros((), np.uint8), tensor.info.shape)
        for name, shape in _shapes(plan[tensor.info.name], stand_in):
            end = at + int(np.prod(shape, dtype=np.int64)) * _SIZES[tensor.dtype]
            index[name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": [at, end]}
            at = end
    head = json.dumps(index).encode()
    head += b" " * (-len(head) % 8)
    total = sum(int(np.prod(t.info.shape, dtype=np.int64)) for t in stored)
    done = 0
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        target.open("wb") as out,
    ):
        out.write(len(head).to_bytes(8, "little") + head)
        for tensor in stored:
            _, change = plan[tensor.info.name]
            _emit(out, change, _numbers(data, tensor))
            done += int(np.prod(tensor.info.shape, dtype=np.int64))
            progress(done, total)


def _shapes(planned: Any, stand_in: Array) -> list[tuple[str, list[int]]]:
    target, _ = planned
    if "{}" in target:
        return [(target.format(expert), list(stand_in.shape[1:])) for expert in range(stand_in.shape[0])]
    return [(target, list(stand_in.shape))]


def _emit(out: BinaryIO, change: Callable[[Array], Any], numbers: Array) -> None:
    for _, part in change(numbers):
        out.write(np.ascontiguousarray(part).data)


def _numbers(data: mmap.mmap, tensor: _Stored) -> Array:
    """The tensor in the type that it is written in; a copy, so that the map may be closed."""
    import gguf

    raw = np.frombuffer(data[tensor.info.offset : tensor.info.offset + tensor.nbytes], np.uint8)
    found: Array
    if tensor.kind.name in _PLAIN:
        found = raw.view(_PLAIN[tensor.kind.name][1])
    else:
        found = gguf.dequantize(raw.reshape(-1, tensor.row_bytes), tensor.kind)
    return found.reshape(tensor.info.shape)
