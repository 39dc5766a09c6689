"""`miles config show` and `miles config schema`: what a run file means, and what may stand in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from miles_core.discovery import Catalogue

app = typer.Typer(help="What a run file means, and what may stand in one.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="a run file, or a run directory")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. schedule.max_staleness=2")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="the objective: formulas, papers, every constant")] = False,
) -> None:
    """Print every resolved value with its origin: default, preset, file, extension or command line."""
    from miles_core.cli.explain import explained
    from miles_core.config.compose import load, reload
    from miles_core.discovery import scan
    from miles_core.run import annotated_yaml

    run_file = (reload if file.is_dir() else load)(file, tuple(overrides or ()))
    lines = explained(run_file, scan()) if explain else annotated_yaml(run_file.tree, run_file.origins)
    print("\n".join(lines))


@app.command()
def schema(
    what: Annotated[
        str, typer.Argument(help="KIND:NAME of an installed plugin, or a section; all sections if empty")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a field")] = False,
) -> None:
    """Print fields with type, default, unit, bounds and help."""
    from miles_core.cli.table import table
    from miles_core.discovery import scan

    groups = _plugin(what, scan()) if ":" in what else _sections(what)
    for title, rows in groups.items():
        if as_json:
            for row in rows:
                print(json.dumps({"section": title, **row}))
            continue
        print(f"\n{title}" if title != next(iter(groups)) else title)
        print(table(list(COLUMNS), [list(row.values()) for row in rows]) if rows else "(no fields)")
    if what.startswith("algorithm:") and not as_json:
        print("\n".join(_short_for(what.partition(":")[2], scan())))


def _short_for(name: str, catalogue: Catalogue) -> list[str]:
    """What a preset stands for, and where the fields of its parts are shown."""
    from miles_core.config.binding import fields_of, required
    from miles_core.config.reading import written
    from miles_core.config.schema import PART_FIELDS

    provider = catalogue.load("algorithm", name).provider
    if any(map(required, fields_of(provider.config).values())):
        return []  # it depends on what it is given
    tree = provider.build(provider.config(), None)  # type: ignore[arg-type]  # a preset needs no context
    shown: dict[str, None] = {}
    for key in tree.keys() & PART_FIELDS.keys():
        kinds, plural = PART_FIELDS[key]
        for part, value in tree[key].items() if plural else [("", tree[key])]:
            use = value if isinstance(value, str) else (value or {}).get("use", part)
            shown |= {f"{kind}:{use}": None for kind in kinds if use in catalogue.names(kind)}
    return [
        "\nshort for, under `algorithm`, whose other keys `miles config schema algorithm` shows:",
        *(f"  {key}: {written(value)}" for key, value in tree.items()),
        *([f"fields of its parts: miles config schema X, with X one of {', '.join(sorted(shown))}"] if shown else []),
    ]


COLUMNS = ("field", "type", "default", "unit", "bounds", "help")


def fields(cls: type, prefix: str = "") -> list[dict[str, str]]:
    """One row for each field of a config dataclass; nested ones by dotted name."""
    import dataclasses

    from miles_core.config.binding import annotation, bounds, fields_of, hints, plain, required
    from miles_core.config.reading import written

    rows: list[dict[str, str]] = []
    for name, field in fields_of(cls).items():
        hint: Any = hints(cls)[name]
        if dataclasses.is_dataclass(hint):
            rows += fields(hint if isinstance(hint, type) else type(hint), f"{prefix}{name}.")
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        values = (
            *(f"{prefix}{name}", annotation(hint), "(required)" if required(field) else written(plain(default))),
            *(str(field.metadata.get("unit", "")), bounds(field), str(field.metadata.get("help", ""))),
        )
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def _sections(what: str) -> dict[str, list[dict[str, str]]]:
    from miles_core.config.schema import SECTIONS
    from miles_core.discovery import close
    from miles_core.errors import UnknownKeyError

    if what and what not in SECTIONS:
        similar = close(what, SECTIONS)
        raise UnknownKeyError(
            f"{what!r} is neither a section that core types ({', '.join(SECTIONS)}) nor KIND:NAME of a plugin",
            fix=f"write {similar}" if similar else "write e.g. schedule, or sync:bucketed",
        )
    return {name: fields(cls) for name, cls in SECTIONS.items() if what in ("", name)}


def _plugin(what: str, catalogue: Catalogue) -> dict[str, list[dict[str, str]]]:
    from miles_core import API_VERSIONS
    from miles_core.config.layers import CORE_KEYS
    from miles_core.config.schema import TermKeys
    from miles_core.errors import InputError

    kind, _, name = what.partition(":")
    if kind not in API_VERSIONS:
        raise InputError(f"{kind!r} is no kind of plugin", fix=f"use one of: {', '.join(API_VERSIONS)}")
    loaded = catalogue.load(kind, name)
    provider = loaded.provider
    owned = TermKeys if kind == "term" and provider.field != "correction" else CORE_KEYS.get(kind)
    where = f", field {provider.field}" if provider.field else ""
    summary = f": {provider.summary}" if provider.summary else ""
    title = f"{kind}:{name} ({loaded.distribution} {loaded.version}{where}){summary}"
    groups = {title: fields(provider.config)}
    return groups | ({"keys that core owns in this section": fields(owned)} if owned else {})
