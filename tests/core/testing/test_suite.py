"""The base of all suites, the runner, and which suite tests which plugin."""

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from miles_core.errors import MilesError, PluginLoadError, UnknownPluginError
from miles_core.provider import Place, Provider
from miles_core.testing import FilterConformance, run_suite
from miles_core.testing.runner import SUITES, suites_of
from miles_core.testing.suite import (
    CheckError,
    Conformance,
    check,
    labels,
    refuses,
    refuses_async,
    run_class,
)
from miles_core.testing.suite import tests as names_of_tests

from .mutants import Options, broken_suite, must_fail, plugin


def keep_all(group):
    return None


def keeper(config, context):
    return keep_all


@dataclass
class Thawed:
    size: int = field(default=1, metadata={"help": "x"})


@dataclass(frozen=True)
class Helpless:
    size: int = 1


@dataclass(frozen=True)
class Demanding:
    size: int = field(metadata={"help": "x"})


@dataclass(frozen=True)
class Unpicklable:
    work: object = field(default=lambda: 1, metadata={"help": "x"})


class Silent(FilterConformance):
    def config(self):
        return None


def provider(**given):
    base = {"name": "broken", "config": Options, "build": keeper, "summary": "x"}
    return Provider(**{**base, **given})


MUTANTS = {
    "config is a frozen dataclass": plugin(keeper, config=Thawed),
    "config survives pickling": plugin(keeper, config=Unpicklable),
    "every option has a help text": plugin(keeper, config=Helpless),
    "the provider has a summary": provider(summary=" "),
    "capabilities are short words": provider(offers=("two words",)),
    "the product keeps its Protocol": plugin(lambda config, context: 5),
}


def test_every_base_label_has_a_mutant():
    assert labels(Conformance) == {*MUTANTS, "options without a default are given"}


@pytest.mark.parametrize("label", MUTANTS)
def test_a_broken_provider_is_seen(label):
    must_fail(label, broken_suite(FilterConformance, MUTANTS[label]))


def test_options_without_a_default_must_be_given():
    class Lacking(FilterConformance):
        provider = plugin(keeper, config=Demanding)

        def config(self):
            return Demanding(size=1)

    must_fail("options without a default are given", Lacking)

    class Given(Lacking):
        options = {"size": 1}  # noqa: RUF012

    assert all(r.passed for r in run_class(Given))


def test_check_and_refuses():
    check("fine", True)
    with pytest.raises(CheckError, match="broken; found: 3"):
        check("broken", False, 3)
    refuses("fine", ValueError, lambda: int("x"))
    with pytest.raises(CheckError, match="no error"):
        refuses("broken", ValueError, lambda: 1)
    with pytest.raises(CheckError, match="TypeError"):
        refuses("broken", ValueError, lambda: int([]))

    async def value():
        return 1

    async def error():
        raise TypeError("x")

    with pytest.raises(CheckError, match="no error"):
        asyncio.run(refuses_async("broken", ValueError, value()))
    with pytest.raises(CheckError, match="TypeError"):
        asyncio.run(refuses_async("broken", ValueError, error()))
    asyncio.run(refuses_async("fine", TypeError, error()))


def test_a_hanging_plugin_fails_its_test():
    class Hanging(Conformance):
        kind = "filter"
        provider = plugin(keeper)
        deadline_s = 0.05

        def test_hang(self):
            self.run(asyncio.sleep(60))

        def test_own_error(self):
            raise MilesError("what was found", fix="this is a test")

        def test_library_error(self):
            raise ZeroDivisionError("by zero")

    found = {r.name: r for r in run_class(Hanging)}
    assert found["test_hang"].label == "ends within 0.05 s"
    assert "what was found" in found["test_own_error"].detail
    assert found["test_library_error"].detail == "ZeroDivisionError: by zero"
    assert found["test_config"].passed and found["test_config"].seconds >= 0
    assert names_of_tests(Hanging)[-1] == "test_library_error"


def test_every_kind_and_field_has_a_suite():
    from miles_core import API_VERSIONS

    assert {kind for kind, _ in SUITES} == set(API_VERSIONS)


@pytest.mark.parametrize(
    ("kind", "name", "suite"),
    [
        ("sync", "toy", "TransportConformance"),
        ("stage", "toy", "AdvantageConformance"),
        ("stage", "toy-penalty", "PenaltyConformance"),
        ("term", "toy-weight", "DynamicWeightConformance"),
        ("model", "toy", "ModelConformance"),
        ("model", ".toy", "ResolverConformance"),
        ("algorithm", "toy", "PresetConformance"),
    ],
)
def test_the_suite_of_a_plugin(kind, name, suite):
    assert [found.__name__ for found in suites_of(kind, name)] == [suite]


def test_run_suite_uses_options_and_tells_unknown_plugins():
    found = run_suite("sync", "toy", {"phase": "staged", "bucket_bytes": 100})
    assert found and all(r.passed for r in found)
    with pytest.raises(UnknownPluginError):
        run_suite("sync", "conformance-nothing")


def test_a_plugin_may_ship_its_own_suite(tmp_path, monkeypatch):
    package = tmp_path / "shipping"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "plugin.py").write_text("def build(config, context):\n    return lambda group: None\n")
    (package / "conformance.py").write_text(
        "from miles_core.testing import FilterConformance\n\n\n"
        "class Mine(FilterConformance):\n    name = 'mine'\n    options = {'size': 3}\n\n\n"
        "class Larger(Mine):\n    options = {'size': 4}\n\n\n"
        "class Other(FilterConformance):\n    name = 'another'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from miles_core.testing.runner import _shipped

    found = _shipped("shipping.plugin", FilterConformance, "filter", "mine")
    assert [(c.__name__, c.options) for c in found] == [("Mine", {"size": 3}), ("Larger", {"size": 4})]
    assert _shipped("shipping.plugin", FilterConformance, "filter", "other") == []
    (package / "conformance.py").write_text("import nowhere_at_all\n")
    monkeypatch.delitem(sys.modules, "shipping.conformance")
    with pytest.raises(PluginLoadError, match=r"shipping.conformance, which filter plugin 'mine' ships, cannot be imp"):
        _shipped("shipping.plugin", FilterConformance, "filter", "mine")
    assert _shipped("miles_core.builtin.text", FilterConformance, "filter", "mine") == []


def test_a_test_that_a_plugin_replaced_is_told_apart(monkeypatch):
    class Own(FilterConformance):
        name = "toy"

        def test_verdicts(self):
            """Looks at nothing."""

    monkeypatch.setattr("miles_core.testing.runner.suites_of", lambda kind, name: [Own])
    told = {r.name: r.detail for r in run_suite("filter", "toy")}
    assert told["test_verdicts"] == "the plugin's own version of this test"
    assert told["test_purity"] == "" and told["test_config"] == ""


def test_importing_the_kit_is_light():
    code = "import sys, json, miles_core.testing; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"torch", "numpy", "omegaconf", "pytest"}


def test_every_exported_name_is_there():
    import miles_core.testing as kit

    assert all(getattr(kit, name) is not None for name in kit.__all__)
    with pytest.raises(AttributeError):
        kit.conformance_nonsense  # noqa: B018


def test_places_are_those_of_the_core():
    assert FilterConformance.places == (Place.CONTROLLER,)
