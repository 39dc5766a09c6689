"""Layers of a run file and how they merge: each leaf remembers where it came from.

A tree is a dict of trees and `Leaf`s. Layers, lowest first: preset, file, extensions, command line (dataclass defaults
lie below all and are filled in when sections are bound). Merging knows where parts stand: choosing *another* plugin for
a part discards the lower layer's keys that belong to the old plugin. Keys that core owns stay (`rollout.use=other`
keeps `max_new_tokens`), except over a preset, whose keys for that part go altogether. The *same* plugin keeps them all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_core.config.binding import fields_of, join, show
from miles_core.config.schema import PART_FIELDS, SECTIONS, AlgorithmKeys, TermKeys
from miles_core.errors import ConfigError, ConfigTypeError

#: Every section of a run file, like `PART_FIELDS`: the kind of plugin that stands there (none where core types all of
#: it), and whether it is an ordered map of such sections.
SHAPES: dict[str, tuple[tuple[str, ...], bool]] = {
    **{key: ((), False) for key in ("run", "eval", "schedule", "optimizer")},
    **{key: ((), True) for key in ("roles", "policies")},
    **{key: ((key,), False) for key in ("model", "env", "algorithm", "renderer")},
    **{key: ((key,), False) for key in ("rollout", "backend", "sync", "launcher")},
    **{"engines": (("rollout",), True), "envs": (("env",), True), "trackers": (("tracker",), True)},
    **{"scorers": (("scorer",), True), "extensions": (("extension",), True)},
}

#: What core owns of a part's section, by kind.
CORE_KEYS = {kind: SECTIONS[kind] for kind in ("rollout", "backend", "sync", "env", "model")} | {"term": TermKeys}
#: Keys that core owns of `algorithm`.
ALGORITHM_KEYS = frozenset({"use", *PART_FIELDS, *fields_of(AlgorithmKeys)})
#: Keys that survive a change of plugin, by its kind.
_KEPT = {kind: frozenset(fields_of(keys)) for kind, keys in CORE_KEYS.items()} | {"algorithm": ALGORITHM_KEYS}

_NAME = re.compile(r"[A-Za-z0-9_][\w-]*")

At = tuple[str, ...]  # the keys on the way to a value


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value (scalar, list or empty mapping) and its origin."""

    value: Any
    origin: str


Tree = dict[str, Any]  # str -> Tree | Leaf


def wrap(value: Any, origin: str, origins: Mapping[str, str] | None = None, path: str = "") -> Any:
    """Plain data as a tree of leaves; `origins` by dotted path, where known, instead of `origin`."""
    if isinstance(value, Mapping) and value:
        return {str(k): wrap(v, origin, origins, join(path, str(k))) for k, v in value.items()}
    return Leaf({} if isinstance(value, Mapping) else value, (origins or {}).get(path, origin))


def unwrap(tree: Any) -> Any:
    """The plain data of a tree."""
    return {k: unwrap(v) for k, v in tree.items()} if isinstance(tree, dict) else tree.value


def origins_of(tree: Any, path: str = "") -> dict[str, str]:
    """Origin of every leaf by dotted path."""
    if isinstance(tree, Leaf):
        return {path: tree.origin}
    return {p: origin for k, v in tree.items() for p, origin in origins_of(v, join(path, k)).items()}


def sections(tree: Tree, key: str) -> dict[str, Tree]:
    """The sections of the map `key`, without those that are set to `null`."""
    found = tree.get(key)
    return {name: s for name, s in found.items() if isinstance(s, dict)} if isinstance(found, dict) else {}


def use_of(section: Tree) -> str | None:
    """The plugin that a part's section names."""
    use = section.get("use")
    return use.value if isinstance(use, Leaf) else None


def _shape(path: At) -> tuple[tuple[str, ...], bool, At]:
    """Kinds and plural of the section, or field of `algorithm`, that holds `path`, and the keys of `path` within it."""
    table, path = SHAPES, path[2:] if len(path) > 2 and path[0] == "policies" else path
    if len(path) > 1 and path[0] == "algorithm":
        table, path = PART_FIELDS, path[1:]
    return (*table[path[0]], path[1:]) if path and path[0] in table else ((), False, path)


def kinds_at(path: At) -> tuple[str, ...]:
    """The kinds of plugin that may stand at `path`; empty where no part stands."""
    kinds, plural, within = _shape(path)
    return kinds if len(within) == plural else ()


def is_map(path: At) -> bool:
    """Whether what stands at `path` is an ordered map of sections, whose keys are names."""
    _, plural, within = _shape(path)
    return plural and not within


def _is_section(path: At) -> bool:
    _, plural, within = _shape(path)
    return len(within) <= plural


def layer(values: Any, origin: str, origins: Mapping[str, str] | None = None, path: At = ()) -> Tree:
    """One layer of the run file, or of its section at `path`, from plain data."""
    tree = wrap(values, origin, origins)
    return expand(tree, path) if isinstance(tree, dict) else {}


def expand(tree: Tree, path: At = ()) -> Tree:
    """The tree with every section in full: `loss: clip` becomes `loss: {use: clip}`.

    Raises `ConfigTypeError` where another value stands in place of a section, `ConfigError` for a strange name.
    """
    out: Tree = {}
    for key, value in tree.items():
        at = (*path, key)
        if is_map(path) and not _NAME.fullmatch(key):
            raise ConfigError(f"{'.'.join(path)}.{key!r} is no instance name", fix="use letters, digits, _ and -")
        if key == "use" and kinds_at(path) and not isinstance(found := unwrap(value), str | None):
            raise ConfigTypeError(f"{'.'.join(at)} is {show(found)}; it must be a plugin's name", fix="name one plugin")
        if isinstance(value, dict):
            out[key] = expand(value, at)
        elif value.value is None or not _is_section(at):
            out[key] = value
        elif value.value == {}:
            out[key] = {}
        elif kinds_at(at) and isinstance(value.value, str):
            out[key] = {"use": value}
        else:
            wanted, example = (" from names to sections", "name: {…}") if is_map(at) else ("", "key: value")
            raise ConfigTypeError(
                f"{'.'.join(at)} is {show(value.value)}; it must be a mapping{wanted}",
                fix=f"write {'.'.join(at)}: {{{example}}}",
            )
    return out


def merge(low: Tree, high: Tree, path: At = (), *, keep_core: bool = True) -> Tree:
    """`high` over `low`. `keep_core`: a change of plugin keeps core's keys of the lower layer (not over a preset)."""
    out = dict(low)
    for key, value in high.items():
        at, below = (*path, key), low.get(key)
        if not isinstance(value, dict):
            out[key] = value
            continue
        if not isinstance(below, dict):
            below = {}
        old = use_of(below) or (key if is_map(path) else None)
        if kinds_at(at) and old is not None and (use_of(value) or old) != old:
            kept = {key for kind in kinds_at(at) for key in _KEPT.get(kind, ()) if keep_core}
            below = {k: v for k, v in below.items() if k in kept}
        out[key] = merge(below, value, at, keep_core=keep_core)
    return out
