"""`miles conformance KIND:NAME`: an installed plugin against the contract of its kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from miles_core.cli.results import record
from miles_core.cli.table import table
from miles_core.errors import EXIT_FINDINGS, InputError, MissingExtraError

WIDEST = 100  # characters of a detail in the table; `--out` has all of it


def conformance(
    plugin: Annotated[str, typer.Argument(help="KIND:NAME, e.g. sync:bucketed or term:clip")],
    options: Annotated[list[str] | None, typer.Argument(help="key=value: options of the plugin")] = None,
    out: Annotated[Path | None, typer.Option("--out", "--json", help="also write the results as JSON here")] = None,
) -> None:
    """Run the conformance suite of the plugin's kind; exit code 1 where a check fails.

    The result is kept as conformance.json in the user's cache, and `miles plugins` shows it.
    """
    from miles_core import API_VERSIONS
    from miles_core.config.reading import read_overrides
    from miles_core.discovery import close, scan

    try:
        from miles_core.testing import run_suite
    except ImportError as error:
        raise MissingExtraError(
            f"the conformance kit needs {error.name}", fix="pip install 'miles-core[testing]'"
        ) from error
    catalogue = scan()
    kind, _, name = plugin.partition(":") if ":" in plugin else ("", "", plugin)
    if kind not in API_VERSIONS:
        known = [f"{e.kind}:{e.name}" for e in catalogue.entries()]
        named = [one for one in known if one.partition(":")[2] == name]
        meant = close(plugin, named) or (named or [close(plugin, known) or "KIND:NAME, as in `miles plugins`"])[0]
        raise InputError(f"{plugin!r} names no kind; kinds are {', '.join(API_VERSIONS)}", fix=f"write {meant}")
    entry = catalogue.find(kind, name)
    given = {key: value for one in read_overrides(tuple(options or ())) for key, value in one.items()}
    results = run_suite(kind, name, given or None)
    failed = [r for r in results if not r.passed]
    rows = [(r.name, "ok" if r.passed else "FAILED", _line(r.detail)) for r in results]
    print(table(("check", "result", "detail"), rows))
    print(f"\n{plugin}: {len(results) - len(failed)} passed, {len(failed)} failed")
    checks = [{"check": r.name, "passed": r.passed, "detail": r.detail, "seconds": r.seconds} for r in results]
    record(entry, catalogue, len(results) - len(failed), len(failed), checks)
    if out is not None:
        head = {"v": 1, "plugin": plugin, "distribution": entry.distribution, "version": entry.version}
        out.write_text(json.dumps({**head, "checks": checks}, indent=1) + "\n")
    if failed:
        raise typer.Exit(EXIT_FINDINGS)


def _line(detail: str) -> str:
    text = " ".join(detail.split())
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 2].rstrip()} …"
