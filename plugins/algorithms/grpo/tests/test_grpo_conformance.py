"""Every part and preset against the kit, with the options that change what they compute."""

from typing import ClassVar

from miles_core.testing import (
    AdvantageConformance,
    EntropyConformance,
    KLConformance,
    LossConformance,
    PresetConformance,
)


class TestGrpo(PresetConformance):
    name = "grpo"


class TestDrGrpo(PresetConformance):
    name = "dr_grpo"


class TestRloo(PresetConformance):
    name = "rloo"


class TestGroup(AdvantageConformance):
    name = "group"


class TestGroupCentred(AdvantageConformance):
    name = "group"
    options: ClassVar = {"scale": "none"}


class TestLeaveOneOut(AdvantageConformance):
    name = "leave_one_out"


class TestClip(LossConformance):
    name = "clip"


class TestClipDual(LossConformance):
    name = "clip"
    options: ClassVar = {"hi": 0.28, "dual": 3.0}


class TestClipSequence(LossConformance):
    name = "clip"
    options: ClassVar = {"level": "sequence"}


class TestReinforce(LossConformance):
    name = "reinforce"


class TestKl(KLConformance):
    name = "kl"


class TestKlUnbiased(KLConformance):
    name = "kl"
    options: ClassVar = {"estimator": "k1", "unbiased": True}


class TestKlLowVar(KLConformance):
    name = "kl"
    options: ClassVar = {"estimator": "low_var"}


class TestEntropy(EntropyConformance):
    name = "entropy"
