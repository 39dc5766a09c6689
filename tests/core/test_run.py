"""The run directory: durable writes, commit markers, what a resume may change."""

import json
import os

import pytest

from miles_core import run as run_module
from miles_core.errors import CheckpointError, ResumeError, RunExistsError, RunNotFoundError
from miles_core.run import RunDir, annotated_yaml, check_resume, write_durably

ODD = [0.1, -0.0, float("inf"), [None, {"a b": float("-inf"), "c": "# sha256 of these values: x"}], 2**70, "é\u2028"]
TREE = {
    "run": {"name": "a", "steps": 3},
    "optimizer": {"lr": 1e-06},
    "env": {"use": "x", "stop": ["\n", "#"], "odd": ODD, "nothing": {}, "a.b": {"#": [[]]}},
}


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "a", TREE, {"run.steps": "file"}, {"x": 1})


def test_resolved_yaml_reads_back_and_names_origins(run):
    assert run.tree() == TREE
    assert "  steps: 3  # file" in annotated_yaml(TREE, {"run.steps": "file"})


def test_an_existing_directory_is_refused_with_both_ways_out(run):
    with pytest.raises(RunExistsError) as error:
        RunDir.create(run.path, TREE, {}, {})
    assert "--resume" in str(error.value) and "run.name=" in str(error.value)


def test_an_empty_directory_may_be_used(tmp_path):
    (tmp_path / "b").mkdir()
    RunDir.create(tmp_path / "b", TREE, {}, {})


def _commit(run, step):
    draft = run.begin_checkpoint(step)
    (draft / "trainer" / "w").write_bytes(b"123")
    return run.commit_checkpoint(draft, step, {"step": step})


def test_checkpoints_count_once_committed(run):
    _commit(run, 1)
    second = _commit(run, 2)
    (run.path / "checkpoints" / "step_000003").mkdir()  # a crash before COMMIT
    assert [c.step for c in run.checkpoints()] == [1, 2]
    assert run.latest() == second and second.ledger() == {"step": 2}
    assert (second.trainer / "w").read_bytes() == b"123"
    run.point_best(1)
    assert run.checkpoint().step == 1 and run.checkpoint(2).step == 2
    with pytest.raises(RunNotFoundError, match="it has: 1, 2"):
        run.checkpoint(7)


@pytest.mark.parametrize("name", ["rename", "fsync", "replace"])
def test_no_space_at_any_point_keeps_the_earlier_checkpoint(run, monkeypatch, name):
    """Fail the first, second, … call of each system call that the commit makes, until it goes through."""
    _commit(run, 1)
    real, failed = getattr(os, name), 0
    for nth in range(50):
        calls = 0

        def failing(*args, nth=nth, **kwargs):
            nonlocal calls
            calls += 1
            if calls == nth + 1:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        monkeypatch.setattr(run_module.os, name, failing)
        draft = run.begin_checkpoint(2)
        (draft / "trainer" / "w").write_bytes(b"9")
        try:
            run.commit_checkpoint(draft, 2, {"step": 2})
        except CheckpointError as error:
            failed += 1
            assert "No space" in str(error) and "--resume" in str(error)
            monkeypatch.setattr(run_module.os, name, real)
            assert run.checkpoint(1).ledger() == {"step": 1}
        else:
            break
        finally:
            monkeypatch.setattr(run_module.os, name, real)
    assert failed >= 1 and run.latest().step == 2


def test_write_durably_keeps_the_old_file_on_failure(tmp_path, monkeypatch):
    write_durably(tmp_path / "f", "old")

    def failing(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_module.os, "fsync", failing)
    with pytest.raises(OSError):
        write_durably(tmp_path / "f", "new")
    assert (tmp_path / "f").read_text() == "old"


def test_resume_differences(tmp_path):
    more = {**TREE, "run": {"name": "a", "steps": 5}, "eval": {"every": 2}}
    assert check_resume(TREE, more, tmp_path) == {"run.steps": (3, 5), "eval.every": (None, 2)}
    with pytest.raises(ResumeError, match=r"run.steps: was 5, now 3"):
        check_resume({**more}, {**more, "run": {"name": "a", "steps": 3}}, tmp_path)
    with pytest.raises(ResumeError, match=r"optimizer.lr: was 1e-06, now 0.1"):
        check_resume(TREE, {**TREE, "optimizer": {"lr": 0.1}}, tmp_path)


@pytest.mark.parametrize(
    ("path", "may"),
    [
        ("schedule.stall_deadline_s", True),
        ("policies.a.schedule.episode_deadline_s", True),
        ("envs.mine.reward_deadline_s", True),
        ("env.tool.deadline_s", True),
        ("backend.deadline_s", True),
        ("policies.a.schedule.max_leases_per_slot", True),
        ("sync.min_engines", True),
        ("schedule.max_staleness", False),
        ("model.architecture.deadline_s", False),
        ("sync.verify", False),
        ("env.delay_s", False),
        ("optimizer.lr", False),
    ],
)
def test_only_patience_may_change_on_a_resume(tmp_path, path, may):
    def tree(value):
        for key in reversed(path.split(".")):
            value = {key: value}
        return value

    if may:
        assert check_resume(tree(1), tree(2), tmp_path) == {path: (1, 2)}
        for was, now in ((2, 1), (None, 1), (1, None), ("1m", "2m")) if path.endswith("deadline_s") else ():
            with pytest.raises(ResumeError, match=f"{path}: was"):
                check_resume(tree(was), tree(now), tmp_path)
    else:
        with pytest.raises(ResumeError, match=f"{path}: was 1, now 2"):
            check_resume(tree(1), tree(2), tmp_path)


def test_what_may_change_may_have_deadlines_of_its_own_and_a_run_may_be_moved(tmp_path):
    def tree(deadline, folder):
        return {"run": {"dir": folder, "name": folder}, "trackers": {"mine": deadline and {"deadline_s": deadline}}}

    for was, now in ((None, 30.0), (30.0, 10.0), (30.0, None)):
        assert check_resume(tree(was, "a"), tree(was, "b"), tmp_path) == {}
        assert "trackers.mine.deadline_s" in check_resume(tree(was, "a"), tree(now, "b"), tmp_path)


def test_lines_end_in_a_line_feed_alone(tmp_path):
    run = RunDir.create(tmp_path / "a", TREE, {}, {})
    separated = "a\u2028b\u2029c\u0085d\x0b"
    lines = [json.dumps({"type": "x", "why": separated}, ensure_ascii=False), "", '{"type": "y"}', '{"type": "é']
    (run.path / "events.jsonl").write_bytes("\n".join(lines).encode()[:-1])  # torn within a character
    assert list(run.events()) == [{"type": "x", "why": separated}, {"type": "y"}]


def test_a_commit_of_another_shape_is_damage(tmp_path):
    run = RunDir.create(tmp_path / "a", TREE, {}, {})
    checkpoint = run.commit_checkpoint(run.begin_checkpoint(4), 4, {})
    for text in ('{"step": 4, "files": ["a"]}', '{"step": 4, "files": 1}', '{"step": 4}'):
        (checkpoint.folder / "COMMIT").write_text(text)
        with pytest.raises(CheckpointError, match="step_000004 cannot be checked"):
            checkpoint.check()


def test_a_name_may_be_as_long_as_the_file_system_takes(tmp_path):
    assert RunDir.create(tmp_path / ("x" * 255), TREE, {}, {}).tree() == TREE


def test_two_processes_that_make_one_directory_do_not_disturb_each_other(tmp_path, monkeypatch):
    made = RunDir.write_config

    def meanwhile(self, tree, origins, lock):
        monkeypatch.setattr(RunDir, "write_config", made)
        monkeypatch.setattr("miles_core.run.os.getpid", lambda: -1)
        RunDir.create(tmp_path / "c", TREE, {}, {})
        made(self, tree, origins, lock)

    monkeypatch.setattr(RunDir, "write_config", meanwhile)
    with pytest.raises(RunExistsError, match="c exists"):
        RunDir.create(tmp_path / "c", TREE, {}, {})
    assert (
        sorted(p.name for p in (tmp_path / "c").iterdir() if p.is_dir())
        == "checkpoints journal rollouts weights".split()
    )
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_run_directory_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    def killed(self, tree, origins, lock):
        raise KeyboardInterrupt

    monkeypatch.setattr(RunDir, "write_config", killed)
    with pytest.raises(KeyboardInterrupt):
        RunDir.create(tmp_path / "c", TREE, {}, {})
    assert not (tmp_path / "c").exists()
    monkeypatch.undo()
    RunDir.create(tmp_path / "c", TREE, {}, {})
