"""Tracker `jsonl`: `metrics.jsonl` and `events.jsonl` in the run directory, one object a line.

A metrics line has `v`, `t` (seconds since 1970), `type` (the side), `step`, `policy`, `lineage`, then one key
`side/name` per metric with `value`, `num` and `den`; `value` is `null` where the denominator is 0, and a number that
JSON cannot hold (NaN, infinity) is `null`. An event line has `v`, `t`, `type`, `step`, `lineage`, then its own fields.

Lines are appended whole, never rewritten: a resumed run goes on in the same files, and a step that is trained again
appears again with a higher lineage. A torn last line, left by a kill, is cut off at the start.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core import hookimpl
from miles_core.errors import TrackerError
from miles_core.jsontext import readable
from miles_core.provider import BuildContext, Provider
from miles_core.records import Metric

FORMAT = 1
_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class JsonlConfig:
    """No options."""


class LineFile:
    """An append-only file of lines. Raises `TrackerError` where the disk refuses; the file then still ends in a whole
    line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._end = _cut_torn_line(self._fd)
        except OSError as error:
            raise self._error(error) from error

    def write(self, line: Mapping[str, Any]) -> None:
        data = readable(line) + b"\n"
        at = self._end
        try:
            while at < self._end + len(data):
                at += os.pwrite(self._fd, data[at - self._end :], at)
        except OSError as error:
            os.ftruncate(self._fd, self._end)
            raise self._error(error) from error
        self._end = at

    def close(self) -> None:
        os.close(self._fd)

    def _error(self, error: OSError) -> TrackerError:
        return TrackerError(
            f"cannot write {self.path}: {error.strerror or error}",
            fix="make room (or the folder writable), then go on with --resume",
        )


def _cut_torn_line(fd: int) -> int:
    """Cut what follows the last newline; the new size in bytes."""
    size = end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - _CHUNK)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        end = start if newline < 0 else start + newline + 1
        if newline >= 0:
            break
    if end < size:
        os.ftruncate(fd, end)
    return end


class JsonlTracker:
    """Keeps the contract `Tracker`. Files are opened by `start`, in `info["dir"]`."""

    def __init__(self) -> None:
        self._metrics: LineFile | None = None
        self._events: LineFile | None = None
        self._lineage = 0
        self._failed = False

    def start(self, info: Mapping[str, Any]) -> None:
        folder = Path(info["dir"])
        self._lineage = int(info.get("lineage", 0))
        self._metrics = LineFile(folder / "metrics.jsonl")
        self._events = LineFile(folder / "events.jsonl")
        self.event("run_start", {"step": info.get("first_step"), "name": info.get("name"), "steps": info.get("steps")})

    def metrics(self, step: int, side: str, values: Mapping[str, Metric], policy: str) -> None:
        line: dict[str, Any] = {**_head(side, step), "policy": policy, "lineage": self._lineage}
        for name, (num, den) in values.items():
            key = name if name.startswith(f"{side}/") else f"{side}/{name}"
            value = _number(num / den) if den else None
            line[key] = {"value": value, "num": _number(num), "den": _number(den)}
        self._write(self._metrics, line)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "evaluating" and fields.get("done") != fields.get("of"):
            return  # a bar's progress, not a fact to keep
        step = fields.get("step")
        own = {**_head(kind, step), "lineage": self._lineage}
        self._write(self._events, {**own, **fields, **own})

    def close(self, status: str) -> None:
        """Write the end of the run and close; after a failed write it only closes, so that the first error is told."""
        if self._events is not None and not self._failed:
            self.event("run_end", {"step": None, "status": status})
        for file in (self._metrics, self._events):
            if file is not None:
                file.close()
        self._metrics = self._events = None

    def _write(self, file: LineFile | None, line: Mapping[str, Any]) -> None:
        if file is None:
            raise TrackerError(
                "tracker `jsonl` was told something before `start` or after `close`", fix="start it first"
            )
        try:
            file.write(line)
        except TrackerError:
            self._failed = True
            raise


def _head(kind: str, step: int | None) -> dict[str, Any]:
    return {"v": FORMAT, "t": time.time_ns() // 1000 / 1e6, "type": kind, "step": step}


def _number(value: float) -> float | int | None:
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _build(config: JsonlConfig, context: BuildContext) -> JsonlTracker:
    return JsonlTracker()


@hookimpl
def miles_tracker() -> Provider[JsonlConfig, JsonlTracker]:
    return Provider(
        name="jsonl", config=JsonlConfig, build=_build, summary="metrics.jsonl and events.jsonl in the run directory"
    )
