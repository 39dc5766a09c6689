"""Records by the thousand: drafts, which are filled as their record is, and are it once they are sealed.

A frozen dataclass is filled by a call for each field, which adds up where every answer of a run has three records; a
draft is not frozen. That an object may be told another class of the same layout is Python's own rule, which it checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields, make_dataclass
from typing import Any, TypeVar

R = TypeVar("R")

#: `seal(draft, record)` makes a draft the record that it is a draft of. Raises `TypeError` for any other.
seal: Callable[[Any, type], None] = vars(object)["__class__"].__set__


def drafts(record: type[R]) -> type[R]:
    """The class of a record's drafts, typed as the record, which has slots and no `__post_init__`."""
    own = [(f.name, Any, field(default=f.default, default_factory=f.default_factory)) for f in fields(record)]  # type: ignore[arg-type]
    return make_dataclass(f"{record.__name__}Draft", own, slots=True, kw_only=True, eq=False)
