"""`miles conformance KIND:NAME`: an installed plugin against the contract of its kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from miles_core.cli.results import record
from miles_core.cli.table import table
from miles_core.errors import EXIT_FINDINGS, InputError, MissingExtraError


def conformance(
    plugin: Annotated[str, typer.Argument(help="KIND:NAME, e.g. sync:bucketed or term:clip")],
    options: Annotated[list[str] | None, typer.Argument(help="key=value: options of the plugin")] = None,
    out: Annotated[Path | None, typer.Option(help="also write the results as JSON")] = None,
) -> None:
    """Run the conformance suite of the plugin's kind; exit code 1 where a check fails."""
    from miles_core.config.reading import read_overrides
    from miles_core.discovery import scan

    try:
        from miles_core.testing import run_suite
    except ImportError as error:
        raise MissingExtraError(
            f"the conformance kit needs {error.name}", fix="pip install 'miles-core[testing]'"
        ) from error
    kind, colon, name = plugin.partition(":")
    if not colon:
        raise InputError(f"{plugin!r} names no kind", fix="write KIND:NAME, e.g. sync:bucketed; see `miles plugins`")
    catalogue = scan()
    entry = catalogue.find(kind, name)
    given = {key: value for one in read_overrides(tuple(options or ())) for key, value in one.items()}
    results = run_suite(kind, name, given or None)
    failed = [r for r in results if not r.passed]
    print(table(("check", "result", "detail"), [(r.name, "ok" if r.passed else "FAILED", r.detail) for r in results]))
    print(f"\n{plugin}: {len(results) - len(failed)} passed, {len(failed)} failed")
    record(entry, catalogue, len(results) - len(failed), len(failed))
    if out is not None:
        rows = [{"check": r.name, "passed": r.passed, "detail": r.detail, "seconds": r.seconds} for r in results]
        head = {"v": 1, "plugin": plugin, "distribution": entry.distribution, "version": entry.version}
        out.write_text(json.dumps({**head, "checks": rows}, indent=1) + "\n")
    if failed:
        raise typer.Exit(EXIT_FINDINGS)
