"""Kind `model`: adapters teach a backend one family of models; resolvers turn a source into a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from miles_core.columns import Batch
    from miles_core.contracts.learning import Output
    from miles_core.contracts.weights import Tensor, TensorSpec
    from miles_core.records import Array


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a policy's model comes from, resolved by core before anything is built.

    Exactly one of `folder` (a Hugging Face folder with `config.json`) and `architecture` (keys of a `config.json` with
    `model_type`, weights drawn from the run's seed) is set. `tokenizer_folder` holds the tokenizer files; it is the
    model folder itself, or `None` where a built-in tokenizer (`tokenizer: chars`) is used.
    """

    asked: str
    folder: Path | None = None
    architecture: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_folder: Path | None = None
    from_run: str = ""  # run and step, where the source was a run folder


@runtime_checkable
class ModelAdapter(Protocol):
    """Kind `model`, place `trainer`: owns build, layout, cost and outputs of one family, for any backend that runs
    plain modules. `module` is whatever `build` returned."""

    def build(self, source: ModelSource, seed: int, *, head: str = "lm") -> Any:
        """The module in float32, on CPU; `head` is `lm`, `value`, or `lm+value` (both on one trunk, where a role
        shares another's module). Same seed, same bits."""

    def blocks(self, module: Any) -> Sequence[Any]:
        """Its repeated layers: what a backend shards and checkpoints one by one."""

    def cost(self, lengths: Array) -> Array:
        """float64 [n]: relative cost of training each trajectory; micro-batches are balanced by it."""

    def outputs(self, module: Any, micro: Batch, want: Sequence[Output]) -> Mapping[str, Any]:
        """One forward over the micro-batch: output name -> tensor [units, …] in the batch's unit order.

        The adapter picks the layout (padded or packed), applies temperature and kept ids of the trajectory columns, and
        leaves gradients in place where an output asks for them. `logprobs[t]` of a first token is 0.
        """

    def export(self, module: Any, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Names and tensors of the module to the Hugging Face stream: tied tensors once, vocabulary padding removed."""

    def save_config(self, module: Any, folder: Path) -> None:
        """Write `config.json` and what else a Hugging Face folder needs beside weights and tokenizer."""


@runtime_checkable
class ModelResolver(Protocol):
    """Kind `model`, place `controller`: the entry point is named like the source's suffix or scheme (`.gguf`)."""

    def resolve(self, source: str, cache: Path, deadline_s: float) -> Path:
        """A Hugging Face folder; converted once, checked on load, safe against a half-written cache."""
