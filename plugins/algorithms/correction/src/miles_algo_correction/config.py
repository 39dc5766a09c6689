"""Options of the corrections. Bounds are on w = exp(π_p − π_b), and always hold 1: what is on-policy is left alone."""

import math
from dataclasses import dataclass
from enum import StrEnum

from miles_core.config.schema import opt

#: exp(−20): no ratio is ever smaller, because the argument of exp is clamped.
SMALLEST = math.exp(-20.0)


class Level(StrEnum):
    token = "token"
    sequence = "sequence"
    geometric = "geometric"


class Mode(StrEnum):
    truncate = "truncate"
    clip = "clip"
    mask = "mask"


class Normalize(StrEnum):
    none = "none"
    batch = "batch"


class Base(StrEnum):
    behaviour = "behaviour"
    proximal = "proximal"


LEVEL = "w of each token, of the trajectory's product (sequence), or of its geometric mean (geometric)"


def _hold_one(low: float, high: float) -> None:
    if not low <= 1 <= high:
        raise ValueError(f"low is {low:g} and high is {high:g}; on-policy tokens have w = 1, which must lie between")


@dataclass(frozen=True, kw_only=True)
class TisConfig:
    """Stage `tis`: clamp(w, 0, high)."""

    high: float = opt(2.0, "largest weight", low=1)
    level: Level = opt(Level.token, LEVEL)


@dataclass(frozen=True, kw_only=True)
class IcepopConfig:
    """Stage `icepop`: w where low ≤ w ≤ high, else 0."""

    low: float = opt(0.5, "smallest w that keeps its weight", low=0)
    high: float = opt(5.0, "largest w that keeps its weight", low=1)
    level: Level = opt(Level.token, LEVEL)

    def __post_init__(self) -> None:
        _hold_one(self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class RejectConfig:
    """The independent rejection rule of `mis`: what lies outside low ≤ w ≤ high at this level is rejected."""

    level: Level = opt(Level.geometric, "token rejects single tokens; sequence and geometric whole trajectories")
    high: float = opt(2.0, "largest w that is trained on", low=1)
    low: float | None = opt(None, "smallest w that is trained on; 1/high where null", low=0)

    def __post_init__(self) -> None:
        _hold_one(self.lowest, self.high)

    @property
    def lowest(self) -> float:
        return 1 / self.high if self.low is None else self.low


@dataclass(frozen=True, kw_only=True)
class MisConfig:
    """Stage `mis`: masked importance sampling with bounds, rejection, veto and normalisation."""

    level: Level = opt(Level.token, LEVEL)
    mode: Mode = opt(Mode.truncate, "truncate: clamp(w, 0, high); clip: clamp(w, low, high); mask: reject outside")
    high: float = opt(2.0, "upper bound of w", low=1)
    low: float | None = opt(None, "lower bound of w for clip and mask; 1/high where null", low=0)
    reject: RejectConfig | None = opt(None, "a rejection rule with its own level and bounds; off where null")
    veto: float | None = opt(
        None, "τ: a trajectory with any token of w < τ is rejected; off where null", low=SMALLEST, high=1
    )
    normalize: Normalize = opt(Normalize.none, "batch: the mean weight of the step becomes 1")

    def __post_init__(self) -> None:
        _hold_one(self.lowest, self.high)
        if self.low is not None and self.mode is Mode.truncate:
            raise ValueError(f"low is {self.low:g} with mode 'truncate', which has no lower bound; use clip or mask")
        if self.normalize is Normalize.batch and self.level is Level.geometric:
            raise ValueError(
                "normalize is 'batch' with level 'geometric'; a geometric mean has no mean weight to divide by"
            )

    @property
    def lowest(self) -> float:
        return 1 / self.high if self.low is None else self.low


@dataclass(frozen=True, kw_only=True)
class BypassConfig:
    """Stage `bypass`: π_p := π_b. No options."""


@dataclass(frozen=True, kw_only=True)
class OpsmConfig:
    """Term `opsm`: off-policy sequence masking."""

    base: Base = opt(Base.behaviour, "what the trajectory is compared with: the engine's π_b, or π_p")
    delta: float = opt(1e-4, "largest mean of base − π that a negative advantage may have", unit="nats", low=0)
