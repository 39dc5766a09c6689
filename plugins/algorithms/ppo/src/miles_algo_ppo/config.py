"""Options of the preset, the stage and the term. The coefficient of the term is core's (`coef`)."""

from dataclasses import dataclass

from miles_core.config.schema import opt


@dataclass(frozen=True, kw_only=True)
class PpoPreset:
    """Preset `ppo` (arXiv 1707.06347, 1506.02438): GAE, whitening, clip .2/.2, mean over tokens, clipped value loss.

    No options of its own: every number is a key of the part that it belongs to. Needs a role `critic`. Deviations from
    the paper: γ = λ = 1 unless set, advantages are whitened, no entropy bonus unless set.
    """


@dataclass(frozen=True, kw_only=True)
class GaeConfig:
    """Stage `gae`: A_t = δ_t + γλ·A_{t'}, δ_t = r_t + γ·V_{t'} − V_t over trainable tokens."""

    gamma: float = opt(1.0, "discount per trainable token", low=0, high=1)
    lam: float = opt(1.0, "λ: 1 is the return minus the value, 0 the one-step error", low=0, high=1)
    bootstrap_truncated: bool = opt(False, "after an answer that was cut off, V at its last token stands for the rest")


@dataclass(frozen=True, kw_only=True)
class ValueConfig:
    """Term `value`: max((V−G)², (V_old + clamp(V−V_old, ±clip) − G)²)."""

    clip: float | None = opt(0.2, "how far V may move from V_old before the gradient stops; off where null", low=0)
