"""Toy tracker: keeps everything it is told, in memory and, with a run directory, in `toy-tracker.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_core.records import Metric


class ToyTracker:
    """`records` are (kind, fields) in order; `kind` is `start`, `metrics`, `event` or `close`."""

    def __init__(self, run_dir: Path | None) -> None:
        self.records: list[tuple[str, dict[str, Any]]] = []
        self._path = None if run_dir is None else run_dir / "toy-tracker.jsonl"
        self._open = False

    def start(self, info: Mapping[str, Any]) -> None:
        self._open = True
        self._put("start", {k: v for k, v in info.items() if k != "summary"})

    def metrics(self, step: int, side: str, values: Mapping[str, Metric], policy: str) -> None:
        self._put("metrics", {"step": step, "side": side, "policy": policy, "values": dict(values)})

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._put("event", {"kind": kind, **fields})

    def close(self, status: str) -> None:
        if self._open:  # closing twice is harmless
            self._put("close", {"status": status})
        self._open = False

    def _put(self, kind: str, fields: dict[str, Any]) -> None:
        self.records.append((kind, fields))
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, **fields}, default=str) + "\n")
