"""The suites that `miles conformance` runs, collected by pytest."""

import pytest
from miles_algo_rewards import conformance

from miles_core.testing import PenaltyConformance, ScorerConformance
from miles_core.testing.suite import run_class

SUITES = [
    value
    for value in vars(conformance).values()
    if isinstance(value, type) and issubclass(value, PenaltyConformance | ScorerConformance) and value.name
]


@pytest.mark.parametrize("suite", SUITES, ids=lambda s: s.__name__)
def test_conforms(suite):
    assert [r.detail for r in run_class(suite) if not r.passed] == []
