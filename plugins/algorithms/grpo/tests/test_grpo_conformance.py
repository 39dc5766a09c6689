"""Every part and preset against the kit, with the options that change what they compute."""

import pytest
from miles_algo_grpo import conformance

from miles_core.testing import PresetConformance
from miles_core.testing import suite as kit

SUITES = [s for s in vars(conformance).values() if isinstance(s, type) and issubclass(s, kit.Conformance) and s.name]
PRESETS = ["grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo", "reinforce_pp", "reinforce_pp_baseline"]


@pytest.mark.parametrize(("suite", "test"), [(s, t) for s in SUITES for t in kit.tests(s)])
def test_part(suite, test):
    (result,) = kit.run_class(suite, only=test)
    assert result.passed, result.detail


@pytest.mark.parametrize("preset", PRESETS)
def test_preset(preset):
    suite = type("Suite", (PresetConformance,), {"name": preset})
    failed = [r for r in kit.run_class(suite) if not r.passed]
    assert not failed, failed


def test_every_part_has_a_suite():
    from miles_algo_grpo import plugin

    offered = [*plugin.miles_stage(), plugin.miles_filter(), *plugin.miles_term()]
    assert {p.name for p in offered} == {s.name for s in SUITES}
    assert {p.name for p in plugin.miles_algorithm()} == set(PRESETS)
