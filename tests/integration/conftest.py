"""Whole runs in this process: `toy(...)` writes a run file of toy plugins, runs it, and gives back what it left."""

import asyncio
import importlib
import shutil
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from miles_core import discovery
from miles_core.cli import main
from miles_core.config.compose import load
from miles_core.discovery import scan
from miles_core.driver import execute
from miles_core.run import RunDir

sys.path.insert(0, str(Path(__file__).parent))  # small_model.py
MILES = Path(sys.executable).with_name("miles")
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


@dataclass
class Said:
    """What a command left: its exit code and its words."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The final message: from the last line that begins with a code on."""
        return self.err[self.err.rfind("MILES-E", 0, self.err.rfind("\nFix: ") + 1) :]


@pytest.fixture
def miles(tmp_path, monkeypatch, capfd):
    """The command line in this process, in an empty folder: `miles("run", "toy.yaml", …)`. `toy.yaml` is there."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(discovery, "_scanned", None)
    (work / "toy.yaml").write_text(TOY)

    def run(*arguments: str) -> Said:
        capfd.readouterr()
        with pytest.raises(SystemExit) as leaving:
            main(arguments)
        return Said(leaving.value.code, *capfd.readouterr())

    return run


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of further distributions: `site("acme-x", "miles.sync.v1", {"foo": "module"}, {"module": code})`."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    modules: list[str] = []

    def add(distribution: str, group: str, names: dict[str, str], code: dict[str, str], version: str = "1.0") -> Path:
        for old in folder.glob(f"{distribution.replace('-', '_')}-*.dist-info"):
            shutil.rmtree(old)
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        head = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\nRequires-Dist: miles-core>=0.1,<1\n"
        (info / "METADATA").write_text(head)
        lines = [f"{name} = {module}" for name, module in names.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
        for module, text in code.items():
            (folder / f"{module}.py").write_text(textwrap.dedent(text))
            modules.append(module)
        discovery._scanned = None
        importlib.invalidate_caches()  # it goes by times, which are coarse on some machines
        return folder

    yield add
    for name in modules:
        sys.modules.pop(name, None)
    discovery._scanned = None


@pytest.fixture
def command(miles):
    """The same as a process of its own: `command("run", …)`; with `before`, after that Python code."""
    script = "{before}\nfrom miles_core.cli import main\nmain()"

    def run(*arguments: str, before: str = "", timeout: float = 120) -> Said:
        start = [sys.executable, "-c", script.format(before=textwrap.dedent(before))] if before else [MILES]
        done = subprocess.run([*start, *arguments], capture_output=True, text=True, timeout=timeout, check=False)
        return Said(done.returncode, done.stdout, done.stderr)

    return run
