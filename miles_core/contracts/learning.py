"""Kinds `stage`, `term`, `filter`: the parts of an algorithm, and the View that terms compute on.

Stages are NumPy on whole groups in the controller; terms are differentiable functions of a `View` (one micro-batch on
one rank). Both are pure: no I/O, no logging, no collectives. Phases are fixed: score -> penalties -> advantage ->
distill -> whiten -> static corrections -> updates per role.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    from miles_core.columns import Batch, ColumnSpec
    from miles_core.records import Array, Group, Metric

Tensor = Any  # a torch tensor under a torch backend, a NumPy array under the toy backend

#: What a term returns one value for. An atom (trajectory, episode, group) is never split over micro-batches or ranks.
TermLevel = Literal["unit", "trajectory", "episode", "group"]
#: Which units a term's denominator counts: `trainable`, or `kept` (trainable without rejected ones).
TermMask = Literal["kept", "trainable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Something a model computes per unit: `logprobs`, `entropy`, `values`, `token_logprobs`, `velocity`, …

    `inputs` are columns that it needs beside tokens (`token_logprobs` at the ids of these columns, side by side). With
    `grad` false the output is detached; a role that is not trained may be asked inside a micro-batch with
    `grad=False`. `k` is how many of the most likely tokens `topk_ids` and `topk_logprobs` hold. `rest_logprobs` is the
    log of the mass outside the ids of `inputs`, or, without those, outside the `k` most likely. A probability of 0 (an
    id outside the kept set) is -1e30, which is finite.
    """

    name: str
    role: str = "actor"
    inputs: tuple[str, ...] = ()
    grad: bool = False
    k: int = 0

    @property
    def column(self) -> str:
        """The name under which `Backend.score` returns it."""
        if self.role == "actor" and self.name in ("logprobs", "values", "entropy"):
            return "proximal_logprobs" if self.name == "logprobs" else self.name
        return f"{self.role}.{self.name}"


LOGPROBS = Output(name="logprobs", grad=True)
ENTROPY = Output(name="entropy", grad=True)


@runtime_checkable
class View(Protocol):
    """One micro-batch on one rank, after packing and slicing. Column values are always per unit."""

    def __getitem__(self, name: str) -> Tensor:
        """Column `name` [units]; trajectory and episode columns are repeated."""

    def __contains__(self, name: str) -> bool: ...

    def out(self, output: Output) -> Tensor:
        """A model output [units, …]."""

    def seq_sum(self, x: Tensor) -> Tensor:
        """[units] -> [units]: the sum over each unit's trajectory, at each of its units; differentiable."""

    def atom_sum(self, x: Tensor, sign: Tensor | None = None) -> Tensor:
        """[units] -> [atoms] of the term's level: the (signed) sum over each atom; differentiable."""

    @property
    def owns(self) -> Tensor:
        """float [atoms]: 1 on exactly one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermOutput:
    """A term's values, one per unit or atom, never reduced; and detached metrics per unit or atom.

    Core reports each metric as the mean over the term's mask (`Σ m x / Σ m` over the global minibatch).
    """

    value: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class Term(Protocol):
    """Kind `term`, place `trainer`: a summand of the objective, or (field `correction`) a dynamic weight.

    `aggregation` overrides the algorithm's for this term (`None` keeps it). Only the policy term is `weighted`: core
    multiplies its value by `correction_weight` and by every dynamic weight. `needs` are columns it reads. An optional
    `scores: Mapping[str, Output]` says exactly what must be scored for some of them (see `Stage`).
    """

    level: TermLevel
    mask: TermMask
    weighted: bool
    aggregation: str | None
    outputs: tuple[Output, ...]
    needs: frozenset[str]

    def __call__(self, view: View) -> TermOutput: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTerm:
    """A term under its name in the run, with its coefficient and what core decided about it.

    The minibatch carries the column `weight.<name>` (float32, per unit or one per atom repeated to units): aggregation
    and mask compiled into one number, so that the loss is Σ coef · weight · value and every rank only sums.
    `role` is the trained role whose update this term belongs to. `dynamic` marks a dynamic weight (no coefficient).
    """

    name: str
    term: Term
    coef: float
    role: str = "actor"
    dynamic: bool = False

    @property
    def info(self) -> TermInfo:
        """What the controller must know of it."""
        told = ("level", "mask", "weighted", "aggregation", "outputs", "needs")
        return TermInfo(
            name=self.name,
            coef=self.coef,
            role=self.role,
            dynamic=self.dynamic,
            scores=getattr(self.term, "scores", {}),
            **{name: getattr(self.term, name) for name in told},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TermInfo:
    """What the controller must know of a bound term: plain data, told by the trainer after it built the terms."""

    name: str
    coef: float
    role: str
    dynamic: bool
    level: TermLevel
    mask: TermMask
    weighted: bool
    aggregation: str | None
    outputs: tuple[Output, ...]
    needs: frozenset[str]
    scores: Mapping[str, Output] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """Columns that a stage writes, and metrics as (numerator, denominator)."""

    columns: Mapping[str, Array]
    metrics: Mapping[str, Metric] = field(default_factory=dict)


@runtime_checkable
class Stage(Protocol):
    """Kind `stage`, place `controller`: computes columns on the whole step's batch, all statistics global.

    `needs` are columns that must exist (they decide the score passes); `gives` are the specs of what it writes. Only
    penalties and corrections may write a column that another writes too: penalties each write their own
    `reward.<name>`; corrections return `correction_weight` (core multiplies) and `rejected` (core ors).

    An optional `scores: Mapping[str, Output]` names, for columns of `needs`, the output that is scored for them; the
    others are found by their names (`proximal_logprobs`, `values`, `bootstrap_value`, `<role>.<output>`). An output
    whose `inputs` are scored columns themselves is scored after those.
    """

    needs: frozenset[str]
    gives: tuple[ColumnSpec, ...]

    def __call__(self, batch: Batch, rng: np.random.Generator) -> StageOutput: ...


@runtime_checkable
class Filter(Protocol):
    """Kind `filter`, place `controller`: keeps or rejects a whole finished group."""

    def __call__(self, group: Group) -> str | None:
        """`None` keeps the group; otherwise a short reason, counted and reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What one optimizer update did. `skipped` says why there was none (zero denominator). Metrics are (num, den)."""

    metrics: Mapping[str, Metric]
    grad_norm: float
    skipped: str = ""
