"""The run files of `recipes/` mean something, and the one for a user's own data learns."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.config.compose import load

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = sorted(f for f in RECIPES.rglob("*.yaml") if f.name != "all.yaml")  # that one lists the others


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(RECIPES)))
def test_run_files_are_valid(file):
    run_file = load(file)
    for policy in run_file.policies.values():
        keys = policy.model.core
        if keys.architecture is not None:
            assert keys.architecture["vocab_size"] == 2 + len(keys.alphabet)


def test_own_data_is_what_the_page_says():
    rows = [json.loads(line) for line in (RECIPES / "own-data" / "tasks.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == 400
    assert all(row["answer"] == "eo"[int(row["prompt"][:-1]) % 2] for row in rows)


def test_the_pairs_of_the_dpo_recipe_are_what_its_script_writes():
    make = runpy.run_path(str(RECIPES / "dpo" / "make.py"))
    for name, content in make["files"]().items():
        assert (RECIPES / "dpo" / name).read_text() == content
    pairs, held_out = (
        [json.loads(line) for line in (RECIPES / "dpo" / name).read_text().splitlines()]
        for name in ("pairs.jsonl", "held-out.jsonl")
    )
    assert not {row["prompt"] for row in pairs} & {row["prompt"] for row in held_out}
    assert all(row["chosen"] == "".join(sorted(row["prompt"][:-1])) != row["rejected"] for row in pairs)


def miles(*arguments, cwd):
    command = [str(Path(sys.executable).with_name("miles")), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_own_data_learns(tmp_path):
    done = miles("run", str(RECIPES / "own-data" / "run.yaml"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "runs/own-data/metrics.jsonl").read_text().splitlines()]
    rewards = [line["eval/reward"]["value"] for line in lines if "eval/reward" in line]
    assert rewards[0] < 0.2 and rewards[-1] > 0.9
    shown = miles("show", "runs/own-data", cwd=tmp_path)
    assert shown.returncode == 0 and "said" in shown.stdout


def test_a_bad_row_is_found_before_the_run(tmp_path):
    for name in ("run.yaml", "reward.py", "tasks.jsonl"):
        (tmp_path / name).write_text((RECIPES / "own-data" / name).read_text())
    with open(tmp_path / "tasks.jsonl", "a") as file:
        file.write('{"question": "12="}\n')
    done = miles("run", "run.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert f"MILES-E800: environment 'jsonl': {tmp_path / 'tasks.jsonl'}:401: no field 'prompt'" in done.stderr
    assert "Fix: " in done.stderr and not (tmp_path / "runs").exists()
