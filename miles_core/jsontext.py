"""JSON as bytes: exact for the journal, forgiving for files that people read.

orjson takes a tenth of the standard library's time, and writes `null` for a number that JSON cannot hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import orjson

_EXACT = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode
_READABLE = json.JSONEncoder(separators=(",", ":"), default=str).encode
_ONLY_JSON = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS


def exact(value: Any) -> bytes:
    """What is JSON comes back as it was. Raises `TypeError`, `ValueError` or `RecursionError` for what JSON cannot hold
    (NaN, infinities); but an enum may become its value, a UUID its text, and a key that is a number a string."""
    try:
        text = orjson.dumps(value, option=_ONLY_JSON)
    except TypeError:  # large whole numbers, keys that are none, half a surrogate pair: the standard library knows more
        return _EXACT(value).encode()
    return _EXACT(value).encode() if b"null" in text else text  # it may have been a NaN


def readable(value: Any) -> bytes:
    """A number that JSON cannot hold becomes `null`, what is no JSON becomes text."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return _READABLE(_plain(value)).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy scalar
        return _plain(value.item())
    return value
