"""The contract of environments, as `miles conformance env:reasoning-gym` tests it."""

import pytest
from miles_env_reasoning_gym import conformance
from miles_env_reasoning_gym.config import ReasoningGymConfig
from miles_env_reasoning_gym.environment import ReasoningGym


@pytest.fixture(scope="module", autouse=True)
def shared_children():
    """One that lives as long as the tests lends its children to all that they build."""
    kept = ReasoningGym(ReasoningGymConfig(dataset="chain_sum"), name="kept", seed=0)
    yield
    del kept


class TestSingle(conformance.SingleConformance):
    pass


class TestMixture(conformance.MixtureConformance):
    pass
