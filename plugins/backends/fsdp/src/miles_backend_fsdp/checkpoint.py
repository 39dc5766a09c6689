"""Checkpoints of a rank's shards, readable by any number of ranks: safetensors files and one JSON file.

Every rank writes the rows that it holds, with their offset, to a file of its own. Loading reads the rows that the new
shards need from wherever they are. Everything that FSDP shards is split along dimension 0, in `torch.chunk` order.
(`torch.distributed.checkpoint` is not used: its metadata file is a pickle.)
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from miles_backend_fsdp.hf_folder import save
from miles_core.errors import CheckpointError

FORMAT = 1
STATE = "state.json"


@dataclass(frozen=True, slots=True)
class Shard:
    """`tensor` holds rows `offset …` of a tensor of shape `shape`."""

    tensor: Tensor
    offset: int
    shape: tuple[int, ...]


def chunk_offset(rows: int, rank: int, ranks: int) -> int:
    """The first row of this rank's chunk, as `torch.chunk` cuts."""
    return min(rows, rank * -(-rows // ranks))


def write(folder: Path, rank: int, ranks: int, shards: Mapping[str, Shard], state: Mapping[str, Any]) -> None:
    """Write this rank's file, and on rank 0 `state` (JSON). Raises `CheckpointError` where that fails (no space)."""
    held = {name: shard for name, shard in shards.items() if shard.tensor.numel() or ranks == 1}
    header = {
        "format": str(FORMAT),
        "shards": json.dumps({name: [shard.offset, list(shard.shape)] for name, shard in held.items()}),
    }
    tensors = {name: shard.tensor.detach().cpu().contiguous() for name, shard in held.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save(tensors, folder / f"rank_{rank:05d}_of_{ranks:05d}.safetensors", header)
        if rank == 0:
            text = json.dumps({"format": FORMAT, "ranks": ranks, **state}, sort_keys=True, indent=1)
            (folder / STATE).write_text(text + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be written: {error}", fix="make room there and resume") from error


def _without(folder: Path) -> str:
    """What to do without the checkpoint whose trainer wrote `folder`."""
    return (
        f"to resume from the one before it, rm -r {shlex.quote(str(folder.parent))}; to export, name another by --step"
    )


def read_state(folder: Path) -> dict[str, Any]:
    """What rank 0 wrote beside the tensors."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / STATE} cannot be read: {error}", fix=_without(folder)) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} is no checkpoint of this backend's format {FORMAT}", fix="resume with the version that wrote it"
        )
    return state


def read(folder: Path, wanted: Mapping[str, Shard]) -> None:
    """Fill the shards in `wanted` in place. Raises `CheckpointError` where rows are missing or shapes differ."""
    ranks = int(read_state(folder)["ranks"])
    left = {name: shard.tensor.shape[0] if shard.tensor.dim() else 1 for name, shard in wanted.items()}
    for number in range(ranks):
        file = folder / f"rank_{number:05d}_of_{ranks:05d}.safetensors"
        try:
            with safe_open(file, framework="pt") as handle:
                for name, (offset, shape) in json.loads(handle.metadata()["shards"]).items():
                    if name in wanted:
                        left[name] -= _copy(handle, name, offset, tuple(shape), wanted[name], file)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}", fix=_without(folder)) from error
    lacking = sorted(name for name, rows in left.items() if rows)
    if lacking:
        raise CheckpointError(
            f"{folder} lacks rows of {len(lacking)} tensors, {lacking[0]!r} among them",
            fix="resume with the model, roles and extensions that wrote the checkpoint",
        )


def _copy(handle: Any, name: str, offset: int, shape: tuple[int, ...], shard: Shard, file: Path) -> int:
    if shape != shard.shape:
        raise CheckpointError(
            f"{file} has {name!r} of shape {shape}; this run's is {shard.shape}",
            fix="resume with the model that wrote the checkpoint",
        )
    if not shape:
        shard.tensor.copy_(handle.get_tensor(name))
        return 1
    part = handle.get_slice(name)
    start: int = max(offset, shard.offset)
    end: int = min(offset + part.get_shape()[0], shard.offset + shard.tensor.shape[0])
    if start >= end:
        return 0
    shard.tensor[start - shard.offset : end - shard.offset].copy_(part[start - offset : end - offset])
    return end - start
