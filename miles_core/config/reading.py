"""YAML in, plain trees out: one reader for run files, command-line values and `resolved.yaml`.

YAML 1.2 core schema: only `true` and `false` are booleans (`on`, `off`, `yes`, `no` stay strings), `1e-3` is a number,
nothing becomes a date. Keys are strings and may not repeat. No tags, so nothing can be executed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from miles_core.errors import ConfigError

_INT = re.compile(r"[-+]?[0-9]+")
_OTHER_INT = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_RAW = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
_TAGS = {"str", "int", "float", "bool", "null", "seq", "map", "timestamp", "merge", "value"}  # PyYAML's own guesses
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def scalar(text: str) -> Any:
    """The value of a plain (unquoted) scalar."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _OTHER_INT.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    return float(text.lower().replace(".", "")) if _SPECIAL.fullmatch(text) else text


class _Reader:
    """Builds plain data from PyYAML's node tree."""

    def __init__(self, source: str) -> None:
        self.source, self.count = source, 0

    def fail(self, node: yaml.Node, message: str, fix: str) -> ConfigError:
        return ConfigError(f"{self.source}, line {node.start_mark.line + 1}: {message}", fix=fix)

    def value(self, node: yaml.Node, depth: int = 0) -> Any:
        if depth > 64:
            raise self.fail(node, "nested deeper than 64 levels", "flatten it; an alias may not contain itself")
        self.count += 1
        if self.count > 100_000:  # aliases multiply
            raise self.fail(node, "more than 100000 values", "put data into a file of its own")
        if node.tag.removeprefix("tag:yaml.org,2002:") not in _TAGS:
            raise self.fail(node, f"the tag {node.tag} is not read", "write plain values only")
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, depth + 1) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, depth)
        return scalar(node.value) if node.style is None else node.value

    def mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.fail(key_node, "a key is not a string", "write plain keys only")
            key = key_node.value
            if key in tree:
                raise self.fail(key_node, f"the key {key!r} stands here twice", "keep one of them")
            tree[key] = self.value(value_node, depth + 1)
        return tree


def parse(text: str, source: str) -> Any:
    """Plain data of one YAML document; `ConfigError` with `source` and line where it cannot be read."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(
            f"{source}{where} is no YAML: {problem}", fix="mend the line; strings with : # { } need quotes"
        ) from error
    return None if node is None else _Reader(source).value(node)


def read_yaml(path: Path) -> dict[str, Any]:
    """A run file, or a run's `resolved.yaml`, as a plain tree."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist", fix="name an existing run file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", fix="name a readable YAML file in UTF-8") from error
    tree = parse(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} holds {'nothing' if tree is None else f'a {type(tree).__name__}'}; a run file is a mapping",
            fix="write sections such as `model: {…}` at the top level",
        )
    return tree


def read_origins(path: Path) -> dict[str, str]:
    """The origins that stand behind the values of a run's `resolved.yaml`, by dotted path."""
    text = path.read_text(encoding="utf-8")
    lines, origins = text.splitlines(), dict[str, str]()

    def walk(node: yaml.Node | None, at: str) -> None:
        if isinstance(node, yaml.MappingNode) and node.value:
            for key, value in node.value:
                walk(value, f"{at}.{key.value}" if at else key.value)
        elif node is not None:
            comment = lines[node.end_mark.line][node.end_mark.column :].partition("# ")[2]
            origins[at] = comment.strip() or "resolved"

    walk(yaml.compose(text, Loader=yaml.SafeLoader), "")
    return origins


def read_overrides(overrides: Sequence[str]) -> list[dict[str, Any]]:
    """`["a.b=1"]` -> `[{"a": {"b": 1}}]`: one tree for each, values read as YAML."""
    trees = []
    for text in overrides:
        path, equals, raw = text.partition("=")
        keys = path.split(".")
        if not equals or not all(key.strip() for key in keys):
            raise ConfigError(
                f"{text!r} on the command line sets nothing", fix="write key=value, e.g. schedule.max_staleness=2"
            )
        tree: Any = parse(raw, f"command line, {path}")
        for key in reversed(keys):
            tree = {key.strip(): tree}
        trees.append(tree)
    return trees


def written(value: Any) -> str:
    """A value as one line that `parse` reads back exactly: JSON, with what YAML does not take raw escaped."""
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    return _NOT_RAW.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
