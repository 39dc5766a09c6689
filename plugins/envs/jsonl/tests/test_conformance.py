"""The contract of environments, as `miles conformance env:jsonl` tests it."""

from miles_env_jsonl import conformance


class TestFraction(conformance.FractionConformance):
    pass


class TestSlices(conformance.SlicesConformance):
    pass
