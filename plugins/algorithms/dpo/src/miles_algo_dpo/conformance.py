"""What `miles conformance` tests of the term: every option that changes its formula, and numbers worked by hand."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from miles_core.testing import PairConformance, TermExample


def _pair(value: float, slope: float, *, means: bool = False) -> TermExample:
    """Rejected before chosen. π − π_ref: −½ over one token of the rejected answer, ½ and 0 over two of the chosen one,
    so h is 1 from sums and ¾ from means. `slope` is d value / dh."""
    chosen = slope / 2 if means else slope
    return TermExample(
        trainable=[[1, 0], [0, 1, 1]],
        outputs={"logprobs": [-1.5, 7, 9, -1, -2]},
        columns={"reference.logprobs": [-1, 0, 0, -1.5, -2], "preference": [-1, 1]},
        value=[value],
        gradient={"logprobs": [-slope, 0, 0, chosen, chosen]},
    )


def _log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


class SigmoidConformance(PairConformance):
    name = "dpo"
    examples: ClassVar[Sequence[TermExample]] = (_pair(0.64439666, -0.047502081),)


class NormalisedConformance(SigmoidConformance):
    options: ClassVar[dict[str, Any]] = {"length_normalised": True, "beta": 2.0}
    examples = (_pair(-_log_sigmoid(1.5), -2 * _sigmoid(-1.5), means=True),)


class IpoConformance(SigmoidConformance):
    options: ClassVar[dict[str, Any]] = {"form": "ipo"}
    examples = (_pair(18.0625, -8.5, means=True),)


class IpoOfSumsConformance(SigmoidConformance):
    options: ClassVar[dict[str, Any]] = {"form": "ipo", "length_normalised": False}
    examples = (_pair(16.0, -8.0),)


class ConservativeConformance(SigmoidConformance):
    options: ClassVar[dict[str, Any]] = {"smoothing": "conservative", "epsilon": 0.1}
    examples = (_pair(0.65439666, -0.037502081),)


class RobustConformance(SigmoidConformance):
    options: ClassVar[dict[str, Any]] = {"smoothing": "robust", "epsilon": 0.1}
    examples = (
        _pair(
            (-0.9 * _log_sigmoid(0.1) + 0.1 * _log_sigmoid(-0.1)) / 0.8,
            0.1 * (-0.9 * _sigmoid(-0.1) - 0.1 * _sigmoid(0.1)) / 0.8,
        ),
    )


class ReferenceFreeConformance(SigmoidConformance):
    options: ClassVar[dict[str, Any]] = {"reference_free": True, "beta": 1.0}
    examples = (  # the reference that stands there is not read: h = −3 + 1.5
        _pair(-_log_sigmoid(-1.5), -_sigmoid(1.5)),
    )
