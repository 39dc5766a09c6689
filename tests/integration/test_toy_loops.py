"""Whole loops of toy plugins: every kind and place is called by a real run."""

import threading

import numpy as np
import pytest

from miles_core.cli.episodes import describe
from miles_core.errors import CombinationError, LearnerError, RewardError, RunExistsError, StarvedError
from miles_core.testing.toys.backend import ToyBackend


def last(values, n=5):
    return sum(values[-n:]) / n


def test_a_policy_learns(toy):
    ran = toy("run.steps=70", "optimizer.lr=0.1", "schedule.groups_per_step=16")
    rewards = ran.curve("rollout/reward")
    assert ran.status == "finished" and len(rewards) == 70
    assert rewards[0] < 0.2 and last(rewards) > 0.9
    assert set(ran.curve("rollout/lag_max")) == {0}
    assert [c.step for c in ran.run.checkpoints()] == [70]


def test_same_seed_same_bits_and_another_seed_other_bits(toy):
    first = toy("run.name=a")
    second = toy("run.name=b")
    other = toy("run.name=c", "run.seed=8")
    for metric in ("train/loss", "rollout/reward", "train/grad_norm"):
        assert first.curve(metric) == second.curve(metric) != other.curve(metric)


def test_staleness_overlaps_and_keeps_its_bound(toy):
    late = ("env.delay_s=0.02", "schedule.max_staleness=2", "schedule.off_policy=uncorrected")
    ran = toy(*late, "schedule.groups_per_step=4", "run.steps=25")
    lags = ran.curve("rollout/lag_max")
    assert max(lags) in (1, 2)
    trained = [f for f in _frames(ran) if f.kind == "trained"]
    slots = [lease["slot"] for lease in _leases(ran, trained)]
    assert slots == list(range(25 * 4)), "every slot in order"


def test_stale_work_without_a_correction_is_refused(toy):
    with pytest.raises(CombinationError, match="off_policy"):
        toy("schedule.max_staleness=1")


@pytest.mark.parametrize("order", ["slot", "ready"])
@pytest.mark.parametrize("mode", ["in_place", "recompute", "abort", "finish"])
def test_every_pause_mode_under_overlap(toy, mode, order):
    ran = toy(
        f"schedule.on_update={mode}",
        f"schedule.order={order}",
        "schedule.max_staleness=2",
        "schedule.off_policy=uncorrected",
        "rollout.step_s=0.002",
        "run.steps=10",
        "schedule.groups_per_step=4",
    )
    assert ran.status == "finished" and max(ran.curve("rollout/lag_max")) <= 2


@pytest.mark.parametrize("phase", ["live", "staged"])
def test_several_engines_serve_only_verified_weights(toy, phase):
    ran = toy("rollout.count=3", f"sync.phase={phase}", "run.steps=6")
    published = [f.header for f in _frames(ran) if f.kind == "published"]
    assert [p["number"] for p in published] == list(range(7))
    for one in published:
        assert sorted(one["engines"]) == ["toy-0", "toy-1", "toy-2"]
        evidence = {tuple(e) for e in one["engines"].values()}
        assert len(evidence) == 1 and next(iter(evidence))[0] == "live", "same root in every engine"


def test_several_policies_with_their_own_versions(toy):
    text = """
run: {name: two, seed: 3, steps: 8}
policies:
  adder:
    share: 2
    model: {use: toy, tokenizer: toy, architecture: {model_type: toy}}
    renderer: toy
    env: {use: toy}
    algorithm: {use: toy}
    optimizer: {lr: 0.3}
    schedule: {groups_per_step: 4, group_size: 4}
  other:
    model: {use: toy, tokenizer: toy, architecture: {model_type: toy}}
    renderer: toy
    env: {use: toy-multiturn}
    algorithm: {use: toy}
    optimizer: {lr: 0.1}
    schedule: {groups_per_step: 2, group_size: 8}
rollout: {use: toy, max_new_tokens: 2}
backend: {use: toy}
sync: {use: toy}
trackers: {jsonl: {}}
"""
    ran = toy(text=text)
    lines = [line for line in ran.run.metrics() if "rollout/reward" in line]
    assert sum(line["policy"] == "adder" for line in lines) == 16
    assert sum(line["policy"] == "other" for line in lines) == 8
    numbers = [f.header["number"] for f in _frames(ran) if f.kind == "published" and f.header["policy"] == "adder"]
    assert numbers == list(range(17))


def test_samplers_in_processes_give_the_same_bits(toy):
    one = toy("run.name=one", "run.steps=5")
    many = toy(
        "run.name=many",
        "run.steps=5",
        "launcher=toy-processes",
        "rollout={use: toy-socket, max_new_tokens: 2}",
        "sync=toy-socket",
        "schedule.samplers=2",
    )
    assert many.curve("train/loss") == one.curve("train/loss")
    assert many.curve("rollout/reward") == one.curve("rollout/reward")


def test_every_part_at_once(toy):
    """The preset that uses every field of `algorithm`, with an extension and a scorer."""
    ran = toy(
        "algorithm={use: toy-everything, value: {use: toy-value}}",
        "roles={reference: {init: actor, update: copy, every: 2}, critic: {update: trained, head: value}}",
        "extensions={toy: {}}",
        "scorers={teacher: {use: toy}}",
        "run.steps=4",
    )
    assert ran.status == "finished"
    assert all(np.isfinite(ran.curve("train/loss")))


def test_demonstrations_need_no_engine(toy):
    ran = toy("algorithm=toy-sft", "rollout=null", "sync=null", "schedule.group_size=1", "run.steps=20")
    losses = ran.curve("train/loss")
    assert losses[-1] < losses[0]


def test_without_an_engine_an_evaluation_reports_the_loss(toy):
    nothing = ("algorithm=toy-sft", "rollout=null", "sync=null", "schedule.group_size=1", "run.steps=20")
    ran = toy(*nothing, "eval={every: 10, tasks: 12}")
    found = ran.curve("eval/loss")
    assert len(found) == 3 and found[-1] < found[0]
    assert ran.run.best().step == {1: 10, 2: 20}[found.index(min(found))], "the lowest loss is the best"


def test_an_evaluation_whose_loss_is_no_number_stops_the_run(toy, monkeypatch):
    def score(self, batch, outputs):
        return {"proximal_logprobs": np.full(batch.units, np.nan, np.float32)}

    monkeypatch.setattr(ToyBackend, "score", score)
    nothing = ("algorithm=toy-sft", "rollout=null", "sync=null", "schedule.group_size=1", "run.steps=2")
    with pytest.raises(LearnerError, match=r"from the evaluation is nan at token \d+ of trajectory 'toy:eval:"):
        toy(*nothing, "eval={every: 1, tasks: 4}")


def test_a_filter_that_rejects_everything_stops_with_its_name(toy):
    filters = "algorithm.filters={spread: {use: toy, minimum: 5.0}}"
    with pytest.raises(StarvedError, match="spread"):
        toy(filters, "schedule.max_leases_per_slot=3")


@pytest.mark.parametrize("fault", ["error", "nan"])
def test_failed_episodes_are_counted_with_task_and_reason(toy, fault):
    ran = toy(f"env.fault={fault}", "env.fault_every=7", "run.steps=5")
    failed, dropped = ran.events("episode_failed"), ran.events("lease_dropped")
    assert ran.status == "finished" and len(failed) == 8 * len(dropped) > 0
    assert "toy:train:" in failed[0]["why"] and failed[0]["episode"] in failed[0]["why"]


def test_steps_that_have_no_trajectory_at_all_train_nothing_and_the_run_goes_on(toy):
    ran = toy("algorithm.truncated=drop_group", "rollout.max_new_tokens=1", "schedule.groups_per_step=2", "run.steps=4")
    assert ran.status == "finished" and ran.curve("rollout/dropped_groups") == [2.0] * 4
    assert ran.curve("train/skipped_updates") == [1.0] * 4 and ran.curve("train/loss") == []


def test_a_reward_that_is_no_number_stops_the_run(toy):
    with pytest.raises(RewardError, match="not a number"):
        toy("env.fault=text")


def test_an_existing_run_is_refused(toy):
    toy("run.steps=1")
    with pytest.raises(RunExistsError, match="--resume"):
        toy("run.steps=1")


def test_a_stop_request_finishes_the_step_saves_and_resumes_to_the_same_bits(toy):
    whole = toy("run.name=whole", "run.steps=12")
    stop = threading.Event()
    threading.Timer(0.15, stop.set).start()
    cut = toy("run.name=cut", "run.steps=12", stop=stop)
    if cut.status == "interrupted":
        assert cut.run.latest().step < 12
        cut = toy("run.name=cut", "run.steps=12", resume=True)
    assert cut.status == "finished"
    assert cut.curve("train/loss") == whole.curve("train/loss")


def test_best_checkpoint_is_kept(toy):
    ran = toy("run.steps=20", "eval={every: 5, tasks: 16, temperature: 1.0}")
    evaluations = {line["step"]: line["eval/reward"]["value"] for line in ran.run.metrics() if "eval/reward" in line}
    assert sorted(evaluations) == [0, 5, 10, 15, 20]
    best = max(evaluations.items(), key=lambda row: (row[1], row[0]))
    assert ran.run.best().step == best[0]


def test_show_says_what_became_of_a_run(toy, miles):
    toy("run.steps=4", "eval={every: 2, tasks: 4}")
    said = miles("show", "runs/toy")
    assert said.out.startswith("toy: toy, finished, 4 of 4 steps, best checkpoint: step ")
    assert "choose --step 0 to 3" in miles("show", "runs/toy", "--step", "999").err
    assert miles("show", "runs/toy", "--samples", "0").code == 2
    planned = miles("plan", "runs/toy")
    assert planned.code == 0 and "nothing is refused" in planned.out
    line = {"prompt": "p", "turns": [["a"]], "expected": None, "info": {}, "components": {}, "reward": None}
    line |= {"status": "ok", "finish": ["stop"], "tokens": [3], "versions": [], "error": None}
    assert describe(line).splitlines() == ["prompt    p", "answer    a", "length    ok, stop, 3 tokens"]


def test_the_lock_names_everything_that_decides_what_runs(toy):
    lock = toy("run.steps=1", "trackers={jsonl: {}}").run.lock()
    assert sorted(lock["distributions"]) == ["miles-core", "miles-testing-toys"]


def _frames(ran):
    from miles_core.journal import read

    return list(read(ran.run.path / "journal"))


def _leases(ran, trained):
    leases = {f.header["id"]: f.header for f in _frames(ran) if f.kind == "lease"}
    return [leases[name] for frame in trained for name in frame.header["leases"]]
