"""Options of the preset and the term. The coefficient of the term is core's (`coef`)."""

from dataclasses import dataclass
from enum import StrEnum

from miles_core.config.schema import opt


class Form(StrEnum):
    sigmoid = "sigmoid"
    ipo = "ipo"


class Smoothing(StrEnum):
    none = "none"
    conservative = "conservative"
    robust = "robust"


@dataclass(frozen=True, kw_only=True)
class DpoPreset:
    """Preset `dpo` (arXiv 2305.18290): −log σ(βh) per pair, mean over pairs, from chosen and rejected answers.

    No options of its own: every number is a key of the term. Needs a role `reference` unless it is reference-free.
    Deviations from the paper: none; β is .1, which is the paper's choice for most of its experiments.
    """


@dataclass(frozen=True, kw_only=True)
class DpoConfig:
    """Term `dpo`: −log σ(βh), h = (π−π_ref)(chosen) − (π−π_ref)(rejected)."""

    beta: float = opt(0.1, "strength of the pull to the reference", low=0)
    form: Form = opt(Form.sigmoid, "`sigmoid`: −log σ(βh); `ipo`: (h − 1/(2β))²")
    smoothing: Smoothing = opt(Smoothing.none, "for labels that are wrong with probability epsilon (sigmoid only)")
    epsilon: float = opt(0.0, "share of wrong labels that smoothing assumes", low=0, high=0.5)
    length_normalised: bool | None = opt(None, "means over each answer's tokens, not sums; true for ipo where null")
    reference_free: bool = opt(False, "π_ref := 0, without a role `reference`")

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"beta is {self.beta}; it must be above 0")
        if self.form == "ipo" and self.smoothing != "none":
            raise ValueError(f"smoothing is {str(self.smoothing)!r} with form 'ipo', which has no label probability")
        if (self.smoothing == "none") != (self.epsilon == 0):
            raise ValueError(f"smoothing is {str(self.smoothing)!r} with epsilon {self.epsilon}; give both, or neither")
        if not self.epsilon < 0.5:
            raise ValueError(f"epsilon is {self.epsilon}; from 0.5 on the labels say nothing, or the opposite")

    @property
    def means(self) -> bool:
        """Whether h is made of means over each answer's tokens."""
        return self.form == "ipo" if self.length_normalised is None else self.length_normalised
