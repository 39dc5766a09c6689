"""Runs with real models through the command line: same seed same bits, killed and resumed to the same bits, overlap
that pays, Ctrl-C, export. Small models; still slow."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_model import MODEL

from miles_core.cli.accounting import check_history
from miles_core.journal import read
from miles_core.run import RunDir

pytestmark = pytest.mark.slow
MILES = Path(sys.executable).with_name("miles")

RUN = (
    MODEL
    + """
run: {name: run, seed: 7, steps: 6, checkpoint_every: 2}
env: {use: arithmetic, task: sort, digits: 1}
rollout: {use: local, slots: 32, max_new_tokens: 3, batch_invariant: true}
backend: {use: fsdp}
sync: {use: bucketed}
algorithm: {use: dr_grpo}
optimizer: {lr: 1.0e-3}
schedule: {groups_per_step: 4, group_size: 16}
trackers: {jsonl: {}}
"""
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def miles(folder: Path, *arguments: str, **kwargs) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [MILES, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **kwargs,
    )


def finish(process: subprocess.Popen, code: int = 0, timeout: float = 300) -> str:
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == code, output
    return output


def losses(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of every step; a step that was trained again keeps its last values."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = [line for line in lines if "train/loss" in line]
    return {line["step"]: (line["train/loss"]["num"], line["train/grad_norm"]["num"]) for line in found}


def steps_done(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_text().count('"train/loss"') if file.exists() else 0


def test_same_seed_same_losses_bit_for_bit(folder):
    for name in ("a", "b"):
        finish(miles(folder, "run", "run.yaml", f"run.name={name}"))
    assert losses(folder / "runs/a") == losses(folder / "runs/b")
    assert len(losses(folder / "runs/a")) == 6
    assert any(norm > 0 for _, norm in losses(folder / "runs/a").values())


def test_ten_kills_then_resume_to_the_same_bits(folder):
    finish(miles(folder, "run", "run.yaml", "run.name=whole", "run.steps=24"))
    expected = losses(folder / "runs/whole")
    rng, kills = random.Random(2), 0
    run = folder / "runs/cut"
    began = 0
    for _ in range(40):
        resume = ["--resume"] if run.exists() else []
        process = miles(folder, "run", "run.yaml", "run.name=cut", "run.steps=24", *resume)
        target = began + rng.randint(1, 4)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline and (kills >= 10 or steps_done(run) < target):
            time.sleep(0.005)
        if process.poll() is not None:
            finish(process)
            break
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        kills += 1
        began = steps_done(run)
    assert kills == 10
    opened = RunDir.open(run)
    from miles_core.config.compose import load

    schedules = {"main": load(folder / "run.yaml", ()).policies["main"].schedule}
    assert check_history(read(run / "journal"), schedules, finished=True) == []
    assert opened.latest().step == 24
    assert losses(run) == expected


def test_ctrl_c_saves_and_resume_goes_on(folder):
    process = miles(folder, "run", "run.yaml", "run.steps=1000")
    run = folder / "runs/run"
    deadline = time.monotonic() + 120
    while steps_done(run) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output = finish(process, code=130)
    assert "--resume" in output
    saved = RunDir.open(run).latest()
    assert saved is not None and saved.step >= 3
    process = miles(folder, "run", "runs/run", "--resume")
    while steps_done(run) < saved.step + 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    finish(process, code=130)
    assert RunDir.open(run).latest().step >= saved.step


def test_overlap_is_faster_and_keeps_order_and_bound(folder):
    late = ("env.delay_s=0.15", "env.delay_max_s=0.6", "run.steps=12", "run.checkpoint_every=null")
    walls = {}
    for name, more in (
        ("strict", ()),
        ("overlap", ("schedule.max_staleness=2", "schedule.off_policy=uncorrected")),
    ):
        finish(miles(folder, "run", "run.yaml", f"run.name={name}", *late, *more))
        lines = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
        walls[name] = sum(line["time/step_s"]["num"] for line in lines if "time/step_s" in line)
    frames = list(read(folder / "runs/overlap/journal"))
    leases = {f.header["id"]: f.header["slot"] for f in frames if f.kind == "lease"}
    trained = [leases[lease] for f in frames if f.kind == "trained" for lease in f.header["leases"]]
    assert trained == list(range(12 * 4))
    for frame in frames:
        if frame.kind == "trained":
            assert frame.header["step"] - frame.header["oldest"] <= 2
    assert walls["overlap"] < walls["strict"]


def test_export_loads_in_transformers_and_starts_a_run(folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    finish(miles(folder, "run", "run.yaml"))
    finish(miles(folder, "export", "runs/run", "out"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    ids = tokenizer.encode("312>", add_special_tokens=False)
    assert ids == [5, 3, 4, 12] and model(torch.tensor([ids])).logits.shape == (1, 4, 13)
    finish(
        miles(folder, "run", "run.yaml", "run.name=next", "model.architecture=null", "model.source=out", "run.steps=1")
    )
    finish(
        miles(
            folder,
            "run",
            "run.yaml",
            "run.name=third",
            "model.architecture=null",
            "model.source=runs/run",
            "run.steps=1",
        )
    )
    first, third = losses(folder / "runs/next"), losses(folder / "runs/third")
    assert first == third, "a run and its export are the same model"
