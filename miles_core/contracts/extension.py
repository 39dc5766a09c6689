"""Kind `extension`: what cuts across parts (LoRA, routing replay, quantisation). A plain object with any of these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    from miles_core.columns import ColumnSpec
    from miles_core.contracts.engine import Request
    from miles_core.contracts.learning import View
    from miles_core.contracts.weights import Layout, Tensor, TensorSpec
    from miles_core.records import Array, Ref

Purpose = Literal["score", "update"]

#: The optional methods of an extension; anything else public on it is refused with a close match.
EXTENSION_METHODS = ("on_config", "request", "collect", "model", "micro", "export", "save")


@runtime_checkable
class Extension(Protocol):
    """Every extension names itself and the columns that it brings; the rest is optional (`EXTENSION_METHODS`)."""

    name: str
    columns: tuple[ColumnSpec, ...]


class OnConfig(Protocol):
    def on_config(self, draft: Mapping[str, Any]) -> Mapping[str, Any]:
        """Changes to the untyped run file before it is frozen (place `controller`); their origin is recorded."""


class EditsRequests(Protocol):
    def request(self, request: Request) -> Request:
        """The request with more to ask for. `id`, `policy`, `sampling`, `seed`, `resume` and the prompt's `tokens`
        stay: trajectories and accounts say what they were."""


class CollectsColumns(Protocol):
    def collect(self, raw: Mapping[str, Any], request: Request) -> Mapping[str, Array | Ref]:
        """Columns from an engine's answer, where its client lives (place `sampler` or `controller`)."""


class TransformsModel(Protocol):
    """May have an attribute `adapted`: the (policy, role) pairs whose modules have adapters by now. A role with
    `update: adapter_off` runs such a module of its origin, and `micro` switches the adapters off for it."""

    def model(self, module: Any, role: str, policy: str) -> Any:
        """The module after build and before sharding (place `trainer`)."""


class WrapsMicroBatch(Protocol):
    def micro(self, view: View, role: str, purpose: Purpose) -> AbstractContextManager[None]:
        """A context around a forward, re-entered with the same view around every activation recomputation."""


class TransformsExport(Protocol):
    def export(
        self, stream: Iterator[tuple[TensorSpec, Tensor]], layout: Layout, policy: str
    ) -> Iterator[tuple[TensorSpec, Tensor]]:
        """The weight stream; works on meta tensors too. Raises `CapabilityError` for a layout it does not support."""


class WritesFolder(Protocol):
    def save(
        self, stream: Iterator[tuple[TensorSpec, Tensor]], policy: str, folder: Path
    ) -> Iterator[tuple[TensorSpec, Tensor]]:
        """In place of `export` where a Hugging Face folder is written (`Backend.save_model`): whole weights, whatever
        engines are sent. May write files of its own into `folder`, on rank 0."""
