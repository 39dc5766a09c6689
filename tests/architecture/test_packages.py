"""Every distribution has the same shape, and every list of them is complete."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from miles_core import API_VERSIONS

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(p.parent for p in ROOT.glob("plugins/*/*/pyproject.toml"))
GROUPS = {f"miles.{kind}.v{major}" for kind, major in API_VERSIONS.items()}


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda p: p.name)
def test_package_shape(folder):
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    package = project["name"].replace("-", "_")
    for file in ("README.md", "CHANGELOG.md", f"src/{package}/__init__.py", f"src/{package}/py.typed"):
        assert (folder / file).exists(), file
    assert list(folder.glob("tests/test_*.py"))
    assert project["version"] and "version" not in project.get("dynamic", [])
    assert any(re.match(r"miles-core(\[\w+\])?>=", d) and ",<" in d for d in project["dependencies"])
    for dependency in project["dependencies"]:
        assert "<" in dependency, f"{dependency} has no upper bound"
    groups = project["entry-points"]
    assert groups.keys() <= GROUPS
    assert all(value.startswith(package + ".") for entries in groups.values() for value in entries.values())


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda p: p.name)
def test_the_development_install_has_it(folder):
    listed = (ROOT / "requirements-dev.txt").read_text() + (ROOT / "requirements-quickstart.txt").read_text()
    assert f"-e {folder.relative_to(ROOT)}\n" in listed


def test_the_uv_workspace_names_every_distribution():
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = {tomllib.loads((p / "pyproject.toml").read_text())["project"]["name"] for p in PLUGINS}
    names |= {"miles-core", "miles-testing-toys"}
    assert set(root["tool"]["uv"]["sources"]) == names
    listed = {d.partition("[")[0].partition(">")[0] for d in root["dependency-groups"]["dev"]}
    assert names <= listed
    tools = {d for d in root["dependency-groups"]["dev"] if d.partition("[")[0].partition(">")[0] not in names}
    assert tools == {line for line in (ROOT / "requirements-dev.txt").read_text().splitlines() if line[0] not in "#-"}


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda p: p.name)
def test_readme_says_how_to_configure_it(folder):
    readme = (folder / "README.md").read_text()
    assert "```yaml" in readme and "pip install" in readme


def test_nothing_private_is_written_down():
    """No path of a build machine and no registry host in any tracked text file."""
    words = ("/work/" + "main", "/work/" + "shared", "/root/" + ".", "pypi" + ".org", "find-" + "links")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = []
    for name in filter(None, tracked.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix in {".py", ".md", ".toml", ".yaml", ".txt", ".cfg", ""}:
            text = path.read_text(errors="ignore")
            found += [f"{name}: {word}" for word in words if word in text]
    assert not found
