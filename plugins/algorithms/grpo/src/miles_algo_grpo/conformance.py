"""What `miles conformance` tests of the parts: options that change what they compute, and numbers worked by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

from miles_algo_grpo.config import RewardKlConfig
from miles_core.config.schema import Algorithm, AlgorithmKeys, Part
from miles_core.provider import BuildContext, Place
from miles_core.testing import (
    AdvantageConformance,
    EntropyConformance,
    FilterConformance,
    KLConformance,
    LossConformance,
    PenaltyConformance,
    RewardKLConformance,
    StageExample,
    TermExample,
    WhitenConformance,
)

# --- advantages -----------------------------------------------------------------------------------------------------


class GroupConformance(AdvantageConformance):
    name = "group"
    examples: ClassVar[Sequence[StageExample]] = (
        StageExample(rewards=[[1, 0, 0, 0]], expect={"advantages": [0.75 / (0.5 + 1e-6), *[-0.25 / (0.5 + 1e-6)] * 3]}),
        # eps beside the root, not inside it: the standard deviation here is not much larger
        StageExample(
            rewards=[[1e-3, 0]], expect={"advantages": [s * 5e-4 / (math.sqrt(5e-7) + 1e-6) for s in (1, -1)]}
        ),
        StageExample(rewards=[[5], [3, 3, 3]], expect={"advantages": [0, 0, 0, 0]}),
        StageExample(rewards=[[0.3, 0.3 + 1e-9], [0.1 + 0.2, 0.3]], expect={"advantages": [0, 0, 0, 0]}),
    )


class PlainGroupConformance(GroupConformance):
    options: ClassVar[dict[str, Any]] = {"eps": 0.0}
    examples = (StageExample(rewards=[[1, 0, 0, 0]], expect={"advantages": [1.5, -0.5, -0.5, -0.5]}),)


class PopulationGroupConformance(GroupConformance):
    options: ClassVar[dict[str, Any]] = {"eps": 0.0, "ddof": 0}
    examples = (StageExample(rewards=[[1, 0]], expect={"advantages": [1, -1]}),)


class CentredGroupConformance(GroupConformance):
    options: ClassVar[dict[str, Any]] = {"scale": "none"}
    examples = (
        StageExample(rewards=[[1, 0], [1, 1, 0]], expect={"advantages": [0.5, -0.5, 1 / 3, 1 / 3, -2 / 3]}),
        # siblings share their episode's reward, which counts once
        StageExample(rewards=[[1, 0]], siblings=[3, 1], expect={"advantages": [0.5, 0.5, 0.5, -0.5]}),
    )


class LeaveOneOutConformance(AdvantageConformance):
    name = "leave_one_out"
    examples = (
        StageExample(rewards=[[1, 0, 0, 0]], expect={"advantages": [1, -1 / 3, -1 / 3, -1 / 3]}),
        StageExample(rewards=[[5], [1, 0], [2, 2]], expect={"advantages": [0, 1, -1, 0, 0]}),
        StageExample(rewards=[[1e6, 1e6 + 0.5]], expect={"advantages": [-0.5, 0.5]}),  # equal for `group` only
    )


class BatchConformance(AdvantageConformance):
    name = "batch"
    examples = (
        StageExample(rewards=[[1, 0], [0, 0]], expect={"advantages": [1.5, -0.5, -0.5, -0.5]}),
        StageExample(rewards=[[5]], expect={"advantages": [0]}),
    )


class CentredConformance(AdvantageConformance):
    name = "centred"
    examples: ClassVar[Sequence[StageExample]] = (
        StageExample(rewards=[[1e6, 1e6 + 0.5]], expect={"advantages": [-0.25, 0.25]}),  # equal for `group` only
        StageExample(rewards=[[1, 0], [1, 1, 0]], expect={"advantages": [0.5, -0.5, 1 / 3, 1 / 3, -2 / 3]}),
    )


class ReturnsConformance(AdvantageConformance):
    name = "returns"
    examples: ClassVar[Sequence[StageExample]] = (
        StageExample(rewards=[[2, -1]], trainable=[[0, 1, 1], [1, 0]], expect={"advantages": [0, 2, 2, -1, 0]}),
    )


class DiscountedConformance(ReturnsConformance):
    options: ClassVar[dict[str, Any]] = {"gamma": 0.5}
    # no decay over the masked token in the middle, and R stands before the masked one at the end
    examples = (StageExample(rewards=[[8]], trainable=[[1, 0, 1, 1, 0]], expect={"advantages": [2, 0, 4, 8, 0]}),)


class WithRewardKl:
    """The run takes KL off the reward."""

    def context(self, place: Place, **given: Any) -> BuildContext:
        made: BuildContext = super().context(place, **given)  # type: ignore[misc]
        part = Part(kind="stage", name="reward_kl", use="reward_kl", options=RewardKlConfig(coef=0.1))
        algorithm = Algorithm(preset="", keys=AlgorithmKeys(), parts={"reward_kl": {"reward_kl": part}})
        policy: Any = SimpleNamespace(algorithm=algorithm)
        return replace(made, run=replace(made.run, policies={"main": policy}))


class CentredWithKlConformance(WithRewardKl, CentredConformance):
    examples = (
        StageExample(
            rewards=[[1, 0]],
            trainable=[[1, 1], [0, 1]],
            columns={"reward_kl": [0.25, -0.5, 7, 0.125]},
            expect={"advantages": [0.25, 1, 0, -0.625]},
        ),
    )


class ReturnsWithKlConformance(WithRewardKl, ReturnsConformance):
    examples = (
        StageExample(
            rewards=[[1, 0]],
            siblings=[2, 1],
            trainable=[[1, 0, 1], [1, 1], [1]],
            columns={"reward_kl": [0.25, 9, 0.5, -1, 0.5, 0.125]},
            expect={"advantages": [0.25, 0, 0.5, 1.5, 0.5, -0.125]},
        ),
    )


# --- whitening, KL in the reward, penalties, filters ----------------------------------------------------------------

_ONE_BY_ROOT = 1 / math.sqrt(1 + 1e-8)
_THREE = {"trainable": [[1, 1, 0, 1]], "columns": {"advantages": [1, 2, 50, 3]}}


class WhiteConformance(WhitenConformance):
    name = "whiten"
    examples: ClassVar[Sequence[StageExample]] = (
        StageExample(**_THREE, expect={"advantages": [-_ONE_BY_ROOT, 0, 0, _ONE_BY_ROOT]}),
        StageExample(columns={"advantages": [5]}, expect={"advantages": [0]}),
        # 1e-8 stands inside the root: the variance here is half of it
        StageExample(
            trainable=[[1, 1]],
            columns={"advantages": [0, 1e-4]},
            expect={"advantages": [s * 5e-5 / math.sqrt(1.5e-8) for s in (-1, 1)]},
        ),
        # two passes: in one, the square of the mean swallows the variance
        StageExample(
            rewards=[[0, 0, 0]],
            columns={"advantages": [1e6, 1e6 + 1, 1e6 + 2]},
            expect={"advantages": [-_ONE_BY_ROOT, 0, _ONE_BY_ROOT]},
        ),
    )


class WhiteKeepsMeanConformance(WhiteConformance):
    options: ClassVar[dict[str, Any]] = {"shift_mean": False}
    examples = (StageExample(**_THREE, expect={"advantages": [2 - _ONE_BY_ROOT, 2, 0, 2 + _ONE_BY_ROOT]}),)


_KL = {"trainable": [[0, 1]], "columns": {"proximal_logprobs": [0, -1], "reference.logprobs": [-9, -1.5]}}


class TakenKlConformance(RewardKLConformance):
    name = "reward_kl"
    options: ClassVar[dict[str, Any]] = {"coef": 0.5}
    examples: ClassVar[Sequence[StageExample]] = (StageExample(**_KL, expect={"reward_kl": [0, 0.25]}),)


class TakenK2Conformance(TakenKlConformance):
    options: ClassVar[dict[str, Any]] = {"coef": 0.5, "estimator": "k2"}
    examples = (StageExample(**_KL, expect={"reward_kl": [0, 0.0625]}),)


class TakenK3Conformance(TakenKlConformance):
    options: ClassVar[dict[str, Any]] = {"coef": 0.5, "estimator": "k3"}
    examples = (StageExample(**_KL, expect={"reward_kl": [0, 0.10653066 / 2]}),)


class TakenLowVarConformance(TakenKlConformance):
    options: ClassVar[dict[str, Any]] = {"coef": 0.5, "estimator": "low_var"}
    examples = (
        StageExample(**_KL, expect={"reward_kl": [0, 0.10653066 / 2]}),
        StageExample(columns={"proximal_logprobs": [-9], "reference.logprobs": [-1]}, expect={"reward_kl": [5]}),
    )


class OverlongConformance(PenaltyConformance):
    name = "overlong"
    options: ClassVar[dict[str, Any]] = {"max_length": 20, "penalty": 2.0}
    examples = (
        # the slope begins at 16; the longest trajectory of an episode counts, and of it what was sampled
        StageExample(
            rewards=[[0, 0, 0, 0]],
            siblings=[1, 2, 1, 1],
            trainable=[[1] * 16, [1] * 3, [0] * 17, [1] * 18, [1] * 25],
            columns={"origin": [1] * 16 + [1] * 3 + [1] * 17 + [0] * 4 + [1] * 14 + [1] * 25},
            expect={"reward.overlong": [0, -0.5, 0, -2]},
        ),
    )


class DynamicSamplingConformance(FilterConformance):
    name = "dynamic_sampling"


# --- terms ----------------------------------------------------------------------------------------------------------

_E, _R = math.e, math.log(4)


def _token(advantage: float, log_ratio: float, value: float, gradient: float) -> TermExample:
    """One token with π_p = −1."""
    return TermExample(
        outputs={"logprobs": [-1 + log_ratio]},
        columns={"advantages": [advantage], "proximal_logprobs": [-1]},
        value=[value],
        gradient={"logprobs": [gradient]},
    )


def _tokens(*value: float, gradient: Sequence[float]) -> TermExample:
    """Two tokens, each with an advantage of its own, at ratio 1."""
    return TermExample(
        outputs={"logprobs": [-1, -2]},
        columns={"advantages": [1, -3], "proximal_logprobs": [-1, -2]},
        value=value,
        gradient={"logprobs": gradient},
    )


class ClipConformance(LossConformance):
    name = "clip"
    examples: ClassVar[Sequence[TermExample]] = (
        _tokens(-1, 3, gradient=[-1, 3]),
        _token(1, 0, -1, -1),
        _token(-1, _R, 4, 4),
        _token(1, 0.5, -1.2, 0),
        _token(-1, -0.5, 0.8, 0),
        _token(1, -0.5, -math.exp(-0.5), -math.exp(-0.5)),
        _token(1, 100, -1.2, 0),
    )


class DualConformance(ClipConformance):
    options: ClassVar[dict[str, Any]] = {"hi": 0.28, "dual": 3.0}
    examples = (_token(-1, _R, 3, 0), _token(1, 0.5, -1.28, 0), _token(-1, 0.5, math.exp(0.5), math.exp(0.5)))


class SequenceConformance(ClipConformance):
    options: ClassVar[dict[str, Any]] = {"level": "sequence"}
    examples = (
        # log-ratios .1 and .3 have the mean .2, which is beyond 1.2 for none; the masked token is not counted
        TermExample(
            trainable=[[0, 1, 1], [1, 0, 0]],
            outputs={"logprobs": [5, -0.95, -0.85, -1, 0, 0]},
            columns={"advantages": [1, 1, 1, 2, 2, 2], "proximal_logprobs": [-1] * 6},
            value=[0, *[-math.exp(0.1)] * 2, -2, 0, 0],
            gradient={"logprobs": [0, *[-math.exp(0.1)] * 2, -2, 0, 0]},
        ),
        # one token far out takes the whole answer out
        TermExample(
            outputs={"logprobs": [-1, 0]},
            columns={"advantages": [1, 1], "proximal_logprobs": [-1, -1]},
            value=[-1.2, -1.2],
            gradient={"logprobs": [0, 0]},
        ),
    )


class CispoConformance(LossConformance):
    name = "cispo"
    options: ClassVar[dict[str, Any]] = {"hi": 0.2}
    gradient_of_value = False  # the weight is detached
    examples: ClassVar[Sequence[TermExample]] = (
        _tokens(1, -6, gradient=[-1, 3]),
        _token(1, 0, 1, -1),
        _token(1, 0.5, 0.6, -1.2),
        _token(-1, 0.5, -0.6, 1.2),
        _token(1, -2, 3 * _E**-2, -(_E**-2)),
    )


class BoundedCispoConformance(CispoConformance):
    options: ClassVar[dict[str, Any]] = {"hi": 0.2, "lo": 0.5}
    examples = (_token(1, -2, 1.5, -0.5), _token(1, 100, -99 * 1.2, -1.2))


class ReinforceConformance(LossConformance):
    name = "reinforce"
    examples = (_token(2, 0, 2, -2), _token(-1, -3, -4, 1), _tokens(1, -6, gradient=[-1, 3]))


def _kl(log_ratio: float, value: float, gradient: float) -> TermExample:
    """One token with π = −1, π_ref = −1.5 and π_p = π − log ρ."""
    return TermExample(
        outputs={"logprobs": [-1]},
        columns={"reference.logprobs": [-1.5], "proximal_logprobs": [-1 - log_ratio]},
        value=[value],
        gradient={"logprobs": [gradient]},
    )


class K3Conformance(KLConformance):
    name = "kl"
    examples: ClassVar[Sequence[TermExample]] = (_kl(0, 0.10653066, 0.39346934),)


class K2Conformance(K3Conformance):
    options: ClassVar[dict[str, Any]] = {"estimator": "k2"}
    examples = (_kl(0, 0.125, 0.5),)


class UnbiasedK1Conformance(K3Conformance):
    options: ClassVar[dict[str, Any]] = {"estimator": "k1", "unbiased": True}
    examples = (_kl(0, 0.5, 1.5), _kl(0.5, 0.5 * _E**0.5, 1.5 * _E**0.5))


class UnbiasedK3Conformance(K3Conformance):
    options: ClassVar[dict[str, Any]] = {"estimator": "k3", "unbiased": True}
    examples = (_kl(0, 0.10653066, 0.5),)


class LowVarConformance(K3Conformance):
    options: ClassVar[dict[str, Any]] = {"estimator": "low_var"}
    examples = (
        _kl(0, 0.10653066, 0.39346934),
        TermExample(
            outputs={"logprobs": [-9]},
            columns={"reference.logprobs": [-1], "proximal_logprobs": [-9]},
            value=[10],
            gradient={"logprobs": [0]},
        ),
    )


class NegativeEntropyConformance(EntropyConformance):
    name = "entropy"
    examples = (TermExample(outputs={"entropy": [1, 3]}, value=[-1, -3], gradient={"entropy": [-1, -1]}),)
