"""`miles conformance KIND:NAME`: every plugin of this repository passes from the command line; what others get told."""

import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLOW = {"rollout:local", "backend:fsdp", "model:causal-lm"}


def entry_points():
    for file in [ROOT / "pyproject.toml", *sorted((ROOT / "plugins").glob("*/*/pyproject.toml"))]:
        for group, names in tomllib.loads(file.read_text())["project"].get("entry-points", {}).items():
            kind = group.split(".")[1]
            yield from (f"{kind}:{name}" for name in names)


@pytest.mark.parametrize(
    "plugin", [pytest.param(p, marks=pytest.mark.slow if p in SLOW else ()) for p in entry_points()]
)
def test_every_plugin_of_the_repository_passes(command, tmp_path, monkeypatch, plugin):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = command("conformance", plugin, "--out", "results.json", timeout=500)
    assert said.code == 0, said.out + said.err
    *_, summary = said.out.splitlines()
    passed = int(re.fullmatch(rf"{plugin}: (\d+) passed, 0 failed", summary)[1])
    written = json.loads(Path("results.json").read_text())
    assert written["plugin"] == plugin and len(written["checks"]) == passed >= 4
    kind, name = plugin.split(":", 1)
    rows = [line.split() for line in command("plugins", "--kind", kind).out.splitlines()]
    assert [f"{passed} passed" in " ".join(row) for row in rows if row[1:2] == [name]] == [True]


FAILING = """
from dataclasses import dataclass, field
from miles_core import hookimpl
from miles_core.provider import Provider

@dataclass(frozen=True)
class Config:
    size: int = field({default}metadata={{"help": "how many"}})

def build(config, context):
    def keep(group):
        return {verdict}
    return keep

@hookimpl
def miles_filter():
    return Provider(name="acme", config=Config, build=build, summary="For a test.")
"""


def test_a_failing_plugin_is_a_finding(miles, site, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code = FAILING.format(default="default=1, ", verdict="'two\\nlines ' * 90")
    site("acme-filter", "miles.filter.v1", {"acme": "acme_failing"}, {"acme_failing": code})
    said = miles("conformance", "filter:acme", "--out", "results.json")
    assert said.code == 1 and said.err == ""
    failed = [line for line in said.out.splitlines() if "FAILED" in line]
    assert len(failed) == 1 and failed[0].startswith("test_verdicts ") and failed[0].endswith(" …")
    assert max(map(len, said.out.splitlines())) < 160
    assert said.out.endswith("filter:acme: 4 passed, 1 failed\n")
    details = {c["check"]: c["detail"] for c in json.loads(Path("results.json").read_text())["checks"]}
    assert len(details["test_verdicts"]) > 900
    assert "4 passed, 1 failed" in miles("plugins", "--kind", "filter").out


def test_a_plugin_that_the_kit_cannot_build_is_told_what_to_ship(miles, site):
    code = FAILING.format(default="", verdict="None")
    site("acme-filter", "miles.filter.v1", {"acme": "acme_demanding"}, {"acme_demanding": code})
    said = miles("conformance", "filter:acme")
    assert said.code == 2 and said.out == ""
    assert (
        said.last.startswith("MILES-E009: the plain FilterConformance cannot build filter:acme") and "size" in said.last
    )
    assert "miles conformance filter:acme key=value" in said.last and "ship a module `conformance`" in said.last
    assert miles("conformance", "filter:acme", "size=3").code == 0


@pytest.mark.slow
def test_a_torch_backend_without_a_suite_is_not_tested_with_toys(miles, monkeypatch):
    monkeypatch.setattr("miles_core.testing.runner._shipped", lambda *_: [])
    for plugin in sorted(SLOW):
        said = miles("conformance", plugin)
        assert said.code == 2 and said.last.startswith("MILES-E009: the plain ") and "toy" in said.last.lower()


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        (["rollout:locl"], "'local'"),
        (["rolout:local"], "rollout:local"),
        (["bucketed"], "sync:bucketed"),
        (["synk:buckets"], "sync:bucketed"),
        (["nothing-of-the-kind"], "KIND:NAME"),
        (["sync:bucketed", "bucket_mb=3"], "sync:bucketed.bucket_mib"),
        (["sync:bucketed", "bucket_mib=many"], "an int"),
    ],
)
def test_what_does_not_exist_gets_a_suggestion(miles, asked, meant):
    said = miles("conformance", *asked)
    assert said.code == 2 and said.out == "" and f"\nFix: write {meant}" in said.err
