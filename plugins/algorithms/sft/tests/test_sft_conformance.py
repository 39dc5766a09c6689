"""The preset and the term against the kit."""

from miles_core.testing import LossConformance, PresetConformance


class TestPreset(PresetConformance):
    name = "sft"


class TestTerm(LossConformance):
    name = "sft"
