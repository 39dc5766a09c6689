"""The contract of environments, as `miles conformance env:math` tests it."""

from miles_env_math import conformance


class TestFraction(conformance.FractionConformance):
    pass


class TestPlain(conformance.PlainConformance):
    pass
