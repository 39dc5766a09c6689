"""Who may import what: judged by what really is in `sys.modules`, and by import-linter's layers."""

import ast
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from miles_core import API_VERSIONS

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "ray", "vllm", "sglang", "megatron")


def _loaded(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(' '.join({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_the_core_is_light():
    assert not _loaded("import miles_core") & {*HEAVY, "omegaconf", "numpy"}


def test_listing_plugins_imports_no_plugin_and_nothing_heavy():
    code = (
        "import sys; sys.argv = ['miles', 'plugins']\nfrom miles_core.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code"
    )
    loaded = _loaded(code)
    assert not loaded & {*HEAVY, "omegaconf", "numpy"}
    assert not {name for name in loaded if name.startswith("miles_") and name != "miles_core"}


def _plugin_modules() -> list[str]:
    groups = [f"miles.{kind}.v{major}" for kind, major in API_VERSIONS.items()]
    return sorted({entry.value for group in groups for entry in entry_points(group=group)})


@pytest.mark.parametrize("module", _plugin_modules())
def test_a_plugin_module_imports_nothing_heavy(module):
    assert not _loaded(f"import {module}") & set(HEAVY)


def test_import_linter_names_every_package():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    packages = {p.name for p in ROOT.glob("plugins/*/*/src/*") if (p / "__init__.py").exists()}
    assert set(config["root_packages"]) == {"miles_core", *packages}


def test_import_rules_hold():
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:]


def _imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return modules | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def test_the_room_of_verifiers_needs_nearly_nothing_and_no_other_room_needs_it():
    core = ROOT / "miles_core"
    rooms = ("miles_core.errors", "miles_core.records", "miles_core.config.schema", "miles_core.verifying")
    for path in core.rglob("*.py"):
        for name in _imported(path):
            if path.is_relative_to(core / "verifying"):
                assert name.split(".")[0] in sys.stdlib_module_names or name.startswith(rooms), (path, name)
            else:
                assert not name.startswith("miles_core.verifying"), path


def test_no_module_imports_the_private_name_of_another():
    for path in [*(ROOT / "miles_core").rglob("*.py"), *ROOT.glob("plugins/*/*/src/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            package = ROOT / str(getattr(node, "module", "")).replace(".", "/")
            private = [n for n in names if n.startswith("_") and not n.startswith("__")]
            assert all((package / f"{name}.py").is_file() for name in private), (path, private)
