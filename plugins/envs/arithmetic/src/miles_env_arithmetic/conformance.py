"""What `miles conformance env:arithmetic` tests: every kind of task."""

from typing import Any, ClassVar

from miles_core.testing import EnvironmentConformance


class SortConformance(EnvironmentConformance):
    name = "arithmetic"


class AddConformance(SortConformance):
    options: ClassVar[dict[str, Any]] = {
        **{"task": "add", "terms": 3, "padded": True},
        **{"reversed_answer": True, "reference_noise": 0.5},
    }


class SubtractConformance(SortConformance):
    options: ClassVar[dict[str, Any]] = {"task": "subtract", "digits": 3, "match": "last"}


class ModularConformance(SortConformance):
    options: ClassVar[dict[str, Any]] = {
        **{"task": "modular", "min_digits": 1, "digits": 3, "modulus": 7},
        **{"delay_s": 0.001, "delay_max_s": 0.002},
    }


class LettersConformance(SortConformance):
    options: ClassVar[dict[str, Any]] = {"task": "reverse", "symbols": "letters", "template": "Reverse {question}"}
