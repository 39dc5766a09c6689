"""Every part and preset against the kit, with the options that change what they compute."""

from miles_algo_grpo import conformance

from miles_core.testing import AdvantageConformance, EntropyConformance, LossConformance, PresetConformance


class TestGrpo(PresetConformance):
    name = "grpo"


class TestDrGrpo(PresetConformance):
    name = "dr_grpo"


class TestRloo(PresetConformance):
    name = "rloo"


class TestGroup(conformance.GroupConformance):
    pass


class TestGroupCentred(conformance.CentredConformance):
    pass


class TestLeaveOneOut(AdvantageConformance):
    name = "leave_one_out"


class TestClip(conformance.ClipConformance):
    pass


class TestClipDual(conformance.DualConformance):
    pass


class TestClipSequence(conformance.SequenceConformance):
    pass


class TestReinforce(LossConformance):
    name = "reinforce"


class TestKl(conformance.DefaultKlConformance):
    pass


class TestKlUnbiased(conformance.UnbiasedConformance):
    pass


class TestKlLowVar(conformance.LowVarConformance):
    pass


class TestEntropy(EntropyConformance):
    name = "entropy"
