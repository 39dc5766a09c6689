"""Toy extension: every cross-cutting method once.

- `request` and `collect` bring the engine's column `toy.previous` (the token before each sampled one), and `micro`
  checks in training that it is what the trainer sees too: routing replay in miniature.
- `model` trains an additive bias in place of the model's weights, and `export` folds it into the weight stream: LoRA in
  miniature.
- `on_config` sets `run.steps` where the option `steps` is given, so that the origin of a changed value can be seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.columns import ColumnSpec, Level
from miles_core.errors import CapabilityError, LearnerError
from miles_core.records import Origin
from miles_core.testing.toys.autodiff import Var
from miles_core.testing.toys.table import ToyModel

if TYPE_CHECKING:
    from miles_core.contracts.engine import Request
    from miles_core.contracts.extension import Purpose
    from miles_core.contracts.learning import View
    from miles_core.contracts.weights import Layout, Tensor, TensorSpec
    from miles_core.records import Array, Ref
    from miles_core.testing.toys.config import ExtensionConfig

PREVIOUS = ColumnSpec(
    name="toy.previous", level=Level.UNIT, dtype="int32", fill=-1, required=False, help="token before a sampled one"
)
DELTA = "toy.delta"


class DeltaModel(ToyModel):
    """A model whose own parameters are frozen and whose logits have a trained bias on top."""

    def __init__(self, base: ToyModel) -> None:
        super().__init__(base.config, base.weights() | {DELTA: np.zeros(base.vocab_size, np.float32)})
        self.frozen = set(base.params)

    def logits(self, ctx: Array) -> Var:
        return super().logits(ctx) + self.params[DELTA]


class ToyExtension:
    """See the module. `seen` counts what happened, for tests: requests, micro-batches, checked tokens."""

    def __init__(self, config: ExtensionConfig) -> None:
        self.name = "toy"
        self._config = config
        self.columns: tuple[ColumnSpec, ...] = (PREVIOUS,) if config.replay else ()
        self.seen = {"requests": 0, "micro": 0, "checked": 0}

    def on_config(self, draft: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._config.steps is None:
            return draft
        return {**draft, "run": {**(draft.get("run") or {}), "steps": self._config.steps}}

    def request(self, request: Request) -> Request:
        self.seen["requests"] += 1
        return replace(request, want=request.want | {PREVIOUS.name}) if self._config.replay else request

    def collect(self, raw: Mapping[str, Any], request: Request) -> Mapping[str, Array | Ref]:
        if PREVIOUS.name not in request.want:
            return {}
        return {PREVIOUS.name: np.asarray(raw[PREVIOUS.name], np.int32)}

    def model(self, module: Any, role: str, policy: str) -> Any:
        return DeltaModel(module) if self._config.delta and role == "actor" else module

    def micro(self, view: View, role: str, purpose: Purpose) -> AbstractContextManager[None]:
        @contextmanager
        def check() -> Iterator[None]:
            self.seen["micro"] += 1
            if self._config.replay and PREVIOUS.name in view:
                self._check(view)
            yield

        return check()

    def _check(self, view: View) -> None:
        recorded, tokens = np.asarray(view[PREVIOUS.name]), np.asarray(view["tokens"])
        sampled = np.asarray(view["origin"]) == Origin.SAMPLED
        before = np.concatenate([[0], tokens[:-1]])
        known = sampled & (recorded != PREVIOUS.fill)
        if not np.array_equal(recorded[known], before[known]):
            raise LearnerError(
                "column 'toy.previous' is not aligned with the tokens that it describes",
                fix="carry extension columns with the tokens of the completion that they came with",
            )
        self.seen["checked"] += int(known.sum())

    def export(
        self, stream: Iterator[tuple[TensorSpec, Tensor]], layout: Layout, policy: str
    ) -> Iterator[tuple[TensorSpec, Tensor]]:
        if layout != "full":
            raise CapabilityError(f"extension 'toy' supports layout 'full', not {layout!r}", fix="use full")
        bias: tuple[TensorSpec, Tensor] | None = None
        delta: Tensor | None = None
        for spec, tensor in stream:
            if spec.name == "bias":
                bias = (spec, tensor)
            elif spec.name == DELTA:
                delta = tensor
            else:
                yield spec, tensor
        if bias is not None:
            meta = 0 in getattr(bias[1], "strides", (1,))
            folded = bias[1] if delta is None or meta else np.asarray(bias[1] + delta, np.float32)
            yield bias[0], folded
