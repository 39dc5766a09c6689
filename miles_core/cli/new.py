"""`miles new KIND NAME`: a package that installs, lints, type-checks, and fails its suite only where code is missing.

Everything that differs between kinds is one file each under `templates/kinds/`: what the kind is called where (TOML, up
to the line `+++`), then the module to be completed. `templates/package/` holds the files that all packages share.
"""

from __future__ import annotations

import importlib.resources
import keyword
import os
import re
import shutil
import tempfile
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Annotated, Any

import typer

from miles_core import API_VERSIONS, __version__
from miles_core.errors import InputError

DEFAULT_FIELDS = {"stage": "advantage", "term": "loss"}
LONGEST = 80  # characters of distribution and name together: what is generated must fit its lines
SETTINGS = "A further class with `options` tests other settings."
#: What every stage and term keeps to.
RULES = {
    "stage": "Units that are not trainable may hold NaN, and must not matter. Return a StageOutput with columns"
    " ${returns} and metrics (numerator, denominator).",
    "term": "Put miles_core.numerics.ratios.select(view['trainable'], x) around what you read: masked units may be NaN."
    " Return a TermOutput with value and with detached metrics per unit.",
}
_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
_TEMPLATES = importlib.resources.files("miles_core.cli") / "templates"
#: Template -> file of the package.
FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "init.py": "src/{package}/__init__.py",
    "config.py": "src/{package}/config.py",
    "plugin.py": "src/{package}/plugin.py",
    "conformance.py": "src/{package}/conformance.py",
    "test_conformance.py": "tests/test_conformance.py",
}


def new(
    kind: Annotated[str, typer.Argument(help="kind of plugin, e.g. sync or stage")],
    name: Annotated[str, typer.Argument(help="what run files will write, e.g. my-sync")],
    field: Annotated[str, typer.Option(help="field of `algorithm` that a stage or term stands in")] = "",
    prefix: Annotated[str, typer.Option(help="put before the distribution's name, e.g. acme")] = "",
    folder: Annotated[Path, typer.Option("--dir", help="where the package's folder is made")] = Path("."),
) -> None:
    """Make a package for a new plugin; `miles conformance KIND:NAME` then says what is left to write."""
    head, body = _template(kind, name)
    chosen = _field(kind, field, head)
    files = package(kind, name, chosen, prefix, head, body)
    distribution = files.pop("")
    _free(kind, name)
    made = folder / distribution
    _write(made, files)
    missing = f"src/{distribution.replace('-', '_')}/{head['module']}.py"
    print(f"made {made}: {kind} plugin {name!r}{f', field {chosen}' if chosen else ''}")
    print(f"  pip install -e {made}")
    print(f"  miles conformance {kind}:{name}    # fails where {missing} says that something is not written yet")


def package(kind: str, name: str, field: str, prefix: str, head: Mapping[str, Any], body: str) -> dict[str, str]:
    """File -> text of the package; under the empty name, the distribution's name."""
    stem = name.removeprefix(".").removesuffix(":") if _resolves(kind, name) else name
    _spelled("the name", stem)
    if prefix:
        _spelled("--prefix", prefix)
    plain = stem.replace("_", "-")
    distribution = "-".join(filter(None, (prefix.replace("_", "-"), "miles", head["family"], plain)))
    if len(distribution) + len(plain) > LONGEST:
        raise InputError(
            f"the distribution would be named {distribution}, which does not fit the lines of a package",
            fix=f"choose a shorter name or --prefix, by {len(distribution) + len(plain) - LONGEST} characters",
        )
    major, minor = __version__.split(".")[:2]
    core_range = f">={major}.{minor},<{int(major) + 1}"
    facts: dict[str, Any] = {**head, **head.get("fields", {}).get(field, {})}
    values: dict[str, str] = {
        **{key: value for key, value in facts.items() if isinstance(value, str)},
        **{"kind": kind, "name": name, "field": field, "distribution": distribution},
        **{"package": distribution.replace("-", "_"), "major": str(API_VERSIONS[kind]), "core_range": core_range},
        "Class": "".join(word.capitalize() for word in plain.split("-")),
        "dependencies": f'"miles-core{core_range}"',
        "provider": _provider(facts, field),
        "field_line": f'\n    field = "{field}"' if facts["suite"] == "TermConformance" else "",
    }
    values |= _parts(kind, facts)
    values["override"] = f"{facts.get('override', '')} {SETTINGS}".strip()
    for _ in range(2):  # values hold names of others, e.g. the summary that of the plugin
        values = {key: Template(value).safe_substitute(values) for key, value in values.items()}
    values["override"] = textwrap.fill(values["override"], 118)
    values["write"] = _comment(values.get("write", ""))
    files = {FILES[file].format(**values): Template(_read("package", file)).substitute(values) for file in FILES}
    source = f"src/{values['package']}"
    files |= {f"{source}/py.typed": "", f"{source}/{facts['module']}.py": Template(body).substitute(values)}
    return {"": distribution, **files}


def _provider(facts: Mapping[str, Any], field: str) -> str:
    """Further arguments of the `Provider`, a line each."""
    lines = [f'field="{field}",'] if field else []
    for key in ("requires", "offers"):
        words = ", ".join(f'"{word}"' for word in facts.get(key, ()))
        if words:
            lines.append(f"{key}=({words}{',' * (len(facts[key]) == 1)}),")
    if field or (facts["family"] == "algo" and facts["module"] == "preset"):
        lines.append('explain="to be written: the formula first, then the paper, then what differs from it",')
    return "".join(f"\n        {line}" for line in lines)


def _parts(kind: str, facts: Mapping[str, Any]) -> dict[str, str]:
    """What stages and terms are made of."""
    if kind not in DEFAULT_FIELDS:
        return {}
    names = {"Output", "Term", "TermLevel", "TermMask", "TermOutput", "View"} | {facts.get("constants", "Output")}
    made = {
        "write": f"{facts['write']} {RULES[kind]}",
        "columns": "CORE_COLUMNS, Batch, ColumnSpec"
        if "CORE_COLUMNS" in facts.get("gives", "")
        else "Batch, ColumnSpec, Level",
        "imports": ", ".join(sorted(names, key=lambda n: (not n.isupper(), n))),
        "needs_set": f"{{{facts['needs']}}}" if facts["needs"] else "",
        "before": f"\n{facts['before']}\n" if "before" in facts else "",
    }
    return {**made, "mask": facts.get("mask", "kept"), "weighted": facts.get("weighted", "False")}


def _comment(text: str) -> str:
    """`text` behind `# Write: ` in a method, wrapped."""
    first, others = f"{'':8}# Write: ", f"{'':8}# "
    return textwrap.fill(" ".join(text.split()), 118, initial_indent=first, subsequent_indent=others)[len(first) :]


def _read(*path: str) -> str:
    return _TEMPLATES.joinpath(*path[:-1], f"{path[-1]}.tmpl").read_text(encoding="utf-8")


def _template(kind: str, name: str) -> tuple[dict[str, Any], str]:
    """The facts of a kind and the text of its module."""
    if kind not in API_VERSIONS:
        raise InputError(f"{kind!r} is no kind; kinds are {', '.join(API_VERSIONS)}", fix=_meant(kind, name))
    head, _, body = _read("kinds", "resolver" if _resolves(kind, name) else kind).partition("+++\n")
    return tomllib.loads(head), body


def _resolves(kind: str, name: str) -> bool:
    """Whether it is a resolver of model sources, named like their suffix or scheme."""
    return kind == "model" and (name.startswith(".") or name.endswith(":"))


def _meant(kind: str, name: str) -> str:
    from miles_core.discovery import close

    for owner in DEFAULT_FIELDS:
        if kind in tomllib.loads(_read("kinds", owner).partition("+++\n")[0])["fields"]:
            return f"write miles new {owner} {name} --field {kind}"
    return f"write {close(kind, {**API_VERSIONS, 'engine': 0}).replace('engine', 'rollout') or 'one of these'}"


def _field(kind: str, field: str, head: Mapping[str, Any]) -> str:
    """The field of a stage or term; empty for other kinds."""
    from miles_core.discovery import close

    fields = head.get("fields", {})
    if not fields:
        if field:
            raise InputError(f"--field is {field!r}; only stages and terms have a field", fix="leave --field out")
        return ""
    if (field or DEFAULT_FIELDS[kind]) not in fields:
        raise InputError(
            f"--field is {field!r}; a {kind} stands in one of: {', '.join(fields)}",
            fix=f"write --field {close(field, fields) or DEFAULT_FIELDS[kind]}",
        )
    return field or DEFAULT_FIELDS[kind]


def _spelled(what: str, name: str) -> None:
    if keyword.iskeyword(name):
        raise InputError(f"{what} is {name!r}, a word of Python's own", fix=f"write something like my-{name}")
    if not _NAME.fullmatch(name):
        better = re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()).strip("-0123456789")
        raise InputError(
            f"{what} is {name!r}; it must be lower-case letters and digits in words joined by - or _, a letter first",
            fix=f"write {better}" if _NAME.fullmatch(better) else "write something like my-plugin",
        )


def _free(kind: str, name: str) -> None:
    """Refuse a name that an installed distribution offers already: both together could not be loaded."""
    from miles_core.discovery import scan

    taken = next((e for e in scan().entries(kind) if e.name == name), None)
    if taken is not None:
        raise InputError(
            f"{taken.distribution} {taken.version} offers the {kind} plugin {name!r} already; with two, neither loads",
            fix="choose another name, or uninstall that distribution first",
        )


def _write(made: Path, files: Mapping[str, str]) -> None:
    """All files or none: written beside the folder, which then appears at once."""
    if made.exists() or made.is_symlink():
        raise InputError(f"{made} exists", fix="choose another name or --dir, or remove it")
    if not made.parent.is_dir():
        raise InputError(f"--dir is {made.parent}, which is no folder", fix=f"mkdir -p {made.parent}")
    draft: Path | None = None
    try:
        draft = Path(tempfile.mkdtemp(prefix=".miles-new-", dir=made.parent))
        draft.chmod(0o777 & ~_umask())
        for file, text in files.items():
            path = draft / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        os.rename(draft, made)
    except OSError as error:
        raise InputError(f"{made} cannot be made: {error.strerror or error}", fix="name a --dir to write in") from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
