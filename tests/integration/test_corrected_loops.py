"""Whole loops with off-policy corrections: overlapped sampling, weights, rejections and the metrics of both."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

LATE = (
    "run.steps=8",
    "env.delay_s=0.01",
    "schedule.max_staleness=2",
    "schedule.groups_per_step=4",
    "optimizer.lr=1.0",
)
MISMATCH = ("abs", "max_abs", "k3", "ess")


@pytest.mark.parametrize(
    ("corrections", "metrics"),
    [
        ("{tis: {}}", ["tis/weight", "tis/truncated"]),
        ("{tis: {level: geometric}, icepop: {high: 2.0}}", ["tis/truncated", "icepop/zeroed", "icepop/weight"]),
        (
            "{mis: {mode: mask, high: 1.05, veto: 1.0e-4, reject: {level: sequence, high: 1.1}}}",
            ["mis/rejected", "mis/vetoed", "mis/weight", "rejected"],
        ),
        ("{bypass: {}}", []),
        ("{first: {use: tis}, second: {use: mis, mode: clip, normalize: batch}}", ["first/truncated", "second/weight"]),
    ],
)
def test_a_corrected_run(toy, corrections, metrics):
    ran = toy(*LATE, f"algorithm.corrections={corrections}")
    assert ran.status == "finished" and max(ran.curve("rollout/lag_max")) > 0
    for name in [*(f"mismatch/{m}" for m in MISMATCH), *metrics]:
        values = ran.curve(f"train/{name}")
        assert len(values) == 8 and all(v == v for v in values), name
    assert max(ran.curve("train/mismatch/max_abs")) > 1e-3  # stale tokens: the trainer is not the engine
    assert all(0 < v <= 1 + 1e-9 for v in ran.curve("train/mismatch/ess"))
    if "rejected" in metrics:
        assert ran.curve("train/rejected") == ran.curve("train/mis/rejected") and max(ran.curve("train/rejected")) > 0


def test_on_policy_a_correction_changes_nothing(toy):
    """The same tokens, losses within float noise: every weight is 1, nothing is rejected."""
    plain = toy("run.steps=5", "run.name=plain")
    for number, corrections in enumerate(
        ("{tis: {}}", "{icepop: {}}", "{mis: {mode: mask, level: sequence, normalize: batch}}", "{bypass: {}}")
    ):
        ran = toy("run.steps=5", f"run.name=r{number}", f"algorithm.corrections={corrections}")
        assert ran.curve("rollout/reward") == plain.curve("rollout/reward")
        assert ran.curve("train/loss") == pytest.approx(plain.curve("train/loss"), abs=1e-6)
        assert max(ran.curve("train/mismatch/max_abs")) < 1e-5


@pytest.mark.slow
def test_real_models_with_a_dynamic_weight_too(tmp_path):
    """fsdp and the local engine: `mis` and `opsm` together, two updates a step, tokens up to two versions old."""
    recipe = Path(__file__).parents[2] / "recipes" / "async-corrected.yaml"
    small = "{model_type: qwen3, vocab_size: 13, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    small += "num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 64, "
    small += "tie_word_embeddings: true, rope_theta: 10000.0, pad_token_id: 0, eos_token_id: 1}"
    miles = Path(sys.executable).with_name("miles")
    given = [
        "run.name=small",
        "run.steps=6",
        "model.source=null",
        f"model={{use: causal-lm, tokenizer: chars, alphabet: '0123456789>', architecture: {small}}}",
        "env={use: arithmetic, task: sort, digits: 1, delay_s: 0.01}",
        "rollout.max_new_tokens=3",
        "optimizer.lr=3.0e-3",
        "algorithm.corrections={tis: null, mis: {veto: 1.0e-4}, opsm: {}}",
        "schedule={groups_per_step: 4, group_size: 8, max_staleness: 2, updates_per_step: 2}",
        "eval.every=null",
        "run.threads=1",
    ]
    done = subprocess.run(
        [miles, "run", str(recipe), *given], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "runs/small/metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if "train/loss" in line]
    assert len(train) == 6
    for name in [*(f"mismatch/{m}" for m in MISMATCH), "mis/vetoed", "mis/truncated", "opsm/masked"]:
        assert all(f"train/{name}" in line for line in train), name
    assert max(line["train/opsm/masked"]["value"] for line in train) > 0
    assert max(line["train/mismatch/max_abs"]["value"] for line in train) > 1e-4
