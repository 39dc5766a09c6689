"""What a run says beside its training: where it goes on from, how to go on in a shell; and a console that goes away."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.run import RunDir

RUN = Path("runs/toy")
SMALL = ("run.steps=3", "run.checkpoint_every=1", "schedule.groups_per_step=2", "schedule.group_size=2")


def test_a_run_whose_checkpoints_were_removed_says_that_it_starts_again(miles):
    assert miles("run", "toy.yaml", *SMALL).code == 0
    shutil.rmtree(RUN / "checkpoints")
    said = miles("run", str(RUN), "--resume")
    assert said.code == 0, said.err
    assert "runs/toy has no checkpoint: it starts again from step 0, on a new lineage" in said.err
    assert "3 steps of before" in said.err
    assert RunDir.open(RUN).latest().step == 3


def test_what_of_a_preset_was_set_by_the_user_is_said(miles):
    said = miles("run", "toy.yaml", *SMALL, "trackers.console={}", "algorithm.loss.coef=2")
    assert said.code == 0 and "toy (set here: loss) on toy, 2 x 2 a step" in said.out + said.err
    said = miles("run", str(RUN), "--resume", "run.steps=4")
    assert said.code == 0 and "toy (set here: loss) on toy" in said.out + said.err
    said = miles("run", "toy.yaml", *SMALL, "run.name=plain", "trackers.console={}")
    assert said.code == 0 and "toy on toy, 2 x 2 a step" in said.out + said.err


@pytest.mark.parametrize("decay", ["linear", "constant"])
def test_a_resume_with_more_steps_says_that_it_stretches_the_learning_rate(miles, decay):
    assert miles("run", "toy.yaml", *SMALL, f"optimizer.decay={decay}").code == 0
    said = miles("run", str(RUN), "--resume", "run.steps=5")
    told = "the learning rate decays over 5 steps from here on; it did over 3"
    assert said.code == 0 and (told in said.err) == (decay == "linear")


def test_hints_are_quoted_for_the_shell(miles):
    said = miles("run", "toy.yaml", *SMALL, "run.dir=my runs/a")
    assert said.code == 0 and "miles show 'my runs/a'" in said.err
    assert miles("run", "my runs/a", "--resume", "run.steps=4").code == 0


@pytest.mark.parametrize("also", ["", "2>&1"])
def test_a_reader_that_goes_away_does_not_end_the_run(command, also):
    """`miles run … | head -1`: standard output breaks, the run goes on to its end."""
    Path("toy.yaml").write_text(Path("toy.yaml").read_text().replace("jsonl: {}", "jsonl: {}, console: {}"))
    line = shlex.join([str(Path(sys.executable).with_name("miles")), "run", "toy.yaml", *SMALL, "env.delay_s=0.05"])
    piped = ["bash", "-c", f"set -o pipefail; {line} {also} | head -1"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(piped, capture_output=True, text=True, timeout=120, check=False, env=buffered)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1 and (also or "finished: runs/toy" in done.stderr)
    assert RunDir.open(RUN).latest().step == 3
