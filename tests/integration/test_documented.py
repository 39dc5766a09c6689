"""Pages that promise to work are run from their own text."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from miles_core.config.compose import load

ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_plugin_of_the_how_to_installs_conforms_and_runs(tmp_path, toy_text):
    page = "docs/how-to/write-an-advantage.md"
    package = tmp_path / "acme-miles-median"
    (package / "acme_miles_median").mkdir(parents=True)
    (package / "pyproject.toml").write_text(blocks(page, "toml")[0])
    (package / "acme_miles_median/__init__.py").write_text(blocks(page, "python")[0])
    tests = tmp_path / "test_median.py"
    tests.write_text(blocks(page, "python")[1])
    site = tmp_path / "site"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}

    def call(*command: object) -> None:
        done = subprocess.run(
            [str(c) for c in command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr

    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--target", site]
    call(*pip, package)
    miles = Path(sys.executable).with_name("miles")
    call(miles, "conformance", "stage:median")
    (tmp_path / "toy.yaml").write_text(toy_text)
    call(miles, "run", "toy.yaml", "run.steps=3", "algorithm.advantage={use: median}")
    call(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests)


def test_the_documented_policies_bind(tmp_path):
    text = next(b for b in blocks("docs/how-to/several.md", "yaml") if "policies:" in b)
    (tmp_path / "two.yaml").write_text(text)
    assert list(load(tmp_path / "two.yaml").policies) == ["first", "second"]


@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/first-run.md"])
def test_the_documented_run_file_is_the_recipe(tmp_path, page):
    (tmp_path / "shown.yaml").write_text(blocks(page, "yaml")[0])
    shown, recipe = load(tmp_path / "shown.yaml"), load(ROOT / "recipes/quickstart.yaml")
    assert shown.policies == recipe.policies and shown.engines == recipe.engines and shown.eval == recipe.eval


def test_documented_install_lines_exist():
    for line in re.findall(r"-e (plugins/\S+)", (ROOT / "docs/tutorials/own-data.md").read_text()):
        assert tomllib.loads((ROOT / line / "pyproject.toml").read_text())["project"]["name"] == "miles-env-jsonl"
