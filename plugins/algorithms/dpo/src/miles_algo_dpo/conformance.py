"""What `miles conformance` tests of the term, under the options that change what it computes."""

from typing import Any, ClassVar

from miles_core.testing import PairConformance


class SigmoidConformance(PairConformance):
    name = "dpo"


class IpoConformance(SigmoidConformance):
    options: ClassVar[dict[str, Any]] = {"form": "ipo"}


class ConservativeConformance(SigmoidConformance):
    options: ClassVar[dict[str, Any]] = {"smoothing": "conservative", "epsilon": 0.1}


class RobustConformance(SigmoidConformance):
    options: ClassVar[dict[str, Any]] = {"smoothing": "robust", "epsilon": 0.1, "length_normalised": True}


class ReferenceFreeConformance(SigmoidConformance):
    options: ClassVar[dict[str, Any]] = {"reference_free": True}
