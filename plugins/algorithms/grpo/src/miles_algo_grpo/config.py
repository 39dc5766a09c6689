"""Options of the stages and terms. The coefficient of a term is core's (`coef`)."""

from dataclasses import dataclass, field
from enum import StrEnum

from miles_core.config.schema import opt


class Scale(StrEnum):
    std = "std"
    none = "none"


class Level(StrEnum):
    token = "token"
    sequence = "sequence"


class Estimator(StrEnum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    low_var = "low_var"


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Stage `group`: (R − mean of the group) / (std of the group + eps)."""

    scale: Scale = opt(Scale.std, "divide by the group's standard deviation, or only centre")
    ddof: int = opt(
        1, "degrees of freedom taken off in the variance: 1 is the sample's, 0 the population's", low=0, high=1
    )
    eps: float = opt(1e-6, "added to the standard deviation", unit="reward", low=0)


@dataclass(frozen=True, kw_only=True)
class LeaveOneOutConfig:
    """Stage `leave_one_out`: R − mean of the others in the group. No options."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Stage `batch`: (R − mean) / (std + eps) over the episodes of the step."""

    ddof: int = opt(
        1, "degrees of freedom taken off in the variance: 1 is the sample's, 0 the population's", low=0, high=1
    )
    eps: float = opt(1e-6, "added to the standard deviation", unit="reward", low=0)


@dataclass(frozen=True, kw_only=True)
class CentredConfig:
    """Stage `centred`: (R − mean of the group) − reward_kl.coef · kl_t. No options."""


@dataclass(frozen=True, kw_only=True)
class ReturnsConfig:
    """Stage `returns`: per-token rewards summed to the right; R stands at the last trainable token."""

    gamma: float = opt(1.0, "discount per trainable token", low=0, high=1)


@dataclass(frozen=True, kw_only=True)
class WhitenConfig:
    """Stage `whiten`: (A − mean) / √(variance + 1e-8) over all trainable tokens of the step."""

    shift_mean: bool = opt(True, "move the mean to 0; where false it is kept and only the scale changes")


@dataclass(frozen=True, kw_only=True)
class RewardKlConfig:
    """Stage `reward_kl`: an estimator of KL(π_p‖π_ref) per token, taken off the reward."""

    estimator: Estimator = opt(Estimator.k1, "k1 and k3 are unbiased estimates of the KL")
    coef: float = opt(0.0, "coefficient; with 0 the stage is not built and needs no role", low=0)


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """Penalty `overlong`: a linear penalty over the last tokens before the longest answer that is allowed."""

    max_length: int | None = opt(None, "L_max; max_new_tokens where null", unit="tokens", low=1)
    buffer: float | None = opt(None, "L_buf, the length of the slope; a fifth of L_max where null", unit="tokens")
    penalty: float = opt(1.0, "the whole penalty, reached at L_max", unit="reward", low=0)

    def __post_init__(self) -> None:
        if self.buffer is not None and not 0 < self.buffer <= (self.max_length or self.buffer):
            raise ValueError(f"buffer is {self.buffer:g}; it must be above 0 and at most max_length")


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Filter `dynamic_sampling`: keeps a group unless all its rewards are equal. No options."""


@dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """Term `clip`: max(−ρA, −clip(ρ, 1 − lo, 1 + hi)A)."""

    lo: float = opt(0.2, "how far the ratio may fall below 1", low=0, high=1)
    hi: float | None = opt(None, "how far the ratio may rise above 1; as far as lo where null", low=0)
    dual: float | None = opt(None, "c: where A<0 the value is at most −cA; off where null, usually 3")
    level: Level = opt(Level.token, "ratio of each token, or of the trajectory's mean log-ratio (GSPO)")

    def __post_init__(self) -> None:
        if self.dual is not None and not self.dual > 1:
            raise ValueError(f"dual is {self.dual}; it must be above 1, or null for off")


@dataclass(frozen=True, kw_only=True)
class CispoConfig:
    """Term `cispo`: −sg(clip(ρ, 1 − lo, 1 + hi))·A·π."""

    # No default: the paper tunes it and names no value, so a run file says it.
    hi: float = field(metadata={"help": "how far the weight may rise above 1", "unit": "", "low": 0, "high": None})
    lo: float = opt(1.0, "how far the weight may fall below 1; 1.0 is no lower bound", low=0, high=1)


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig:
    """Term `reinforce`: −A·π. No options."""


@dataclass(frozen=True, kw_only=True)
class KlConfig:
    """Term `kl`: an estimator of KL(π‖π_ref) as a loss. `k3` and `low_var` have the gradient of the other direction."""

    estimator: Estimator = opt(Estimator.k3, "k2 is exact on-policy; k3 and low_var pull in the other direction of KL")
    unbiased: bool = opt(False, "multiply k1 or k3 by the token ratio with its gradient: exact")

    def __post_init__(self) -> None:
        if self.estimator == "k1" and not self.unbiased:
            raise ValueError("estimator is 'k1': its gradient is 0 in expectation; use k2, or unbiased: true")
        if self.unbiased and self.estimator not in ("k1", "k3"):
            raise ValueError(f"unbiased is true with estimator {str(self.estimator)!r}; it corrects k1 and k3 only")


@dataclass(frozen=True, kw_only=True)
class EntropyConfig:
    """Term `entropy`: −H, so that a positive coefficient raises entropy. No options."""
