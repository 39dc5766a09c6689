"""The public API as text: what plugins and readers of run directories rely on, in `public_api.txt`.

    python tests/architecture/public_api.py            print what differs, exit 1 where something does
    python tests/architecture/public_api.py --write    take the present state over

Read from source, so that nothing is imported (but for the formats, which are read from a small run of toys).
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SNAPSHOT = Path(__file__).with_name("public_api.txt")
CORE = ROOT / "miles_core"

#: Modules that plugins may import, in the order of the audit guide. Others are the core's own business.
MODULES = (
    *("__init__", "hookspecs", "provider", "errors", "records", "columns", "seeds", "config/schema"),
    *(f"contracts/{n}" for n in ("engine", "weights", "backend", "model", "learning", "environment", "rendering")),
    *("contracts/launcher", "contracts/extension", "weights"),
    *sorted(f"numerics/{p.stem}" for p in CORE.glob("numerics/[!_]*.py")),
    *(f"verifying/{n}" for n in ("extract", "prompts", "sandbox", "workers")),
    *("testing/suite", "testing/suites/worked"),
)
HOW = """
The public API changed. docs/explanation/compatibility.md says what that means:
- Only new lines (a field with a default, a new optional method, hook, key, error, event or metric), or a line that only
  gained an optional argument at its end: additive. Write it into CHANGELOG.md and take it over with
  python tests/architecture/public_api.py --write
- A line is gone, renamed, or means something else: breaking. Keep the old one working beside the new one, or raise the
  kind's API major (API_VERSIONS in miles_core/__init__.py), or the `format`/`v` of the format, before you take it over.
"""


# --- source ----------------------------------------------------------------------------------------------------------


def modules() -> Iterator[str]:
    for name in MODULES:
        tree = ast.parse((CORE / f"{name}.py").read_text())
        yield f"\n## miles_core{'' if name == '__init__' else '.' + name.replace('/', '.')}\n"
        for node in tree.body:
            yield from shown(node)


def shown(node: ast.stmt, indent: str = "") -> Iterator[str]:
    """Lines for a definition, without bodies; nothing for what is private."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if not node.name.startswith("_") or (indent and node.name in ("__call__", "__getitem__", "__contains__")):
            kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
            made = "".join(f"@{ast.unparse(d)} " for d in node.decorator_list if indent and isinstance(d, ast.Name))
            returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
            yield f"{indent}{made}{kind} {node.name}({ast.unparse(node.args)}){returns}"
    elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
        bases = ", ".join(map(ast.unparse, node.bases))
        frozen = "frozen " if "frozen=True" in "".join(map(ast.unparse, node.decorator_list)) else ""
        yield f"{indent}{frozen}class {node.name}({bases})"
        for child in node.body:
            yield from shown(child, indent + "    ")
    elif isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
        value = "" if node.value is None else f" = {_default(node.value)}"
        yield f"{indent}{ast.unparse(node.target)}: {ast.unparse(node.annotation)}{value}"
    elif isinstance(node, ast.Assign) and not ast.unparse(node.targets[0]).startswith("_"):
        yield f"{indent}{ast.unparse(node.targets[0])} = {_default(node.value)}"


def _default(value: ast.expr) -> str:
    """A default, without help texts: `opt(16, "…", low=1)` is shown as `16, low=1`."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "opt":
        bounds = [f", {k.arg}={ast.unparse(k.value)}" for k in value.keywords if k.arg in ("low", "high")]
        return ast.unparse(value.args[0]) + "".join(bounds)
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "_core":
        return "…"
    text = ast.unparse(value)
    return text if len(text) <= 300 or not isinstance(value, ast.DictComp) else "…"


def columns() -> Iterator[str]:
    yield "\n## Columns of the core: level, name, dtype\n"
    tree = ast.parse((CORE / "columns.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_core" and isinstance(node.args[1], ast.Constant):
            level, name, dtype = (ast.unparse(a).removeprefix("Level.").strip("'") for a in node.args[:3])
            yield " ".join([level.lower(), name, dtype, *(f"{k.arg}={ast.unparse(k.value)}" for k in node.keywords)])


def places() -> Iterator[str]:
    yield "\n## Kind, place: what must be built there\n"
    sys.path.insert(0, str(ROOT))
    from miles_core.compatibility import PROTOCOLS

    for (kind, place), protocol in sorted(PROTOCOLS.items(), key=str):
        yield f"{kind} {place.value}: {protocol.__module__}.{protocol.__name__}"


def kit() -> Iterator[str]:
    from miles_core import testing
    from miles_core.testing.runner import SUITES

    yield "\n## miles_core.testing\n"
    yield from testing.__all__
    yield "\n## Suite of a kind and field\n"
    yield from (f"{kind} {field or '-'}: {suite}" for (kind, field), suite in SUITES.items())


def commands() -> Iterator[str]:
    import typer

    from miles_core.cli.main import build

    yield "\n## Commands and their options\n"
    group = typer.main.get_command(build())
    for name, command in sorted(group.commands.items()):
        leaves = {f"{name} {n}": c for n, c in getattr(command, "commands", {}).items()} or {name: command}
        for path, leaf in sorted(leaves.items()):
            options = sorted(o for p in leaf.params for o in p.opts if o.startswith("--") and o != "--help")
            given = [p.name.upper() for p in leaf.params if p.param_type_name == "argument"]
            yield " ".join(["miles", path, *given, *options])


# --- formats ---------------------------------------------------------------------------------------------------------

TOY = """
run: {name: toy, seed: 7, steps: 3, checkpoint_every: 2}
model: {use: toy, tokenizer: toy, architecture: {model_type: toy}}
renderer: toy
env: {use: toy}
rollout: {use: toy, max_new_tokens: 2}
backend: {use: toy}
sync: {use: toy}
algorithm: {use: toy-everything}
roles: {reference: {init: actor}}
schedule: {groups_per_step: 4, group_size: 4}
eval: {every: 2, tasks: 8}
trackers: {jsonl: {}}
"""


def formats() -> Iterator[str]:
    """Keys of every file of a run directory."""
    from miles_core.journal import read

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "toy.yaml").write_text(TOY)
        path = os.pathsep.join([str(ROOT), *sys.path])
        command = [sys.executable, "-m", "miles_core.cli", "run", "toy.yaml"]
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        run = Path(folder) / "runs/toy"
        yield "\n## Run directory\n"
        names = {re_numbers(str(p.relative_to(run))) for p in run.rglob("*") if p.is_file()}
        yield from sorted(names)
        yield "\n## plugins.lock\n"
        lock = json.loads((run / "plugins.lock").read_text())
        yield f"format {lock['format']}: {keys(lock)}"
        yield f"distributions.*: {keys(next(iter(lock['distributions'].values())))}"
        yield "\n## events.jsonl: type, keys\n"
        yield from by_type(map(json.loads, (run / "events.jsonl").read_text().splitlines()), "type")
        yield "\n## metrics.jsonl: keys of a line, then names by side\n"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        yield keys({k: 0 for line in lines for k, v in line.items() if not isinstance(v, dict)})
        yield keys(next(v for v in lines[-1].values() if isinstance(v, dict)))
        yield from sorted({k for line in lines for k, v in line.items() if isinstance(v, dict)})
        yield "\n## journal: kind, keys of the header\n"
        yield from by_type((dict(frame.header) for frame in read(run / "journal")), "kind")
        yield "\n## checkpoint: keys of ledger.json\n"
        yield keys(json.loads(next(run.glob("checkpoints/*/ledger.json")).read_text()))
        yield "\n## rollouts/*.jsonl: keys of a line\n"
        samples = [line for p in run.glob("rollouts/*.jsonl") for line in p.read_text().splitlines()]
        yield from by_type(map(json.loads, samples), "")


def re_numbers(text: str) -> str:
    import re

    return re.sub(r"\d{6}", "NNNNNN", text)


def keys(mapping: dict) -> str:
    return " ".join(sorted(mapping))


def by_type(lines: Iterator[dict], key: str) -> Iterator[str]:
    """One line for each value of `key`: all keys that were seen with it."""
    seen: dict[str, dict] = {}
    for line in lines:
        seen.setdefault(str(line.get(key, "")), {}).update(line)
    yield from sorted(f"{name}: {keys(found)}".removeprefix(": ") for name, found in seen.items())


def text() -> str:
    """The whole snapshot."""
    head = (
        "# Public API of miles-core. Made by tests/architecture/public_api.py, which says what to do when it changes.\n"
    )
    sections = [modules(), columns(), places(), kit(), commands(), formats()]
    return head + "".join(f"{line}\n" for section in sections for line in section)


def difference(now: str) -> list[str]:
    before = SNAPSHOT.read_text() if SNAPSHOT.exists() else ""
    return list(difflib.unified_diff(before.splitlines(), now.splitlines(), "public_api.txt", "now", lineterm="", n=0))


def main() -> int:
    now = text()
    if "--write" in sys.argv:
        SNAPSHOT.write_text(now)
        return 0
    if changed := difference(now):
        print("\n".join(changed) + HOW)
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
