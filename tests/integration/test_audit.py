"""`miles audit` holds the journal against what else a run directory says, needs no plugin for it, and says nothing
against a run that died, wherever it died."""

import json
import shutil
from pathlib import Path

import pytest

from miles_core.builtin.jsonl import JsonlTracker
from miles_core.errors import MilesError
from miles_core.journal import Journal, read
from miles_core.ledger import Ledger
from miles_core.rollouts import Rollouts
from miles_core.run import SEAL, RunDir

RUN = Path("runs/toy")
SMALL = ("run.steps=4", "run.checkpoint_every=2", "schedule.groups_per_step=2", "schedule.group_size=2")
FRAMES = RUN / "journal/000000.frames"


def cut(keep_steps: int, path: Path = FRAMES) -> int:
    """Cut the journal behind the frame that trained the last step that is kept; its new size."""
    after, *_ = [f.position[1] for f in read(RUN / "journal") if f.kind == "trained"][keep_steps:]
    path.write_bytes(path.read_bytes()[:after])
    return after


def clean(said) -> None:
    assert said.code == 0 and "every promise held" in said.out, said.out + said.err


def finding(said, *sentences: str) -> None:
    assert said.code == 1 and "every promise held" not in said.out, said.out + said.err
    assert [line.strip() for line in said.out.partition("broken promise")[2].splitlines()[1:]] == list(sentences)


def unsealed(step: int = 4) -> Path:
    """The run as miles-core 0.1.0 left it, which wrote no digests, so that a ledger may be changed; that of `step`."""
    for checkpoint in RunDir.open(RUN).checkpoints():
        (checkpoint.folder / "COMMIT").write_text(f"{checkpoint.step}\n")
    file = RUN / "resolved.yaml"
    file.write_text("".join(line for line in file.open() if not line.startswith(SEAL)))
    return RUN / f"checkpoints/step_{step:06d}/ledger.json"


@pytest.fixture
def ran(miles):
    """The command line, beside a finished run of four steps with checkpoints of steps 2 and 4."""
    assert miles("run", "toy.yaml", *SMALL).code == 0
    assert [c.step for c in RunDir.open(RUN).checkpoints()] == [2, 4]
    return miles


@pytest.mark.parametrize("how", ["no folder", "no file", "an empty file", "a segment without records"])
def test_an_empty_journal_beside_a_run_that_trained(ran, how):
    if how != "no folder":
        FRAMES.unlink()
    if how == "no folder":
        shutil.rmtree(RUN / "journal")
    elif how == "an empty file":
        FRAMES.touch()
    elif how == "a segment without records":
        Journal(RUN / "journal").close()
    beside = "checkpoints/ has 2, the last of step 4; metrics.jsonl has 4 steps; rollouts/ has 4 files"
    finding(ran("audit", str(RUN)), f"journal/ holds no record, yet {beside}")


def test_a_journal_that_lost_its_end(ran):
    [first, last] = [c.ledger()["journal"][1] for c in RunDir.open(RUN).checkpoints()]
    end = cut(2)
    assert first < end < last
    finding(
        ran("audit", str(RUN)),
        f"checkpoints/step_000004/ledger.json was written at byte {last} of journal/000000.frames, whose records end "
        f"at byte {end}",
        "metrics.jsonl has 2 step(s) of policy main in lineage 0 that the journal does not have, from step 2 to step 3",
    )


def test_a_journal_that_lost_its_end_and_goes_on_in_another_segment(ran):
    cut(2)
    journal = Journal(RUN / "journal")
    journal.append("note", {})
    journal.close()
    said = ran("audit", str(RUN))
    assert said.code == 1 and "checkpoints/step_000004/ledger.json was written at byte" in said.out


def test_a_torn_tail_does_not_hide_a_checkpoint_that_stood_in_it(ran):
    last = RunDir.open(RUN).latest().ledger()["journal"][1]
    end = cut(3)
    FRAMES.write_bytes(FRAMES.read_bytes() + b"\x01" * (2 * last))
    said = ran("audit", str(RUN))
    assert f"byte {last} of journal/000000.frames, whose records end at byte {end}" in said.out, said.out


def test_a_checkpoint_that_consumed_other_steps_than_the_journal(ran):
    file = unsealed()
    ledger = json.loads(file.read_text())
    file.write_text(json.dumps({**ledger, "journal": RunDir.open(RUN).checkpoints()[0].ledger()["journal"]}))
    at = json.loads(file.read_text())["journal"][1]
    finding(
        ran("audit", str(RUN)),
        f"checkpoints/step_000004/ledger.json was written at byte {at} of journal/000000.frames with 4 steps of policy "
        "main; there the journal has 2",
    )
    file.write_text(json.dumps(RunDir.open(RUN).checkpoints()[0].ledger()))
    finding(
        ran("audit", str(RUN)),
        "checkpoints/step_000004/ledger.json says 2 consumed steps of policy main; the checkpoint is of 4",
    )
    file.write_text("{}")
    said = ran("audit", str(RUN))
    assert said.code == 1 and "checkpoints/step_000004/ledger.json is no ledger of a checkpoint" in said.out
    file.unlink()
    said = ran("audit", str(RUN))
    assert said.code == 1 and "checkpoints/step_000004/ledger.json cannot be read" in said.out


@pytest.mark.parametrize("name", ["trainer/", "ledger.json"])
def test_a_file_of_a_checkpoint_that_changed(ran, name):
    """One byte, anywhere: neither audit nor resume nor export takes it for what was saved."""
    folder = RUN / "checkpoints/step_000004"
    file = next(
        path for path in sorted(folder.rglob("*")) if path.is_file() and str(path).startswith(f"{folder}/{name}")
    )
    told, good = f"the checkpoint {folder}: {file.relative_to(folder)}", file.read_bytes()
    at = good.index(b"4") if name == "ledger.json" else len(good) // 2
    file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    assert f"{told} is not what was saved" in ran("audit", str(RUN)).out
    before = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file() and path.name != "lock"}
    before[file] = good
    for command in (("run", str(RUN), "--resume", "run.steps=6"), ("export", str(RUN), "out", "--step", "4")):
        said = ran(*command)
        code = (3, "MILES-E306") if command[0] == "run" else (2, "MILES-E904")  # no run began that an export could stop
        assert (said.code, said.err[:10]) == code and f"{told} is not what was saved" in said.err, said.err
        assert f"rm -r {folder}" in said.err and not Path("out").exists()
    assert ran("export", str(RUN), "out", "--step", "2").code == 0
    file.unlink()
    assert (f"{told} is gone" if name == "trainer/" else "ledger.json cannot be read") in ran("audit", str(RUN)).out
    file.write_bytes(good)
    clean(ran("audit", str(RUN)))
    assert all(path.read_bytes() == kept for path, kept in before.items())


def test_a_run_of_the_first_release_goes_on_without_digests(miles):
    assert miles("run", "toy.yaml", *SMALL).code == 0
    unsealed()
    clean(miles("audit", str(RUN)))
    assert miles("run", str(RUN), "--resume", "run.steps=6").code == 0
    clean(miles("audit", str(RUN)))
    assert SEAL in (RUN / "resolved.yaml").read_text()


def test_values_that_were_edited_in_the_run_directory(ran):
    file, good = RUN / "resolved.yaml", (RUN / "resolved.yaml").read_text()
    told = f"{file} was changed: its values are not those that the run wrote there"
    file.write_text(good.replace("lr: 0.3", "lr: 0.2"))
    finding(ran("audit", str(RUN)), told)
    weights = next(path for path in (RUN / "checkpoints/step_000002/trainer").iterdir())
    kept = weights.read_bytes()
    weights.write_bytes(kept + b" ")
    finding(
        ran("audit", str(RUN)),
        told,
        f"the checkpoint {weights.parents[1]}: trainer/{weights.name} is not what was saved",
    )
    weights.write_bytes(kept)
    for command in (("run", str(RUN), "--resume", "run.steps=6"), ("export", str(RUN), "out"), ("show", str(RUN))):
        said = ran(*command)
        assert said.code == 2 and said.err.startswith(f"MILES-E901: {told}\nFix: undo the change"), said.err
    for cut in range(0, len(good) - 2, len(good) // 30):  # a copy that broke off
        file.write_text(good[:cut])
        with pytest.raises(MilesError, match=r"resolved\.yaml"):
            RunDir.open(RUN).tree()
    file.write_text(good[: len(good) // 2])
    finding(ran("audit", str(RUN)), told)
    assert ran("show", str(RUN)).err.startswith(f"MILES-E901: {told}\nFix: undo the change")
    file.write_text(good.replace("  # ", "  #   ", 1) + "\n# a note\n")  # comments are nobody's
    clean(ran("audit", str(RUN)))
    assert ran("run", str(RUN), "--resume", "run.steps=6").code == 0


def test_a_checkpoint_of_an_abandoned_lineage_counts(miles):
    assert miles("run", "toy.yaml", *SMALL).code == 0
    shutil.move(RUN / "checkpoints/step_000004", "kept")
    assert miles("run", str(RUN), "--resume", "run.steps=6").code == 0
    assert [f.header["lineage"] for f in read(RUN / "journal") if f.kind == "lineage"] == [1]
    clean(miles("audit", str(RUN)))
    shutil.rmtree(RUN / "checkpoints/step_000004")
    shutil.move("kept", RUN / "checkpoints/step_000004")
    clean(miles("audit", str(RUN)))
    last = RunDir.open(RUN).checkpoints()[1].ledger()
    assert (last["lineage"], last["journal"][0]) == (0, 0)
    cut(2)
    said = miles("audit", str(RUN))
    assert said.code == 1 and f"step_000004/ledger.json was written at byte {last['journal'][1]} of" in said.out


def test_a_lineage_that_goes_on_from_what_the_journal_lacks(miles):
    assert miles("run", "toy.yaml", *SMALL).code == 0
    at = RunDir.open(RUN).latest().ledger()["journal"][1]
    assert miles("run", str(RUN), "--resume", "run.steps=6").code == 0
    end = cut(3)
    for checkpoint in RunDir.open(RUN).checkpoints()[:-1]:
        shutil.rmtree(checkpoint.folder)
    said = miles("audit", str(RUN))
    assert said.code == 1
    assert f"lineage 1 goes on at byte {at} of journal/000000.frames, whose records end at byte {end}" in said.out


MOMENTS = {
    "before the journal": (Journal, "_next_segment", 1, ()),
    "before the first record": (Journal, "append", 1, ()),
    "before anything": (Ledger, "publish", 1, ()),
    "a lease": (Ledger, "lease", 6, ()),
    "before it is journalled": (Ledger, "trained", 3, ()),
    "before rollouts": (Rollouts, "write", 3, ()),
    "before publication": (Ledger, "publish", 4, ()),
    "before metrics": (JsonlTracker, "metrics", 7, ()),
    "between metrics": (JsonlTracker, "metrics", 8, ()),
    "before a checkpoint": (Ledger, "snapshot", 1, ()),
    "within a checkpoint": (RunDir, "commit_checkpoint", 1, ()),
    "behind a checkpoint": (RunDir, "point_best", 1, ("eval={every: 1, tasks: 2}",)),
    "within the last evaluation": (Ledger, "evaluated", 10, ("eval={every: 1, tasks: 2}",)),
    "overlapping": (Ledger, "finish", 7, ("schedule.max_staleness=2", "schedule.off_policy=uncorrected")),
}


@pytest.mark.parametrize("torn", [b"", b"\x30\x00\x00\x00\x00\x00\x00\x00torn"], ids=["whole", "torn"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_that_died_is_no_finding(miles, tmp_path, monkeypatch, moment, torn):
    owner, name, nth, more = MOMENTS[moment]
    original, calls, dead = getattr(owner, name), [0], tmp_path / "dead"

    def dies(*args, **kwargs):
        calls[0] += 1
        if calls[0] == nth:  # what the disk holds at this moment
            shutil.copytree(RUN, dead)
            raise RuntimeError("died")
        return original(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, dies)
        assert miles("run", "toy.yaml", *SMALL, *more).code != 0
    shutil.rmtree(RUN)
    shutil.copytree(dead, RUN)
    with FRAMES.open("ab") as file:
        file.write(torn)
    if torn:
        with (RUN / "metrics.jsonl").open("a") as file:
            file.write('{"v": 1, "type": "train", "step": 9')
    clean(miles("audit", str(RUN)))
    assert miles("run", str(RUN), "--resume").code == 0
    clean(miles("audit", str(RUN)))


TWO = """
run: {name: toy, seed: 7, steps: 4, checkpoint_every: 2}
rollout: {use: toy, max_new_tokens: 2}
backend: {use: toy}
sync: {use: toy}
trackers: {jsonl: {}}
policies:
  twice: &POLICY
  once: &POLICY
"""
POLICY = """{model: {use: toy, tokenizer: toy, architecture: {model_type: toy}}, renderer: toy, env: {use: toy},
    algorithm: {use: toy}, schedule: {groups_per_step: 2, group_size: 2}"""


def test_each_policy_by_its_own_steps(miles):
    Path("two.yaml").write_text(TWO.replace("&POLICY", f"{POLICY}, share: 2}}", 1).replace("&POLICY", f"{POLICY}}}"))
    said = miles("run", "two.yaml")
    assert said.code == 0, said.err
    clean(miles("audit", str(RUN)))
    [first, last] = [c.ledger()["journal"][1] for c in RunDir.open(RUN).checkpoints()]
    file = unsealed()
    file.write_text(file.read_text().replace(f'"journal":[0,{last}]', f'"journal":[0,{first}]'))
    written = f"checkpoints/step_000004/ledger.json was written at byte {first} of journal/000000.frames with"
    finding(
        miles("audit", str(RUN)),
        f"{written} 4 steps of policy once; there the journal has 2",
        f"{written} 8 steps of policy twice; there the journal has 4",
    )


def test_it_needs_none_of_the_plugins_of_the_run(ran, monkeypatch):
    from miles_core.discovery import Catalogue

    before = ran("audit", str(RUN))
    clean(before)
    unsealed()
    file = RUN / "resolved.yaml"
    assert file.read_text().count('"toy"') > 5
    file.write_text(file.read_text().replace('use: "toy"', 'use: "gone"'))
    monkeypatch.setattr(Catalogue, "load", None)
    said = ran("audit", str(RUN))
    assert said.code == 0 and said.out == before.out, said.err
    file.write_text(file.read_text().replace("group_size: 2", "group_size: -2"))
    said = ran("audit", str(RUN))
    assert said.code == 2 and "schedule.group_size" in said.err
