"""The quickstart's own script: which warm-up it takes, and Ctrl-C."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "recipes" / "quickstart.py"
RUN = Path("runs/toy")
SMALL = ("run.steps=3", "run.checkpoint_every=1", "schedule.groups_per_step=2", "schedule.group_size=2")
#: In the place of `miles`: says that it began, and on Ctrl-C saves for a moment and leaves as an interrupted run does.
COMMAND = f"""#!{sys.executable}
import signal, sys, time
def save(number, frame):
    time.sleep(0.2)
    print("saved", flush=True)
    sys.exit(130)
signal.signal(signal.SIGINT, save)
print("began", flush=True)
time.sleep(60)
"""


@pytest.fixture
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_is_done_once_it_has_all_of_its_steps(miles, quickstart):
    assert not quickstart.is_done(RUN)
    assert miles("run", "toy.yaml", *SMALL).code == 0
    assert quickstart.is_done(RUN)
    shutil.rmtree(RUN / "checkpoints" / "step_000003")  # as where it was interrupted
    assert not quickstart.is_done(RUN)
    assert miles("run", "toy.yaml", *SMALL, "--resume").code == 0
    assert quickstart.is_done(RUN)


LEAVES = {
    "interrupted": "sys.exit(130)",
    "in its last step": "sys.exit(0)",
    "as it leaves": "signal.signal(signal.SIGINT, signal.SIG_DFL); signal.raise_signal(signal.SIGINT)",
}


@pytest.mark.parametrize("times", [1, 5])
@pytest.mark.parametrize("how", LEAVES)
def test_ctrl_c_lets_the_command_save_and_leaves(tmp_path, how, times):
    command = tmp_path / "miles"
    command.write_text(COMMAND.replace("sys.exit(130)", LEAVES[how]))
    command.chmod(0o755)
    start = (
        f"import runpy; miles = runpy.run_path({str(SCRIPT)!r})['miles']; miles.__globals__['MILES'] = {str(command)!r}"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{start}; miles('run'); miles('again')"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert "miles run" in (process.stdout.readline() + process.stdout.readline())
    assert process.stdout.readline() == "began\n"
    os.killpg(process.pid, signal.SIGINT)
    for _ in range(times - 1):
        os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "saved\n", "")
