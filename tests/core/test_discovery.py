"""Discovery by metadata and gates A to C: every message word for word."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from miles_core.discovery import OURS, Catalogue
from miles_core.errors import (
    AmbiguousPluginError,
    IncompatiblePluginError,
    PluginContractError,
    PluginLoadError,
    UnknownPluginError,
)


def message(error):
    return f"{error.value.message}\nFix: {error.value.fix}"


def test_a_plugin_is_described_without_being_imported(plugins):
    plugins.add(code="raise RuntimeError('imported')", summary="Carries foo")
    [entry] = plugins.catalogue().entries("sync")
    assert (entry.kind, entry.name, entry.major, entry.distribution, entry.version, entry.summary) == (
        *("sync", "foo", 1, "acme-miles-sync-foo", "1.0"),
        "Carries foo",
    )
    assert entry.requires_core == ">=0.1,<1" or set(entry.requires_core.split(",")) == {">=0.1", "<1"}
    assert plugins.catalogue().state(entry) == "fits"


def test_loading_imports_that_module_only_and_registers_it_once(plugins):
    plugins.add()
    plugins.add("acme-other", code="raise RuntimeError('imported')", names=("other",))
    catalogue = plugins.catalogue()
    loaded = catalogue.load("sync", "foo")
    assert (loaded.provider.name, loaded.distribution, loaded.version, loaded.kind) == (
        *("foo", "acme-miles-sync-foo", "1.0"),
        "sync",
    )
    assert catalogue.load("sync", "foo") is loaded
    assert [p.__name__ for p in catalogue.pm.get_plugins()] == ["acme_miles_sync_foo"]


def test_one_module_may_serve_several_names_and_kinds(plugins):
    plugins.parts()
    catalogue = plugins.catalogue()
    assert catalogue.load("rollout", "toy").provider.name == "toy"
    assert catalogue.load("term", "clip").provider.name == "clip"
    assert len(catalogue.pm.get_plugins()) == 1


def test_every_conftest_plugin_loads(plugins):
    catalogue = plugins.parts().catalogue()
    for entry in catalogue.entries():
        if entry.distribution == "acme-parts":
            assert catalogue.load(entry.kind, entry.name).provider.name == entry.name


def test_unknown_name_with_a_close_match(plugins):
    plugins.parts()
    with pytest.raises(UnknownPluginError) as error:
        plugins.catalogue().load("sync", "buckted")
    assert message(error) == (
        "no sync plugin is named 'buckted'; installed: bucketed (acme-parts 2.0), p2p (acme-parts 2.0)\n"
        "Fix: write 'bucketed', if that was meant"
    )
    assert str(error.value).startswith("MILES-E001: ")


def test_unknown_name_of_our_own_distribution_gets_its_install_line(plugins):
    with pytest.raises(UnknownPluginError) as error:
        plugins.catalogue().load("rollout", "local")
    assert message(error) == (
        "no rollout plugin is named 'local'; installed: none\nFix: pip install miles-rollout-local"
    )


def test_unknown_name_that_is_of_another_kind(plugins):
    plugins.parts()
    with pytest.raises(UnknownPluginError) as error:
        plugins.catalogue().load("term", "group")
    assert error.value.fix == "'group' is of kind stage; name a term plugin here"


def test_two_distributions_with_one_name(plugins):
    plugins.add("acme-one")
    plugins.add("acme-two", "2.0")
    catalogue = plugins.catalogue()
    with pytest.raises(AmbiguousPluginError) as error:
        catalogue.load("sync", "foo")
    assert message(error) == (
        "two distributions offer the sync plugin 'foo': acme-one 1.0 and acme-two 2.0\n"
        "Fix: keep one of them: pip uninstall acme-one, or pip uninstall acme-two"
    )
    assert {catalogue.state(e) for e in catalogue.entries("sync")} == {"name clash: acme-one, acme-two"}


def test_one_distribution_found_twice_is_no_clash(plugins, tmp_path):
    plugins.add()
    again = tmp_path / "again"
    again.mkdir()
    (plugins.folder / "acme_miles_sync_foo-1.0.dist-info").rename(again / "acme_miles_sync_foo-1.0.dist-info")
    plugins.add()
    catalogue = Catalogue.read([str(plugins.folder), str(again)])
    assert len(catalogue.entries("sync")) == 1


@pytest.mark.parametrize(
    ("major", "state", "fix"),
    [
        (
            2,
            "API v2, core speaks v1",
            "install a release of acme-miles-sync-foo for sync API v1, or upgrade miles-core",
        ),
        (0, "API v0, core speaks v1", "install a release of acme-miles-sync-foo for sync API v1"),
    ],
)
def test_gate_a_another_api_major(plugins, major, state, fix):
    plugins.add(major=major)
    catalogue = plugins.catalogue()
    with pytest.raises(IncompatiblePluginError) as error:
        catalogue.load("sync", "foo")
    assert message(error) == (
        f"sync plugin 'foo' (acme-miles-sync-foo 1.0) targets sync API v{major}; miles-core 0.1.0 speaks v1\nFix: {fix}"
    )
    assert [catalogue.state(e) for e in catalogue.entries("sync")] == [state]


def test_a_plugin_in_two_majors_loads_from_ours(plugins):
    plugins.add()
    lines = "[miles.sync.v1]\nfoo = acme_miles_sync_foo\n[miles.sync.v2]\nfoo = acme_missing\n"
    plugins.metadata("acme-miles-sync-foo", "1.0", lines)
    assert plugins.catalogue().load("sync", "foo").provider.name == "foo"


@pytest.mark.parametrize("wanted", [">=0.2,<1", "<0.1"])
def test_gate_b_core_range_excludes_ours(plugins, wanted):
    plugins.add(requires=[f"miles-core{wanted}", "torch>=2"])
    catalogue = plugins.catalogue()
    with pytest.raises(IncompatiblePluginError) as error:
        catalogue.load("sync", "foo")
    assert message(error) == (
        f"sync plugin 'foo' (acme-miles-sync-foo 1.0) needs miles-core{wanted}; miles-core 0.1.0 is installed\n"
        f"Fix: pip install 'miles-core{wanted}', or install a release of acme-miles-sync-foo that takes "
        "miles-core 0.1.0"
    )
    assert [catalogue.state(e) for e in catalogue.entries("sync")] == [f"needs miles-core{wanted}"]


def test_a_range_inside_an_extra_and_core_itself_are_not_judged(plugins):
    plugins.add(requires=["Miles_Core (>=9) ; extra == 'future'"])
    plugins.metadata("miles-core", "0.1.0", "[miles.sync.v1]\nours = acme_miles_sync_foo\n", ["miles-core>=9"])
    catalogue = plugins.catalogue()
    assert [catalogue.state(e) for e in catalogue.entries("sync")] == ["fits", "fits"]


def test_gate_c_an_argument_that_the_hook_does_not_give(plugins):
    code = """
        from miles_core import hookimpl

        @hookimpl
        def miles_on_step(policy, loss):
            pass
    """
    plugins.add(code=code)
    with pytest.raises(PluginContractError) as error:
        plugins.catalogue().load("sync", "foo")
    assert message(error) == (
        "sync plugin 'foo' (acme-miles-sync-foo 1.0) breaks the hook contract: PluginValidationError: Plugin "
        "'acme-miles-sync-foo:acme_miles_sync_foo' for hook 'miles_on_step' hookimpl definition: miles_on_step(policy, "
        "loss) Argument(s) {'loss'} are declared in the hookimpl but can not be found in the hookspec\n"
        "Fix: the hook is miles_on_step(policy, step, metrics); take any of these"
    )
    assert error.value.__cause__ is not None


def test_gate_c_an_unknown_hook(plugins):
    code = """
        from miles_core import hookimpl

        @hookimpl
        def miles_on_weight(version):
            pass
    """
    plugins.add(code=code)
    plugins.add("acme-fine", names=("fine",))
    catalogue = plugins.catalogue()
    with pytest.raises(PluginContractError) as error:
        catalogue.load("sync", "foo")
    assert error.value.message.startswith(
        "sync plugin 'foo' (acme-miles-sync-foo 1.0) breaks the hook contract: PluginValidationError: unknown hook "
        "'miles_on_weight' in plugin <module 'acme_miles_sync_foo'"
    )
    assert error.value.fix == "name it miles_on_weights, if that was meant"
    assert catalogue.load("sync", "fine").provider.name == "fine"  # the broken one left nothing behind


@pytest.mark.parametrize(
    ("body", "found", "fix"),
    [
        (
            "return Provider(name='bar', config=Config, build=print)",
            "its entry point is named 'foo', but miles_sync() of acme_miles_sync_foo offers 'bar'",
            "name the entry point like Provider.name, one entry point for each provider",
        ),
        ("return []", "its entry point is named 'foo', but miles_sync() of acme_miles_sync_foo offers nothing", None),
        ("return 'foo'", "miles_sync() offers a str", "return a Provider, or a list of them"),
        (
            "return Provider(name='foo', config=dict, build=print)",
            "miles_sync() offers 'foo' with config <class 'dict'>",
            "make config a dataclass type",
        ),
        (
            "return [Provider(name='foo', config=Config, build=print)] * 2",
            "miles_sync() offers two providers named 'foo'",
            "give every provider a name of its own",
        ),
        (
            "raise ValueError('no licence')",
            "miles_sync() raised: ValueError: no licence",
            "a hook only describes; move what can fail into `build`",
        ),
    ],
)
def test_gate_c_providers(plugins, body, found, fix):
    code = f"""
from dataclasses import dataclass
from miles_core import hookimpl
from miles_core.provider import Provider

@dataclass
class Config:
    size: int = 1

@hookimpl
def miles_sync():
    {body}
"""
    plugins.add(code=code)
    with pytest.raises(PluginContractError) as error:
        plugins.catalogue().load("sync", "foo")
    assert error.value.message == f"sync plugin 'foo' (acme-miles-sync-foo 1.0): {found}"
    assert fix is None or error.value.fix == fix


def test_a_failing_import_keeps_its_cause(plugins):
    plugins.add(code="1 / 0")
    with pytest.raises(PluginLoadError) as error:
        plugins.catalogue().load("sync", "foo")
    assert message(error) == (
        "sync plugin 'foo' (acme-miles-sync-foo 1.0) cannot be imported: ZeroDivisionError: division by zero\n"
        "Fix: upgrade or reinstall acme-miles-sync-foo; `--traceback` shows where it failed"
    )
    assert isinstance(error.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("requires", "fix"),
    [
        (["acme-gpu>=1 ; extra == 'gpu'"], "pip install 'acme-miles-sync-foo[gpu]'"),
        ([], "pip install what provides 'acme_gpu'"),
    ],
)
def test_a_missing_dependency_names_what_to_install(plugins, requires, fix):
    plugins.add(code="import acme_gpu.cuda", requires=requires)
    with pytest.raises(PluginLoadError) as error:
        plugins.catalogue().load("sync", "foo")
    assert error.value.fix == fix


def test_a_plugin_that_exits_on_import_is_an_error_of_its_own(plugins):
    plugins.add(code="raise SystemExit(0)")
    with pytest.raises(PluginLoadError):
        plugins.catalogue().load("sync", "foo")


def test_a_broken_plugin_that_nobody_names_does_no_harm(plugins):
    plugins.add("acme-broken", names=("broken",), code="1 / 0", requires=["miles-core>=9"])
    plugins.add()
    assert plugins.catalogue().load("sync", "foo").provider.name == "foo"


def test_an_entry_point_must_name_a_module(plugins):
    plugins.add()
    plugins.metadata("acme-miles-sync-foo", "1.0", "[miles.sync.v1]\nfoo = acme_miles_sync_foo:plugin\n")
    with pytest.raises(PluginContractError) as error:
        plugins.catalogue().load("sync", "foo")
    assert message(error) == (
        "sync plugin 'foo' (acme-miles-sync-foo 1.0): its entry point names an object, acme_miles_sync_foo:plugin\n"
        "Fix: name the module that holds the hooks"
    )


def test_broken_metadata_is_a_row_and_harms_nobody(plugins):
    plugins.add()
    plugins.metadata("acme-torn", "1", "[miles.sync.v1]\nno equals sign\n")
    plugins.metadata("acme-nameless", "1", "[miles.sync.v1]\nx = y\n")
    (plugins.folder / "acme_nameless-1.dist-info" / "METADATA").write_text("")
    plugins.add("acme-range", names=("range",), requires=["miles-core>=banana"])
    catalogue = plugins.catalogue()
    assert catalogue.load("sync", "foo").provider.name == "foo"
    broken = [e for e in catalogue.entries() if e.kind == "?"]
    assert len(broken) == 2 and all(e.summary.startswith("unreadable metadata: ") for e in broken)
    assert {catalogue.state(e) for e in broken} == {"unknown kind"}
    assert catalogue.state(catalogue.entries("sync")[1]) == "needs miles-core>=banana"
    with pytest.raises(IncompatiblePluginError):
        catalogue.load("sync", "range")


def test_an_unknown_kind_and_foreign_groups_are_rows_at_most(plugins):
    plugins.metadata("acme-odd", "1", "[miles.teleport.v1]\nx = acme_odd\n[console_scripts]\ny = acme_odd:main\n")
    catalogue = plugins.catalogue()
    [entry] = [e for e in catalogue.entries() if e.distribution == "acme-odd"]
    assert catalogue.state(entry) == "unknown kind"
    with pytest.raises(UnknownPluginError):
        catalogue.load("teleport", "x")


def test_a_distribution_installed_by_pip_is_found_in_a_fresh_interpreter(tmp_path):
    project = tmp_path / "project"
    (project / "src" / "acme_wheel").mkdir(parents=True)
    (project / "pyproject.toml").write_text(
        """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "acme-wheel"
version = "3.1"
description = "A real wheel"
dependencies = ["miles-core>=0.1,<1"]
[project.entry-points."miles.env.v1"]
wheel = "acme_wheel.plugin"
[tool.hatch.build.targets.wheel]
packages = ["src/acme_wheel"]
"""
    )
    (project / "src" / "acme_wheel" / "__init__.py").write_text("")
    (project / "src" / "acme_wheel" / "plugin.py").write_text(
        "from dataclasses import dataclass\nfrom miles_core import hookimpl\n"
        "from miles_core.provider import Provider\n@dataclass\nclass Config:\n    size: int = 1\n"
        "@hookimpl\ndef miles_env():\n    return Provider(name='wheel', config=Config, build=lambda c, x: None)\n"
    )
    target = tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*pip, str(target), str(project)], check=True, timeout=300)
    script = (
        f"import sys; sys.path.insert(0, {str(target)!r})\nfrom miles_core.discovery import scan\n"
        "c = scan()\n[e] = [e for e in c.entries('env') if e.name == 'wheel']\n"
        "print(e, e.summary, c.state(e), c.load('env', 'wheel').provider.name, scan() is c)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "env plugin 'wheel' (acme-wheel 3.1) A real wheel fits wheel True"


def test_the_install_lines_name_every_plugin_of_this_repository():
    root = Path(__file__).parents[2]
    offered = {}
    for file in root.glob("plugins/*/*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        points = project["entry-points"].items()
        offered[project["name"]] = {f"{group.split('.')[1]}:{name}" for group, names in points for name in names}
    assert {name: set(offers) for name, offers in OURS.items()} == offered


def test_scanning_imports_nothing_heavy(plugins):
    for i in range(20):
        plugins.add(f"acme-many-{i}", names=(f"many{i}",), code="import torch")
    script = (
        f"import sys; sys.path.insert(0, {str(plugins.folder)!r})\nfrom miles_core.discovery import scan\n"
        "c = scan()\nassert sum(e.name.startswith('many') for e in c.entries()) == 20\n"
        "[c.state(e) for e in c.entries()]\nprint(*sorted(m.split('.')[0] for m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "numpy", "omegaconf", "yaml"}
    assert not {m for m in loaded if m.startswith("acme")}
