"""`miles doctor`: what would fail. With a run file, of that run; without, of everything that is installed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from miles_core import __version__
from miles_core.cli.probe import Finding
from miles_core.errors import EXIT_FINDINGS, MilesError

if TYPE_CHECKING:
    from miles_core.config.schema import RunFile
    from miles_core.discovery import Catalogue

MIN_FREE_GIB = 1.0
EXTRAS = {"torch": ("torch",), "render": ("tokenizers", "jinja2"), "plot": ("matplotlib",)}


def doctor(
    file: Annotated[Path | None, typer.Argument(help="a run file; everything that is installed where absent")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, as for `miles run`")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line")] = False,
) -> None:
    """Look for what would fail, each finding with its fix. Exits with 1 where there is one."""
    from miles_core.discovery import scan

    catalogue = scan()
    findings = [*environment(catalogue)]
    findings += of_file(file, tuple(overrides or ()), catalogue) if file else of_everything(catalogue)
    bad = [f for f in findings if not f.ok]
    for finding in findings:
        if as_json:
            row = {"name": finding.name, "ok": finding.ok, "finding": finding.finding, "fix": finding.fix}
            print(json.dumps(row))
        else:
            print(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.name}: {finding.finding}")
            if not finding.ok and finding.fix:
                print(f"      Fix: {finding.fix}")
    if not as_json:
        print(f"\n{len(bad)} finding(s)" if bad else "\nnothing found")
    if bad:
        raise typer.Exit(EXIT_FINDINGS)


def environment(catalogue: Catalogue) -> Iterator[Finding]:
    """Interpreter, core, extras, space: nothing heavy is imported."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding(name="python", ok=sys.version_info >= (3, 11), finding=version, fix="use Python 3.11 or newer")
    built_in = [e for e in catalogue.entries() if e.distribution == "miles-core"]
    yield Finding(
        name="miles-core",
        ok=bool(built_in),
        finding=__version__ if built_in else "its metadata is not installed, so built-ins cannot be found",
        fix="pip install miles-core (or pip install -e . in a clone)",
    )
    for extra, modules in EXTRAS.items():
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        state = f"not installed ({', '.join(missing)}); pip install 'miles-core[{extra}]'" if missing else "installed"
        yield Finding(name=f"extra {extra}", ok=True, finding=state)  # optional: absence alone is no fault
    free = shutil.disk_usage(".").free / 2**30
    yield Finding(
        name="space", ok=free >= MIN_FREE_GIB, finding=f"{free:.1f} GiB free here", fix="free space, or set run.dir"
    )


def of_everything(catalogue: Catalogue) -> list[Finding]:
    """Every installed plugin: metadata first, then loaded in a process of its own, with its health checks."""
    from miles_core.cli.probe import probe_all

    entries = catalogue.entries()
    states = {e: catalogue.state(e) for e in entries}
    findings = [
        Finding(name=f"{e.kind}:{e.name}", ok=False, finding=f"{e.distribution} {e.version}: {state}", fix=_fix(state))
        for e, state in states.items()
        if state != "fits"
    ]
    return findings + probe_all([e for e in entries if states[e] == "fits"])


def of_file(file: Path, overrides: tuple[str, ...], catalogue: Catalogue) -> list[Finding]:
    """One run: its file, its directory, capabilities, model sources, data, and the health checks of the plugins that it
    names."""
    from miles_core.cli.probe import probe_all
    from miles_core.config.compose import load

    try:
        run_file = load(file, overrides, catalogue=catalogue)
    except MilesError as error:
        return [Finding(name=str(file), ok=False, finding=f"{error.code}: {error.message}", fix=error.fix)]
    findings = [Finding(name=str(file), ok=True, finding="well-formed"), _directory(run_file)]
    findings.append(_prepared(run_file, catalogue))
    entries = list(dict.fromkeys(catalogue.find(p.kind, p.use) for p in run_file.parts()))
    return findings + probe_all(entries)


def _directory(run_file: RunFile) -> Finding:
    from miles_core.driver import run_path
    from miles_core.run import refuse_existing

    path = run_path(run_file)
    try:
        refuse_existing(path)
    except MilesError as error:
        return Finding(name="run directory", ok=False, finding=f"{error.code}: {error.message}", fix=error.fix)
    return Finding(name="run directory", ok=True, finding=f"{path} is free")


def _prepared(run_file: RunFile, catalogue: Catalogue) -> Finding:
    from miles_core.driver import run_path
    from miles_core.export import export_cached
    from miles_core.prepare import prepare

    try:
        prepare(run_file, catalogue, run_path(run_file), export_cached)
    except MilesError as error:
        return Finding(name="models, data, parts", ok=False, finding=f"{error.code}: {error.message}", fix=error.fix)
    return Finding(name="models, data, parts", ok=True, finding="found, and they fit together")


def _fix(state: str) -> str:
    if state.startswith("name clash"):
        return "uninstall one of them; until then a run that names it is refused"
    return "upgrade it, or uninstall it; runs that do not name it are not harmed"
