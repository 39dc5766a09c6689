"""Every broken fake that we keep, installed like a plugin: `miles conformance KIND:NAME` rejects it.

The fakes are those of the tests beside this one, each with the assertion that must see it. Here they have entry points
and are judged by the command: at least 40, of all kinds.
"""

import json
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from miles_core import API_VERSIONS, discovery, hookimpl
from miles_core.cli import main
from miles_core.provider import Provider
from miles_core.testing import ResolverConformance
from miles_core.testing.suite import Conformance

from . import (
    test_suite_backend,
    test_suite_corrections,
    test_suite_engine,
    test_suite_environment,
    test_suite_launcher,
    test_suite_model,
    test_suite_parts,
    test_suite_rendering,
    test_suite_transport,
)


def engines() -> Iterator[tuple[str, type[Conformance]]]:
    for label, made in test_suite_engine.MUTANTS.items():
        made = made if isinstance(made, tuple) else (made,)
        offers = made[1] if len(made) > 1 else test_suite_engine.ENGINE_OFFERS
        if len(made) < 3:  # others change the suite, too
            yield label, test_suite_engine.suite_for(made[0], offers)


def kept() -> Iterator[tuple[str, type[Conformance]]]:
    """(label, suite with the fake as its provider)."""
    yield from engines()
    for module in (test_suite_backend, test_suite_transport):
        for label, changes in module.MUTANTS.items():
            yield label, module.suite_for(**changes)
    tables = [*test_suite_parts.STAGE_TABLE.values(), *test_suite_parts.TERM_TABLE.values()]
    tables += [test_suite_parts.FILTERS, test_suite_parts.PRESETS, *test_suite_model.TABLES.values()]
    tables += [test_suite_corrections.STATIC, test_suite_corrections.DYNAMIC]
    tables += [test_suite_environment.ENVS, test_suite_environment.SCORERS]
    tables += [test_suite_launcher.LAUNCHERS, test_suite_launcher.TRACKERS]
    tables += [test_suite_rendering.TOKENIZERS, test_suite_rendering.RENDERERS]
    for table in tables:
        yield from table.items()


FAKES = {
    f"{suite.kind}:{'.' * issubclass(suite, ResolverConformance)}fake-{number}": (label, suite)
    for number, (label, suite) in enumerate(kept())
}
SLOW_KINDS = {"rollout": 2, "launcher": 2}  # how many of them go through the command; a suite takes seconds
QUICK = 5  # of every other kind in the quick tests, the others in the slow ones
#: Rejected by another assertion, because the command picks the suite by the field; or kept in one process's memory.
ELSEWHERE = {"the provider says its field", "a verdict depends on its group only"}
#: Waits for its deadlines, which says nothing more here.
PATIENT = {
    "carry returns soon once cancelled",
    "every engine serves the version",
    "a version that was not staged is not carried",
}


def chosen() -> Iterator[Any]:
    seen: dict[str, int] = {}
    for plugin, (label, suite) in FAKES.items():
        seen[suite.kind] = seen.get(suite.kind, 0) + 1
        if label not in PATIENT and seen[suite.kind] <= SLOW_KINDS.get(suite.kind, len(FAKES)):
            yield pytest.param(plugin, marks=pytest.mark.slow if seen[suite.kind] > QUICK else ())


def providers() -> dict[str, list[Provider]]:
    """Kind -> its fakes under names of their own, built from the module of the package."""
    found: dict[str, list[Provider]] = {}
    for plugin, (_, suite) in FAKES.items():

        def build(config, context, real=suite.provider.build):
            return real(config, context)

        build.__module__ = "kept_fakes.plugin"
        name = plugin.partition(":")[2]
        found.setdefault(suite.kind, []).append(replace(suite.provider, name=name, build=build))
    return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A distribution with an entry point for each fake, and the suites that it ships."""
    site = tmp_path_factory.mktemp("site")
    offered = providers()
    registry = types.ModuleType("kept_fakes_registry")
    registry.hooks = {f"miles_{kind}": hookimpl(lambda made=made: made) for kind, made in offered.items()}
    registry.suites = {
        f"Fake{number}": type(suite.__name__, (suite,), {"name": plugin.partition(":")[2], "provider": None})
        for number, (plugin, (_, suite)) in enumerate(FAKES.items())
    }
    package, info = site / "kept_fakes", site / "kept_fakes-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text("import kept_fakes_registry as registry\n\nvars().update(registry.hooks)\n")
    (package / "conformance.py").write_text(
        "import kept_fakes_registry as registry\n\nvars().update(registry.suites)\n"
    )
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kept-fakes\nVersion: 1.0\n")
    lines = [
        f"[miles.{k}.v1]\n" + "".join(f"{p.name} = kept_fakes.plugin\n" for p in made) for k, made in offered.items()
    ]
    (info / "entry_points.txt").write_text("".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setitem(sys.modules, registry.__name__, registry)
        patch.setattr(discovery, "_scanned", None)
        yield


def test_there_are_fakes_of_every_kind():
    kinds = {suite.kind for _, suite in FAKES.values()}
    assert kinds == set(API_VERSIONS)
    quick = [param for param in chosen() if not param.marks]
    assert len(FAKES) >= 300 and len(quick) >= 60 and {p.values[0].partition(":")[0] for p in quick} == kinds


@pytest.mark.parametrize("plugin", list(chosen()))
def test_the_command_rejects_it(installed, plugin, tmp_path, monkeypatch, capsys):
    label, _ = FAKES[plugin]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as leaving, warnings.catch_warnings(action="ignore"):
        main(["conformance", plugin, "--out", str(tmp_path / "conformance.json")])
    said = capsys.readouterr()
    assert leaving.value.code == 1 and " FAILED " in said.out, said
    checks = json.loads((tmp_path / "conformance.json").read_text())["checks"]
    failed = [check["detail"] for check in checks if not check["passed"]]
    assert label in ELSEWHERE or any(detail.startswith(label) for detail in failed), (label, failed)
