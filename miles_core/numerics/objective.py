"""The objective of one micro-batch: Σ coef · weight · value over terms, for any backend and any tensor library.

A backend calls `evaluate` once a micro-batch, backpropagates the loss it returns, and adds the sums up over
micro-batches (`accumulate`) and ranks; `finish` turns them into metrics. Nothing here divides: aggregation, masks and
denominators are inside the columns `weight.<term>`, so the result depends on no split. Nothing here imports torch: it
works on torch tensors and on NumPy arrays alike.

What `evaluate` expects of a view (`contracts.learning.View`), beyond the Protocol:
- `view["trainable"]` bool [units]; `view["weight.<term>"]` float [units] for every term that is not dynamic;
  `"rejected" in view`, `"correction_weight" in view`, `"proximal_logprobs" in view`, `"behaviour_logprobs" in view`
  answer for the minibatch, and are equal on every rank and micro-batch; so does `"origin" in view`.
- At least one unit. A rank that has nothing to do passes a micro-batch without trainable units.
- Only for terms of level trajectory, episode or group: `atom_sum` and `owns` of that level.
Columns may live in any float dtype; outputs are float32 or better.

Terms never see the backend's view itself but a masked one: floating columns and outputs are *selected* to 0 where a
unit is not trainable, so a masked NaN reaches neither a value nor a gradient. That view also serves
`proximal_logprobs` as the detached current ones where the minibatch has none (`in` still says that it has none).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.contracts.learning import LOGPROBS, BoundTerm, Output, Tensor, TermLevel, TermOutput, View
from miles_core.errors import NEW_RUN, LearnerError
from miles_core.measures import EXP_LIMIT, is_max
from miles_core.records import Metric, Origin

if TYPE_CHECKING:
    from miles_core.columns import Batch

__all__ = [
    "EXP_LIMIT",
    "Summand",
    "Sums",
    "ViewAt",
    "accumulate",
    "evaluate",
    "finish",
    "is_max",
    "skip_reason",
    "summands",
]

#: Name -> (numerator, denominator), 0-d tensors or arrays, still to be added over micro-batches and ranks.
Sums = dict[str, tuple[Tensor, Tensor]]
#: The view of this micro-batch whose atoms are those of a level. The same model outputs must stand behind all of them.
ViewAt = Callable[[TermLevel], View]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summand:
    """One term on one micro-batch.

    `values` [units or atoms] is weight · value · correction weights (no coefficient), 0 where masked; the term's loss
    is their sum. `counted` float [units or atoms] is 1 where the term's mask holds: what its metrics are a mean over.
    """

    bound: BoundTerm
    values: Tensor
    counted: Tensor
    output: TermOutput


def evaluate(view_at: ViewAt, terms: Sequence[BoundTerm], trajectory_of: Callable[[int], str]) -> tuple[Tensor, Sums]:
    """The loss of one micro-batch (0-d, differentiable) and its sums (detached, float64).

    `trajectory_of(unit)` names the trajectory of a unit of this micro-batch, for errors only. Raises `LearnerError`
    where an output or a value is not finite at a trainable unit. Sums: `loss` (with coefficients), `<term>` (without),
    `<term>/<metric>`, and `mismatch/…` of this forward where the minibatch has `behaviour_logprobs`.
    """
    if all(bound.dynamic for bound in terms):
        raise LearnerError("an update without terms", fix="give the trained role a term with a coefficient")
    inputs = _Inputs(view_at("unit"))
    found = _summands(view_at, terms, inputs)
    _refuse_nonfinite(inputs, found, trajectory_of)
    loss: Any = 0.0
    sums: Sums = {}
    for summand in found:
        name = summand.bound.name
        if not summand.bound.dynamic:
            term_loss = summand.values.sum()
            loss = loss + summand.bound.coef * term_loss
            sums[name] = (_f64(_detach(term_loss)), _zero(term_loss))
        total = _f64(summand.counted).sum()
        for metric, value in summand.output.metrics.items():
            picked = _select(summand.counted > 0, _f64(_detach(value)))
            if is_max(metric):
                sums[f"{name}/{metric}"] = (picked.max(), _zero(total))
            else:
                sums[f"{name}/{metric}"] = ((picked * _f64(summand.counted)).sum(), total)
    sums["loss"] = (_f64(_detach(loss)), _zero(loss))
    sums.update(_mismatch(inputs))
    return loss, sums


def summands(view_at: ViewAt, terms: Sequence[BoundTerm], trajectory_of: Callable[[int], str]) -> list[Summand]:
    """What `evaluate` adds up, term by term: for backends that need values per unit (finite differences)."""
    inputs = _Inputs(view_at("unit"))
    found = _summands(view_at, terms, inputs)
    _refuse_nonfinite(inputs, found, trajectory_of)
    return found


def accumulate(total: Sums, part: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Add the sums of a further micro-batch (or rank) to `total`, in place."""
    for name, (num, den) in part.items():
        old = total.get(name)
        if old is None:
            total[name] = (num, den)
        elif is_max(name):
            total[name] = (_max(old[0], num), den)
        else:
            total[name] = (old[0] + num, old[1] + den)


def finish(total: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Metric]:
    """Metrics of one update, from sums over all its micro-batches and ranks. Losses and maxima have denominator 1."""
    found = {name: (float(num), float(den)) for name, (num, den) in total.items()}
    w, w2 = found.pop("mismatch/w", None), found.pop("mismatch/w2", None)
    if w is not None and w2 is not None:
        found["mismatch/ess"] = (w[0] ** 2, w2[0] * w[1])  # (Σw)² / (n Σw²)
    return {name: (num, 1.0 if "/" not in name or is_max(name) else den) for name, (num, den) in found.items()}


def skip_reason(minibatch: Batch, terms: Sequence[BoundTerm], role: str | None = None) -> str:
    """Why this minibatch must not be stepped on (every weight of the role's terms is 0), or an empty string."""
    names = [t.name for t in terms if not t.dynamic and (role is None or t.role == role)]
    if any(np.any(minibatch.columns[f"weight.{name}"] != 0) for name in names):
        return ""
    return "no unit has a weight: zero denominator"


class _Inputs:
    """Columns and outputs of one micro-batch, selected to 0 where not trainable; shared by the views of all levels."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.trainable = view["trainable"]
        self.kept = self.trainable & ~view["rejected"] if "rejected" in view else self.trainable
        self.columns: dict[str, Tensor] = {}
        self.outputs: dict[Output, Tensor] = {}
        self.bad: dict[str, Tensor] = {}  # label -> bool [units]: not finite at a trainable unit

    def column(self, name: str) -> Tensor:
        if name not in self.columns:
            if name == "proximal_logprobs" and name not in self.view:
                self.columns[name] = _detach(self.output(LOGPROBS))
            else:
                value = self.view[name]
                self.columns[name] = _select(self.trainable, value) if _floating(value) else value
        return self.columns[name]

    def output(self, output: Output) -> Tensor:
        if output not in self.outputs:
            value = self.view.out(output)
            bad = ~_finite(_detach(value))
            bad = bad.reshape(len(bad), -1).any(-1) & self.trainable
            self.bad[f"output {output.name!r} of role {output.role!r}"] = bad
            self.outputs[output] = _select(self.trainable, value)
        return self.outputs[output]


class _MaskedView:
    """What a term sees."""

    def __init__(self, inputs: _Inputs, view: View) -> None:
        self._inputs = inputs
        self._view = view

    def __getitem__(self, name: str) -> Tensor:
        return self._inputs.column(name)

    def __contains__(self, name: str) -> bool:
        return name in self._inputs.view

    def out(self, output: Output) -> Tensor:
        return self._inputs.output(output)

    def seq_sum(self, x: Tensor) -> Tensor:
        return self._view.seq_sum(x)

    def atom_sum(self, x: Tensor, sign: Tensor | None = None) -> Tensor:
        return self._view.atom_sum(x, sign)

    @property
    def owns(self) -> Tensor:
        return self._view.owns


def _summands(view_at: ViewAt, terms: Sequence[BoundTerm], inputs: _Inputs) -> list[Summand]:
    found: list[Summand] = []
    weight = inputs.column("correction_weight") if "correction_weight" in inputs.view else None
    for bound in (b for b in terms if b.dynamic):
        _require_units(bound, "a dynamic weight")
        output = bound.term(_MaskedView(inputs, inputs.view))
        value = _select(inputs.trainable, _detach(output.value))
        weight = value if weight is None else weight * value
        counted = inputs.kept if bound.term.mask == "kept" else inputs.trainable
        found.append(Summand(bound=bound, values=value, counted=_like(counted, value), output=output))
    for bound in (b for b in terms if not b.dynamic):
        if bound.name == "loss":
            raise LearnerError("a term is named 'loss', the name of the total", fix="name the term like its plugin")
        counted = inputs.kept if bound.term.mask == "kept" else inputs.trainable
        own = inputs.column(f"weight.{bound.name}")
        if bound.term.level == "unit":
            output = bound.term(_MaskedView(inputs, inputs.view))
            values = own * _select(counted, output.value)
            if bound.term.weighted and weight is not None:
                values = values * weight
            found.append(Summand(bound=bound, values=values, counted=_like(counted, own), output=output))
            continue
        if bound.term.weighted:
            _require_units(bound, "a weighted term")
        # The compiled weight is the same on every unit of an atom, trainable or not: read it unmasked and average.
        view = view_at(bound.term.level)
        output = bound.term(_MaskedView(inputs, view))
        raw = inputs.view[f"weight.{bound.name}"]
        per_atom = view.atom_sum(raw) / view.atom_sum(_ones(raw))
        alive = _like(view.atom_sum(_like(counted, raw)) > 0, raw) * view.owns
        found.append(Summand(bound=bound, values=per_atom * output.value * alive, counted=alive, output=output))
    return found


def _require_units(bound: BoundTerm, what: str) -> None:
    if bound.term.level != "unit":
        raise LearnerError(
            f"term {bound.name!r} is {what} of level {bound.term.level!r}; correction weights are per unit",
            fix="give it level 'unit', or do not weight it",
        )


def _refuse_nonfinite(inputs: _Inputs, found: Sequence[Summand], trajectory_of: Callable[[int], str]) -> None:
    flags = dict(inputs.bad)
    atoms: dict[str, str] = {}
    for summand in found:
        label = f"the value of term {summand.bound.name!r}"
        flags[label] = ~_finite(_detach(summand.values))
        if summand.bound.term.level != "unit":
            atoms[label] = summand.bound.term.level
    if not bool(sum(flag.sum() for flag in flags.values())):  # the one wait for the device
        return
    for label, flag in flags.items():
        for index in np.flatnonzero(np.asarray(flag.tolist())):
            where = f"{atoms[label]} {index} of the micro-batch" if label in atoms else trajectory_of(int(index))
            raise LearnerError(
                f"{label} is not finite at a trainable unit of {where}",
                fix=f"look at that trajectory (`miles show`), or take a lower optimizer.lr {NEW_RUN}",
            )


def _mismatch(inputs: _Inputs) -> Sums:
    """Trainer against engine from this forward. The learner prefers what a score pass measured; where a correction put
    π_b in place of π_p there may be none, and the column `proximal_logprobs` says nothing."""
    view = inputs.view
    if "behaviour_logprobs" not in view or LOGPROBS not in inputs.outputs:
        return {}
    mask = inputs.trainable
    if "origin" in view:  # the token axis: demonstrations have no behaviour
        mask = mask & (view["origin"] == Origin.SAMPLED)
    log_w = _f64(_detach(inputs.output(LOGPROBS))) - _f64(inputs.column("behaviour_logprobs"))
    log_w = _select(mask, log_w)
    m = _like(mask, log_w)
    w = _exp(log_w.clip(-EXP_LIMIT, EXP_LIMIT)) * m
    n = m.sum()
    return {
        "mismatch/abs": (abs(log_w).sum(), n),
        "mismatch/max_abs": (abs(log_w).max(), _zero(n)),
        "mismatch/k3": ((w - m - log_w).sum(), n),
        "mismatch/w": (w.sum(), n),
        "mismatch/w2": ((w * w).sum(), n),
    }


# --- the few operations on which NumPy and torch differ -------------------------------------------------------------


def _is_numpy(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic | float | int)


def _floating(x: Any) -> bool:
    return bool(x.dtype.kind == "f") if _is_numpy(x) else bool(x.is_floating_point())


def _select(mask: Any, x: Any) -> Any:
    """`x` where `mask` [units], else 0; trailing dimensions broadcast. The gradient is selected too."""
    extra = getattr(x, "ndim", 0) - mask.ndim
    if extra > 0:
        mask = mask.reshape(*mask.shape, *([1] * extra))
    return np.where(mask, x, np.zeros((), x.dtype)) if _is_numpy(x) else x.masked_fill(~mask, 0.0)


def _detach(x: Any) -> Any:
    return x if _is_numpy(x) else x.detach()


def _finite(x: Any) -> Any:
    return np.isfinite(x) if _is_numpy(x) else x.isfinite()


def _exp(x: Any) -> Any:
    return np.exp(x) if _is_numpy(x) else x.exp()


def _f64(x: Any) -> Any:
    return np.asarray(x, np.float64) if _is_numpy(x) else x.double()


def _like(x: Any, other: Any) -> Any:
    return np.asarray(x, other.dtype) if _is_numpy(x) else x.to(other.dtype)


def _ones(x: Any) -> Any:
    return np.ones_like(x) if _is_numpy(x) else x.detach() * 0 + 1


def _zero(x: Any) -> Any:
    return np.float64(0.0) if _is_numpy(x) else x.detach().double() * 0


def _max(a: Any, b: Any) -> Any:
    return np.maximum(a, b) if _is_numpy(a) else a.maximum(b)
