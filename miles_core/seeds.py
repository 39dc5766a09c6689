"""Random streams. Every random choice of a run comes from `run.seed` through a named stream, never from arrival order.

A seed is the first 8 bytes (big-endian) of SHA-256 over the canonical JSON of `[run_seed, policy, stream, …]`; the test
vectors in `tests/core/test_seeds.py` are public.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


_canonical = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode  # `dumps` builds one every time


def derive(run_seed: int, policy: str, stream: str, *path: int | str) -> int:
    """A 64-bit unsigned seed for `stream`, e.g. `derive(7, "main", "sample", task_id, attempt, member, turn)`."""
    text = _canonical([run_seed, policy, stream, *path])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def family(run_seed: int, policy: str, stream: str, *path: int | str) -> Callable[..., int]:
    """`family(a, b, …)(y, z)` is `derive(a, b, …, y, z)` for whole numbers y, z, …, for many seeds that begin alike."""
    begun = hashlib.sha256((_canonical([run_seed, policy, stream, *path])[:-1] + ",").encode())

    def seed(*rest: int) -> int:
        whole = begun.copy()
        whole.update((",".join(map(str, rest)) + "]").encode())  # what JSON makes of whole numbers
        return int.from_bytes(whole.digest()[:8], "big")

    return seed


def generator(run_seed: int, policy: str, stream: str, *path: int | str) -> np.random.Generator:
    """A counter-based NumPy generator (Philox) of that seed."""
    import numpy as np

    return np.random.Generator(np.random.Philox(key=derive(run_seed, policy, stream, *path)))
