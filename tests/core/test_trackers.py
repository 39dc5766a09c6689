"""Built-in trackers: formats of the files, torn lines, a full disk, bars and plain lines."""

import errno
import io
import json
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from miles_core.builtin import console as console_module
from miles_core.builtin import jsonl
from miles_core.builtin.console import ConsoleConfig, ConsoleTracker, Style
from miles_core.builtin.jsonl import JsonlTracker, LineFile
from miles_core.contracts.launcher import Tracker
from miles_core.errors import TrackerError

INFO = {"name": "r", "steps": 2, "first_step": 0, "lineage": 0, "policies": ["main"], "summary": "grpo on sorting"}


def lines(path):
    return [json.loads(line, parse_constant=lambda c: pytest.fail(c)) for line in path.read_text().splitlines()]


def test_formats(tmp_path):
    tracker = jsonl.miles_tracker().build(jsonl.JsonlConfig(), None)
    assert isinstance(tracker, Tracker)
    tracker.start({**INFO, "dir": tmp_path})
    tracker.metrics(3, "train", {"train/loss": (1.0, 4.0), "kl": (0.0, 0.0), "bad": (math.nan, 2.0)}, "main")
    tracker.event("published", {"step": 4, "seconds": np.float32(0.5), "bad": math.inf, "who": ("a", "b"), "t": 9})
    tracker.event("evaluating", {"step": 0, "done": 1, "of": 2})
    tracker.event("evaluating", {"step": 0, "done": 2, "of": 2})
    tracker.close("finished")
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert list(line)[:6] == ["v", "t", "type", "step", "policy", "lineage"]
    assert {k: line[k] for k in ("v", "type", "step", "policy")} == {
        "v": 1,
        "type": "train",
        "step": 3,
        "policy": "main",
    }
    assert line["train/loss"] == {"value": 0.25, "num": 1, "den": 4}
    assert line["train/kl"] == {"value": None, "num": 0, "den": 0}
    assert line["train/bad"] == {"value": None, "num": None, "den": 2}
    start, event, evaluated, end = lines(tmp_path / "events.jsonl")
    assert (start["type"], start["step"], start["steps"]) == ("run_start", 0, 2)
    assert event["type"] == "published" and event["step"] == 4 and event["t"] > 1e9
    assert (event["seconds"], event["bad"], event["who"]) == (0.5, None, ["a", "b"])
    assert (evaluated["type"], evaluated["done"]) == ("evaluating", 2)
    assert (end["type"], end["status"]) == ("run_end", "finished")


def test_resume_appends_after_a_torn_line(tmp_path):
    tracker = JsonlTracker()
    tracker.start({**INFO, "dir": tmp_path})
    tracker.metrics(0, "train", {"loss": (1.0, 1.0)}, "main")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"v": 1, "t": 17' + "0" * (3 << 16))  # a kill in the middle of a long line
    again = JsonlTracker()
    again.start({**INFO, "dir": tmp_path, "lineage": 1, "first_step": 1})
    again.metrics(1, "train", {"loss": (2.0, 1.0)}, "main")
    again.close("finished")
    found = lines(tmp_path / "metrics.jsonl")
    assert [(x["step"], x["lineage"], x["train/loss"]["value"]) for x in found] == [(0, 0, 1), (1, 1, 2)]


@given(whole=st.lists(st.binary().filter(lambda b: b"\n" not in b), max_size=5), torn=st.binary(max_size=30))
def test_only_the_torn_line_is_cut(tmp_path_factory, whole, torn):
    torn = torn.replace(b"\n", b"")
    path = tmp_path_factory.mktemp("x") / "f"
    kept = b"".join(w + b"\n" for w in whole)
    path.write_bytes(kept + torn)
    file = LineFile(path)
    file.write({"a": 1})
    file.close()
    assert path.read_bytes() == kept + b'{"a":1}\n'


def test_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    tracker = JsonlTracker()
    tracker.start({**INFO, "dir": tmp_path})
    tracker.metrics(0, "train", {"loss": (1.0, 1.0)}, "main")
    before = (tmp_path / "metrics.jsonl").read_bytes()
    real, calls = os.pwrite, []

    def full(fd, data, at):
        calls.append(at)
        if len(calls) == 1:
            return real(fd, data[:7], at)  # a short write first, as disks do
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(TrackerError, match=r"cannot write .*metrics.jsonl: No space left on device\nFix: make room"):
        tracker.metrics(1, "train", {"loss": (1.0, 1.0)}, "main")
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    tracker.close("MILES-E850")  # must not raise again over the first error


def test_told_too_early(tmp_path):
    with pytest.raises(TrackerError, match="before `start`"):
        JsonlTracker().metrics(0, "train", {}, "main")
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(TrackerError, match="cannot write"):
        JsonlTracker().start({**INFO, "dir": tmp_path})


def make(live=False, policies=("main",), every=1):
    out = io.StringIO()
    rich = Console(file=out, force_terminal=live, width=160, color_system=None, legacy_windows=False)
    return ConsoleTracker(rich, policies, live=live, every=every), out


def feed(tracker, steps, policy="main"):
    for step in steps:
        for done in (1, 2):
            tracker.event("group_finished", {"policy": policy, "step": step, "done": done, "of": 2})
        tracker.metrics(step, "rollout", {"reward": (3.0, 4.0), "lag": (0.0, 8.0)}, policy)
        tracker.metrics(step, "train", {"train/loss": (-1.0, 8.0)}, policy)
        tracker.metrics(step, "time", {"step_s": (0.5, 1.0), "tokens_per_s": (100.0, 0.5)}, policy)


def test_one_plain_line_a_step():
    tracker, out = make()
    assert isinstance(tracker, Tracker)
    tracker.start({**INFO, "dir": "runs/r"})
    tracker.metrics(0, "eval", {"failed_episodes": (0.0, 1.0), "length": (9.0, 2.0), "reward": (1.0, 4.0)}, "main")
    feed(tracker, range(2))
    tracker.close("finished")
    said = out.getvalue().splitlines()
    assert said[:3] == ["run r in runs/r", "grpo on sorting", "evaluation after 0 steps: reward 0.250, length 4.500"]
    assert said[3] == "step 1/2  reward 0.750  loss -0.125  lag 0.00  tokens/s 200  step s 0.50"
    assert said[4].startswith("step 2/2") and said[5].startswith("finished after") and len(said) == 6


def test_a_line_without_time_comes_with_the_next_step():
    tracker, out = make()
    tracker.start({**INFO, "dir": "d"})
    tracker.metrics(0, "train", {"loss": (1.0, 1.0)}, "main")
    assert "step 1/2" not in out.getvalue()
    tracker.metrics(1, "train", {"loss": (2.0, 1.0)}, "main")
    assert "step 1/2  loss 1\n" in out.getvalue()
    tracker.close("interrupted")
    assert "step 2/2  loss 2\n" in out.getvalue()


def test_lines_every_n_steps_and_the_last():
    tracker, out = make(every=3)
    tracker.start({**INFO, "dir": "d", "steps": 6})
    feed(tracker, range(6))
    assert [x.split()[1] for x in out.getvalue().splitlines() if x.startswith("step")] == ["1/6", "4/6", "6/6"]


def test_bad_news_is_bounded():
    tracker, out = make()
    tracker.start({**INFO, "dir": "d"})
    for i in range(50):
        tracker.event("lease_dropped", {"policy": "main", "why": f"filter {i}"})
    tracker.event("checkpoint", {"step": 1})
    feed(tracker, [0])
    said = out.getvalue()
    assert said.count("group dropped: why filter") == 3 and "group dropped: 47 more" in said
    assert "checkpoint: step 1" in said


def test_failures_of_an_evaluation_are_told_in_its_line():
    out = io.StringIO()
    tracker = ConsoleTracker(Console(file=out, width=160), ("main",), live=False, how="greedy")
    tracker.start({**INFO, "dir": "d"})
    for why in ("reward is nan", "another"):
        tracker.event("episode_failed", {"policy": "main", "episode": "e", "why": why, "evaluation": 1})
    tracker.metrics(1, "eval", {"reward": (0.0, 4.0), "failed_episodes": (4.0, 1.0)}, "main")
    tracker.metrics(2, "eval", {"reward": (1.0, 4.0), "failed_episodes": (0.0, 1.0)}, "main")
    said = out.getvalue().splitlines()[2:]
    assert said == [
        "evaluation after 1 step (greedy, 4 tasks): reward 0.000, 4 of 4 episodes FAILED: reward is nan",
        "evaluation after 2 steps (greedy, 4 tasks): reward 0.250",
    ]


def test_a_loss_comes_with_the_gradient():
    tracker, out = make()
    tracker.start({**INFO, "dir": "d"})
    tracker.metrics(0, "train", {"loss": (-2e-9, 1.0), "grad_norm": (0.25, 1.0)}, "main")
    tracker.metrics(1, "train", {"loss": (1.0, 1.0), "grad_norm": (0.25, 1.0)}, "main")
    tracker.close("finished")
    assert out.getvalue().splitlines()[2:4] == [
        "step 1/2  loss -2e-09  grad_norm 0.25",
        "step 2/2  loss 1  grad_norm 0.25",
    ]


def test_live_bars():
    tracker, out = make(live=True)
    tracker.start({**INFO, "dir": "d"})
    feed(tracker, range(2))
    tracker.event("evaluating", {"policy": "main", "step": 2, "done": 1, "of": 4})
    tracker._progress.refresh()
    tracker.metrics(2, "eval", {"reward": (1.0, 2.0)}, "main")
    tracker.close("finished")
    said = out.getvalue()
    assert "steps" in said and "2/2" in said and "reward 0.750" in said and "evaluation after 2 steps" in said
    assert "1/4" in said
    assert "step 1/2" not in said


@pytest.mark.parametrize("width", [60, 80, 120])
def test_live_bars_keep_the_count_of_steps_where_it_is_narrow(width):
    out = io.StringIO()
    rich = Console(file=out, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    tracker = ConsoleTracker(rich, ("main",), live=True)
    tracker.start({**INFO, "dir": "d", "steps": 1000})
    feed(tracker, range(2))
    tracker._progress.refresh()
    tracker.close("finished")
    bars = [line for line in out.getvalue().splitlines() if "steps" in line and "reward" in line]
    assert bars and all(" 2/1000 " in line and "reward 0" in line for line in bars[-1:]), bars
    assert ("step s 0.50" in bars[-1]) == (width == 120)


def test_several_policies_are_told_apart():
    tracker, out = make(policies=("a", "b"))
    tracker.start({**INFO, "dir": "d"})
    feed(tracker, [0], "a")
    feed(tracker, [0], "b")
    assert "[a] step 1/2" in out.getvalue() and "[b] step 1/2" in out.getvalue()


def test_provider():
    run = SimpleNamespace(policies={}, eval=SimpleNamespace(temperature=0.0))
    context = SimpleNamespace(run=run, policy="main")
    provider = console_module.miles_tracker()
    assert provider.build(ConsoleConfig(style=Style.live), context)._live
    assert not provider.build(ConsoleConfig(style=Style.plain), context)._live
