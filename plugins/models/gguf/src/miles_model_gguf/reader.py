"""The header of a GGUF file: metadata, and where each tensor lies. Versions 2 and 3, little-endian.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Written here rather than taken from the package
`gguf`, whose reader keeps a NumPy array for every token of the vocabulary, and trusts every length that a damaged file
states. Here nothing is read beyond the end of the file, and every damage is one `ModelSourceError`.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import ModelSourceError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
_STRING, _ARRAY = 8, 9
#: Type number -> struct code of a scalar.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """`shape` is row-major, as NumPy has it (the file states it the other way round); `kind` is the number of the
    quantisation; `offset` counts bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """`metadata`: key -> int, float, bool, str, or a list of these."""

    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]


def damaged(path: Path, what: str) -> ModelSourceError:
    """The error for a file that does not keep the format."""
    return ModelSourceError(f"{path} is no whole GGUF file: {what}", fix="download or copy the file again")


def read_header(path: Path) -> Header:
    """Raises `ModelSourceError` where the file is no GGUF file, of another version, big-endian, or truncated."""
    if path.stat().st_size < len(MAGIC) + 20:
        raise damaged(path, f"it has {path.stat().st_size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        magic = cursor.take(4)
        if magic != MAGIC:
            raise damaged(path, f"it begins with {magic!r}")
        version = cursor.scalar("I")
        if version not in VERSIONS:
            order = " (a big-endian file)" if version % 65536 == 0 else ""
            raise ModelSourceError(
                f"{path} is GGUF version {version}{order}; versions {' and '.join(map(str, VERSIONS))} are read, "
                "little-endian",
                fix="convert the file with a current llama.cpp",
            )
        n_tensors, n_keys = cursor.scalar("Q"), cursor.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        infos = [cursor.tensor() for _ in range(n_tensors)]
        alignment = metadata.get(ALIGNMENT, 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise damaged(path, f"{ALIGNMENT} is {alignment!r}")
        start = -(-cursor.at // alignment) * alignment
    names = {info.name for info in infos}
    if len(names) != len(infos):
        raise damaged(path, "two tensors have one name")
    tensors = tuple(
        TensorInfo(name=i.name, shape=i.shape, kind=i.kind, offset=start + i.offset)
        for i in sorted(infos, key=lambda info: info.offset)
    )
    return Header(metadata=metadata, tensors=tensors)


class _Cursor:
    """Reads on from where it stands, never past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._size = path, data, len(data)
        self.at = 0

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > self._size:
            raise damaged(self._path, f"it ends after {self._size} bytes, inside its header")
        found = self._data[self.at : end]
        self.at = end
        return found

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        try:
            return self.take(self.scalar("Q")).decode()
        except UnicodeDecodeError as error:
            raise damaged(self._path, f"the text before byte {self.at} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise damaged(self._path, f"the value before byte {self.at} is of an unknown type {kind}")
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            code = _SCALARS[inner]
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))
        if inner != _STRING:
            raise damaged(self._path, f"the list before byte {self.at} is of type {inner}")
        return [self.string() for _ in range(count)]

    def tensor(self) -> TensorInfo:
        name = self.string()
        dims = self.scalar("I")
        if not 0 < dims <= _MAX_DIMS:
            raise damaged(self._path, f"tensor {name!r} has {dims} dimensions")
        shape = struct.unpack(f"<{dims}Q", self.take(8 * dims))
        return TensorInfo(name=name, shape=shape[::-1], kind=self.scalar("I"), offset=self.scalar("Q"))
