"""What the distribution registers, and that registering it is light."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import torch

from miles_backend_fsdp.config import CausalLMConfig, FsdpConfig
from miles_backend_fsdp.plugin import miles_backend, miles_model
from miles_core.config.schema import BackendKeys
from miles_core.contracts.backend import Backend
from miles_core.contracts.model import ModelAdapter
from miles_core.errors import EXIT_BAD_INPUT, ConfigError
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


def test_a_gpu_that_is_not_there_is_refused_before_any_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"backend.gpus_per_rank is 1, and trainer rank 0 finds no CUDA device") as no:
        miles_backend().build(FsdpConfig(), context(core=BackendKeys(gpus_per_rank=1)))
    assert "write backend.gpus_per_rank=0" in no.value.fix and no.value.exit_code == EXIT_BAD_INPUT


def test_ranks_of_one_machine_share_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    keys = BackendKeys(ranks=4, gpus_per_rank=1)
    made = [miles_backend().build(FsdpConfig(), context(core=keys, rank=rank, ranks=4)) for rank in range(4)]
    assert [str(backend._device) for backend in made] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]  # type: ignore[attr-defined]


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
