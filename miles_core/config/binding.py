"""From plain trees to the dataclasses that type them, and back.

Strict on purpose: nothing is converted but int to float and an enum's value to its member, so that `alphabet: 0123`
is refused instead of losing its zero. Errors carry the full path. Takes what a dataclass field may be annotated with:
bool, int, float, str, `Path`, enums, `Literal`, `list`, `tuple[T, ...]`, `dict[str, T]`, unions, dataclasses, `Any`.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from miles_core.config import schema
from miles_core.discovery import close
from miles_core.errors import ConfigError, ConfigRangeError, ConfigTypeError, PluginContractError, UnknownKeyError

T = TypeVar("T")
MISSING = "???"  # a default that must be overwritten, as OmegaConf spells it


@cache
def hints(cls: Any) -> dict[str, Any]:
    """Resolved annotations of a dataclass; `PluginContractError` where one cannot be resolved at run time."""
    try:
        return typing.get_type_hints(cls)
    except Exception as error:
        raise PluginContractError(
            f"the config {cls.__module__}.{cls.__qualname__} has an annotation that cannot be resolved: {error}",
            fix="import what its annotations name at run time, not under TYPE_CHECKING",
        ) from error


def default_of(field: dataclasses.Field[Any]) -> Any:
    """A field's default, or `MISSING` where it must be given."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING if field.default is dataclasses.MISSING else field.default


def fields_of(cls: type) -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(cls) if f.init}


def bind(cls: type[T], values: Any, path: str, also: Sequence[str] = ()) -> T:
    """An instance of the dataclass `cls` from `values` at `path`; `also` are further keys to suggest.

    Raises `UnknownKeyError`, `ConfigTypeError`, `ConfigRangeError`, `ConfigError` (a missing value).
    """
    if not isinstance(values, Mapping):
        raise ConfigTypeError(f"{path} is {show(values)}; it must be a mapping", fix=f"write {path}: {{key: value}}")
    known, typed = fields_of(cls), hints(typing.cast(Any, cls))
    for key in values:
        if key not in known:
            raise unknown_key(path, key, [*known, *also])
    given: dict[str, Any] = {}
    for name, field in known.items():
        at = f"{path}.{name}" if path else name
        value = values[name] if name in values else default_of(field)
        if isinstance(value, str) and value == MISSING:
            raise ConfigError(
                f"{at} must be given ({_help(field) or annotation(typed[name])})", fix=f"add {at} to the run file"
            )
        if name in values:
            given[name] = convert(typed[name], value, at)
            _bounds(given[name], field, at)
    try:
        return cls(**given)
    except (ValueError, TypeError) as error:
        raise ConfigRangeError(f"{path}: {error}", fix=f"change the values under {path}") from error


def unknown_key(path: str, key: str, known: Sequence[str], fix: str = "") -> UnknownKeyError:
    """The error for a key that nobody knows, with a close match."""
    similar = close(key, known)
    at, elsewhere = f"{path}.{key}" if path else key, schema.SECTION_OF.get(key, "")
    if not fix and similar:
        fix = f"write {f'{path}.{similar}' if path else similar}, if that was meant"
    elif not fix:
        fix = f"write {elsewhere}.{key}, if that was meant" if elsewhere else f"remove {at}"
    return UnknownKeyError(f"{at} is no known key; {path or 'a run file'} has: {', '.join(sorted(known))}", fix=fix)


def convert(hint: Any, value: Any, path: str) -> Any:
    """`value` as `hint` types it; `ConfigTypeError` at `path` where it does not fit."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _one_of(hint, args, value, path)
    if dataclasses.is_dataclass(hint):
        return bind(typing.cast(type, hint), value, path)
    if isinstance(hint, type) and issubclass(hint, Enum):
        for member in hint:
            if value == member.value or (isinstance(value, str) and value == member.name):
                return member
        choices = [str(m.value) for m in hint]
    elif origin is Literal:
        if any(value == a and type(value) is type(a) for a in args):
            return value
        choices = [str(a) for a in args]
    else:
        return _plain(hint, origin, args, value, path)
    similar = close(str(value), choices)
    raise ConfigTypeError(
        f"{path} is {show(value)}; it must be one of: {', '.join(choices)}",
        fix=f"write {path}: {similar or choices[0]}",
    )


def _one_of(hint: Any, args: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in args:
        return None
    rest = [a for a in args if a is not type(None)]
    if len(rest) == 1:
        return convert(rest[0], value, path)
    for option in sorted(rest, key=lambda a: a is not type(value)):
        try:
            return convert(option, value, path)
        except ConfigTypeError:
            continue
    raise _mismatch(hint, value, path)


def _plain(hint: Any, origin: Any, args: tuple[Any, ...], value: Any, path: str) -> Any:
    kind = origin or hint
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind in (bool, int, str):
        if type(value) is kind:
            return value
    elif kind is Path:
        if isinstance(value, str):
            return Path(value)
    elif kind in (list, tuple, Sequence):
        if isinstance(value, list | tuple):
            item = args[0] if args else Any
            items = [convert(item, v, f"{path}[{i}]") for i, v in enumerate(value)]
            return items if kind is list else tuple(items)
    elif kind in (dict, Mapping):
        if isinstance(value, Mapping):
            item = args[1] if args else Any
            return {str(k): convert(item, v, f"{path}.{k}") for k, v in value.items()}
    elif kind is not float:
        raise PluginContractError(
            f"{path} is annotated {annotation(hint)}, which a config cannot hold",
            fix="use bool, int, float, str, Path, enums, Literal, list, tuple[T, ...], dict[str, T] or dataclasses",
        )
    raise _mismatch(hint, value, path)


def _mismatch(hint: Any, value: Any, path: str) -> ConfigTypeError:
    asked = annotation(hint)
    fix = f'quote it: "{value}"' if asked == "str" and type(value) in (int, float, bool) else f"write a {asked}"
    return ConfigTypeError(f"{path} is {show(value)}; it must be {asked}", fix=fix)


def _bounds(value: Any, field: dataclasses.Field[Any], path: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    low, high = field.metadata.get("low"), field.metadata.get("high")
    if math.isnan(value) or (low is not None and value < low) or (high is not None and value > high):
        wanted = bounds(field)
        what = f" ({_help(field)})" if _help(field) else ""
        raise ConfigRangeError(f"{path} is {value}; it must be {wanted or 'a number'}{what}", fix=f"change {path}")


def bounds(field: dataclasses.Field[Any]) -> str:
    """The bounds of a field in words; empty where it has none."""
    low, high = field.metadata.get("low"), field.metadata.get("high")
    if low is not None and high is not None:
        return f"from {low} to {high}"
    if low is not None:
        return f"at least {low}"
    return f"at most {high}" if high is not None else ""


def _help(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata.get("help", ""))


def annotation(hint: Any) -> str:
    """How a type is written in a run file: `int`, `str or null`, `one of: a, b`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join([annotation(a) for a in args if a is not type(None)] + ["null"] * (type(None) in args))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of: " + ", ".join(str(m.value) for m in hint)
    if origin is Literal:
        return "one of: " + ", ".join(map(str, args))
    if origin in (list, tuple, Sequence):
        return f"list of {annotation(args[0])}"
    if origin in (dict, Mapping):
        return "mapping" if args[1] is Any else f"mapping to {annotation(args[1])}"
    if dataclasses.is_dataclass(hint):
        return "mapping"
    return getattr(hint, "__name__", str(hint))


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
