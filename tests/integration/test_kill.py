"""SIGKILL at random points of whole toy loops, then resume: nothing trained twice, no lease without an end, and the
bits of the uninterrupted run."""

import asyncio
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from miles_core.cli.accounting import check_history
from miles_core.cli.audit import audit
from miles_core.config.compose import load
from miles_core.discovery import scan
from miles_core.driver import execute
from miles_core.journal import read
from miles_core.run import RunDir

STEPS = 14
OVERRIDES = (f"run.steps={STEPS}", "run.checkpoint_every=3", "schedule.groups_per_step=4", "eval={every: 4, tasks: 8}")
OVERLAP = ("schedule.max_staleness=2", "schedule.off_policy=uncorrected", "env.delay_s=0.005")

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["miles_core.driver", "miles_testing_toys.plugin", "miles_core.builtin.jsonl"])


def _go(folder: str, overrides: tuple[str, ...], resume: bool) -> None:
    os.chdir(folder)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
    run_file = load(Path("toy.yaml"), overrides, catalogue=scan())
    asyncio.run(execute(run_file, scan(), threading.Event(), resume=resume))


def _start(folder: Path, overrides: tuple[str, ...]) -> "multiprocessing.Process":
    process = context.Process(target=_go, args=(str(folder), overrides, (folder / "runs/toy/plugins.lock").is_file()))
    process.start()
    return process


def _finish(folder: Path, overrides: tuple[str, ...]) -> RunDir:
    process = _start(folder, overrides)
    process.join(120)
    assert process.exitcode == 0
    return RunDir.open(folder / "runs/toy")


def _losses(run: RunDir) -> dict[int, float]:
    return {line["step"]: line["train/loss"]["value"] for line in run.metrics() if "train/loss" in line}


def _kill_at_random(folder: Path, overrides: tuple[str, ...], rng: random.Random, span_s: float) -> bool:
    """Start or resume, kill after a random time: whether it was still running."""
    process = _start(folder, overrides)
    process.join(rng.uniform(0.02, span_s))
    alive = process.is_alive()
    if alive:
        os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    return alive


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [(), OVERLAP], ids=["strict", "overlap"])
def test_kills_at_a_hundred_random_points(tmp_path, overlap, toy_text):
    overrides = OVERRIDES + overlap
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "toy.yaml").write_text(toy_text)
    began = time.monotonic()
    expected = _losses(_finish(whole, overrides))
    span_s = time.monotonic() - began
    rng, kills, runs = random.Random(5), 0, 0
    while kills < 50:
        folder = tmp_path / f"run-{runs}"
        folder.mkdir()
        (folder / "toy.yaml").write_text(toy_text)
        runs += 1
        for _ in range(4):
            alive = _kill_at_random(folder, overrides, rng, span_s)
            if (folder / "runs/toy").is_dir():
                assert audit(folder / "runs/toy") == 0  # whatever the kill left
            if not alive:
                break
            kills += 1
        done = (folder / "runs/toy/checkpoints" / f"step_{STEPS:06d}" / "COMMIT").is_file()
        run = RunDir.open(folder / "runs/toy") if done else _finish(folder, overrides)
        schedules = {"main": load(folder / "toy.yaml", overrides, catalogue=scan()).policies["main"].schedule}
        assert check_history(read(run.path / "journal"), schedules, finished=not done) == []
        assert audit(run.path) == 0
        assert run.latest().step == STEPS
        if not overlap:
            assert _losses(run) == expected
