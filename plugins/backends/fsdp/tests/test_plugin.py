"""What the distribution registers, and that registering it is light."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

from miles_backend_fsdp.config import CausalLMConfig, FsdpConfig
from miles_backend_fsdp.plugin import miles_backend, miles_model
from miles_core.contracts.backend import Backend
from miles_core.contracts.model import ModelAdapter
from miles_core.provider import BuildContext, Place


def context(**fields: object) -> BuildContext:
    return BuildContext(place=Place.TRAINER, name="x", run=SimpleNamespace(), **fields)  # type: ignore[arg-type]


def test_entry_points_name_the_providers() -> None:
    groups = ("miles.backend.v1", "miles.model.v1")
    found = {(g, e.name) for g in groups for e in entry_points(group=g) if e.value == "miles_backend_fsdp.plugin"}
    assert found == {("miles.backend.v1", miles_backend().name), ("miles.model.v1", miles_model().name)}


def test_products_keep_their_contracts() -> None:
    assert isinstance(miles_backend().build(FsdpConfig(), context()), Backend)
    assert isinstance(miles_model().build(CausalLMConfig(), context()), ModelAdapter)


def test_prefixes_are_not_shared_under_an_extension_that_brings_values_per_token() -> None:
    class Wrapping:
        name, columns = "wrapping", ()

        def micro(self, view: object, role: str, purpose: str) -> None: ...

    class Replaying(Wrapping):
        columns = ("wrapping.experts",)

    assert miles_model().build(CausalLMConfig(), context())._share  # type: ignore[attr-defined]
    assert miles_model().build(CausalLMConfig(), context(extensions=(Wrapping(),)))._share  # type: ignore[attr-defined]
    assert not miles_model().build(CausalLMConfig(), context(extensions=(Replaying(),)))._share  # type: ignore[attr-defined]


def test_registering_imports_nothing_heavy() -> None:
    code = (
        "import sys, miles_backend_fsdp.plugin as p; p.miles_backend(); p.miles_model(); "
        "print([m for m in ('torch', 'transformers', 'numpy', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
