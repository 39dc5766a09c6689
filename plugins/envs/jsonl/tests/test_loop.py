"""Whole runs of toy plugins on a file: a reward that learns, one that breaks, and rows that break late."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from miles_core.config.compose import load
from miles_core.discovery import scan
from miles_core.driver import execute
from miles_core.errors import LateDataError, ResumeError, RewardError
from miles_core.journal import read

RUN = """
run: {name: mine, seed: 7, steps: 6}
model: {use: toy, tokenizer: chars, alphabet: "0123456789=", architecture: {model_type: toy}}
env: {use: jsonl, path: tasks.jsonl, reward: "reward:score", reward_deadline_s: 1.0}
rollout: {use: toy, max_new_tokens: 2}
backend: {use: toy}
sync: {use: toy}
algorithm: {use: toy}
optimizer: {lr: 0.3}
schedule: {groups_per_step: 4, group_size: 4}
trackers: {jsonl: {}}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the files lie beside the run file, not in the working directory

    def start(reward, *overrides, rows=None, resume=False):
        rows = rows or [{"prompt": f"{i}=", "answer": str(i)} for i in range(10)]
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
        (tmp_path / "reward.py").write_text(reward)
        (tmp_path / "run.yaml").write_text(RUN)
        run_file = load(tmp_path / "run.yaml", overrides, catalogue=scan())
        asyncio.run(execute(run_file, scan(), threading.Event(), resume=resume))
        return [json.loads(line) for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]

    return start


def values(metrics, name):
    return [line[name]["value"] for line in metrics if name in line]


def test_learns_from_a_file(run):
    metrics = run(
        "def score(text, answer):\n    return {'reward': text[:1] == '7', 'long': len(text)}\n", "run.steps=40"
    )
    curve = values(metrics, "rollout/reward")
    assert sum(curve[-5:]) / 5 > 0.5 > sum(curve[:5]) / 5
    assert len(values(metrics, "rollout/reward.long")) == 40


def test_evaluation_has_its_own_rows(run):
    metrics = run("def score(text):\n    return 0.5\n", "env.eval_fraction=0.3", "eval.every=3", "eval.tasks=50")
    assert values(metrics, "eval/reward") == [0.5, 0.5, 0.5]
    ids = {e["task"] for e in map(json.loads, Path("runs/mine/events.jsonl").read_text().splitlines()) if "task" in e}
    assert all(task.startswith("jsonl:train:") for task in ids) and len(ids) == 7


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return 1.5", "returned 1.5, outside its stated range of 0 to 1"),
        ("raise ValueError('no idea')", "no idea"),
        ("return float('nan')", "nan"),
        ("import time; time.sleep(3)", "took longer than 1 s"),
    ],
)
def test_failed_episodes_are_counted_with_their_reason(run, body, why):
    reward = f"def score(text, answer):\n    if answer == '3':\n        {body}\n    return 1.0\n"
    run(reward, "run.steps=3", "env.reward_range=[0, 1]")
    lines = [json.loads(line) for line in Path("runs/mine/events.jsonl").read_text().splitlines()]
    failed = [line for line in lines if line["type"] == "episode_failed"]
    # Every episode of that task failed, so its groups could not be trained.
    assert len(failed) == 4 * sum(line["type"] == "lease_dropped" for line in lines) > 0
    assert all(why in line["why"].lower() and "jsonl:train:3#" in line["episode"] for line in failed)
    if "ValueError" in body:  # the first line of the user's own file that it went through
        assert all(line["why"].endswith(f"ValueError: no idea ({Path('../reward.py').resolve()}:3)") for line in failed)


def test_what_is_no_number_stops_the_run(run):
    with pytest.raises(RewardError, match=r"reward function 'reward:score' on task jsonl:train:\d: its result is None"):
        run("def score(text):\n    pass\n")


def test_a_late_bad_row_stops_the_run_and_can_be_resumed(run):
    reward = "def score(text):\n    return 1.0\n"
    rows = [{"prompt": f"{i % 10}=", "answer": "1"} for i in range(30)]
    options = ("env.check_rows=5", "env.shuffle=false", "run.checkpoint_every=1")
    with pytest.raises(LateDataError, match=r"tasks.jsonl:13: no field 'prompt'"):
        run(reward, *options, rows=[*rows[:12], {"question": "1="}, *rows[13:]])
    metrics = run(reward, *options, rows=rows, resume=True)  # the row was repaired
    steps = [line["step"] for line in metrics if "rollout/reward" in line]
    assert sorted(set(steps)) == list(range(6))


@pytest.mark.parametrize("eval_path", [None, "held.jsonl"])
def test_a_late_row_that_has_no_tokens_names_file_and_line_and_is_mended(run, tmp_path, eval_path):
    reward = "def score(text):\n    return 1.0\n"
    rows = [{"prompt": f"{i % 10}=", "answer": "1"} for i in range(30)]
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "11=", "answer": "1"}))
    options = (
        "env.check_rows=5",
        "env.shuffle=false",
        "run.checkpoint_every=1",
        f"env.eval_path={eval_path or 'null'}",
    )
    with pytest.raises(LateDataError, match=r"tasks.jsonl:13: .*'é'") as stopped:
        run(reward, *options, rows=[*rows[:12], {"prompt": "é=", "answer": "1"}, *rows[13:]])
    assert "leave as many rows as there were" in stopped.value.fix
    with pytest.raises(ResumeError, match="reads its tasks from has changed"):
        run(reward, *options, rows=[{"prompt": "9=", "answer": "1"}, *rows[1:]], resume=True)  # one that was trained
    metrics = run(reward, *options, rows=rows, resume=True)
    assert {line["step"] for line in metrics if "rollout/reward" in line} == set(range(6))


def test_a_run_does_not_go_on_with_other_tasks(run):
    rows = [{"prompt": f"{i}=", "answer": str(i)} for i in range(10)]
    reward = "def score(text):\n    return 0.5\n"
    run(reward, "run.steps=2", rows=rows)
    lock = Path("runs/mine/plugins.lock").read_text()
    with pytest.raises(ResumeError, match=r"environment 'jsonl' of policy 'main' reads its tasks from has changed"):
        run(reward, "run.steps=3", rows=rows[::-1], resume=True)
    assert Path("runs/mine/plugins.lock").read_text() == lock
    run(reward, "run.steps=3", rows=rows, resume=True)


def test_a_reward_that_was_mended_is_said_to_be_another(run):
    rows = [{"prompt": f"{i}=", "answer": str(i)} for i in range(10)]
    run("def score(text):\n    return 0.5\n", "run.steps=2", rows=rows)
    run("def score(text):\n    return 0.25\n", "run.steps=3", rows=rows, resume=True)
    lines = [json.loads(line) for line in Path("runs/mine/events.jsonl").read_text().splitlines()]
    changed = {line["what"]: (line["was"], line["now"]) for line in lines if line["type"] == "changed"}
    assert changed.keys() == {"run.steps", "scoring of main/jsonl"} and changed["run.steps"] == (2, 3)
    was, now = changed["scoring of main/jsonl"]
    assert len(was) == len(now) == 64 and was != now
    lineage = [frame.header for frame in read(Path("runs/mine/journal")) if frame.kind == "lineage"]
    assert lineage[-1]["changes"]["scoring of main/jsonl"] == [was, now]
    run("def score(text):\n    return 0.25\n", "run.steps=4", rows=rows, resume=True)
    lines = [json.loads(line) for line in Path("runs/mine/events.jsonl").read_text().splitlines()]
    assert sum(line.get("what", "").startswith("scoring") for line in lines) == 1
