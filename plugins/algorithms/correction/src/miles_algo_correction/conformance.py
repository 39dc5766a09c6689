"""What `miles conformance` tests of corrections whose options change what they compute, with numbers worked by hand."""

import math
from typing import Any, ClassVar

from miles_core.testing import CorrectionConformance, DynamicWeightConformance, StageExample, TermExample


def worked(w: list[list[float]], weight: list[float], rejected: list[int] | None = None) -> tuple[StageExample, ...]:
    """One trajectory a row of w, all of it trainable: the weights, and what is rejected."""
    logs = [math.log(x) for row in w for x in row]
    expect: dict[str, list[float]] = {"correction_weight": weight}
    if rejected is not None:
        expect["rejected"] = [float(x) for x in rejected]
    return (
        StageExample(
            rewards=[[0.0] * len(w)],
            trainable=[[1] * len(row) for row in w],
            columns={"proximal_logprobs": [x - 1.0 for x in logs], "behaviour_logprobs": [-1.0] * len(logs)},
            expect=expect,
        ),
    )


class TisConformance(CorrectionConformance):
    name = "tis"
    level = "token"
    examples = worked([[1.0, 3.0, 0.1]], [1.0, 2.0, 0.1])


class SequenceTisConformance(TisConformance):
    options: ClassVar[dict[str, Any]] = {"level": "sequence"}
    level = "sequence"
    examples = worked([[1.5, 1.2], [0.5, 1.0]], [1.8, 1.8, 0.5, 0.5])


class GeometricTisConformance(TisConformance):
    options: ClassVar[dict[str, Any]] = {"level": "geometric"}
    level = "geometric"
    examples = worked([[4.0, 1.0], [9.0]], [2.0, 2.0, 2.0])


class IcepopConformance(CorrectionConformance):
    name = "icepop"
    level = "token"
    examples = worked([[0.5, 5.0, 0.49, 5.01, 1.0]], [0.5, 5.0, 0.0, 0.0, 1.0])


class MisConformance(CorrectionConformance):
    name = "mis"
    level = "token"


class MaskConformance(MisConformance):
    options: ClassVar[dict[str, Any]] = {"mode": "mask"}
    rejects = "token"
    examples = worked([[3.0, 1.0], [0.25, 0.5]], [3.0, 1.0, 0.25, 0.5], [1, 0, 1, 0])


class SequenceMaskConformance(MisConformance):
    options: ClassVar[dict[str, Any]] = {"mode": "mask", "level": "sequence"}
    level, rejects = "sequence", "trajectory"
    examples = worked([[3.0, 1.0], [0.5, 1.5]], [3.0, 3.0, 0.75, 0.75], [1, 1, 0, 0])


class GeometricClipConformance(MisConformance):
    options: ClassVar[dict[str, Any]] = {"mode": "clip", "level": "geometric", "veto": 1e-4}
    level, rejects = "geometric", "trajectory"
    examples = worked([[0.16, 1.0], [9e-5, 1.0]], [0.5, 0.5, 0.5, 0.5], [0, 0, 1, 1])


class RejectingConformance(MisConformance):
    options: ClassVar[dict[str, Any]] = {"reject": {"level": "geometric", "high": 1.5}, "veto": 1e-4}
    rejects = "trajectory"
    examples = worked([[4.0, 1.0], [2.0, 1.0]], [2.0, 1.0, 2.0, 1.0], [1, 1, 0, 0])


class TokenRuleConformance(MisConformance):
    """The trajectory's weight counts the tokens that the token rule rejects."""

    options: ClassVar[dict[str, Any]] = {"level": "geometric", "reject": {"level": "token"}}
    level, rejects = "geometric", "token"
    examples = worked([[2.25, 1.0]], [1.5, 1.5], [1, 0])


class NormalisedConformance(MisConformance):
    options: ClassVar[dict[str, Any]] = {"normalize": "batch", "mode": "mask"}
    normalised = True
    examples = worked([[3.0, 1.0], [0.5, 0.75]], [4.0, 4 / 3, 2 / 3, 1.0], [1, 0, 0, 0])


class NormalisedSequenceConformance(MisConformance):
    options: ClassVar[dict[str, Any]] = {"normalize": "batch", "level": "sequence", "mode": "clip"}
    level, normalised = "sequence", True
    examples = worked([[3.0, 1.0], [0.1]], [1.6, 1.6, 0.4])


class BypassConformance(CorrectionConformance):
    name = "bypass"


class OpsmConformance(DynamicWeightConformance):
    name = "opsm"
    examples = (
        TermExample(
            outputs={"logprobs": [-1.0, -2.0, -1.5]},
            columns={
                "advantages": [1.0, -1.0, -1.0],
                "behaviour_logprobs": [-1.0] * 3,
                "proximal_logprobs": [-1.0] * 3,
            },
            trainable=[[1, 1], [1]],
            value=[1.0, 0.0, 0.0],
        ),
        TermExample(
            outputs={"logprobs": [-1.0, -0.5]},
            columns={"advantages": [-1.0, -1.0], "behaviour_logprobs": [-1.0] * 2, "proximal_logprobs": [-1.0] * 2},
            value=[1.0, 1.0],
        ),
    )


class ProximalOpsmConformance(OpsmConformance):
    options: ClassVar[dict[str, Any]] = {"base": "proximal"}
