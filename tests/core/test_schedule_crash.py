"""Kills and failing disks: whatever happens, a resume trains nothing twice and leaves no lease without an end."""

import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from miles_core.cli.accounting import check_history
from miles_core.config.schema import EvalConfig, ScheduleConfig
from miles_core.errors import JournalError, StoppedError
from miles_core.journal import read
from miles_core.testing.simulation import Disk, Scenario, Simulation, imbalances

STRICT = ScheduleConfig(groups_per_step=3, group_size=2, max_leases_per_slot=1000)


def finish(sim, kills):
    """Run through `kills` (shares of the turns or disk operations of a whole run), then to the end."""
    for _, disk, turn in kills:
        try:
            result = sim.run(disk=disk, kill_at=turn)
        except StoppedError:
            continue
        if result is not None:
            return result
    return sim.run()


def proven(sim):
    assert imbalances(sim.ledger, finished=True) == []
    assert check_history(read(sim.folder), sim.schedules, finished=True) == []


@st.composite
def blows(draw):
    """A kill at an await, or a failure or kill at an operation of the disk; as a share of a whole run."""
    return draw(st.sampled_from(["await", "error", "torn", "kill"])), draw(st.integers(0, 999))


def aim(blow, whole):
    kind, share = blow
    if kind == "await":
        return kind, None, 1 + whole.turns * share // 1000
    return kind, Disk({whole.operations * share // 1000: kind}), None


@st.composite
def scenarios(draw, *, strict):
    staleness = 0 if strict else draw(st.integers(0, 3))
    schedule = ScheduleConfig(
        groups_per_step=draw(st.integers(1, 4)),
        group_size=draw(st.integers(1, 2)),
        max_staleness=staleness,
        order="slot" if strict else draw(st.sampled_from(["slot", "ready"])),
        on_stale=draw(st.sampled_from(["drop", "retry", "mask"])),
        publish_every=draw(st.integers(1, staleness + 1)),
        oversample=draw(st.integers(0, 2)),
        max_leases_per_slot=1000,
    )
    return Scenario(
        schedule=schedule,
        steps=draw(st.integers(2, 5)),
        policies=draw(st.sampled_from([{"main": 1}, {"a": 2, "b": 1}])),
        timing=draw(st.integers(0, 1000)),
        reject=draw(st.sampled_from([0.0, 0.4])),
        fail=draw(st.sampled_from([0.0, 0.2])),
        long=draw(st.sampled_from([0.0, 0.1])),
        size=draw(st.sampled_from([None, 5])),
        checkpoint_every=draw(st.sampled_from([None, 1, 2])),
        evaluation=draw(st.sampled_from([EvalConfig(), EvalConfig(every=2, tasks=3)])),
        demonstrations=draw(st.sampled_from([False, False, False, True])),
    )


def on_policy_runs_end_as_if_nothing_had_happened(scenario, kills):
    with tempfile.TemporaryDirectory() as folder:
        whole = Simulation(scenario, Path(folder) / "whole")
        whole.run()
        sim = Simulation(scenario, Path(folder) / "killed")
        assert finish(sim, [aim(blow, whole) for blow in kills]).status == "finished"
        proven(sim)
        assert sim.weights == whole.weights
        assert sim.trained == whole.trained


def asynchronous_runs_keep_their_promises(scenario, kills):
    with tempfile.TemporaryDirectory() as folder:
        whole = Simulation(scenario, Path(folder) / "whole")
        whole.run()
        sim = Simulation(scenario, Path(folder) / "killed")
        assert finish(sim, [aim(blow, whole) for blow in kills]).status == "finished"
        proven(sim)
        for policy, share in scenario.policies.items():
            assert [s for p, s, _ in sim.trained if p == policy] == list(range(scenario.steps * share))


KILLS = st.lists(blows(), min_size=1, max_size=4)
FEW, MANY = settings(max_examples=50, deadline=None), settings(max_examples=600, deadline=None)

test_on_policy = FEW(given(scenarios(strict=True), KILLS)(on_policy_runs_end_as_if_nothing_had_happened))
test_asynchronous = FEW(given(scenarios(strict=False), KILLS)(asynchronous_runs_keep_their_promises))


@pytest.mark.slow
@MANY
@given(scenarios(strict=True), KILLS)
def test_many_on_policy_runs(scenario, kills):
    on_policy_runs_end_as_if_nothing_had_happened(scenario, kills)


@pytest.mark.slow
@MANY
@given(scenarios(strict=False), KILLS)
def test_many_asynchronous_runs(scenario, kills):
    asynchronous_runs_keep_their_promises(scenario, kills)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_kill_at_every_await(tmp_path, staleness):
    scenario = Scenario(
        schedule=replace(STRICT, max_staleness=staleness), steps=2, checkpoint_every=1, reject=0.3, turns=1
    )
    whole = Simulation(scenario, tmp_path / "whole")
    whole.run()
    for turn in range(1, whole.turns + 1):
        sim = Simulation(scenario, tmp_path / f"killed-{turn}")
        sim.run(kill_at=turn)
        assert sim.run().status == "finished"
        proven(sim)
        if staleness == 0:
            assert (sim.weights, sim.trained) == (whole.weights, whole.trained)


@pytest.mark.parametrize("what", ["error", "torn", "kill"])
def test_a_failure_at_every_operation_of_the_disk(tmp_path, what):
    scenario = Scenario(schedule=STRICT, steps=2, checkpoint_every=1, reject=0.3, turns=1)
    whole = Simulation(scenario, tmp_path / "whole")
    whole.run()
    for operation in range(whole.operations):
        sim = Simulation(scenario, tmp_path / f"{what}-{operation}")
        if what == "kill":
            sim.run(disk=Disk({operation: what}))
        else:
            with pytest.raises(JournalError, match="No space left"):
                sim.run(disk=Disk({operation: what}))
        assert sim.run().status == "finished"
        proven(sim)
        assert (sim.weights, sim.trained) == (whole.weights, whole.trained)


def test_kills_in_a_row_before_the_first_checkpoint(tmp_path):
    scenario = Scenario(schedule=STRICT, steps=3, reject=0.3)
    whole = Simulation(scenario, tmp_path / "whole")
    whole.run()
    sim = Simulation(scenario, tmp_path / "killed")
    for turn in (5, 12, 40, 80, 120, 150):
        assert sim.run(kill_at=turn) is None
    assert sim.run().status == "finished"
    proven(sim)
    assert sim.ledger.lineage == 6
    assert sim.weights == whole.weights


def test_a_resume_keeps_finished_groups_of_the_checkpoint_s_version(tmp_path):
    """Killed while step 1 samples, with a checkpoint of step 1: what had finished is not sampled again."""
    scenario = Scenario(schedule=STRICT, steps=2, checkpoint_every=1)
    sim = Simulation(scenario, tmp_path / "killed")
    turn = 1
    while True:
        sim = Simulation(scenario, tmp_path / f"killed-{turn}")
        sim.run(kill_at=turn)
        if 1 in sim.checkpoints and len(sim.ledger.waiting("main")) == 2:
            break
        turn += 1
    kept = {entry.lease.id for entry in sim.ledger.waiting("main")}
    calls = sim.sampler.calls
    sim.run()
    proven(sim)
    assert sim.sampler.calls - calls == 2  # the two episodes of the group that was in flight
    record = next(f.header for f in read(sim.folder) if f.kind == "lineage")
    assert set(record["kept"]) == kept and len(record["returned"]) == 1


def test_groups_of_later_versions_are_sampled_again_with_the_same_seeds(tmp_path):
    """A checkpoint every two steps, killed in step 3: step 2 is trained again, from groups of version 2 only."""
    scenario = Scenario(schedule=STRICT, steps=4, checkpoint_every=2)
    whole = Simulation(scenario, tmp_path / "whole")
    whole.run()
    for turn in range(1, whole.turns):
        sim = Simulation(scenario, tmp_path / f"killed-{turn}")
        sim.run(kill_at=turn)
        if len(sim.trained) == 3:
            break
    calls = sim.sampler.calls
    sim.run()
    proven(sim)
    record = next(f.header for f in read(sim.folder) if f.kind == "lineage")
    assert record["steps"] == {"main": 2} and len(record["kept"]) == 3  # step 2's groups, trained by a void step
    assert sim.sampler.calls - calls == 6  # step 3 only
    assert sim.weights == whole.weights


def test_what_changed_is_written_with_the_lineage(tmp_path):
    from miles_core.journal import Journal
    from miles_core.ledger import Ledger

    sim = Simulation(Scenario(schedule=STRICT, steps=1), tmp_path / "j")
    sim.run()
    journal = Journal(sim.folder)
    saved = json.loads(sim.checkpoints[1])["ledger"]
    Ledger.resume(saved, journal, sim.schedules, changes={"run.steps": [1, 2]})
    journal.close()
    record = [f.header for f in read(sim.folder) if f.kind == "lineage"]
    assert [r["changes"] for r in record] == [{"run.steps": [1, 2]}]


def test_an_older_checkpoint_may_be_chosen(tmp_path):
    """Resume from step 1 though step 3 was saved: the abandoned branch is void, also for later resumes."""
    scenario = Scenario(schedule=STRICT, steps=4, checkpoint_every=1, reject=0.3)
    whole = Simulation(scenario, tmp_path / "whole")
    whole.run()
    sim = Simulation(scenario, tmp_path / "killed")
    sim.stop_after = 3
    sim.run()
    sim.stop_after = None
    sim.checkpoints = {1: sim.checkpoints[1]}
    for turn in (60, 130):
        sim.run(kill_at=turn)
        sim.checkpoints = {1: sim.checkpoints[1]}
    assert sim.run().status == "finished"
    proven(sim)
    assert (sim.weights, sim.trained) == (whole.weights, whole.trained)


def test_a_later_checkpoint_does_not_stand_on_a_branch_from_an_earlier_one(tmp_path):
    """Step 2 is saved; a branch from step 1 is begun and given up; what goes on from step 2 knows nothing of it."""
    scenario = Scenario(schedule=STRICT, steps=4, checkpoint_every=1, reject=0.3)
    whole = Simulation(scenario, tmp_path / "whole")
    whole.run()
    sim = Simulation(scenario, tmp_path / "killed")
    sim.stop_after = 2
    sim.run()
    sim.stop_after = None
    saved = dict(sim.checkpoints)
    sim.checkpoints = {1: saved[1]}
    while len(sim.trained) < 3:  # the branch trains step 1 and 2 anew
        sim.run(kill_at=sim.turns + 40)
        sim.checkpoints = {1: saved[1]}
    sim.checkpoints = saved
    calls = sim.sampler.calls
    assert sim.run().status == "finished"
    assert imbalances(sim.ledger, finished=True) == []
    assert (sim.weights, sim.trained) == (whole.weights, whole.trained)
    lineage = [f.header for f in read(sim.folder) if f.kind == "lineage"][-1]
    assert lineage["kept"] == [] and sim.sampler.calls > calls  # the branch's groups are not its own


@example(0)
@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_a_torn_journal_tail_costs_work_and_no_promise(cut):
    """The machine dies: the unsynced tail behind the checkpoint is lost from any byte on."""
    scenario = Scenario(schedule=STRICT, steps=3, checkpoint_every=1, reject=0.3)
    with tempfile.TemporaryDirectory() as folder:
        whole = Simulation(scenario, Path(folder) / "whole")
        whole.run()
        sim = Simulation(scenario, Path(folder) / "killed")
        sim.run(kill_at=whole.turns * 2 // 3)
        _, offset = json.loads(sim.checkpoints[max(sim.checkpoints)])["ledger"]["journal"]
        last = sorted(sim.folder.glob("*.frames"))[-1]
        data = last.read_bytes()
        last.write_bytes(data[: offset + cut % (len(data) - offset + 1)])
        assert sim.run().status == "finished"
        proven(sim)
        assert (sim.weights, sim.trained) == (whole.weights, whole.trained)


PROCESS = """
import sys
from pathlib import Path
from miles_core.config.schema import ScheduleConfig
from miles_core.testing.simulation import Scenario, Simulation
schedule = ScheduleConfig(groups_per_step=3, group_size=2, max_leases_per_slot=1000)
scenario = Scenario(schedule=schedule, steps=40, checkpoint_every=5, reject=0.3)
here = Path(sys.argv[1])
(here / "kept").mkdir(exist_ok=True)
sim = Simulation(scenario, here / "journal", keep=here / "kept")
print("go", flush=True)
print(sim.run().status, sim.weights["main"], sim.ledger.lineage, flush=True)
"""


def start(folder):
    process = subprocess.Popen([sys.executable, "-c", PROCESS, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "go\n"
    return process


def rest(process):
    """What it still says, until it ends."""
    with process:
        return process.stdout.read().split()


def test_a_real_process_killed_for_real(tmp_path):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    began = time.perf_counter()
    status, weights, _ = rest(start(tmp_path / "whole"))
    took = time.perf_counter() - began
    assert status == "finished"
    chance = random.Random(0)
    for _ in range(4):
        process = start(tmp_path / "killed")
        time.sleep(chance.uniform(0.0, 0.2 * took))
        process.kill()
        rest(process)
    ended = rest(start(tmp_path / "killed"))
    assert ended[:2] == ["finished", weights]
    assert int(ended[2]) > 0  # lineages: it was really resumed
    schedules = {"main": ScheduleConfig(groups_per_step=3, group_size=2)}
    assert check_history(read(tmp_path / "killed" / "journal"), schedules, finished=True) == []
