"""Runs of toys through the command line, with the kinds and places that tests/integration leaves out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
run:       {name: toy, seed: 7, steps: 3}
model:     {use: toy, tokenizer: toy, architecture: {model_type: toy}}
renderer:  toy
env:       {use: toy}
rollout:   {use: toy, max_new_tokens: 2}
backend:   {use: toy}
sync:      {use: toy}
algorithm: {use: toy}
optimizer: {lr: 0.2}
trackers:  {toy: {}, jsonl: {}}
schedule:  {groups_per_step: 4, group_size: 4}
"""

PROCESSES = ["launcher=toy-processes", "sync.use=toy-socket", "rollout.use=toy-socket", "schedule.samplers=2"]

VARIANTS = {
    "threads": ["launcher=toy"],
    "multi-turn with branches": ["env.use=toy-multiturn", "env.branches=2"],
    "cut distribution": ["rollout.top_k=5", "rollout.temperature=0.7"],
    "scorer": ["scorers={toy: {}}", "env.scorer=toy"],
    "processes and an engine of its own": [*PROCESSES, "rollout.own_process=true", "extensions={toy: {}}"],
}


def run(folder, text, overrides):
    (folder / "toy.yaml").write_text(text)
    miles = Path(sys.executable).with_name("miles")
    command = [miles, "run", "toy.yaml", "--traceback", *overrides]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "runs/toy/toy-tracker.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def trained(records, policy):
    found = [r for r in records if r["kind"] == "metrics" and r["side"] == "train" and r["policy"] == policy]
    return sorted(r["step"] for r in found)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run(tmp_path, name):
    records = run(tmp_path, RUN, VARIANTS[name])
    assert trained(records, "main") == [0, 1, 2]
    assert records[-1]["status"] == "finished"
