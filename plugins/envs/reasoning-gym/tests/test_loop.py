"""Whole runs of toy plugins on data sets that misbehave: one message or counted episodes each."""

import asyncio
import json
import threading
from pathlib import Path

import pytest
from miles_env_reasoning_gym.config import ReasoningGymConfig
from miles_env_reasoning_gym.environment import ReasoningGym

from miles_core.config.compose import load
from miles_core.discovery import scan
from miles_core.driver import execute
from miles_core.errors import ConfigError, DataError

RUN = """
run: {name: mine, seed: 7, steps: 3}
model: {use: toy, tokenizer: chars, alphabet: "0123456789=", architecture: {model_type: toy}}
env:
  use: reasoning-gym
  dataset: misbehaving
  modules: [MODULE]
  options: {items: 10, what: good}
  extract: [whole]
  deadline_s: 1.0
rollout: {use: toy, max_new_tokens: 2}
backend: {use: toy}
sync: {use: toy}
algorithm: {use: toy}
optimizer: {lr: 0.3}
schedule: {groups_per_step: 3, group_size: 4}
trackers: {jsonl: {}}
"""


MODULE = Path(__file__).with_name("misbehaving.py")


@pytest.fixture(scope="module", autouse=True)
def shared_children():
    """One that lives as long as the tests lends its children to every run."""
    config = ReasoningGymConfig(dataset="misbehaving", modules=[str(MODULE)], deadline_s=1.0)
    kept = ReasoningGym(config, name="kept", seed=0)
    yield
    del kept


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN.replace("MODULE", str(MODULE)))

    def start(*overrides, resume=False):
        run_file = load(tmp_path / "run.yaml", overrides, catalogue=scan())
        asyncio.run(execute(run_file, scan(), threading.Event(), resume=resume))
        folder = Path("runs") / run_file.run.name
        lines = {
            name: list(map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines()))
            for name in ("metrics", "events")
        }
        files = sorted((folder / "rollouts").iterdir())
        samples = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        return lines["metrics"], lines["events"], samples

    return start


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("spin", "took longer than 1 s"),
        ("die", "ended its process (exit code 3)"),
        ("raise", "raised RuntimeError: broken verifier of two lines"),
        ("above", "returned 7, outside its stated range of 0 to 1"),
    ],
)
def test_a_bad_verdict_is_one_counted_episode(run, what, why):
    metrics, events, _ = run(f"env.options.what={what}", "env.options.when='3'")
    failed = [event for event in events if event["type"] == "episode_failed"]
    assert failed and all(f"VerifierError: the verifier of misbehaving {why}, answer " in e["why"] for e in failed)
    steps = [line for line in metrics if "rollout/reward" in line]
    assert len(steps) == 3 and all(0 <= line["rollout/reward"]["value"] <= 1 for line in steps)
    assert sum(line["rollout/failed_episodes"]["num"] for line in steps) <= len(failed)
    assert events[-1]["type"] == "run_end" and events[-1]["status"] == "finished"


def test_what_is_too_long_earns_nothing_and_says_so(run):
    _, events, samples = run("env.max_answer_chars=1", "env.options.what=spin")
    assert not [event for event in events if event["type"] == "episode_failed" and "longer" not in event["why"]]
    long = [line for line in samples if line["info"].get("verdict") == "too long"]
    assert long and all(line["reward"] == 0 and "at most 1 are judged" in line["info"]["why"] for line in long)


def test_evaluation_and_training_share_nothing(run):
    _, _, samples = run("env.options.items=1000", "eval.every=1", "eval.tasks=20", "run.steps=5")
    prompts = {split: {s["prompt"] for s in samples if f":{split}:" in s["episode"]} for split in ("train", "eval")}
    assert prompts["train"] and prompts["eval"] and not prompts["train"] & prompts["eval"]


def test_a_curriculum_is_resumed_where_it_was(run):
    stages = "[{options: {width: 3}}, {options: {width: 5}}, {options: {width: 7}}]"
    moving = f"env.curriculum={{every: 5, stages: {stages}, review: 0.3}}"
    _, _, whole = run(moving, "run.steps=6")
    run(moving, "run.name=cut", "run.steps=3")
    _, _, cut = run(moving, "run.name=cut", "run.steps=6", resume=True)
    told = [[(s["episode"], s["prompt"], s["turns"]) for s in samples] for samples in (whole, cut)]
    assert told[0] == told[1]
    assert {len(s["prompt"]) for s in whole} == {4, 6, 8}


@pytest.mark.parametrize(
    ("override", "kind", "says"),
    [
        ("env.dataset=misbehavin", ConfigError, "close ones: misbehaving"),
        ("env.options.item=3", ConfigError, "misbehaving has no option 'item'"),
        ("env.options.items=0", ConfigError, "items must be positive"),
        ("env.modules=[misbehave.py]", ConfigError, "'misbehave.py', and there is no such file"),
        ("eval={every: 1, tasks: 50}", DataError, "too few different ones"),
    ],
)
def test_bad_input_is_one_message_before_the_run(run, override, kind, says):
    with pytest.raises(kind) as refused:
        run(override)
    assert says in refused.value.message and refused.value.exit_code == 2
    assert not Path("runs").exists()
