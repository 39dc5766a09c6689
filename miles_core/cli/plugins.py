"""`miles plugins`: what is installed, from metadata; `--check` loads each plugin in a process of its own."""

from __future__ import annotations

import json
import textwrap
from typing import Annotated

import typer

from miles_core import API_VERSIONS
from miles_core.errors import EXIT_FINDINGS, InputError


def plugins(
    kind: Annotated[str, typer.Option(help="only this kind, e.g. sync")] = "",
    check: Annotated[bool, typer.Option("--check", help="also load each one, in a process of its own")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line")] = False,
) -> None:
    """List installed plugins: kind, name, distribution, version, API, last conformance result, state; then what their
    distributions say of themselves."""
    from miles_core.cli.results import found, recorded
    from miles_core.cli.table import table
    from miles_core.discovery import scan

    if kind and kind not in API_VERSIONS:
        raise InputError(f"{kind!r} is no kind of plugin", fix=f"use one of: {', '.join(API_VERSIONS)}")
    catalogue, known = scan(), recorded()
    entries = [e for e in catalogue.entries() if kind in ("", e.kind)]
    states = {e: catalogue.state(e) for e in entries}
    if check:
        from miles_core.cli.probe import probe_all

        fitting = {f"{e.kind}:{e.name}": e for e in entries if states[e] == "fits"}
        for finding in probe_all(list(fitting.values())):
            if finding.name in fitting and not states[fitting[finding.name]].startswith("broken"):
                states[fitting[finding.name]] = "loads" if finding.ok else f"broken: {finding.finding}"
    results = {e: found(e, catalogue, known) for e in entries}
    rows = [
        {
            **{"kind": e.kind, "name": e.name, "distribution": e.distribution, "version": e.version},
            **{"api": f"v{e.major}", "state": states[e], "conformance": results[e][0]},
            "summary": e.summary,
        }
        for e in entries
    ]
    if as_json:
        for e, row in zip(entries, rows, strict=True):
            print(json.dumps({**row, "results": results[e][1]}))
    elif rows:
        shown = ("kind", "name", "distribution", "version", "api", "conformance", "state")
        print(table(shown, [[row[key] for key in shown] for row in rows]), "", sep="\n")
        for distribution, version, summary in sorted({(e.distribution, e.version, e.summary) for e in entries}):
            about = f"{distribution} {version}: {summary}"
            print(textwrap.fill(about, 120, subsequent_indent="    ", break_on_hyphens=False))
    else:
        print(f"no plugin{f' of kind {kind}' if kind else ''} is installed")
    if check and any(state.startswith("broken") for state in states.values()):
        raise typer.Exit(EXIT_FINDINGS)
