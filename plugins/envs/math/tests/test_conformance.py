"""The contract of environments, as `miles conformance env:math` tests it."""

import pytest
from miles_env_math import conformance
from miles_env_math.config import MathConfig
from miles_env_math.environment import MathEnvironment


@pytest.fixture(scope="module", autouse=True)
def shared_children():
    """One that lives as long as the tests lends its children to all that they build."""
    kept = MathEnvironment(MathConfig(path=conformance.SAMPLE), name="kept", seed=0)
    yield
    del kept


class TestFraction(conformance.FractionConformance):
    pass


class TestPlain(conformance.PlainConformance):
    pass
