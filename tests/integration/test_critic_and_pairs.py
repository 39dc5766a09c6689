"""Whole runs of real models with a critic, on pairs of answers, and on documents that are packed or not."""

import asyncio
import json
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from small_model import MODEL

from miles_core.config.compose import load
from miles_core.discovery import scan
from miles_core.driver import execute

pytestmark = pytest.mark.slow

BASE = (
    MODEL
    + """
run: {name: small, seed: 7, steps: 3}
env: {use: arithmetic, task: sort, digits: 1}  # a model that knows nothing is right one time in thirteen
backend: {use: fsdp}
optimizer: {lr: 3.0e-3}
trackers: {jsonl: {}}
"""
)
SAMPLED = """
rollout: {use: local, max_new_tokens: 1}
sync: {use: bucketed}
"""
PPO = """
algorithm: {use: ppo, advantage: {gamma: 0.9, lam: 0.8, bootstrap_truncated: true}, reward_kl: {coef: 0.01}}
schedule: {groups_per_step: 64, group_size: 1, updates_per_step: 2}
"""
OWN = """
roles:
  actor: {from_step: 1}
  critic: {init: actor, update: trained, head: value, optimizer: {lr: 1.0e-2}}
  reference: {init: actor, update: copy, every: 2}
"""
SHARED = """
roles:
  critic: {init: actor, update: shares, head: value}
  reference: {init: actor, update: frozen}
"""


@pytest.fixture
def run(tmp_path):
    def start(text, *overrides, name="small", resume=False):
        file = tmp_path / "run.yaml"
        file.write_text(BASE + text)
        given = (f"run.dir={tmp_path / name}", f"run.name={name}", *overrides)
        run_file = load(file, given, catalogue=scan())
        result = asyncio.run(execute(run_file, scan(), threading.Event(), resume=resume))
        assert result.status == "finished"
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

        def curve(metric):
            return [line[metric]["value"] for line in lines if metric in line]

        return curve

    return start


def pairs(folder):
    rows = [
        {"prompt": f"{a}{b}>", "chosen": "".join(sorted(f"{a}{b}")), "rejected": f"{(a + 1) % 10}{b}"}
        for a in range(10)
        for b in range(10)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_critic_of_its_own_warms_up_first(run):
    curve = run(SAMPLED + PPO + OWN, "run.steps=4")
    assert curve("train/gae/explained_variance")[0] == 0  # a head that begins at 0
    assert len(curve("train/critic.loss")) == 4 and len(curve("train/loss")) == 3  # the policy waits one step
    assert curve("train/critic.lr") == [0.01] * 4
    for name in ("value/clipped", "value/abs_error", "gae/return", "reward_kl/kl", "whiten/std"):
        assert len(curve(f"train/{name}")) == 4, name
    assert curve("train/reward_kl/kl")[0] == pytest.approx(0.0, abs=1e-6)


def test_a_plan_says_whose_model_a_role_is(tmp_path):
    """And which parts a coefficient of 0 leaves out; what follows another model has no optimizer."""
    file = tmp_path / "run.yaml"
    file.write_text(BASE + SAMPLED + PPO.replace("reward_kl: {coef: 0.01}", "whiten: {}") + SHARED)
    command = [Path(sys.executable).with_name("miles"), "plan", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "main/critic: shares the model of actor" in lines
    assert any("reward_kl (coefficient 0: not built)" in line for line in lines)


def test_a_shared_critic_learns_and_a_resumed_run_repeats_it(run):
    steps = "run.checkpoint_every=2"
    straight = run(SAMPLED + PPO + SHARED, steps, "run.steps=4", name="straight")
    assert not straight("train/critic.lr") and len(straight("train/critic.loss")) == 4
    run(SAMPLED + PPO + SHARED, steps, "run.steps=2", name="halves")
    resumed = run(SAMPLED + PPO + SHARED, steps, "run.steps=4", name="halves", resume=True)
    for name in ("train/critic.loss", "train/loss", "rollout/reward", "train/gae/explained_variance"):
        assert resumed(name)[-2:] == straight(name)[-2:], name


@pytest.mark.parametrize("loss", ["{beta: 0.5}", "{form: ipo}", "{reference_free: true}"])
def test_pairs_from_a_file(run, tmp_path, loss):
    pairs(tmp_path)
    schedule = "schedule: {groups_per_step: 20, group_size: 2, updates_per_step: 2}"
    curve = run(
        f"algorithm: {{use: dpo, loss: {loss}}}\n{schedule}\n",
        "env={use: jsonl, path: pairs.jsonl, eval_fraction: 0.2}",
        "run.steps=8",
        "eval={every: 4, tasks: 20}",
        *(() if "free" in loss else ("roles.reference={init: actor, update: frozen}",)),
    )
    accuracy, margin = curve("train/dpo/accuracy"), curve("train/dpo/margin")
    assert len(margin) == 8 and margin[-1] > margin[0] and accuracy[-1] >= 0.7
    both = zip(margin, curve("train/dpo/chosen"), curve("train/dpo/rejected"), strict=True)
    assert all(abs(m - (c - r)) < 1e-5 for m, c, r in both)
    assert len(curve("eval/loss")) == 3 and not curve("rollout/reward")


def test_packed_documents_give_the_loss_of_padded_ones(run):
    text = "algorithm: {use: sft, aggregation: episode_mean}\nschedule: {groups_per_step: 16, group_size: 1}\n"
    short = ("env.min_digits=1", "env.digits=5")
    layouts = [
        run(text, *short, f"model.layout={layout}", *more, name=f"{layout}{len(more)}")("train/loss")
        for layout, more in (("padded", ()), ("packed", ()), ("packed", ("backend.micro_tokens=20",)))
    ]
    for one, other in pairwise(layouts):
        assert one == pytest.approx(other, rel=1e-5)
