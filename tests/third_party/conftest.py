"""Packages of outsiders as wheels, installed by pip into folders that stand on the path beside our own."""

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from miles_core import discovery
from miles_core.cli import main

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent


@dataclass
class Said:
    """What a command left."""

    code: int
    out: str
    err: str


@dataclass
class Outside:
    """A folder of installed distributions (`site`), and a place to work in."""

    site: Path
    work: Path

    def miles(self, *arguments: object, code: int | None = 0, timeout: float = 300) -> Said:
        """The command in a process of its own; `code` is what it must exit with."""
        path = os.pathsep.join(filter(None, [str(self.site), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(self.work / "cache")}
        command = [BIN / "miles", *map(str, arguments)]
        done = subprocess.run(command, cwd=self.work, env=environment, capture_output=True, text=True, timeout=timeout)
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return Said(done.returncode, done.stdout, done.stderr)


def build(project: Path, into: Path) -> Path:
    """The wheel of a project."""
    command = [BIN / "hatchling", "build", "-t", "wheel", "-d", into]
    subprocess.run([str(c) for c in command], cwd=project, check=True, capture_output=True, timeout=120)
    return max(into.glob("*.whl"), key=lambda p: p.stat().st_mtime_ns)


def install(site: Path, wheels: list[Path]) -> None:
    """Plain pip, without a network and without what the wheels depend on: that is here already."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    done = subprocess.run([*pip, "--target", site, *wheels], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def toy_text() -> str:
    """The run file that the toys' README shows, without lines that tests replace."""
    text = (HERE.parent / "toys/README.md").read_text()
    return re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0] + "trackers: {jsonl: {}}\n"


@pytest.fixture(scope="session")
def strangers(tmp_path_factory) -> Path:
    """The packages of `packages/`, installed."""
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    install(site, [build(project, wheels) for project in sorted((HERE / "packages").iterdir())])
    return site


@pytest.fixture
def outside(strangers, tmp_path) -> Outside:
    (tmp_path / "toy.yaml").write_text(toy_text())
    return Outside(strangers, tmp_path)


@pytest.fixture
def here(tmp_path, monkeypatch, capfd):
    """`here(site)(…)`: the command line in this process, with the distributions of `site` beside ours."""

    def beside(site: Path):
        (tmp_path / "toy.yaml").write_text(toy_text())
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.syspath_prepend(site)
        monkeypatch.setattr(discovery, "_scanned", None)

        def miles(*arguments: str) -> Said:
            capfd.readouterr()
            with pytest.raises(SystemExit) as leaving:
                main(arguments)
            return Said(leaving.value.code, *capfd.readouterr())

        return miles

    return beside


@pytest.fixture(scope="session")
def package(tmp_path_factory):
    """`package("acme-x", {"sync": {"foo": "module"}}, {"module": code}, …)`: the wheel of a small project."""
    projects, wheels = tmp_path_factory.mktemp("projects"), tmp_path_factory.mktemp("small")

    def make(name, entries, code, *, version="1.0", major=1, requires=("miles-core>=0.1,<1",), extras=""):
        project = projects / name
        project.mkdir()
        for module, text in code.items():
            (project / f"{module}.py").write_text(textwrap.dedent(text))
        groups = [
            f'[project.entry-points."miles.{kind}.v{major}"]\n' + "".join(f'"{n}" = "{m}"\n' for n, m in names.items())
            for kind, names in entries.items()
        ]
        (project / "pyproject.toml").write_text(
            f'[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
            f'[project]\nname = "{name}"\nversion = "{version}"\ndescription = "For a test."\n'
            f"dependencies = {list(requires)}\n{extras}\n" + "".join(groups) + "[tool.hatch.build.targets.wheel]\n"
            f"only-include = {[f'{module}.py' for module in code]}\n"
        )
        return build(project, wheels)

    return make


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """`wheel(project)`: the wheel of a project."""
    folder = tmp_path_factory.mktemp("single")
    return lambda project: build(project, folder)


@pytest.fixture(scope="session")
def into():
    """`into(site, wheels)` installs."""
    return install
