"""A resolver has no options: it is built before any section of a run file could hold them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GgufConfig:
    """Nothing to set."""
