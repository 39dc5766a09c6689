"""Options."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """No options."""


@dataclass(frozen=True, kw_only=True)
class Scaled:
    scale: float = field(default=1.0, metadata={"help": "factor", "unit": "", "low": 0, "high": None})
