"""YAML in, plain trees out: one reader for run files, command-line values and `resolved.yaml`.

YAML 1.2 core schema: only `true` and `false` are booleans (`on`, `off`, `yes`, `no` stay strings), `1e-3` is a number,
nothing becomes a date. Keys are strings and may not repeat. No tags, so nothing can be executed; no aliases, so a short
file cannot stand for endless data.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from miles_core.config.binding import join
from miles_core.errors import ConfigError

#: The core schema of YAML 1.2: what a plain scalar means. The first pattern that matches decides; the rest are strings.
_CORE_SCHEMA: tuple[tuple[str, Callable[[str], Any]], ...] = (
    (r"|~|null|Null|NULL", lambda text: None),
    (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    (r"[-+]?[0-9]+", int),
    (r"0o[0-7]+|0x[0-9a-fA-F]+", lambda text: int(text, 0)),
    (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", float),
    (r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", lambda text: float(text.replace(".", ""))),
)
_NOT_RAW = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


def scalar(text: str) -> Any:
    """The value of a plain (unquoted) scalar."""
    return next((read(text) for pattern, read in _CORE_SCHEMA if re.fullmatch(pattern, text)), text)


def _value(node: yaml.Node, source: str, seen: set[int]) -> Any:
    """Plain data of PyYAML's node tree. An alias is a node that was `seen`: few of them can stand for endless data."""

    def refused(at: yaml.Node, message: str, fix: str) -> ConfigError:
        return ConfigError(f"{source}, line {at.start_mark.line + 1}: {message}", fix=fix)

    if id(node) in seen:
        raise refused(node, "an alias to this value is not read", "write the value again where it is meant")
    seen.add(id(node))
    if node.tag.removeprefix("tag:yaml.org,2002:") not in ("str", "seq", "map"):
        raise refused(node, f"the tag {node.tag} is not read", "write plain values only")
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, source, seen) for item in node.value]
    if isinstance(node, yaml.ScalarNode):
        return scalar(node.value) if node.style is None else node.value
    tree: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise refused(key, "a key is not a string", "write plain keys only")
        if key.value in tree:
            raise refused(key, f"the key {key.value!r} stands here twice", "keep one of them")
        tree[key.value] = _value(value, source, seen)
    return tree


def parse(text: str, source: str) -> Any:
    """Plain data of one YAML document; `ConfigError` with `source` and line where it cannot be read."""
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)  # which guesses no types
        return None if node is None else _value(node, source, set())
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # also a number of thousands of digits
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(
            f"{source}{where} is no YAML: {problem}", fix="mend the line; strings with : # { } need quotes"
        ) from error


def read_yaml(path: Path) -> dict[str, Any]:
    """A run file, or a run's `resolved.yaml`, as a plain tree."""
    try:
        tree = parse(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist", fix="name an existing run file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", fix="name a readable YAML file in UTF-8") from error
    if not isinstance(tree, dict):
        found = "nothing" if tree is None else f"a {type(tree).__name__}"
        fix = "write sections such as `model: {…}` at the top level"
        raise ConfigError(f"{path} holds {found}; a run file is a mapping", fix=fix)
    return tree


def read_origins(path: Path) -> dict[str, str]:
    """The origins that stand behind the values of a run's `resolved.yaml`, by dotted path."""
    text = path.read_text(encoding="utf-8")
    lines, origins = text.splitlines(), dict[str, str]()

    def walk(node: yaml.Node | None, at: str) -> None:
        if isinstance(node, yaml.MappingNode) and node.value:
            for key, value in node.value:
                walk(value, join(at, key.value))
        elif node is not None:
            comment = lines[node.end_mark.line][node.end_mark.column :].partition("# ")[2]
            origins[at] = comment.strip() or "resolved"

    walk(yaml.compose(text, Loader=yaml.BaseLoader), "")
    return origins


def read_overrides(overrides: Sequence[str]) -> list[dict[str, Any]]:
    """`["a.b=1"]` -> `[{"a": {"b": 1}}]`: one tree for each, values read as YAML."""
    trees = []
    for text in overrides:
        path, equals, raw = text.partition("=")
        keys = [key.strip() for key in path.split(".")]
        if not equals or not all(keys):
            fix = "write key=value, e.g. schedule.max_staleness=2"
            raise ConfigError(f"{text!r} on the command line sets nothing", fix=fix)
        tree: Any = parse(raw, f"command line, {path}")
        for key in reversed(keys):
            tree = {key: tree}
        trees.append(tree)
    return trees


def written(value: Any) -> str:
    """A value as one line that `parse` reads back exactly: JSON, with what YAML does not take raw escaped."""
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{written(key)}: {written(item)}' for key, item in value.items())}}}"
    return _NOT_RAW.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
