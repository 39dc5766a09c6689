"""Whole runs in this process: `toy(...)` writes a run file of toy plugins, runs it, and gives back what it left."""

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from miles_core.config.compose import load
from miles_core.discovery import scan
from miles_core.driver import execute
from miles_core.run import RunDir

TOY = """
run: {name: toy, seed: 7, steps: 30}
model: {use: toy, tokenizer: toy, architecture: {model_type: toy}}
renderer: toy
env: {use: toy}
rollout: {use: toy, max_new_tokens: 2}
backend: {use: toy}
sync: {use: toy}
algorithm: {use: toy}
optimizer: {lr: 0.3}
schedule: {groups_per_step: 8, group_size: 8}
trackers: {jsonl: {}}
"""


@dataclass
class Ran:
    """A run and what it left behind."""

    run: RunDir
    status: str

    def curve(self, name: str) -> list[float]:
        """Values of a metric by step; a step that was trained again keeps its last value."""
        found = {line["step"]: line[name]["value"] for line in self.run.metrics() if name in line}
        return [value for _, value in sorted(found.items())]

    def events(self, kind: str) -> list[dict]:
        import json

        lines = (self.run.path / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["type"] == kind]


@pytest.fixture
def toy_text() -> str:
    """A run file of toy plugins."""
    return TOY


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def start(*overrides: str, text: str = TOY, resume: bool = False, stop: threading.Event | None = None) -> Ran:
        file = Path("toy.yaml")
        file.write_text(text)
        run_file = load(file, overrides, catalogue=scan())
        result = asyncio.run(execute(run_file, scan(), stop or threading.Event(), resume=resume))
        return Ran(RunDir.open(Path("runs") / run_file.run.name), result.status)

    return start
