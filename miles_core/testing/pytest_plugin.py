"""pytest plugin for suites (`pytest -p miles_core.testing.pytest_plugin`, or `pytest_plugins` in a conftest).

A suite's test may not be quietly replaced: a subclass that overrides one must mark it `xfail(reason=…, strict=True)`,
so that a known gap is written down and its end is noticed. Nothing here loads itself (no `pytest11` entry point).
"""

from __future__ import annotations

from typing import Any

from miles_core.testing.suite import Conformance


def overridden(cls: type, name: str) -> bool:
    """Whether `cls` replaces a test that a suite of the kit wrote."""
    if not issubclass(cls, Conformance):
        return False
    writers = [c for c in cls.__mro__ if name in vars(c)]
    return len(writers) > 1 and not writers[0].__module__.startswith("miles_core.testing.")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Refuse the session where a suite's test is overridden without a strict, reasoned xfail."""
    import pytest

    for item in items:
        cls = getattr(item, "cls", None)
        if cls is None or not overridden(cls, item.originalname or item.name):
            continue
        marks = [m for m in item.iter_markers("xfail") if m.kwargs.get("strict") and m.kwargs.get("reason")]
        if not marks:
            raise pytest.UsageError(
                f"{item.nodeid} overrides a test of the conformance suite. "
                "Fix: mark it @pytest.mark.xfail(reason=..., strict=True), or give it another name"
            )
