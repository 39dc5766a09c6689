"""From plain trees to the dataclasses that type them, and back.

Strict on purpose: nothing is converted but int to float and an enum's value to its member, so that `alphabet: 0123`
is refused instead of losing its zero. Errors carry the full path. Takes what a dataclass field may be annotated with:
bool, int, float, str, `Path`, enums, `Literal`, `list`, `tuple[T, ...]`, `dict[str, T]`, unions, dataclasses, `Any`.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union

from miles_core.config import schema
from miles_core.discovery import close
from miles_core.errors import (
    ConfigError,
    ConfigRangeError,
    ConfigTypeError,
    PluginContractError,
    UnknownKeyError,
    blamed,
    clause,
)

T = TypeVar("T")

#: What YAML gives for an annotation that stands for one plain value.
_SCALARS: dict[Any, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,), Path: (str,)}
_LISTS, _MAPPINGS = (list, tuple, Sequence), (dict, Mapping)


@cache
def hints(cls: Any) -> dict[str, Any]:
    """Resolved annotations of a dataclass; `PluginContractError` where one cannot be resolved at run time."""
    fix = "import what its annotations name at run time, not under TYPE_CHECKING"
    with blamed(f"the annotations of the config {cls.__module__}.{cls.__qualname__}", PluginContractError, fix):
        return typing.get_type_hints(cls)


def required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def fields_of(cls: type) -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(cls) if f.init}


def join(path: str, key: str) -> str:
    """The dotted path of `key` in the section at `path`, which is empty for the run file itself."""
    return f"{path}.{key}" if path else key


def bind(cls: type[T], values: Any, path: str, also: Sequence[str] = ()) -> T:
    """An instance of the dataclass `cls` from `values` at `path`; `also` are further keys to suggest.

    Raises `UnknownKeyError`, `ConfigTypeError`, `ConfigRangeError`, `ConfigError` (a missing value).
    """
    if not isinstance(values, Mapping):
        raise ConfigTypeError(f"{path} is {show(values)}; it must be a mapping", fix=f"write {path}: {{key: value}}")
    known, typed = fields_of(cls), hints(typing.cast(Any, cls))
    check_keys(path, values, [*known, *also])
    given: dict[str, Any] = {}
    for name, field in known.items():
        at = join(path, name)
        if name in values:
            given[name] = convert(typed[name], values[name], at)
            _check_bounds(given[name], field, at)
        elif required(field):
            what = field.metadata.get("help") or annotation(typed[name])
            raise ConfigError(f"{at} must be given ({what})", fix=f"add {at} to the run file")
    try:
        return cls(**given)
    except (ValueError, TypeError) as error:
        raise ConfigRangeError(f"{path}: {error}", fix=f"change the values under {path}") from error
    except (Exception, SystemExit) as error:
        raise PluginContractError(
            f"{path}: {cls.__name__} raised {clause(error)}", fix="an options class refuses values with ValueError"
        ) from error


def check_keys(path: str, keys: Iterable[str], known: Sequence[str]) -> None:
    """Refuse a key of the section at `path` that nobody knows, with a close match."""
    for key in [key for key in keys if key not in known]:
        at, similar = join(path, key), close(key, known)
        section = next((name for name, cls in schema.SECTIONS.items() if key in fields_of(cls)), "")
        meant = join(path, similar) if similar else section and f"{section}.{key}"
        word, colon, _ = key.partition(":")
        if colon and word in (*known, "use"):
            meant = f"a space after the colon: {key.replace(':', ': ', 1)}"
        what = f"{at} is no known key; {path or 'a run file'} has: {', '.join(sorted(known))}"
        raise UnknownKeyError(what, fix=f"write {meant}, if that was meant" if meant else f"remove {at}")


def convert(hint: Any, value: Any, path: str) -> Any:
    """`value` as `hint` types it; `ConfigTypeError` at `path` where it does not fit."""
    origin, args, choices = typing.get_origin(hint) or hint, typing.get_args(hint), _choices(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return bind(typing.cast(type, hint), value, path)
    if origin in (Union, UnionType):
        options = [a for a in args if a is not NoneType]
        if value is None and NoneType in args:
            return None
        for option in sorted(options, key=lambda a: a is not type(value)):
            try:
                return convert(option, value, path)
            except ConfigTypeError:
                if len(options) == 1:
                    raise
    elif choices:
        for word, meant in choices.items():
            if value == word and type(value) is type(word):
                return meant
    elif origin in _LISTS and isinstance(value, list | tuple):
        items = [convert((args or [Any])[0], item, f"{path}[{i}]") for i, item in enumerate(value)]
        return items if origin is list else tuple(items)
    elif origin in _MAPPINGS and isinstance(value, Mapping):
        return {str(k): convert((args or [Any])[-1], item, f"{path}.{k}") for k, item in value.items()}
    elif type(value) in _SCALARS.get(hint, ()):
        return hint(value)
    elif origin not in (*_SCALARS, *_LISTS, *_MAPPINGS):
        raise PluginContractError(
            f"{path} is annotated {annotation(hint)}, which a config cannot hold",
            fix="use bool, int, float, str, Path, enums, Literal, list, tuple[T, ...], dict[str, T] or dataclasses",
        )
    asked, words = annotation(hint), [str(word) for word in choices]
    fix = "write true or false" if asked == "bool" else f"write {'an' if asked[0] in 'aeiou' else 'a'} {asked}"
    if words:
        fix = f"write {path}: {close(str(value), words) or words[0]}"
    elif asked == "str" and type(value) in (int, float, bool):
        fix = f'quote it: "{value}"'
    raise ConfigTypeError(f"{path} is {show(value)}; it must be {asked}", fix=fix)


def _choices(hint: Any) -> dict[Any, Any]:
    """What may be written for an enum or a `Literal`, and what each word stands for; empty for other types."""
    if typing.get_origin(hint) is Literal:
        return {word: word for word in typing.get_args(hint)}
    return {member.value: member for member in hint} if isinstance(hint, type) and issubclass(hint, Enum) else {}


def _check_bounds(value: Any, field: dataclasses.Field[Any], path: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    low, high, help = (field.metadata.get(key) for key in ("low", "high", "help"))
    if not math.isfinite(value) or (low is not None and value < low) or (high is not None and value > high):
        what = f" ({help})" if help else ""
        asked = (math.isfinite(value) and bounds(field)) or "a finite number"
        raise ConfigRangeError(f"{path} is {value}; it must be {asked}{what}", fix=f"change {path}")


def bounds(field: dataclasses.Field[Any]) -> str:
    """The bounds of a field in words; empty where it has none."""
    low, high = field.metadata.get("low"), field.metadata.get("high")
    if low is not None and high is not None:
        return f"from {low} to {high}"
    if low is not None:
        return f"at least {low}"
    return f"at most {high}" if high is not None else ""


def annotation(hint: Any) -> str:
    """How a type is written in a run file: `int`, `str or null`, `one of: a, b`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join([annotation(a) for a in args if a is not NoneType] + ["null"] * (NoneType in args))
    if choices := _choices(hint):
        return "one of: " + ", ".join(map(str, choices))
    if origin in _LISTS:
        return f"list of {annotation(args[0])}"
    if origin in _MAPPINGS and args[1] is not Any:
        return f"mapping to {annotation(args[1])}"
    return "mapping" if origin in _MAPPINGS or dataclasses.is_dataclass(hint) else getattr(hint, "__name__", str(hint))


def show(value: Any) -> str:
    """A found value with its type, short."""
    text = repr(value)
    return f"{text if len(text) < 60 else text[:57] + '...'} ({'null' if value is None else type(value).__name__})"


def plain(value: Any) -> Any:
    """A bound value as plain data: what `resolved.yaml` holds."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value
