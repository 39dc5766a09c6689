"""Wheels without this repository: built by `make wheels`, installed by pip into fresh environments, run elsewhere."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from miles_core.discovery import OURS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROJECTS = [ROOT, *sorted(p.parent for p in ROOT.glob("plugins/*/*/pyproject.toml"))]
QUICKSTART = ("fsdp", "local", "bucketed", "algo_grpo", "algo_sft", "arithmetic")


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
    call("make", "wheels", f"BIN={Path(sys.executable).parent}", f"DIST={folder}", cwd=ROOT)
    assert len(list(folder.glob("*.whl"))) == len(PROJECTS)
    call(Path(sys.executable).with_name("hatchling"), "build", "-t", "wheel", "-d", folder, cwd=ROOT / "tests/toys")
    return folder


def test_every_distribution_holds_its_package_and_nothing_else(wheels):
    named = {tomllib.loads((p / "pyproject.toml").read_text())["project"]["name"] for p in PROJECTS}
    found = sorted(wheels.glob("*.whl"))
    assert {w.name.partition("-")[0].replace("_", "-") for w in found} == named | {"miles-testing-toys"}
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
    call(miles, "new", "filter", "mine", cwd=tmp_path)
    assert (tmp_path / "miles-algo-mine/src/miles_algo_mine/filter.py").is_file()


@pytest.fixture
def fresh(tmp_path):
    """An environment that has every library of this one, and nothing of ours: `fresh(wheels…)` installs into it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True, timeout=120)
    packages = tmp_path / f"env/lib/python3.{sys.version_info.minor}/site-packages"
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for folder in map(Path, (p for p in sys.path if p.endswith("site-packages"))):
        for path in folder.iterdir():
            if not path.name.startswith(("miles", "_editable_impl_miles", "__editable__")) and path.suffix != ".pth":
                (libraries / path.name).symlink_to(path)
    (packages / "libraries.pth").write_text(f"{libraries}\n")
    (tmp_path / "recipes").mkdir()
    for recipe in ROOT.glob("recipes/*.yaml"):
        (tmp_path / "recipes" / recipe.name).write_text(recipe.read_text())
    python = tmp_path / "env/bin/python"

    def install(*wheels: Path) -> Path:
        pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
        call(python, *pip, *wheels, cwd=tmp_path)
        return tmp_path / "env/bin/miles"

    return install


def of(wheels: Path, name: str) -> Path:
    return next(wheels.glob(f"*{name.replace('-', '_')}-*.whl"))


def test_the_quickstart_runs_from_wheels_with_its_recipes_beside_it(wheels, fresh, tmp_path):
    miles = fresh(of(wheels, "miles_core"), *(of(wheels, name) for name in QUICKSTART))
    assert str(ROOT) not in call(
        tmp_path / "env/bin/python", "-c", "import miles_core; print(miles_core)", cwd=tmp_path
    )
    call(miles, "run", "recipes/warmup.yaml", "run.steps=5", cwd=tmp_path)
    call(miles, "run", "recipes/quickstart.yaml", "run.steps=2", "eval.tasks=16", cwd=tmp_path)
    assert "rollout/reward" in call(miles, "show", "runs/quickstart", cwd=tmp_path)


def test_a_subset_names_what_is_missing_until_nothing_is(wheels, fresh, tmp_path):
    """`pip install miles-core miles-sync-bucketed`, and then what each message says, is enough to plan the run."""
    miles = fresh(of(wheels, "miles_core"), of(wheels, "miles_sync_bucketed"))
    assert "fits" in call(miles, "plugins", "--kind", "sync", cwd=tmp_path)
    asked = []
    for _ in QUICKSTART:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        command = [miles, "config", "show", "recipes/quickstart.yaml"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            break
        assert done.returncode == 2 and done.stderr.startswith("MILES-E001: "), done.stderr
        line = re.search(r"^Fix: pip install (miles-[a-z-]+)$", done.stderr, re.MULTILINE)
        assert line and line[1] in OURS, done.stderr
        asked.append(line[1])
        fresh(of(wheels, line[1]))
    assert done.returncode == 0, done.stderr
    expected = {"miles-backend-fsdp", "miles-rollout-local", "miles-algo-grpo", "miles-env-arithmetic"}
    assert len(asked) == len(set(asked)) and set(asked) == expected
