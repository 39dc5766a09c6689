"""What `miles conformance` tests of parts whose options change what they compute."""

from typing import Any, ClassVar

from miles_core.testing import AdvantageConformance, KLConformance, LossConformance


class GroupConformance(AdvantageConformance):
    name = "group"


class CentredConformance(GroupConformance):
    options: ClassVar[dict[str, Any]] = {"scale": "none"}


class ClipConformance(LossConformance):
    name = "clip"


class DualConformance(ClipConformance):
    options: ClassVar[dict[str, Any]] = {"hi": 0.28, "dual": 3.0}


class SequenceConformance(ClipConformance):
    options: ClassVar[dict[str, Any]] = {"level": "sequence"}


class DefaultKlConformance(KLConformance):
    name = "kl"


class UnbiasedConformance(DefaultKlConformance):
    options: ClassVar[dict[str, Any]] = {"estimator": "k1", "unbiased": True}


class LowVarConformance(DefaultKlConformance):
    options: ClassVar[dict[str, Any]] = {"estimator": "low_var"}
