"""Runs with adapters through the command line: resumed to the same bits, two policies over one base, folders out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_model import MODEL

pytestmark = pytest.mark.slow
MILES = Path(sys.executable).with_name("miles")
BASE = (
    MODEL
    + """
run: {name: base, seed: 3, steps: 2}
env: {use: arithmetic, task: sort, digits: 1}
backend: {use: fsdp}
algorithm: {use: sft}
optimizer: {lr: 1.0e-3}
schedule: {groups_per_step: 8}
trackers: {jsonl: {}}
"""
)
POLICY = """
model: {use: causal-lm, source: runs/base}
env: {use: arithmetic, task: sort, digits: 1}
algorithm: {use: dr_grpo, kl: {coef: 0.05}}
roles: {reference: {init: actor}}
optimizer: {lr: 1.0e-2}
schedule: {groups_per_step: 4, group_size: 16}
"""
SHARED = """
rollout: {use: local, slots: 32, max_new_tokens: 3}
backend: {use: fsdp}
sync: {use: bucketed}
extensions: {lora: {rank: 4}}
trackers: {jsonl: {}}
"""
RUN = "run: {name: run, seed: 7, steps: 4, checkpoint_every: 2}\n" + POLICY + SHARED
TWO = (
    "run: {name: two, seed: 7, steps: 3}\npolicies:\n"
    + "".join(f"  {name}:" + POLICY.replace("\n", "\n    ").rstrip(" ") for name in ("one", "other"))
    + SHARED.replace("rank: 4", "rank: 4, export: adapter")
)


def miles(folder: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [MILES, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a run that others start from."""
    folder = tmp_path_factory.mktemp("lora")
    for name, text in {"base": BASE, "run": RUN, "two": TWO}.items():
        (folder / f"{name}.yaml").write_text(text)
    miles(folder, "run", "base.yaml")
    return folder


def losses(run: Path) -> dict[int, list[float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = [line for line in lines if "train/loss" in line]
    return {line["step"]: [line[f"train/{key}"]["num"] for key in ("loss", "grad_norm", "kl")] for line in found}


def test_adapters_resume_to_the_same_bits_and_leave_as_folders(folder):
    invariant = "rollout.batch_invariant=true"
    miles(folder, "run", "run.yaml", invariant, "run.name=whole")
    miles(folder, "run", "run.yaml", invariant, "run.name=cut", "run.steps=2")
    miles(folder, "run", "run.yaml", invariant, "run.name=cut", "run.steps=4", "--resume")
    expected = losses(folder / "runs/whole")
    assert losses(folder / "runs/cut") == expected and len(expected) == 4
    assert expected[0][2] == 0.0 and expected[3][2] > 0.0  # KL to the base: 0 before the first update
    trainer = folder / "runs/whole/checkpoints/step_000004/trainer"
    assert all(".lora_" in name for name in load_file(trainer / "rank_00000_of_00001.safetensors"))
    assert '"adapter_off"  # extension lora' in (folder / "runs/whole/resolved.yaml").read_text()

    miles(folder, "export", "runs/whole", "tuned")
    base = load_file(next((folder / "runs/base/exports").glob("*/model.safetensors")))
    tuned = load_file(folder / "tuned/model.safetensors")
    adapter = load_file(folder / "tuned/adapter/adapter_model.safetensors")
    assert tuned.keys() == base.keys()
    told = json.loads((folder / "tuned/adapter/adapter_config.json").read_text())
    for name, weight in base.items():
        layer = name.removesuffix(".weight")
        if layer in told["target_modules"]:
            a, b = (adapter[f"base_model.model.{layer}.lora_{part}.weight"] for part in "AB")
            weight = weight + told["lora_alpha"] / told["r"] * (b @ a)
        np.testing.assert_allclose(tuned[name], weight, atol=1e-6)


def test_two_policies_are_two_adapters_over_one_base(folder):
    assert "needs 'lora'" in miles(folder, "plan", "two.yaml", "rollout.batch_invariant=true", code=2)
    drawn = MODEL.split("model:")[1]
    (folder / "drawn.yaml").write_text(RUN.replace("{use: causal-lm, source: runs/base}", drawn.replace("\n", "\n  ")))
    refused = miles(folder, "run", "drawn.yaml", "extensions.lora.export=adapter", "run.name=drawn", code=2)
    assert "engines read one base from one folder; models are main: drawn at random" in refused
    assert not (folder / "runs/drawn").exists()
    miles(folder, "run", "two.yaml", "extensions.lora.policies=[one,other]")
    events = [json.loads(line) for line in (folder / "runs/two/events.jsonl").read_text().splitlines()]
    carried = [event for event in events if event["type"] == "weights_carried" and not event["alias"]]
    assert {event["version"].partition("@")[0] for event in carried} == {"one", "other"}
    rank, layers = 4, 2
    sizes = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 64), (32, 64), (64, 32)]  # (in, out) of each projection
    assert {event["bytes"] for event in carried} == {4 * layers * sum(rank * (i + o) for i, o in sizes)}
    miles(folder, "export", "runs/two", "out", "--policy", "other")
    adapter = load_file(folder / "out/adapter/adapter_model.safetensors")
    trained = load_file(folder / "runs/two/checkpoints/step_000003/trainer/rank_00000_of_00001.safetensors")
    for name, tensor in adapter.items():
        own, others = (
            trained[f"{p}/actor/weight/lm.{name.removeprefix('base_model.model.')}"] for p in ("other", "one")
        )
        assert np.array_equal(tensor, own) and not np.array_equal(tensor, others)
