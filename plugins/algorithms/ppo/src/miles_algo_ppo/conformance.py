"""What `miles conformance` tests of parts whose options change what they compute."""

from typing import Any, ClassVar

from miles_core.testing import AdvantageConformance, ValueConformance


class GaeConformance(AdvantageConformance):
    name = "gae"


class DiscountedConformance(GaeConformance):
    options: ClassVar[dict[str, Any]] = {"gamma": 0.95, "lam": 0.9, "bootstrap_truncated": True}


class ClippedConformance(ValueConformance):
    name = "value"


class UnclippedConformance(ClippedConformance):
    options: ClassVar[dict[str, Any]] = {"clip": None}
