"""Random streams. Every random choice of a run comes from `run.seed` through a named stream, never from arrival order.

A seed is the first 8 bytes (big-endian) of SHA-256 over the canonical JSON of `[run_seed, policy, stream, …]`; the test
vectors in `tests/core/test_seeds.py` are public.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    import numpy as np


def _canonical(*parts: int | str) -> bytes:
    try:
        return orjson.dumps(parts)
    except TypeError:  # a whole number of more than 64 bits
        return json.dumps(parts, separators=(",", ":"), ensure_ascii=False).encode()


def _seed(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def derive(run_seed: int, policy: str, stream: str, *path: int | str) -> int:
    """A 64-bit unsigned seed for `stream`, e.g. `derive(7, "main", "sample", task_id, attempt, member, turn)`."""
    return _seed(_canonical(run_seed, policy, stream, *path))


def family(run_seed: int, policy: str, stream: str, *path: int | str) -> Callable[..., int]:
    """`family(a, b, …)(y, z)` is `derive(a, b, …, y, z)` for whole numbers y, z, …, for many seeds that begin alike."""
    begun = _canonical(run_seed, policy, stream, *path)[:-1]
    return lambda *rest: _seed(begun + (b",%d" * len(rest) + b"]") % rest)  # what JSON makes of whole numbers


def generator(run_seed: int, policy: str, stream: str, *path: int | str) -> np.random.Generator:
    """A counter-based NumPy generator (Philox) of that seed."""
    import numpy as np

    return np.random.Generator(np.random.Philox(key=derive(run_seed, policy, stream, *path)))
