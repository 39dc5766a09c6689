"""Wheels without this repository: built, installed into a fresh environment by plain pip, run outside the clone."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROJECTS = [ROOT, ROOT / "tests/toys", *sorted(p.parent for p in ROOT.glob("plugins/*/*/pyproject.toml"))]


def call(*command: object, cwd: Path, code: int = 0) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for project in PROJECTS:
        call(Path(sys.executable).with_name("hatchling"), "build", "-t", "wheel", "-d", folder, cwd=project)
    return folder


def test_every_distribution_holds_its_package_and_nothing_else(wheels):
    found = sorted(wheels.glob("*.whl"))
    assert len(found) == len(PROJECTS)
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        tops = {n.partition("/")[0] for n in names if ".dist-info/" not in n}
        assert len(tops) == 1, f"{wheel.name}: {tops}"
        package = next(iter(tops))
        assert any(n == f"{package}/__init__.py" for n in names)
        assert wheel.name.startswith("miles_testing_toys") or any(n == f"{package}/py.typed" for n in names)
        assert not any("tests/" in n for n in names)


def test_a_plain_install_runs_outside_the_clone(wheels, tmp_path, toy_text):
    call(sys.executable, "-m", "venv", "env", cwd=tmp_path)
    python, miles = tmp_path / "env/bin/python", tmp_path / "env/bin/miles"
    core, toys = next(wheels.glob("miles_core-*")), next(wheels.glob("miles_testing_toys-*"))
    sort = next(wheels.glob("miles_env_arithmetic-*"))
    call(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", core, toys, sort, cwd=tmp_path)
    assert "torch" not in call(python, "-m", "pip", "list", cwd=tmp_path)
    assert "arithmetic" in call(miles, "plugins", cwd=tmp_path)
    (tmp_path / "toy.yaml").write_text(toy_text)
    call(miles, "run", "toy.yaml", "run.steps=3", cwd=tmp_path)
    assert "rollout/reward" in call(miles, "show", "runs/toy", cwd=tmp_path)
    missing = call(miles, "run", "toy.yaml", "sync={use: bucketed}", "run.name=x", cwd=tmp_path, code=2)
    assert "MILES-E001" in missing and "pip install miles-sync-bucketed" in missing
    assert not (tmp_path / "runs/x").exists()
