"""From the stream of a module's own tensors to what leaves it: whole weights with adapters merged in, or adapters.

A backend's stream names the tensors of an adapted layer `X.weight`, `X.lora_A.weight`, `X.lora_B.weight` (and
`X.lora_magnitude_vector`), one after another. Everything works on meta tensors too; nothing is merged in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from miles_algo_lora.layers import MAGNITUDE, A, B, merged
from miles_core.contracts.weights import TensorSpec
from miles_core.errors import WeightError

Stream = Iterator[tuple[TensorSpec, Any]]

#: How PEFT's files begin every name.
PEFT_PREFIX = "base_model.model."


@dataclass
class Adapted:
    """One adapted layer out of a stream: its name there, the base's spec, and its tensors by their last name."""

    name: str
    spec: TensorSpec
    tensors: dict[str, Any] = field(default_factory=dict)


def layers_of(
    stream: Stream, is_adapted: Callable[[str], bool], dora: bool
) -> Iterator[tuple[TensorSpec, Any] | Adapted]:
    """Plain tensors as they come, and each adapted layer as one, as soon as all of it is there.

    Raises `WeightError` where a layer's adapter does not follow its weight.
    """
    wanted = {"weight", A, B} | ({MAGNITUDE} if dora else set())
    open_layer: Adapted | None = None
    for spec, tensor in stream:
        layer, last = _split(spec.name, wanted)
        if layer and is_adapted(layer):
            if last == "weight":
                _refuse(open_layer)
                open_layer = Adapted(layer, spec)
            if open_layer is None or open_layer.name != layer:
                raise WeightError(f"the stream has {spec.name!r} before the layer's weight", fix="report this backend")
            open_layer.tensors[last] = tensor
            if open_layer.tensors.keys() == wanted:
                yield open_layer
                open_layer = None
            continue
        yield spec, tensor
    _refuse(open_layer)


def _refuse(layer: Adapted | None) -> None:
    if layer is not None:
        raise WeightError(
            f"the stream has {sorted(layer.tensors)} of the adapted layer {layer.name!r}, and ends or goes on without "
            "its adapter",
            fix="use a backend that exports every parameter of a module, layer by layer",
        )


def _split(name: str, wanted: set[str]) -> tuple[str, str]:
    """`X.lora_A.weight` as (X, lora_A.weight); ("", name) where it ends in none of `wanted`."""
    for last in sorted(wanted, key=len, reverse=True):
        if name.endswith("." + last):
            return name[: -len(last) - 1], last
    return "", name


def whole(layer: Adapted, scale: float) -> tuple[TensorSpec, Any]:
    """The layer's weight with its adapter merged in."""
    t = layer.tensors
    if t["weight"].is_meta:
        return layer.spec, t["weight"]
    return layer.spec, merged(t["weight"], t[A], t[B], scale, t.get(MAGNITUDE))


def alone(layer: Adapted, scale: float) -> Iterator[tuple[TensorSpec, Any]]:
    """The layer's adapter under its names in PEFT. `scale` is multiplied into B: what is sent has the scale 1, so that
    no engine needs to be told another."""
    for last in (A, B, MAGNITUDE):
        if last in layer.tensors:
            tensor = layer.tensors[last]
            if last == B and scale != 1.0:
                tensor = tensor * scale
            yield replace(layer.spec, name=f"{PEFT_PREFIX}{layer.name}.{last}", shape=tuple(tensor.shape)), tensor
