"""Whole runs of real models against a second trainer in float64 that reads their journal (`recomputed.py`): losses,
gradient norms, shares of clipped tokens, and the weights that came out."""

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recomputed import PRESETS, by_step, icepop, leases_of, mis, retrain, tis, truncated
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from miles_core.config.compose import load
from miles_core.discovery import scan
from miles_core.driver import execute
from miles_core.run import RunDir

ENV = """
from dataclasses import dataclass
from miles_core import hookimpl
from miles_core.config.schema import opt
from miles_core.provider import Provider
from miles_core.records import Score, Task

class Tasks:
    size = None

    def task(self, position):
        return Task(id=f"graded:train:{position}", prompt=f"{position % 10}{position * 7 % 10}>")

class Graded:
    task_splits = ("train",)

    def __init__(self, coarse):
        self.coarse = coarse

    def tasks(self, split):
        return Tasks()

    def worth(self, *texts):
        if texts[0].startswith("9"):
            raise ValueError("no answer begins with a nine")
        count = sum(text.count(c) for text in texts for c in "345")
        return Score(reward=float(min(count, 1) if self.coarse else count))

    async def score(self, task, context):
        score = self.worth(context.text)
        with open("scores.txt", "a") as file:  # of groups that are not trained, no journal keeps the rewards
            print(task.id, score.reward, file=file)
        return score

class Tree(Graded):
    async def episode(self, task, session, context):
        turns = [await session.sample()]
        if turns[0].finish == "stop":
            turns += [await session.sample(">", parent=turns[0].node) for _ in range(2)]
        return self.worth(*[turn.text for turn in turns])

@dataclass(frozen=True, kw_only=True)
class GradedConfig:
    tree: bool = opt(False, "two answers behind the first one")
    coarse: bool = opt(False, "a reward of 0 or 1")

@hookimpl
def miles_env():
    build = lambda config, _: (Tree if config.tree else Graded)(config.coarse)
    return Provider(name="graded", config=GradedConfig, build=build, summary="counts digits")
"""
RUN = """
run: {name: run, seed: 7, steps: 2}
model: {use: causal-lm, source: ./base, tokenizer: chars, alphabet: "0123456789>"}
env: {use: graded}
rollout: {use: local, slots: 32, max_new_tokens: 6, temperature: 0.9}
backend: {use: fsdp}
sync: {use: bucketed}
algorithm: {use: grpo}
optimizer: {lr: 1.0e-2, eps: 1.0e-4, decay: linear, weight_decay: 0.01}
schedule: {groups_per_step: 5, group_size: 4, updates_per_step: 2, max_leases_per_slot: 100}
trackers: {jsonl: {}}
"""
REFERENCE = "roles.reference={init: actor, update: frozen}"
CRITIC = "roles.critic={init: actor, update: trained, head: value, optimizer: {lr: 5.0e-3, eps: 1.0e-4, decay: linear}}"
TREE = ("env.tree=true", "algorithm.constant_length=7")


@pytest.fixture
def run(tmp_path, monkeypatch, site):
    """Run, retrain, compare; gives back the groups of each step, the metrics and what was recomputed."""
    monkeypatch.chdir(tmp_path)
    site("acme-graded", "miles.env.v1", {"graded": "acme_graded"}, {"acme_graded": ENV})
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=13,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        initializer_range=0.15,
    )
    Qwen3ForCausalLM(config).save_pretrained("base")
    Path("run.yaml").write_text(RUN)

    def start(recipe, *overrides):
        run_file = load(Path("run.yaml"), overrides, catalogue=scan())
        assert asyncio.run(execute(run_file, scan(), threading.Event())).status == "finished"
        folder = Path("runs/run")
        told, actor, critic = retrain(folder, Path("base"), recipe, run_file.policies["main"], run_file.run.steps)
        merged = {}
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            merged.setdefault(json.loads(line)["step"], {}).update(json.loads(line))
        lines = [line for _, line in sorted(merged.items()) if "train/loss" in line]
        assert len(told) == len(lines) == run_file.run.steps
        for expected, line in zip(told, lines, strict=True):
            found = {name: line[f"train/{name}"]["num"] for name in expected if f"train/{name}" in line}
            for name in {"loss", "grad_norm"} | ({"critic.loss"} if critic else set()):
                assert found[name] == pytest.approx(expected[name], rel=2e-4, abs=2e-6), name
            assert found["mismatch/k3"] == pytest.approx(expected["mismatch/k3"], rel=1e-4, abs=1e-6)
            for name in ("clip/clip_low", "clip/clip_high", "opsm/masked", "rejected"):
                assert found.get(name, expected[name]) == expected[name], name
            updates = run_file.policies["main"].schedule.updates_per_step
            assert line["train/skipped_updates"]["num"] == updates - expected["updates"]
        weights = load_file(RunDir.open(folder).latest().trainer / "rank_00000_of_00001.safetensors")
        start_of = load_file("base/model.safetensors")
        for role, model in {"actor": actor, "critic": critic}.items():
            for name, parameter in model.lm.named_parameters() if model else ():
                key = f"main/{role}/weight/lm.{name}"
                if key in weights:
                    moved = (parameter - start_of[name]).abs().max()
                    assert (weights[key] - parameter).abs().max() < 2e-3 * moved + 1e-7, key
        return list(by_step(folder).values()), lines, told

    return start


VARIANTS = {
    "grpo": ([REFERENCE, "algorithm.kl.coef=0.05", "algorithm.entropy.coef=0.02"], {"kl": 0.05, "entropy": 0.02}),
    "dr_grpo": ([], {"length": 6}),
    "rloo": ([], {}),
    "dapo": ([], {"overlong": (6, 1.2)}),
    "gspo": ([], {}),
    "cispo": (["algorithm.loss.hi=0.05"], {"hi": 0.05}),
    "reinforce_pp": (
        [REFERENCE, "algorithm.reward_kl.coef=0.2", "algorithm.advantage.gamma=0.9"],
        {"reward_kl": 0.2, "gamma": 0.9},
    ),
    "reinforce_pp_baseline": ([REFERENCE, "algorithm.reward_kl.coef=0.2"], {"reward_kl": 0.2}),
    "ppo": (
        [CRITIC, "algorithm.advantage={gamma: 0.9, lam: 0.8, bootstrap_truncated: true}"],
        {"gamma": 0.9, "lam": 0.8, "bootstrap": True},
    ),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_with_two_updates_a_step(run, preset):
    overrides, changes = VARIANTS[preset]
    groups, _, told = run(replace(PRESETS[preset], **changes), f"algorithm.use={preset}", *overrides)
    assert len({len(g.episodes) for step in groups for g in step}) > 1  # some episodes failed, and groups shrank
    assert all(line["updates"] == 2 for line in told)
    if preset in ("gspo", "cispo", "dapo"):
        assert sum(line["clip/clip_low"] + line["clip/clip_high"] for line in told) > 0  # the bounds are met


def test_a_critic_that_shares_the_actors_module(run):
    """One gradient of both losses, clipped by one norm."""
    changes = VARIANTS["ppo"][1] | {"shared": True, "kl": 0.05}
    overrides = [REFERENCE, "roles.critic={init: actor, update: shares, head: value}", VARIANTS["ppo"][0][1]]
    run(replace(PRESETS["ppo"], **changes), "algorithm.use=ppo", *overrides, "algorithm.kl.coef=0.05")


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "rloo", "gspo", "cispo", "reinforce_pp"])
def test_siblings_are_one_episode(run, preset):
    """Two answers behind a first one, with a turn of the environment between; three updates of five groups."""
    overrides, changes = VARIANTS[preset]
    changes = changes | {"length": 7}
    more = ("env.tree=true", "algorithm.constant_length=7", "schedule.updates_per_step=3")
    groups, _, told = run(replace(PRESETS[preset], **changes), f"algorithm.use={preset}", *overrides, *more)
    counts = {len(e.trajectories) for step in groups for g in step for e in g.episodes}
    assert counts == {1, 2} and all(line["updates"] == 3 for line in told)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["grpo", "rloo", "dapo", "reinforce_pp_baseline"])
@pytest.mark.parametrize("counted", [True, False])
def test_truncated_answers_are_not_trained(run, preset, counted):
    """They keep their place in the denominators of episodes, and in their group's baseline unless told otherwise."""
    overrides, changes = VARIANTS[preset]
    changes = changes | {"mask_truncated": True, "counted": counted}
    more = ("algorithm.truncated=mask", f"algorithm.excluded_count_in_baseline={str(counted).lower()}")
    more += ("schedule.groups_per_step=6", "rollout.max_new_tokens=10")
    changes |= {"overlong": (10, 2.0)} if preset == "dapo" else {}
    groups, _, _ = run(replace(PRESETS[preset], **changes), f"algorithm.use={preset}", *overrides, *more)
    cut = [truncated(e) for step in groups for g in step for e in g.episodes]
    assert 0.2 < sum(cut) / len(cut) < 0.8


@pytest.mark.slow
def test_groups_with_truncated_answers_are_dropped_before_minibatches_are_cut(run):
    more = ("algorithm.truncated=drop_group", "rollout.max_new_tokens=16", "schedule.group_size=2")
    groups, lines, _ = run(replace(PRESETS["grpo"], drop_truncated=True), *more, "schedule.groups_per_step=8")
    dropped = [sum(any(map(truncated, g.episodes)) for g in step) for step in groups]
    assert [line["rollout/dropped_groups"]["num"] for line in lines] == dropped
    assert all(0 < n < len(step) for n, step in zip(dropped, groups, strict=True))


def test_dapo_from_end_to_end(run):
    """No group without a signal is trained, its slot is sampled again; the penalty of length comes after the filter."""
    more = (
        "schedule.group_size=3",
        "schedule.groups_per_step=6",
        "algorithm.use=dapo",
        "optimizer.lr=0.05",
        "env.coarse=true",
    )
    groups, lines, told = run(replace(PRESETS["dapo"], overlong=(6, 1.2)), *more)
    rewards = {}
    for line in Path("scores.txt").read_text().splitlines():
        rewards.setdefault(line.split()[0], set()).add(float(line.split()[1]))
    leases = leases_of(Path("runs/run"))
    trained = {lease["slot"]: task for task, lease in leases.items() if lease["end"] == "trained"}
    dropped = {task: lease for task, lease in leases.items() if lease["end"] == "dropped"}
    assert sorted(trained) == list(range(12)) and all(rewards[task] == {0.0, 1.0} for task in trained.values())
    assert len(dropped) > 2 and all(len(rewards[task]) == 1 for task in dropped)
    assert all("all rewards are equal" in lease["why"] and lease["slot"] in trained for lease in dropped.values())
    for step, line, expected in zip(groups, lines, told, strict=True):
        lengths = [max(int((t.columns["origin"] == 1).sum()) for t in e.trajectories) for g in step for e in g.episodes]
        penalty = [-min(1.0, max(0.0, (n - 4.8) / 1.2)) for n in lengths]
        assert line["rollout/reward.overlong"]["num"] == pytest.approx(sum(penalty)) and sum(penalty) < 0
        assert line["rollout/reward_penalised"]["num"] == pytest.approx(expected["reward"])
        rewards = [e.reward for g in step for e in g.episodes]
        assert line["rollout/reward"]["num"] == pytest.approx(sum(rewards))  # never rewritten
        assert expected["reward"] == pytest.approx(sum(rewards) + sum(penalty))
    shares = [told[i][f"clip/{side}"] for i in range(2) for side in ("clip_low", "clip_high")]
    assert sum(shares) > 4  # the bounds, of which the upper one is further away, are met


MIS = "{mis: {level: sequence, mode: clip, high: 1.5, reject: {high: 1.1}, veto: 0.6, normalize: batch}}"
CORRECTIONS = {
    "tis": ("{tis: {high: 1.01}}", {"correct": tis(1.01)}),
    "icepop": ("{icepop: {low: 0.97, high: 1.03}}", {"correct": icepop(0.97, 1.03)}),
    "mis": (MIS, {"correct": mis(1.5, 1.1, 0.6)}),
    "mis, kept": (MIS, {"correct": mis(1.5, 1.1, 0.6), "reject_denominator": True}),
    "opsm": ("{opsm: {}}", {"opsm": 1e-4}),
    "bypass": ("{bypass: {}}", {"bypass": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", CORRECTIONS)
def test_late_answers_are_corrected(run, how):
    """A version late, with two updates a step: weights, rejections, and the denominators under both."""
    text, changes = CORRECTIONS[how]
    more = (
        f"algorithm.corrections={text}",
        "schedule.max_staleness=1",
        "run.steps=3",
        "optimizer.lr=2.0e-3",
        *VARIANTS["grpo"][0],
    )
    if "kept" in how:
        more += ("algorithm.reject_denominator=kept",)
    _, lines, told = run(replace(PRESETS["grpo"], **VARIANTS["grpo"][1], **changes), *more)
    assert max(line["rollout/lag_max"]["num"] for line in lines) == 1
    if how.startswith("mis"):
        assert any(0 < line["rejected"] < line["trainable"] for line in told)
    if how == "opsm":
        assert sum(line["opsm/masked"] for line in told) > 0
