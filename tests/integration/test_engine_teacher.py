"""A teacher that an engine holds: the same numbers as the same model in the backend, in whole runs of a real model."""

import asyncio
import json
import threading

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
env: {use: arithmetic, task: sort, digits: 2}
backend: {use: fsdp}
optimizer: {lr: 3.0e-3}
trackers: {jsonl: {}}
"""
)
SAMPLED = "sync: {use: bucketed}\nschedule: {groups_per_step: 8, group_size: 2}\n"
BACKEND = "engines: {main: {use: local, max_new_tokens: 3}}\nroles: {teacher: {source: SOURCE}}\n"
ENGINE = """
engines: {main: {use: local, max_new_tokens: 3}, judge: {use: local}}
roles: {teacher: {source: SOURCE, engine: judge}}
"""


@pytest.fixture
def run(tmp_path):
    def start(name, text, *overrides):
        file = tmp_path / "run.yaml"
        file.write_text(BASE + text.replace("SOURCE", str(tmp_path / "teacher")))
        run_file = load(file, (f"run.dir={tmp_path / name}", *overrides), catalogue=scan())
        asyncio.run(execute(run_file, scan(), threading.Event()))
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return lambda metric: [line[metric]["value"] for line in lines if metric in line]

    return start


@pytest.mark.parametrize(
    ("algorithm", "metric"),
    [
        ("{use: opd_topk, distill: {k: 4, support: teacher}}", "train/topk_kl"),
        ("{use: opd}", "train/opd/reverse_kl"),
    ],
)
def test_an_engine_teaches_what_the_backend_would(run, algorithm, metric):
    run("teacher", "algorithm: sft\nschedule: {groups_per_step: 64}\n", "run.seed=3", "optimizer.lr=1.0e-2")
    text = SAMPLED + f"algorithm: {algorithm}\n"
    here, there = run("here", text + BACKEND), run("there", text + ENGINE)
    assert len(here(metric)) == 3 and here(metric)[0] > 0.01
    assert there(metric) == pytest.approx(here(metric), rel=1e-3, abs=1e-5)
    assert there("train/loss") == pytest.approx(here("train/loss"), rel=1e-3, abs=1e-5)
