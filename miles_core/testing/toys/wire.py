"""Frames over a socket: a JSON header and raw arrays, with lengths in front. Nothing is ever unpickled.

u32 header bytes · u64 body bytes · header JSON · arrays one after another, in the order of the header's `arrays`
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from miles_core.errors import WeightError

Array = np.ndarray[Any, Any]

_LENGTHS = struct.Struct("<IQ")
MAX_HEADER = 1 << 24
MAX_BODY = 1 << 32
DTYPES = frozenset({"f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "b1"})


def encode(header: Mapping[str, Any], arrays: Mapping[str, Array] | None = None) -> bytes:
    """One frame."""
    listed = []
    blocks = []
    for name, array in (arrays or {}).items():
        plain = np.ascontiguousarray(array).reshape(array.shape)  # ascontiguousarray makes scalars one-dimensional
        listed.append([name, plain.dtype.str[1:], list(plain.shape)])
        blocks.append(plain.astype(plain.dtype.newbyteorder("<"), copy=False).tobytes())
    text = json.dumps({**header, "arrays": listed}, separators=(",", ":")).encode()
    body = b"".join(blocks)
    return _LENGTHS.pack(len(text), len(body)) + text + body


def decode(text: bytes, body: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """Header and arrays of one frame. Raises `WeightError` where lengths or types do not fit."""
    try:
        header = json.loads(text)
        listed = header.pop("arrays")
        arrays: dict[str, Array] = {}
        at = 0
        for name, dtype, shape in listed:
            if dtype not in DTYPES or any(not isinstance(n, int) or n < 0 for n in shape):
                raise ValueError(f"array {name!r} of type {dtype!r} and shape {shape!r}")
            count = int(np.prod(shape, dtype=np.int64))
            found = np.frombuffer(body, dtype="<" + dtype, count=count, offset=at).reshape(shape)
            arrays[name] = found.copy()
            at += found.nbytes
        if at != len(body):
            raise ValueError(f"{len(body) - at} bytes too many")
    except (ValueError, KeyError, TypeError) as error:
        raise WeightError(f"a frame is not readable: {error!r}", fix="use the same version on both sides") from error
    return header, arrays


def frame_lengths(prefix: bytes) -> tuple[int, int]:
    """(header, body) bytes of the frame that `prefix` begins; `WeightError` for lengths that no frame has."""
    header, body = _LENGTHS.unpack(prefix)
    if header > MAX_HEADER or body > MAX_BODY:
        raise WeightError(f"a frame announces {header} + {body} bytes", fix="connect to the right port")
    return header, body


async def receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], dict[str, Array]]:
    """The next frame; `EOFError` where the other side closed."""
    try:
        header, body = frame_lengths(await reader.readexactly(_LENGTHS.size))
        return decode(await reader.readexactly(header), await reader.readexactly(body))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError("the connection was closed") from error


def receive_blocking(stream: Any) -> tuple[dict[str, Any], dict[str, Array]]:
    """The next frame of a buffered binary stream; `EOFError` where the other side closed."""

    def read(n: int) -> bytes:
        data: bytes = stream.read(n)
        if len(data) < n:
            raise EOFError("the connection was closed")
        return data

    header, body = frame_lengths(read(_LENGTHS.size))
    return decode(read(header), read(body))
