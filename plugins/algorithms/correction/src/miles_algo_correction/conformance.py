"""What `miles conformance` tests of corrections whose options change what they compute, with numbers worked by hand."""

from typing import Any, ClassVar

from miles_core.testing import CorrectionConformance, DynamicWeightConformance


class TisConformance(CorrectionConformance):
    name = "tis"
    level = "token"


class SequenceTisConformance(TisConformance):
    options: ClassVar[dict[str, Any]] = {"level": "sequence"}
    level = "sequence"


class GeometricTisConformance(TisConformance):
    options: ClassVar[dict[str, Any]] = {"level": "geometric"}
    level = "geometric"


class IcepopConformance(CorrectionConformance):
    name = "icepop"
    level = "token"


class MisConformance(CorrectionConformance):
    name = "mis"
    level = "token"


class MaskConformance(MisConformance):
    options: ClassVar[dict[str, Any]] = {"mode": "mask"}
    rejects = "token"


class SequenceMaskConformance(MisConformance):
    options: ClassVar[dict[str, Any]] = {"mode": "mask", "level": "sequence"}
    level, rejects = "sequence", "trajectory"


class GeometricClipConformance(MisConformance):
    options: ClassVar[dict[str, Any]] = {"mode": "clip", "level": "geometric", "veto": 1e-4}
    level, rejects = "geometric", "trajectory"


class RejectingConformance(MisConformance):
    options: ClassVar[dict[str, Any]] = {"reject": {"level": "geometric", "high": 1.5}, "veto": 1e-4}
    rejects = "trajectory"


class TokenRuleConformance(MisConformance):
    """The trajectory's weight counts the tokens that the token rule rejects."""

    options: ClassVar[dict[str, Any]] = {"level": "geometric", "reject": {"level": "token"}}
    level, rejects = "geometric", "token"


class NormalisedConformance(MisConformance):
    options: ClassVar[dict[str, Any]] = {"normalize": "batch", "mode": "mask"}
    normalised = True


class NormalisedSequenceConformance(MisConformance):
    options: ClassVar[dict[str, Any]] = {"normalize": "batch", "level": "sequence", "mode": "clip"}
    level, normalised = "sequence", True


class BypassConformance(CorrectionConformance):
    name = "bypass"


class OpsmConformance(DynamicWeightConformance):
    name = "opsm"


class ProximalOpsmConformance(OpsmConformance):
    options: ClassVar[dict[str, Any]] = {"base": "proximal"}
