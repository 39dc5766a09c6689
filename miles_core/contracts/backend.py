"""Kind `backend`, place `trainer`: trains the roles of every policy, on one rank. Methods are called collectively.

Everything runs on the rank's own thread. Batches arrive whole on every rank (columns are small; large ones are `Ref`s);
the backend splits them over ranks and micro-batches. Denominators are already inside the batch (`weight.<term>`), so
ranks only sum, and the result does not depend on the split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from miles_core.columns import Batch
    from miles_core.config.schema import OptimizerConfig
    from miles_core.contracts.learning import BoundTerm, Output, UpdateResult
    from miles_core.contracts.model import ModelAdapter, ModelSource
    from miles_core.contracts.weights import Layout, Tensor, TensorSpec
    from miles_core.records import Array


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """One model of a policy. `init` names the role whose weights it starts from; empty: its own `source`.

    `update`: `trained` (has an optimizer), `frozen`, `copy` (every n steps), `ema`, `adapter_off`
    (the same module without its adapters), `shares` (another head on the same module, trained with it).
    """

    name: str
    source: ModelSource
    adapter: ModelAdapter
    init: str = ""
    update: str = "trained"
    every: int = 1
    decay: float = 0.0
    head: str = "lm"
    optimizer: OptimizerConfig | None = None
    seed: int = 0


@runtime_checkable
class Backend(Protocol):
    """One rank of a training backend, serving all policies of the run."""

    def build(self, policies: Mapping[str, Mapping[str, RoleSpec]], total_updates: Mapping[str, int]) -> None:
        """Policy -> role name -> spec. `total_updates[policy]` is the length of the learning-rate schedules."""

    def score(self, batch: Batch, outputs: Sequence[Output]) -> Mapping[str, Array]:
        """Forward without gradient. Column name -> [units, …] on every rank.

        Each output stands under `Output.column`. `bootstrap_value` is V at the last unit of each trajectory that has
        trainable units: the head's output at that very unit, and it stands there; what stands elsewhere is not read.
        """

    def update(self, minibatch: Batch, terms: Sequence[BoundTerm]) -> UpdateResult:
        """One optimizer update of the policy `minibatch.policy`: Σ coef · weight · value, gradients summed over ranks.

        Metrics per term: `loss` (total), `<term>`, `<term>/<metric>`, and `lr`; `logprobs` reuse is the backend's own.
        Where the minibatch has no `proximal_logprobs`, views serve `proximal_logprobs` as the detached current ones.
        """

    def blend(self, policy: str, dst: str, src: str, decay: float) -> None:
        """Role weights: dst = decay · dst + (1 - decay) · src."""

    def export(self, policy: str, layout: Layout, meta: bool = False) -> Iterator[tuple[TensorSpec, Tensor]]:
        """The actor's weights as a Hugging Face stream, extensions applied. With `meta`, tensors carry no data."""

    def save(self, folder: Path) -> None:
        """Write all state of all policies: weights, optimizer, schedule position, RNG. The caller commits."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, from any number of ranks."""

    def save_model(self, policy: str, folder: Path) -> None:
        """Write a Hugging Face folder of the actor (weights and config; core adds the tokenizer)."""

    def offload(self, tags: Sequence[str]) -> None: ...

    def onload(self, tags: Sequence[str]) -> None: ...

    def close(self) -> None: ...
