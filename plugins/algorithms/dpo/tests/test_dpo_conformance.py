"""The term and the preset against the kit, with every option that changes what is computed."""

from miles_algo_dpo import conformance

from miles_core.testing import PresetConformance


class TestPreset(PresetConformance):
    name = "dpo"


class TestSigmoid(conformance.SigmoidConformance):
    pass


class TestNormalised(conformance.NormalisedConformance):
    pass


class TestIpo(conformance.IpoConformance):
    pass


class TestIpoOfSums(conformance.IpoOfSumsConformance):
    pass


class TestConservative(conformance.ConservativeConformance):
    pass


class TestRobust(conformance.RobustConformance):
    pass


class TestReferenceFree(conformance.ReferenceFreeConformance):
    pass
