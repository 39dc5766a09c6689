"""The contract of environments, as `miles conformance env:reasoning-gym` tests it."""

from miles_env_reasoning_gym import conformance


class TestSingle(conformance.SingleConformance):
    pass


class TestMixture(conformance.MixtureConformance):
    pass
