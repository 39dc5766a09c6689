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

#: Sections that hold one part, and sections that are ordered maps of parts: section -> kind.
SINGULAR = {
    **{"backend": "backend", "sync": "sync", "launcher": "launcher", "rollout": "rollout"},
    **{"model": "model", "renderer": "renderer", "env": "env", "algorithm": "algorithm"},
}
PLURAL = {"engines": "rollout", "envs": "env", "trackers": "tracker", "scorers": "scorer", "extensions": "extension"}

#: What core owns of a part's section, by kind.
CORE_KEYS = {kind: SECTIONS[kind] for kind in ("rollout", "backend", "sync", "env", "model")} | {"term": TermKeys}
#: Keys that core owns of `algorithm`.
ALGORITHM_KEYS = frozenset({"use", *PART_FIELDS, *fields_of(AlgorithmKeys)})

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


def _in_policy(path: At) -> At:
    return path[2:] if len(path) > 2 and path[0] == "policies" else path


def kinds_at(path: At) -> tuple[str, ...]:
    """The kinds of plugin that may stand at `path`; empty where no part stands."""
    match _in_policy(path):
        case (section,) if section in SINGULAR:
            return (SINGULAR[section],)
        case (section, _) if section in PLURAL:
            return (PLURAL[section],)
        case ("algorithm", field, *name) if field in PART_FIELDS and len(name) == PART_FIELDS[field][1]:
            return PART_FIELDS[field][0]
    return ()


def is_map(path: At) -> bool:
    """Whether what stands at `path` is an ordered map of sections, whose keys are names."""
    match _in_policy(path):
        case (section,):
            return section in PLURAL or section in ("policies", "roles")
        case ("algorithm", field):
            return field in PART_FIELDS and PART_FIELDS[field][1]
    return False


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


def _is_section(path: At) -> bool:
    plain = _in_policy(path) in [("run",), ("eval",), ("schedule",), ("optimizer",)]
    return plain or bool(kinds_at(path)) or is_map(path) or is_map(path[:-1])


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
            kept = _owned_by_core(kinds_at(at)) if keep_core else frozenset()
            below = {k: v for k, v in below.items() if k in kept}
        out[key] = merge(below, value, at, keep_core=keep_core)
    return out


def _owned_by_core(kinds: tuple[str, ...]) -> frozenset[str]:
    """Keys that survive a change of plugin."""
    if kinds == ("algorithm",):
        return ALGORITHM_KEYS
    return frozenset(key for kind in kinds if kind in CORE_KEYS for key in fields_of(CORE_KEYS[kind]))
