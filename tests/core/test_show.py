"""`miles show`: which rollouts it prints, and how each is told."""

import json
from collections import Counter

import numpy as np
import pytest
from rich.console import Console

from miles_core.cli.episodes import Wanted, cut, describe, show_rollouts, told_failures
from miles_core.cli.show import Order, draw
from miles_core.errors import RunNotFoundError
from miles_core.records import Episode, Group, Origin, Task, Trajectory
from miles_core.rollouts import Rollouts, read_samples
from miles_core.run import RunDir

LINE = {
    **{"v": 1, "policy": "main", "episode": "sums:train:0#0/0", "prompt": "user: 1+1?", "expected": "2"},
    **{"turns": [["two", "or 2"]], "reward": 1.0, "components": {"format": 0.1}, "learnt": {}},
    **{"info": {"extracted": "2", "verdict": "right", "why": "the last number"}, "status": "ok", "error": ""},
    **{"finish": ["stop"], "tokens": [14], "written": [4], "versions": ["main@0.3"]},
}


def line(group, member, reward=1.0, verdict="right", **more):
    info = {**LINE["info"], "verdict": verdict}
    return {**LINE, "episode": f"sums:train:{group}#0/{member}", "reward": reward, "info": info, **more}


@pytest.fixture
def shown(tmp_path, capsys):
    """What is printed of a run with these rollouts, by file name, and these events."""

    def show(files, events=(), **wanted):
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        for name, lines in files.items():
            (tmp_path / "rollouts" / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(x) + "\n" for x in events) + '{"type": "torn')
        capsys.readouterr()
        show_rollouts(Console(width=100), RunDir(tmp_path), Wanted(**wanted))
        return capsys.readouterr().out

    return show


def episodes(out):
    return [word.removeprefix("sums:train:") for word in out.split() if word.startswith("sums:train:")]


def test_one_rollout_is_told_with_all_that_made_its_reward():
    told = describe({**LINE, "learnt": {"reward.overlong": -0.5, "advantage": 0.25}})
    assert told.splitlines() == [
        "prompt    user: 1+1?",
        "answer    two",
        "answer    or 2",
        "expected  2",
        "· extracted 2",
        "· verdict right",
        "· why     the last number",
        "+ format  0.1",
        "- overlong -0.5",
        "reward    1, trained on 0.5, advantage +0.250 (ok, stop, 4 of 14 tokens written; sampled by main@0.3)",
    ]
    failed = describe({**LINE, "status": "failed", "reward": None, "error": "task t: hung", "turns": []})
    assert "reward    none (failed" in failed and failed.endswith("error     task t: hung")
    two = describe({**LINE, "turns": [["a"], ["b"]]})
    assert "answer 1  a\nanswer 2  b" in two
    talk = describe({**LINE, "turns": [["a", "b"]], "between": [["more?"]]})
    assert "answer    a\nthen      more?\nanswer    b" in talk
    old = {key: value for key, value in LINE.items() if key not in ("learnt", "written")}  # of an earlier version
    assert "reward    1 (ok, stop, 14 tokens; sampled by main@0.3)" in describe(old)


def test_long_texts_are_cut_in_the_middle_with_a_count():
    assert cut("x" * 1000, 1000) == "x" * 1000 and cut("y" * 9999, 0) == "y" * 9999
    assert cut("a" * 600 + "b" * 1_000_000 + "c" * 400, 1000) == "a" * 600 + " […1,000,000 characters…] " + "c" * 400
    assert len(describe({**LINE, "turns": [["z" * 2**20]]}, 100)) < 600
    assert cut("a\x1b[2J\r\n\tb", 0) == "a\\x1b[2J\\x0d\n\tb"  # no text moves the cursor


def test_first_and_last_step_are_printed_group_by_group(shown):
    lines = [line(g, m, reward=m / 2, verdict=("wrong", "partly right (0.5)")[m]) for g in range(2) for m in range(2)]
    out = shown({f"step_{i:06d}": lines for i in (0, 3, 7)})
    assert out.count("rollouts of step") == 2 and "step 3" not in out
    assert "rollouts of step 7: 4 written, reward 0.250, 2 wrong, 2 partly right" in out
    assert episodes(out) == ["0#0/0", "1#0/0", "0#0/1"] * 2


def test_orders(shown):
    lines = [line(0, m, reward=r, tokens=[t]) for m, (r, t) in enumerate([(0.5, 9), (1.0, 5), (0.0, 7), (None, 1)])]
    files = {"step_000000": lines}
    assert episodes(shown(files, order=Order.best, samples=9)) == ["0#0/1", "0#0/0", "0#0/2"]
    assert episodes(shown(files, order=Order.worst, samples=2)) == ["0#0/2", "0#0/0"]
    assert episodes(shown(files, order=Order.longest, samples=4)) == ["0#0/0", "0#0/2", "0#0/1", "0#0/3"]


def test_searches_look_at_every_step(shown):
    files = {f"step_{i:06d}": [line(i, 0), line(i, 1, verdict="no answer")] for i in range(5)}
    out = shown(files, verdict="no", samples=2)
    assert episodes(out) == ["0#0/1", "1#0/1"] and "step 1: sums:train:1#0/1" in out
    assert episodes(shown(files, episode=":3#0/", samples=9)) == ["3#0/0", "3#0/1"]
    with pytest.raises(RunNotFoundError, match=r"no rollout with verdict 'wrong'; verdicts: no answer, right"):
        shown(files, verdict="wrong")
    with pytest.raises(RunNotFoundError, match=r"no rollout with episode 'x' and verdict 'right'"):
        shown(files, episode="x", verdict="right")


def test_evaluations_and_json(shown):
    files = {"eval_000004": [line(0, 0)], "step_000004": [line(1, 0)]}
    out = shown(files, side="eval")
    assert "rollouts of the evaluation after 4 steps: 1 written" in out and episodes(out) == ["0#0/0"]
    (found,) = map(json.loads, shown(files, as_json=True, step=4).splitlines())
    assert found == {"step": 4, **line(1, 0)}
    with pytest.raises(RunNotFoundError, match="no rollouts of an evaluation after 9 steps") as none:
        shown(files, side="eval", step=9)
    assert none.value.fix == "choose --step 4"
    more = {f"eval_{step:06d}": [line(0, 0)] for step in (0, 2)}
    with pytest.raises(RunNotFoundError) as none:
        shown(more, side="eval", step=9)
    assert none.value.fix == "choose --step 0, 2, 4"
    with pytest.raises(RunNotFoundError) as none:
        shown({f"step_{step:06d}": [line(0, 0)] for step in (2, 3)}, step=9)
    assert none.value.fix == "choose --step 2 to 4"


def test_a_curve_fits_its_terminal():
    curve = [(step, -1e-9 * step) for step in range(40)]
    lines = draw("train/loss", curve, 20).splitlines()
    assert lines[0] == "train/loss: -0 -> -3.9e-08, step 0 to 39" and {len(x) for x in lines[1:]} == {30}


def test_readable_samples_hold_what_the_environment_said(tmp_path):
    origin = np.array([Origin.PROMPT, *[Origin.SAMPLED] * 2, *[Origin.ENVIRONMENT] * 2, Origin.SAMPLED], np.uint8)
    columns = {"tokens": np.array([*map(ord, ">ab??c")], np.int32), "origin": origin}
    leaf = Trajectory(id="t#0/0/0", length=6, columns=columns)
    group = Group(
        id="t#0",
        policy="main",
        slot=0,
        attempt=0,
        task=Task(id="t", prompt=">"),
        episodes=(Episode(id="t#0/0", member=0, trajectories=(leaf,), reward=1.0),),
    )
    Rollouts(tmp_path, {"main": lambda ids: "".join(map(chr, ids))}).write("main", 3, "train", [group])
    (found,) = read_samples(tmp_path, "train", 3)
    file = next(tmp_path.glob("step_*"))
    wrong = [json.dumps(found | {key: value}) for key, value in (("turns", None), ("tokens", "many"), ("reward", "r"))]
    for damage in ("junk", '{"a": 1}', "[1]", *wrong, json.dumps({k: v for k, v in found.items() if k != "info"})):
        file.write_text(f"{json.dumps(found)}\n{damage}\n")
        with pytest.raises(RunNotFoundError, match=r"step_000003.jsonl is damaged"):
            list(read_samples(tmp_path, "train", 3))
    assert (found["turns"], found["between"], found["written"]) == ([["ab", "c"]], [["??"]], [3])
    found["prompt"] = "a\u2028b\u0085"
    file.write_text(f"{json.dumps(found, ensure_ascii=False)}\n\n{json.dumps(found)}\n")
    assert list(read_samples(tmp_path, "train", 3)) == [found, found]


def test_failed_episodes_are_counted_by_reason(shown):
    why = "task t:{0}, episode t:{0}#0/1: VerifierError: the verifier took longer than 1 s, answer '{0}'"
    events = [{"type": "episode_failed", "why": why.format(i)} for i in range(3)]
    events += [{"type": "episode_failed", "why": why.format(9), "evaluation": 0}, {"type": "run_end"}]
    out = shown({"step_000000": [line(0, 0)]}, events)
    assert "3 episodes failed and were not trained on:" in out
    assert "     3 x VerifierError: the verifier took longer than 1 s\n" in out
    many = told_failures(Counter({f"reason {i}": i for i in range(1, 9)}))
    assert many.startswith("36 episodes failed") and many.count(" x ") == 5 and "and 3 other reasons" in many
