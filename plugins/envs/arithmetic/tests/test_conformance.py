"""The environment against the kit, with every kind of task."""

from typing import ClassVar

from miles_core.testing import EnvironmentConformance


class TestSort(EnvironmentConformance):
    name = "arithmetic"


class TestAdd(EnvironmentConformance):
    name = "arithmetic"
    options: ClassVar = {"task": "add", "terms": 3, "padded": True, "reversed_answer": True, "reference_noise": 0.5}


class TestSubtract(EnvironmentConformance):
    name = "arithmetic"
    options: ClassVar = {"task": "subtract", "digits": 3, "match": "last"}


class TestModular(EnvironmentConformance):
    name = "arithmetic"
    options: ClassVar = {
        "task": "modular",
        "min_digits": 1,
        "digits": 3,
        "modulus": 7,
        "delay_s": 0.001,
        "delay_max_s": 0.002,
    }


class TestLetters(EnvironmentConformance):
    name = "arithmetic"
    options: ClassVar = {"task": "reverse", "symbols": "letters", "template": "Reverse {question}"}
