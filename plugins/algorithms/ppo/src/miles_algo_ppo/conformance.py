"""What `miles conformance` tests of the parts: options that change what they compute, and numbers worked by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

from miles_core.config.schema import Algorithm, AlgorithmKeys, Part
from miles_core.provider import BuildContext, Place
from miles_core.testing import AdvantageConformance, StageExample, TermExample, ValueConformance


class GaeConformance(AdvantageConformance):
    name = "gae"
    examples: ClassVar[Sequence[StageExample]] = (
        # γ = λ = 1: the return minus the value; each sibling has R at its own last trainable token
        StageExample(
            rewards=[[2, -1]],
            siblings=[2, 1],
            trainable=[[0, 1, 1], [1, 0], [1]],
            columns={"values": [9, 0.5, 0.25, 1, 9, 0]},
            expect={"advantages": [0, 1.5, 1.75, 1, 0, -1], "returns": [0, 2, 2, 2, 0, -1]},
        ),
    )


class DiscountedConformance(GaeConformance):
    options: ClassVar[dict[str, Any]] = {"gamma": 0.9, "lam": 0.8}
    examples = (
        # the masked token between is skipped without decay, whatever stands there
        StageExample(
            trainable=[[1, 0, 1, 1]],
            columns={"values": [0.5, 77, 0.2, 0.1]},
            expect={"advantages": [0.06736, 0, 0.538, 0.9], "returns": [0.56736, 0, 0.738, 1]},
        ),
    )


class BootstrappedConformance(GaeConformance):
    options: ClassVar[dict[str, Any]] = {"gamma": 0.5, "lam": 0.5, "bootstrap_truncated": True}
    examples = (
        # of two answers that are alike, one was cut off: γ times its value at the end stands for the rest
        StageExample(
            rewards=[[1, 1]],
            trainable=[[1, 1], [1, 1]],
            columns={"values": [0, 2, 0, 2], "truncated": [True, False], "bootstrap_value": [4, 4]},
            expect={"advantages": [1.25, 1, 0.75, -1], "returns": [1.25, 3, 0.75, 1]},
        ),
    )


@dataclass(frozen=True)
class _Taken:
    coef: float = 0.1


class WithRewardKlConformance(GaeConformance):
    """The run takes KL off the reward, on every trainable token."""

    examples = (
        StageExample(
            trainable=[[1, 0, 1]],
            columns={"values": [0.5, 9, 0.25], "reward_kl": [0.25, 9, -0.5]},
            expect={"advantages": [0.75, 0, 1.25], "returns": [1.25, 0, 1.5]},
        ),
    )

    def context(self, place: Place, **given: Any) -> BuildContext:
        made = super().context(place, **given)
        part = Part(kind="stage", name="reward_kl", use="reward_kl", options=_Taken())
        algorithm = Algorithm(preset="", keys=AlgorithmKeys(), parts={"reward_kl": {"reward_kl": part}})
        policy: Any = SimpleNamespace(algorithm=algorithm)
        return replace(made, run=replace(made.run, policies={"main": policy}))


def _unit(value: float, old: float, target: float, loss: float, gradient: float) -> TermExample:
    return TermExample(
        outputs={"critic.values": [value]},
        columns={"values": [old], "returns": [target]},
        value=[loss],
        gradient={"critic.values": [gradient]},
    )


class ClippedConformance(ValueConformance):
    name = "value"
    examples: ClassVar[Sequence[TermExample]] = (
        _unit(0.5, 0.5, 1, 0.25, -1),
        _unit(0.75, 0.5, 1, 0.09, 0),  # held at .7, which is the worse one: no gradient
        _unit(1.5, 0.5, 0, 2.25, 3),  # moved away from the target: the square itself
        _unit(0.25, 0.5, 0, 0.09, 0),
        _unit(0.5, 9, 1, 60.84, 0),  # an old value far off
    )


class UnclippedConformance(ClippedConformance):
    options: ClassVar[dict[str, Any]] = {"clip": None}
    examples = (_unit(0.75, 0.5, 1, 0.0625, -0.5), _unit(0.5, 9, 1, 0.25, -1))
