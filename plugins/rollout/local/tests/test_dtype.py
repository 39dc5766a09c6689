"""The trainer publishes in one number format, the engine computes in one: refused before a run where they differ."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from miles_core.compatibility import match_capabilities
from miles_core.config.compose import load
from miles_core.discovery import scan
from miles_core.driver import execute
from miles_core.errors import EXIT_BAD_INPUT, CapabilityError
from miles_rollout_local.config import Dtype, LocalConfig
from miles_rollout_local.plugin import miles_rollout

RUN = """
run: {name: mine, steps: 1}
model:
  use: causal-lm
  tokenizer: chars
  alphabet: "0123456789>"
  architecture: {model_type: qwen3, vocab_size: 13, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
    num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 64,
    tie_word_embeddings: true, pad_token_id: 0, eos_token_id: 1}
env: {use: arithmetic, task: sort, digits: 1}
rollout: {use: local, slots: 4, max_new_tokens: 3}
backend: {use: fsdp}
sync: {use: bucketed}
algorithm: {use: dr_grpo}
schedule: {groups_per_step: 2, group_size: 2}
"""
SUPERVISED = RUN.replace("rollout: {use: local, slots: 4, max_new_tokens: 3}\n", "").replace("dr_grpo", "sft")
SUPERVISED = SUPERVISED.replace("sync: {use: bucketed}\n", "").replace(", group_size: 2", ", group_size: 1")


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def made(*overrides: str, text: str = RUN) -> Any:
        Path("run.yaml").write_text(text)
        return load(Path("run.yaml"), overrides, catalogue=scan())

    return made


@pytest.mark.parametrize(
    ("trains", "samples"),
    [("bfloat16", "float32"), ("float32", "float16"), ("float32", "bfloat16"), ("bfloat16", "float16")],
)
def test_a_run_whose_trainer_publishes_another_format_is_refused(run_file: Any, trains: str, samples: str) -> None:
    file = run_file(f"backend.dtype={trains}", f"rollout.dtype={samples}")
    with pytest.raises(CapabilityError) as refused:
        asyncio.run(execute(file, scan(), threading.Event()))
    said = str(refused.value)
    assert f"rollout 'local' needs 'weights.dtype:{samples}'" in said
    assert "Fix: give rollout 'local' and backend 'fsdp' options that agree on weights.dtype" in said
    assert f"backend 'fsdp' offers export.full, optimizer.adamw, weights.dtype:{trains}" in said
    assert refused.value.exit_code == EXIT_BAD_INPUT
    assert not Path("runs").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_formats_fit(run_file: Any, dtype: str) -> None:
    rows = match_capabilities(run_file(f"backend.dtype={dtype}", f"rollout.dtype={dtype}"), scan())
    assert [row.offered_by for row in rows if row.capability == f"weights.dtype:{dtype}"] == [("backend 'fsdp'",)]


def test_a_run_in_bfloat16_trains_and_samples(run_file: Any) -> None:
    file = run_file("backend.dtype=bfloat16", "rollout.dtype=bfloat16")
    assert asyncio.run(execute(file, scan(), threading.Event())).status == "finished"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_an_engine_any_format_trains(run_file: Any, dtype: str) -> None:
    assert match_capabilities(run_file(f"backend.dtype={dtype}", text=SUPERVISED), scan()) is not None


def test_the_engine_asks_for_what_it_computes_in() -> None:
    assert [miles_rollout().required(LocalConfig(dtype=dtype)) for dtype in Dtype] == [
        {"weights.dtype:float32"},
        {"weights.dtype:bfloat16"},
        {"weights.dtype:float16"},
    ]
