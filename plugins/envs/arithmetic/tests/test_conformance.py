"""The contract of environments, as `miles conformance env:arithmetic` tests it."""

from miles_env_arithmetic import conformance


class TestSort(conformance.SortConformance):
    pass


class TestAdd(conformance.AddConformance):
    pass


class TestSubtract(conformance.SubtractConformance):
    pass


class TestModular(conformance.ModularConformance):
    pass


class TestLetters(conformance.LettersConformance):
    pass
