"""A teacher that an engine holds: the same numbers as the same model in the backend, in whole runs of a real model."""

import asyncio
import json
import threading

import pytest

from miles_core.config.compose import load
from miles_core.discovery import scan
from miles_core.driver import execute

pytestmark = pytest.mark.slow

BASE = """
run: {name: small, seed: 7, steps: 3}
env: {use: arithmetic, task: sort, digits: 2}
backend: {use: fsdp}
optimizer: {lr: 3.0e-3}
trackers: {jsonl: {}}
model:
  use: causal-lm
  tokenizer: chars
  alphabet: "0123456789>"
  architecture: {model_type: qwen3, vocab_size: 13, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
    num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 64,
    tie_word_embeddings: true, rope_theta: 10000.0, pad_token_id: 0, eos_token_id: 1}
"""
SAMPLED = "sync: {use: bucketed}\nschedule: {groups_per_step: 8, group_size: 2}\n"
BACKEND = "engines: {main: {use: local, max_new_tokens: 3}}\nroles: {teacher: {source: SOURCE}}\n"
ENGINE = """
engines: {main: {use: local, max_new_tokens: 3}, judge: {use: local}}
roles: {teacher: {source: SOURCE, engine: judge}}
"""


@pytest.fixture
def run(tmp_path):
    def start(name, text, *overrides):
        file = tmp_path / "run.yaml"
        file.write_text(BASE + text.replace("SOURCE", str(tmp_path / "teacher")))
        run_file = load(file, (f"run.dir={tmp_path / name}", *overrides), catalogue=scan())
        asyncio.run(execute(run_file, scan(), threading.Event()))
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return lambda metric: [line[metric]["value"] for line in lines if metric in line]

    return start


@pytest.mark.parametrize(
    ("algorithm", "metric"),
    [
        ("{use: opd_topk, distill: {k: 4, support: teacher}}", "train/topk_kl"),
        ("{use: opd}", "train/opd/reverse_kl"),
    ],
)
def test_an_engine_teaches_what_the_backend_would(run, algorithm, metric):
    run("teacher", "algorithm: sft\nschedule: {groups_per_step: 64}\n", "run.seed=3", "optimizer.lr=1.0e-2")
    text = SAMPLED + f"algorithm: {algorithm}\n"
    here, there = run("here", text + BACKEND), run("there", text + ENGINE)
    assert len(here(metric)) == 3 and here(metric)[0] > 0.01
    assert there(metric) == pytest.approx(here(metric), rel=1e-3, abs=1e-5)
    assert there("train/loss") == pytest.approx(here("train/loss"), rel=1e-3, abs=1e-5)
