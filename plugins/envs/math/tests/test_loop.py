"""Whole runs of toy plugins on problems whose answers are hostile, and on files that cannot be used."""

import asyncio
import json
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from miles_env_math import environment
from miles_env_math.config import MathConfig
from miles_env_math.environment import MathEnvironment

from miles_core.config.compose import load
from miles_core.discovery import scan
from miles_core.driver import execute
from miles_core.errors import DataError, LateDataError
from miles_core.verifying.extract import find

RUN = """
run: {name: mine, seed: 7, steps: 2, checkpoint_every: 1}
model: {use: toy, tokenizer: chars, alphabet: "0123456789+?^!", architecture: {model_type: toy}}
env: {use: math, path: p.jsonl, extract: [whole], deadline_s: 0.3, shuffle: false, prompt: {suffix: ""}}
rollout: {use: toy, max_new_tokens: 4}
backend: {use: toy}
sync: {use: toy}
algorithm: {use: toy}
optimizer: {lr: 0.3}
schedule: {groups_per_step: 3, group_size: 8}
trackers: {jsonl: {}}
"""
ENDLESS = "(((((9^9)^9)^9)^9)^9)^9 + 100000000!"


@pytest.fixture(scope="module", autouse=True)
def shared_children():
    """One that lives as long as the tests lends its children to every run."""
    kept = MathEnvironment(MathConfig(path="-", deadline_s=0.3), name="kept", seed=0)
    yield
    del kept


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)

    def start(rows, *overrides, resume=False):
        if rows is not None:
            (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
        run_file = load(tmp_path / "run.yaml", overrides, catalogue=scan())
        asyncio.run(execute(run_file, scan(), threading.Event(), resume=resume))
        lines = {
            name: list(map(json.loads, Path(f"runs/mine/{name}.jsonl").read_text().splitlines()))
            for name in ("metrics", "events")
        }
        samples = [
            json.loads(line) for p in Path("runs/mine/rollouts").iterdir() for line in p.read_text().splitlines()
        ]
        return lines["metrics"], lines["events"], samples

    return start


def sums(count):
    return [{"problem": f"{i}+1?", "answer": str(i + 1)} for i in range(count)]


def test_hostile_answers_are_counted_and_the_run_goes_on(run, monkeypatch):
    def meant(text, places, tag):  # a toy model cannot write so much: a first digit stands for it
        said = {"1": ENDLESS, "2": "9^9^9^9", "3": "7" * 2**20}.get(text[:1], text)
        return find(said, places, tag)

    monkeypatch.setattr(environment, "find", meant)
    metrics, events, samples = run(sums(2), "env.extract=[last_line]")
    failed = [event["why"] for event in events if event["type"] == "episode_failed"]
    assert failed and all("VerifierError: math-verify could not judge it" in why for why in failed)
    assert any("took longer than 0.3 s" in why for why in failed)
    assert events[-1]["status"] == "finished" and len([m for m in metrics if "rollout/reward" in m]) == 2
    judged = {line["info"]["verdict"] for line in samples if line["status"] != "failed"}
    assert "too long" in judged <= {"right", "wrong", "no answer", "too long"}


def test_a_late_reference_stops_the_run_and_can_be_resumed(run):
    rows = [*sums(4), {"problem": "4+1?", "answer": ENDLESS}, *sums(2)]
    with pytest.raises(LateDataError, match=r"p.jsonl:5: math-verify cannot read the answer") as late:
        run(rows, "env.check_references=2")
    assert late.value.exit_code == 3
    rows[4]["answer"] = "5"
    _, events, _ = run(rows, "env.check_references=2", resume=True)
    assert events[-1]["status"] == "finished"


def test_a_file_with_another_schema_is_one_message_before_the_run(run, tmp_path):
    table = pa.table({"question": ["1+1?"] * 3, "final_answer": ["2"] * 3})
    pq.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"p.parquet has no column 'problem'; its columns: question \(string\)") as bad:
        run(None, "env.path=p.parquet")
    assert bad.value.exit_code == 2 and not Path("runs").exists()
    fields = ("env.problem_field=question", "env.answer_field=final_answer")
    _, events, _ = run(None, "env.path=p.parquet", *fields)
    assert events[-1]["status"] == "finished"
    with pytest.raises(DataError, match=r"p.jsonl:2: no field 'answer'; it has problem"):
        run([*sums(1), {"problem": "2+2?"}], "run.name=other")
