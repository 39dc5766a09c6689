"""The preset and the term against the kit."""

from miles_algo_sft import conformance

from miles_core.testing import PresetConformance


class TestPreset(PresetConformance):
    name = "sft"


class TestTerm(conformance.SftConformance):
    pass
