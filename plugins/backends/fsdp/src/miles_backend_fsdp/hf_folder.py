"""Hugging Face folders: read and write safetensors files, one or several with an index. Never pickle."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from miles_core.errors import ModelSourceError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 4 << 30


def files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file. Raises `ModelSourceError` where the folder has no safetensors weights."""
    index = folder / INDEX
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    if not (folder / SINGLE).is_file():
        raise ModelSourceError(
            f"{folder} holds neither {SINGLE} nor {INDEX}; found {sorted(p.name for p in folder.glob('*'))}",
            fix="name a Hugging Face folder with safetensors weights (other formats are not read)",
        )
    with safe_open(folder / SINGLE, framework="pt") as handle:
        return {name: folder / SINGLE for name in handle.keys()}


def read(folder: Path, wanted: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    """Copy the folder's tensors into the (float32) tensors `wanted`, in place.

    Returns the wanted names that the folder lacks, and its names that nobody wanted. Raises `ModelSourceError` where a
    shape differs.
    """
    found = files(folder)
    by_file: dict[Path, list[str]] = {}
    for name, file in found.items():
        if name in wanted:
            by_file.setdefault(file, []).append(name)
    for file, names in sorted(by_file.items()):
        with safe_open(file, framework="pt") as handle:
            for name in names:
                tensor = handle.get_tensor(name)
                if tensor.shape != wanted[name].shape:
                    raise ModelSourceError(
                        f"{file} has {name!r} of shape {tuple(tensor.shape)}; "
                        f"config.json makes it {tuple(wanted[name].shape)}",
                        fix="use the config.json that belongs to these weights",
                    )
                wanted[name].copy_(tensor)
    return sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))


def write(folder: Path, stream: Iterable[tuple[str, Tensor]], *, keep: bool = True) -> None:
    """Write `stream` as one safetensors file, or as several of at most 4 GiB with an index.

    Every rank consumes the stream, because gathering is collective; only a rank with `keep` holds tensors and writes.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    names: list[list[str]] = []
    for name, tensor in stream:
        if not keep:
            continue
        nbytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + nbytes > SHARD_BYTES:
            names.append(_flush(folder, shards.pop(), len(names) + 1))
            shards.append({})
            size = 0
        shards[-1][name] = tensor.detach().cpu().contiguous().clone()
        size += nbytes
    if not keep:
        return
    names.append(_flush(folder, shards.pop(), len(names) + 1))
    count = len(names)
    if count == 1:
        (folder / _temporary(1)).replace(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, inside in enumerate(names, start=1):
        file = f"model-{number:05d}-of-{count:05d}.safetensors"
        (folder / _temporary(number)).replace(folder / file)
        weight_map |= dict.fromkeys(inside, file)
    text = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2, sort_keys=True)
    (folder / INDEX).write_text(text + "\n", encoding="utf-8")


def _temporary(number: int) -> str:
    return f".part-{number:05d}.safetensors"


def _flush(folder: Path, tensors: dict[str, Tensor], number: int) -> list[str]:
    save(tensors, folder / _temporary(number), {"format": "pt"})
    return list(tensors)


def save(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    """One safetensors file that whoever may read its folder may read: the library makes it private to its writer."""
    save_file(tensors, file, metadata=metadata)
    file.chmod(file.parent.stat().st_mode & 0o666)
