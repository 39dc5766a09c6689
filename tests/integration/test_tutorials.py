"""Tutorials that make a package are run from their own text: every command, every block of code, in their order."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?:^(?P<lead>[^\n]*):\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture
def shell(tmp_path):
    """An environment of its own that sees what is installed here, with the commands that a reader has."""
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=120)
    packages = environment / f"lib/python3.{sys.version_info.minor}/site-packages"
    here = [p for p in sys.path if p.endswith("site-packages")]
    editable = [line for p in here for file in Path(p).glob("*.pth") for line in file.read_text().splitlines()]
    seen = [*here, *(line for line in editable if line.startswith("/"))]
    (packages / "here.pth").write_text("\n".join(seen) + "\n")
    for name, module in (("pip", "pip"), ("miles", "miles_core.cli"), ("hatchling", "hatchling")):
        command = environment / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{environment}/bin/python" -m {module} "$@"\n')
        command.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    (work / "recipes").symlink_to(ROOT / "recipes")
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    variables |= {"PATH": f"{environment}/bin:/usr/bin:/bin", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_DEPS": "1"}
    variables |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def run(line: str) -> str:
        code = int(found[1]) if (found := re.search(r"# exits with (\d)", line)) else 0
        done = subprocess.run(
            ["/bin/sh", "-c", line], cwd=work, env=variables, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == code, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    return work, run


def follow(page: str, work: Path, run) -> tuple[str, int]:
    """Do what the page says; everything that was printed, and how many lines a reader typed."""
    printed, typed = "", 0
    for block in BLOCK.finditer((ROOT / page).read_text()):
        lines = [line for line in block["text"].splitlines() if line.strip()]
        typed += len(lines)
        path = re.search(r"`([\w./-]+\.py)`", block["lead"] or "")
        if block["language"] == "sh":
            printed += "".join(map(run, lines))
        elif path and "in place of the error" in block["lead"]:
            file = work / path[1]
            code = textwrap.indent(block["text"].rstrip(), " " * 8)
            text, count = re.subn(
                r"^ +raise NotImplementedError.*$", lambda _, code=code: code, file.read_text(), flags=re.M
            )
            assert count == 1
            file.write_text(text)
        elif path:
            (work / path[1]).write_text(block["text"])
        else:
            raise AssertionError(f"nothing says where this goes: {block['text'][:60]}")
    return printed, typed


def test_an_advantage_from_nothing_to_published_in_25_lines(shell):
    printed, typed = follow("docs/tutorials/a-published-advantage.md", *shell)
    assert "not written yet: Stage.__call__" in printed and "stage:median: " in printed
    assert typed <= 25
    listed = [line for line in printed.splitlines() if line.startswith("stage ") and " median " in line]
    assert listed and " passed" in listed[-1] and "failed" not in listed[-1]


def test_a_transport_in_100_lines(shell):
    work, run = shell
    follow("docs/tutorials/a-transport.md", work, run)
    package = work / "acme-miles-sync-folder"
    lines = (package / "src/acme_miles_sync_folder/transport.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 100
    for command in ("python -m ruff check .", "python -m ruff format --check .", "python -m mypy"):
        run(f"cd {package.name} && {command}")
