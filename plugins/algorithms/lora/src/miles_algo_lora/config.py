"""Options of the extension `lora`. Imports nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from miles_core.config.schema import opt


class Export(StrEnum):
    """What engines are sent: whole weights with the adapters merged in, or the adapters alone."""

    merged = "merged"
    adapter = "adapter"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Options of `extensions: {lora: {…}}`."""

    rank: int = opt(8, "rank r of every adapter", unit="rows", low=1)
    alpha: float = opt(16.0, "strength: the adapter's output is scaled by alpha / rank", low=0)
    rslora: bool = opt(False, "scale by alpha / sqrt(rank) instead (rank-stabilised LoRA)")
    dora: bool = opt(False, "train each row's length apart from its direction (DoRA)")
    dropout: float = opt(0.0, "share of an adapter's inputs dropped in training; above 0 splits change the loss", low=0)
    targets: list[str] = opt(["*_proj"], "globs over names of linear layers: the last part, or the whole dotted name")
    export: Export = opt(Export.merged, "what engines are sent; `adapter` needs engines that offer `lora`")
    policies: list[str] = opt([], "policies that get adapters; all where empty")
    roles: list[str] = opt(["actor"], "trained roles that get adapters")
    train_also: list[str] = opt([], "globs over parameters that are trained whole too; a value head always is")

    def __post_init__(self) -> None:
        if self.alpha <= 0:
            raise ValueError(f"alpha is {self.alpha:g}; it must be above 0, or the adapters could never do anything")
        if self.dropout >= 1:
            raise ValueError(f"dropout is {self.dropout:g}; it must be below 1")
        if not self.targets or not self.roles:
            raise ValueError(f"targets is {self.targets} and roles is {self.roles}; neither may be empty")
        if self.dora and self.dropout > 0:
            raise ValueError(f"dora with dropout {self.dropout:g} is not built; set dropout: 0 or dora: false")
        if self.dora and self.export is Export.adapter:
            raise ValueError("dora with export 'adapter': engines know plain LoRA only; set export: merged")

    @property
    def scale(self) -> float:
        """s in y = W x + s·B(A x): alpha / rank (arXiv 2106.09685), or alpha / sqrt(rank) (arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
