"""Rows of a file by number, read when asked for: JSONL by byte offsets, Parquet through pyarrow."""

from __future__ import annotations

import json
import math
import os
import re
import weakref
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from miles_core.errors import DataError, MissingExtraError

_SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d+)?:(?P<end>-?\d+)?\]")


class BadRow(Exception):
    """A row that cannot be used: `where` is file and line, `what` says why, `fix` what to do."""

    def __init__(self, where: str, what: str, fix: str) -> None:
        super().__init__(f"{where}: {what}")
        self.where, self.what, self.fix = where, what, fix


class Rows(Protocol):
    """A file's rows. `read` raises `BadRow`; `where` names file and line (1-based) for messages; `raw` is equal where
    rows are."""

    def __len__(self) -> int: ...

    def read(self, row: int) -> Mapping[str, Any]: ...

    def where(self, row: int) -> str: ...

    def raw(self, row: int) -> bytes: ...


def split_slice(text: str) -> tuple[str, slice]:
    """`file@[start:end]` to path and slice, Python's meaning. Raises `DataError` for a slice that is none."""
    found = _SLICE.fullmatch(text)
    if found:
        start, end = (int(found[k]) if found[k] else None for k in ("start", "end"))
        return found["path"], slice(start, end)
    if "@[" in text:
        raise DataError(
            f"{text!r} does not end in a slice", fix="write it as file@[start:end], e.g. tasks.jsonl@[:1000]"
        )
    return text, slice(None)


def find(path: str, folders: Sequence[Path]) -> Path:
    """The file, absolute. Relative paths are looked up in `folders` in order. Raises `DataError`."""
    places = [Path(path)] if Path(path).is_absolute() else [folder / path for folder in folders]
    for place in places:
        if place.is_file():
            return place.resolve()
    raise DataError(
        f"no file {path!r}; looked at {', '.join(dict.fromkeys(map(str, places)))}",
        fix="correct env.path, relative to the run file or to the working directory; for a resume, put the file back",
    )


def open_rows(path: Path) -> Rows:
    """Raises `DataError` for a kind of file that is not read, or that is unreadable."""
    if path.suffix in (".jsonl", ".ndjson"):
        return JsonlRows(path)
    if path.suffix in (".parquet", ".pq"):
        return ParquetRows(path)
    raise DataError(
        f"{path} is neither JSONL (.jsonl, .ndjson) nor Parquet (.parquet, .pq)",
        fix="convert it: one JSON object a line, in a file that ends in .jsonl",
    )


class JsonlRows:
    """One JSON object a line; blank lines are skipped. Keeps offsets only (24 bytes a row), not rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # stays open: rows are read until the run ends
        weakref.finalize(self, os.close, self._fd)
        self._offsets, self._sizes, self._lines = array("q"), array("q"), array("q")
        at = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._offsets.append(at)
                    self._sizes.append(len(line))
                    self._lines.append(number)
                at += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def where(self, row: int) -> str:
        return f"{self.path}:{self._lines[row]}"

    def read(self, row: int) -> Mapping[str, Any]:
        try:
            value = json.loads(self.raw(row).decode("utf-8-sig" if row == 0 else "utf-8"), **_STRICT)
        except (ValueError, RecursionError) as error:
            raise BadRow(self.where(row), f"not JSON: {error}", "repair or remove the line") from error
        if not isinstance(value, dict):
            raise BadRow(self.where(row), f"holds a {kind_of(value)}, not an object", "write one object a line")
        return value

    def raw(self, row: int) -> bytes:
        return os.pread(self._fd, self._sizes[row], self._offsets[row]).strip()


class ParquetRows:
    """A Parquet file, held as an Arrow table."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise MissingExtraError(
                f"{path} is a Parquet file, and pyarrow is not installed", fix="pip install 'miles-env-jsonl[parquet]'"
            ) from error
        self.path = path
        try:
            self._table = pyarrow.parquet.read_table(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path} is no readable Parquet file: {error}", fix="write the file again") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def where(self, row: int) -> str:
        return f"{self.path}: row {row + 1}"

    def read(self, row: int) -> Mapping[str, Any]:
        (value,) = self._table.slice(row, 1).to_pylist()
        return dict(value)

    def raw(self, row: int) -> bytes:
        return json.dumps(self.read(row), sort_keys=True, default=str).encode()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_constant(text)


_STRICT: dict[str, Any] = {"parse_constant": _no_constant, "parse_float": _finite}


def kind_of(value: Any) -> str:
    """JSON's word for the type of `value`."""
    names = {list: "list", str: "string", bool: "boolean", int: "number", float: "number", dict: "object"}
    return names.get(type(value), "null" if value is None else type(value).__name__)
