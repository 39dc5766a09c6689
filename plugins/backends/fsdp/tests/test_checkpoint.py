"""Saving, exact resuming, and what a broken checkpoint gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_support import adapter, batch_of, bound, make_backend, random_groups, source, weights
from transformers import AutoModelForCausalLM

from miles_backend_fsdp import hf_folder
from miles_backend_fsdp.config import Dtype, FsdpConfig
from miles_core.config.schema import Decay, OptimizerConfig
from miles_core.contracts.learning import LOGPROBS
from miles_core.contracts.model import ModelSource
from miles_core.errors import CheckpointError

OPTIMIZER = OptimizerConfig(lr=3e-3, decay=Decay.cosine, warmup_updates=2, weight_decay=0.1)
ROLES = {
    "reference": {"init": "actor", "update": "frozen"},
    "old": {"init": "actor", "update": "ema"},
    "critic": {"head": "value", "init": "actor", "optimizer": OPTIMIZER},
}


def train(backend: Any, steps: range) -> list[dict[str, Any]]:
    found = []
    for step in steps:
        found.append(dict(backend.update(batch_of(random_groups(step), step), [bound()]).metrics))
        backend.blend("main", "old", "actor", 0.9)
    return found


def fresh(**options: Any) -> Any:
    return make_backend(optimizer=OPTIMIZER, roles=ROLES, total=8, **options)


@pytest.mark.parametrize("dtype", list(Dtype))
def test_a_resumed_run_continues_to_the_bit(dtype: Dtype, tmp_path: Path) -> None:
    config = FsdpConfig(dtype=dtype, micro_tokens=40)
    straight = fresh(config=config)
    train(straight, range(3))
    straight.save(tmp_path / "trainer")
    resumed = fresh(config=config)
    train(resumed, range(5, 7))  # whatever it holds is replaced
    resumed.score(batch_of(random_groups(0)), [LOGPROBS])  # and gathered weights are not written to
    resumed.load(tmp_path / "trainer")
    assert train(straight, range(3, 6)) == train(resumed, range(3, 6))
    for role in ("actor", "old", "critic"):
        ours = weights(straight, role)
        assert all(torch.equal(ours[name], tensor) for name, tensor in weights(resumed, role).items())
    straight.close()
    resumed.close()


def test_a_checkpoint_before_the_first_update_can_be_resumed(tmp_path: Path) -> None:
    straight = fresh()
    straight.save(tmp_path)
    resumed = fresh()
    resumed.load(tmp_path)
    assert train(straight, range(2)) == train(resumed, range(2))
    straight.close()
    resumed.close()


def test_no_file_of_a_checkpoint_is_a_pickle_and_frozen_roles_are_left_out(tmp_path: Path) -> None:
    backend = fresh()
    folder = tmp_path / "trainer"
    backend.save(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["rank_00000_of_00001.safetensors", "state.json"]
    assert {p.stat().st_mode & 0o444 for p in folder.iterdir()} == {folder.stat().st_mode & 0o444}
    state = json.loads((folder / "state.json").read_text())
    assert state["format"] == 1 and set(state["policies"]["main"]) == {"actor", "old", "critic"}
    backend.close()


def test_broken_checkpoints_are_refused(tmp_path: Path) -> None:
    backend = fresh()
    backend.save(tmp_path / "a")
    file = tmp_path / "a" / "rank_00000_of_00001.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"rank_00000_of_00001\.safetensors cannot be read"):
        backend.load(tmp_path / "a")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"(?s)cannot be read.*Fix: to resume from the one before it, rm -r "):
        backend.load(tmp_path / "a")
    (tmp_path / "a" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="format 1"):
        backend.load(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read"):
        backend.load(tmp_path / "nothing")
    other = make_backend(architecture=source("llama"))
    other.save(tmp_path / "b")
    with pytest.raises(CheckpointError, match="lacks rows of"):
        backend.load(tmp_path / "b")
    wider = make_backend(architecture=source(intermediate_size=128), roles=ROLES)
    wider.save(tmp_path / "c")
    with pytest.raises(CheckpointError, match="of shape"):
        backend.load(tmp_path / "c")
    for made in (backend, other, wider):
        made.close()


def test_no_space_is_a_checkpoint_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = fresh()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_folder, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        backend.save(tmp_path / "a")
    backend.close()


@pytest.mark.parametrize("dtype", list(Dtype))
def test_an_exported_folder_is_loaded_by_transformers_and_by_the_adapter(dtype: Dtype, tmp_path: Path) -> None:
    backend = make_backend(config=FsdpConfig(dtype=dtype), architecture=source("qwen3_moe"))
    batch = batch_of(random_groups(1))
    backend.update(batch, [bound()])
    backend.save_model("main", tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == (torch.bfloat16 if dtype == Dtype.bfloat16 else torch.float32)
    ours = {name.removeprefix("lm."): tensor for name, tensor in weights(backend).items()}
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, ours[name])
    again = adapter().build(ModelSource(asked="x", folder=tmp_path), 0)
    assert all(torch.equal(p, ours[n.removeprefix("lm.")].float()) for n, p in again.named_parameters())
    backend.close()
