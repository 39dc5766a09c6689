"""The loop in virtual time: admission, order, lag, filters, stops, deadlines, errors, several policies."""

import asyncio
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from miles_core.cli.accounting import check_history
from miles_core.config.schema import EvalConfig, ScheduleConfig
from miles_core.errors import DeadlineError, JournalError, LedgerError, RecordError, StarvedError
from miles_core.journal import read
from miles_core.ledger import Lease, Ledger, Open
from miles_core.records import Task
from miles_core.schedule import PolicySetup
from miles_core.side import Side
from miles_core.testing.simulation import Deadlock, Disk, Scenario, Simulation, VirtualClock, digest, imbalances

SMALL = ScheduleConfig(groups_per_step=3, group_size=2)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "journal"


def proven(sim, *, finished=True):
    """The ledger agrees with itself, and the journal with the promises."""
    assert imbalances(sim.ledger, finished=finished) == []
    assert check_history(read(sim.folder), sim.schedules, finished=finished) == []


@st.composite
def schedules(draw):
    order = draw(st.sampled_from(["slot", "ready"]))
    staleness = draw(st.integers(0, 3))
    return ScheduleConfig(
        groups_per_step=draw(st.integers(1, 4)),
        group_size=draw(st.integers(1, 3)),
        max_staleness=staleness,
        order=order,
        on_stale=draw(st.sampled_from(["drop", "retry", "mask"])),
        on_failed_episode=draw(st.sampled_from(["shrink", "drop_group"])),
        publish_every=draw(st.integers(1, staleness + 1)),
        oversample=draw(st.integers(0, 3)),
        max_leases_per_slot=1000,
    )


@st.composite
def scenarios(draw):
    return Scenario(
        schedule=draw(schedules()),
        steps=draw(st.integers(1, 6)),
        policies=draw(st.sampled_from([{"main": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 1}])),
        timing=draw(st.integers(0, 1000)),
        reject=draw(st.sampled_from([0.0, 0.3])),
        fail=draw(st.sampled_from([0.0, 0.2])),
        long=draw(st.sampled_from([0.0, 0.1])),
        size=draw(st.sampled_from([None, 5, 64])),
        checkpoint_every=draw(st.sampled_from([None, 1, 2])),
        evaluation=draw(st.sampled_from([EvalConfig(), EvalConfig(every=2, tasks=3)])),
        demonstrations=draw(st.sampled_from([False, False, False, True])),
    )


@given(scenarios())
@settings(max_examples=80, deadline=None)
def test_every_schedule_ends_and_keeps_its_promises(scenario):
    """No deadlock (the clock would raise), nothing twice, no token too old (the learner asserts), every lease ended."""
    with tempfile.TemporaryDirectory() as folder:
        sim = Simulation(scenario, Path(folder) / "journal")
        assert sim.run().status == "finished"
        proven(sim)
        for policy, share in scenario.policies.items():
            steps = [step for name, step, _ in sim.trained if name == policy]
            assert steps == list(range(scenario.steps * share))


@given(scenarios(), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_on_policy_runs_do_not_depend_on_timing(scenario, timing):
    schedule = replace(scenario.schedule, max_staleness=0, order="slot", publish_every=1)
    ends = []
    for seed in (scenario.timing, timing):
        with tempfile.TemporaryDirectory() as folder:
            sim = Simulation(replace(scenario, schedule=schedule, timing=seed), Path(folder) / "journal")
            sim.run()
            rewards = [v for step, side, v, _ in sim.metrics_seen if side in ("rollout", "eval")]
            ends.append((sim.weights, sim.trained, rewards))
    assert ends[0] == ends[1]


def test_on_policy_batches_hold_the_next_tasks_in_order(folder):
    sim = Simulation(Scenario(schedule=SMALL, steps=3, timing=4), folder)
    sim.run()
    assert sim.trained == [("main", s, tuple(f"toy:train:{i}#0" for i in range(3 * s, 3 * s + 3))) for s in range(3)]
    assert sim.published == ["main@0.0", "main@0.1", "main@0.2", "main@0.3"]


def test_finite_tasks_wrap_round_with_a_new_attempt(folder):
    sim = Simulation(Scenario(schedule=SMALL, steps=2, size=4), folder)
    sim.run()
    assert sim.trained[1][2] == ("toy:train:3#0", "toy:train:0#1", "toy:train:1#1")


def test_a_bound_of_one_step_overlaps_sampling_and_training(folder, tmp_path):
    """Sampling takes about as long as training: η = 1 hides one behind the other, and every slot stays in order."""
    base = Scenario(schedule=SMALL, steps=20, train_s=2.0)
    times, waits = [], []
    for staleness in (0, 1):
        scenario = replace(base, schedule=replace(SMALL, max_staleness=staleness))
        sim = Simulation(scenario, tmp_path / f"eta{staleness}")
        sim.run()
        proven(sim)
        times.append(sim.now)
        waits.append(sum(v["wait_s"][0] for _, side, v, _ in sim.metrics_seen if side == "time"))
        assert [ids for _, _, ids in sim.trained] == [
            tuple(f"toy:train:{i}#0" for i in range(3 * s, 3 * s + 3)) for s in range(20)
        ]
        lags = [v["lag_max"][0] for _, side, v, _ in sim.metrics_seen if side == "rollout"]
        assert max(lags) == staleness
    assert waits[1] < 0.3 * waits[0]
    assert times[1] < 0.8 * times[0]


def test_ready_takes_what_is_finished_and_reports_what_grew_too_old(folder):
    schedule = ScheduleConfig(groups_per_step=3, group_size=1, max_staleness=1, order="ready")
    sim = Simulation(Scenario(schedule=schedule, steps=40, long=0.1), folder)
    sim.run()
    proven(sim)
    stale = [fields for kind, fields in sim.events if kind == "lease_stale"]
    assert stale and all(f["then"] == "drop" and f["lag"] > 1 and f["longest"] > 0 for f in stale)
    assert sim.ledger.books["main"].ended["dropped"] == len(stale)


def test_slot_order_trains_the_long_ones_too(folder):
    schedule = ScheduleConfig(groups_per_step=3, group_size=1, max_staleness=1)
    sim = Simulation(Scenario(schedule=schedule, steps=40, long=0.1), folder)
    sim.run()
    assert sim.ledger.books["main"].ended == {"issued": 120, "trained": 120}


def test_masking_trains_groups_whose_old_tokens_became_context(folder):
    schedule = ScheduleConfig(groups_per_step=3, group_size=1, max_staleness=1, order="ready", on_stale="mask")
    sim = Simulation(Scenario(schedule=schedule, steps=40, long=0.15, turns=3, train_s=0.5), folder)
    sim.run()
    proven(sim)
    lags = [v["lag_max"][0] for _, side, v, _ in sim.metrics_seen if side == "rollout"]
    assert max(lags) > 1  # older tokens were in a batch; the learner asserts that they were not trainable


def test_replacements_of_rejected_groups_keep_the_slot(folder):
    sim = Simulation(Scenario(schedule=SMALL, steps=4, reject=0.5), folder)
    sim.run()
    proven(sim)
    dropped = [fields for kind, fields in sim.events if kind == "lease_dropped"]
    assert dropped and all(f["why"] == "filter choosy: unlucky" for f in dropped)
    told = [v["dropped"] for _, side, v, _ in sim.metrics_seen if side == "rollout"]
    assert sum(n for n, _ in told) == len(dropped)
    assert all(slot < 12 for slot in (f["slot"] for f in dropped))


def test_a_filter_that_rejects_everything_stops_the_run_with_its_reasons(folder):
    schedule = replace(SMALL, max_leases_per_slot=4)
    sim = Simulation(Scenario(schedule=schedule, steps=2, reject=1.0), folder)
    with pytest.raises(StarvedError) as stopped:
        sim.run()
    assert "used 4 leases" in str(stopped.value)
    assert "4 x filter choosy: unlucky" in str(stopped.value)
    assert imbalances(sim.ledger, finished=True) == []  # even so, every lease has its end


def test_reasons_of_failures_are_counted_without_ids():
    side = object.__new__(Side)
    side.name, side.schedule, side.retries = "main", replace(SMALL, max_leases_per_slot=4), Counter()
    late = "failed episode: task t:{0}, episode t:{0}#0/1: TimeoutError: request 'r{0}' took 1 s on task t:{0}"
    nan = "failed episode: task t:{0}, episode t:{0}#0/1: reward is nan, trajectories t:{0}#0/1/0"
    with pytest.raises(StarvedError) as stopped:
        side.check_starved(0, Counter([*map(late.format, range(3)), *map(nan.format, range(2))]))
    first, fix = str(stopped.value).split("\n")
    assert first.endswith(
        "3 x failed episode: TimeoutError: request took 1 s on its task (e.g. task t:0, episode t:0#0/1); "
        "2 x failed episode: reward is nan (e.g. task t:0, episode t:0#0/1)"
    )
    assert fix.startswith("Fix: mend the reward or environment") and "raise the deadline that passed" in fix
    with pytest.raises(StarvedError, match=r"Fix: raise schedule.max_leases_per_slot"):
        side.check_starved(0, Counter({"filter choosy: unlucky": 3, nan.format(1): 1}))


@pytest.mark.parametrize("then", ["shrink", "drop_group"])
def test_failed_episodes(folder, then):
    schedule = ScheduleConfig(groups_per_step=3, group_size=4, on_failed_episode=then, min_group_size=2)
    sim = Simulation(Scenario(schedule=schedule, steps=6, fail=0.3), folder)
    sizes = []

    class Watch:
        def write(self, policy, step, split, groups, learnt):
            sizes.extend(len(g.episodes) for g in groups)

    sim.rollouts = Watch()
    sim.run()
    proven(sim)
    failed = [fields for kind, fields in sim.events if kind == "episode_failed"]
    assert failed and all(f["why"] == "unlucky episode" for f in failed)
    dropped = {fields["why"] for kind, fields in sim.events if kind == "lease_dropped"}
    if then == "shrink":
        assert {2, 3, 4} >= set(sizes) and min(sizes) < 4
        assert dropped <= {f"{n} of 4 episodes left, min_group_size 2: unlucky episode" for n in (0, 1)}
    else:
        assert set(sizes) == {4}
        assert dropped == {"failed episode: unlucky episode"}


def test_a_policy_with_twice_the_share_trains_twice_as_often_in_config_order(folder):
    sim = Simulation(Scenario(schedule=SMALL, steps=2, policies={"a": 2, "b": 1}), folder)
    sim.run()
    assert [(policy, step) for policy, step, _ in sim.trained] == [
        ("a", 0), ("a", 1), ("b", 0), ("a", 2), ("a", 3), ("b", 1)
    ]  # fmt: skip


def test_publish_every_holds_the_lag(folder):
    schedule = replace(SMALL, max_staleness=2, publish_every=3)
    sim = Simulation(Scenario(schedule=schedule, steps=9), folder)
    sim.run()
    proven(sim)
    assert sim.published == ["main@0.0", "main@0.3", "main@0.6", "main@0.9"]


def test_publishing_too_rarely_never_hangs():
    """A run file that asks for it is refused (`config/rules.py`); a loop that is built so stops at once."""
    schedule = replace(SMALL, max_staleness=0, publish_every=2)
    with tempfile.TemporaryDirectory() as folder, pytest.raises(LedgerError, match=r"step 1 .* can never be filled"):
        Simulation(Scenario(schedule=schedule, steps=2), Path(folder) / "j").run()


def test_demonstrations_need_no_engine(folder):
    sim = Simulation(Scenario(schedule=SMALL, steps=3, demonstrations=True), folder)
    sim.run()
    proven(sim)
    assert sim.published == [] and len(sim.trained) == 3


def test_evaluation_and_the_best_checkpoint(folder):
    evaluation = EvalConfig(every=2, tasks=5)
    sim = Simulation(Scenario(schedule=SMALL, steps=5, evaluation=evaluation), folder)
    result = sim.run()
    proven(sim)
    rewards = {step: v["reward"] for step, side, v, _ in sim.metrics_seen if side == "eval"}
    assert sorted(rewards) == [0, 2, 4, 5]
    assert all(den == 5 for _, den in rewards.values())
    best = max((2, 4, 5), key=lambda step: (rewards[step][0], step))  # the last of the best; step 0 has no checkpoint
    assert result.best == (best, rewards[best][0] / 5)
    assert sim.best == best and best in sim.checkpoints
    assert sim.ledger.books["main"].ended["evaluated"] == 20


def test_an_evaluation_is_not_repeated_by_a_resume(folder):
    evaluation = EvalConfig(every=2, tasks=3)
    sim = Simulation(Scenario(schedule=SMALL, steps=5, evaluation=evaluation, checkpoint_every=2), folder)
    sim.stop_after = 3
    sim.run()
    sim.checkpoints = {2: sim.checkpoints[2]}
    sim.stop_after = None
    sim.run()
    assert [step for step, side, _, _ in sim.metrics_seen if side == "eval"] == [0, 2, 4, 5]


def test_a_stop_request_during_an_evaluation_starts_no_other_step(folder):
    class Impatient(Simulation):
        def metrics(self, step, side, values, policy):
            super().metrics(step, side, values, policy)
            self.stopped |= side == "eval" and step == 2

    sim = Impatient(Scenario(schedule=SMALL, steps=5, evaluation=EvalConfig(every=2, tasks=3)), folder)
    result = sim.run()
    assert (result.status, result.step) == ("interrupted", 2)
    assert sorted(sim.checkpoints) == [2] and sim.best == 2


def test_what_is_evaluated_is_what_was_trained(folder):
    """Step 2 is no publication (every 3), so the evaluation there asks for one."""
    schedule = replace(SMALL, max_staleness=2, publish_every=3)
    evaluation = EvalConfig(every=2, tasks=3)
    sim = Simulation(Scenario(schedule=schedule, steps=6, evaluation=evaluation), folder)
    sim.run()
    proven(sim)
    assert sim.published == [f"main@0.{n}" for n in (0, 2, 3, 4, 6)]


def test_ready_takes_first_what_can_wait_least():
    ledger = Ledger(None, {"main": replace(SMALL, order="ready", max_staleness=3)})
    setup = PolicySetup(name="main", schedule=ledger.schedules["main"], tasks=None, learner=None)
    side = Side(setup, ledger)
    ages = {"a": (2, 2), "b": (1, 3), "c": None, "d": (0, 0), "e": (2, 2)}  # in order of finishing

    def waiting(name, slot):
        task = Task(id=name, prompt="")
        return Open(
            Lease(
                id=name, policy="main", slot=slot, task=task, attempt=0, env="toy", position=slot, split="train",
                started_version=0,
            ),
            versions=ages[name],
        )  # fmt: skip

    entries = [waiting(name, slot) for slot, name in enumerate(ages)]
    assert [e.lease.id for e in side.choose(entries, 3)] == ["a", "b", "d"]  # in slot order
    assert side.choose(entries[:2], 3) is None


def test_progress_counts_towards_the_next_batch(folder):
    sim = Simulation(Scenario(schedule=replace(SMALL, max_staleness=1), steps=8, train_s=20.0), folder)
    sim.run()
    seen = [(f["step"], f["done"], f["of"]) for kind, f in sim.events if kind == "group_finished"]
    assert {step for step, _, _ in seen} >= set(range(2, 8))  # whose groups finished while the step before trained
    assert max(done for _, done, _ in seen) == 3 and {of for _, _, of in seen} == {3}


def test_a_slot_is_free_as_soon_as_its_group_is_too_old(folder):
    """While step 1 trains, a group of version 0 can no longer be part of step 2: it makes room at once."""
    schedule = ScheduleConfig(groups_per_step=3, group_size=1, max_staleness=1, order="ready", oversample=3)
    sim = Simulation(Scenario(schedule=schedule, steps=4, train_s=50.0), folder)
    sim.run()
    proven(sim)
    told = [f.get("version", kind) for kind, f in sim.events if kind in ("published", "lease_stale")]
    assert told.index("lease_stale") < told.index("main@0.2")


def test_checkpoints_at_their_interval_and_at_the_end(folder):
    sim = Simulation(Scenario(schedule=SMALL, steps=5, checkpoint_every=2), folder)
    sim.run()
    assert sorted(sim.checkpoints) == [2, 4, 5]


def test_a_stop_request_finishes_the_step_saves_and_can_go_on(folder, tmp_path):
    scenario = Scenario(schedule=replace(SMALL, max_staleness=0), steps=6)
    whole = Simulation(scenario, tmp_path / "whole")
    whole.run()
    sim = Simulation(scenario, folder)
    sim.stop_after = 2
    result = sim.run()
    assert (result.status, result.step) == ("interrupted", 2)
    assert sorted(sim.checkpoints) == [2]
    sim.stop_after = None
    assert sim.run().status == "finished"
    proven(sim)
    assert sim.weights == whole.weights and sim.trained == whole.trained


@example(Scenario(schedule=ScheduleConfig(groups_per_step=2, group_size=1, max_staleness=2), steps=4, reject=0.5), 2.0)
@given(scenarios(), st.floats(0, 30))
@settings(max_examples=150, deadline=None)
def test_a_stop_request_at_any_time_finishes_its_step_and_can_go_on(scenario, at):
    """Also where leases of that step are dropped while others, sampled ahead, wait."""
    with tempfile.TemporaryDirectory() as folder:
        sim = Simulation(scenario, Path(folder) / "journal")
        sim.is_set = lambda: asyncio.get_running_loop().time() >= at
        first = sim.run()
        done = {policy: first.step * share for policy, share in scenario.policies.items()}
        assert {policy: book.consumed for policy, book in sim.ledger.books.items()} == done
        del sim.is_set
        assert sim.run().status == "finished"
        proven(sim)


def test_a_stop_request_saves_where_what_is_abandoned_fails(folder):
    """Ctrl-C reaches the whole process group: engines may die of it."""

    async def abort(lease_ids):
        raise OSError("connection refused")

    schedule = replace(SMALL, max_staleness=2, order="ready")
    sim = Simulation(Scenario(schedule=schedule, steps=9, long=0.5, train_s=0.1), folder)
    sim.sampler.abort = abort
    sim.stop_after = 2
    assert sim.run().status == "interrupted" and sorted(sim.checkpoints) == [2]
    sim.stop_after = None
    assert sim.run().status == "finished"
    proven(sim)


def test_a_stop_request_starts_nothing_beyond_the_step(folder):
    sim = Simulation(Scenario(schedule=replace(SMALL, max_staleness=2), steps=20), folder)
    sim.stop_after = 3
    sim.run()
    issued = sim.ledger.books["main"].ended["issued"]
    assert sim.ledger.books["main"].ended["trained"] == 9
    assert issued == 9 + sim.ledger.books["main"].ended["returned"] + len(sim.ledger.waiting("main"))
    assert issued <= 3 * (2 + 1 + 2)  # what version 2 allowed: step 2 was running when the stop was asked for
    assert sim.ledger.in_flight("main") == []


def test_a_finished_run_can_be_extended(folder, tmp_path):
    scenario = Scenario(schedule=SMALL, steps=3)
    whole = Simulation(replace(scenario, steps=5), tmp_path / "whole")
    whole.run()
    sim = Simulation(scenario, folder)
    sim.run()
    assert sim.run(steps=5).step == 5
    proven(sim)
    assert sim.weights == whole.weights


def test_resuming_a_finished_run_does_nothing(folder):
    sim = Simulation(Scenario(schedule=SMALL, steps=3), folder)
    sim.run()
    before = list(sim.trained), dict(sim.checkpoints)
    assert sim.run().status == "finished"
    assert (sim.trained, sim.checkpoints) == before


def test_the_first_error_of_the_sampler_surfaces_and_cancels_training(folder):
    sim = Simulation(Scenario(schedule=replace(SMALL, max_staleness=1), steps=9, train_s=1000.0), folder)
    sim.sampler.error_at = 8
    with pytest.raises(RuntimeError, match="the sampler broke"):
        sim.run()
    assert sim.now < 1000.0  # the training step that was running did not hold it up
    assert sim.ledger.in_flight("main") == []


def test_the_first_error_of_the_learner_surfaces_and_cancels_sampling(folder):
    sim = Simulation(Scenario(schedule=replace(SMALL, max_staleness=1), steps=9), folder)
    sim.learner_error = (2, RecordError("a column is wrong", fix="mend it"))
    with pytest.raises(RecordError, match="a column is wrong"):
        sim.run()
    assert sim.ledger.in_flight("main") == []


def test_a_hanging_episode_meets_the_stall_deadline(folder):
    sim = Simulation(Scenario(schedule=replace(SMALL, stall_deadline_s=50.0), steps=3), folder)
    sim.sampler.hang_at = 7
    with pytest.raises(DeadlineError) as stopped:
        sim.run()
    assert "a group for step 1 of policy 'main', first toy:train:3 (slot 3)" in str(stopped.value)
    assert "nothing happened for 50 s" in str(stopped.value)


def test_a_hanging_training_step_meets_the_deadline(folder):
    sim = Simulation(Scenario(schedule=replace(SMALL, stall_deadline_s=50.0), steps=3, train_s=1e6), folder)
    with pytest.raises(DeadlineError, match="training step 0 of policy 'main'"):
        sim.run()


def test_a_hanging_publication_meets_the_deadline(folder):
    sim = Simulation(Scenario(schedule=replace(SMALL, stall_deadline_s=50.0), steps=3, publish_s=1e6), folder)
    with pytest.raises(DeadlineError, match=r"publishing main@0\.0"):
        sim.run()


def test_a_hanging_evaluation_meets_the_deadline(folder):
    schedule = replace(SMALL, stall_deadline_s=50.0)
    sim = Simulation(Scenario(schedule=schedule, steps=3, evaluation=EvalConfig(every=1, tasks=2)), folder)
    sim.sampler.hang_at = 7  # after the six episodes of the first batch
    with pytest.raises(DeadlineError, match="evaluating 1 tasks of policy 'main'"):
        sim.run()


def test_no_space_in_the_journal_stops_with_how_to_go_on(folder):
    sim = Simulation(Scenario(schedule=SMALL, steps=4, checkpoint_every=1), folder)
    with pytest.raises(JournalError, match=r"No space left[\s\S]*--resume"):
        sim.run(disk=Disk({30: "error"}))
    assert sim.run().status == "finished"
    proven(sim)


def test_the_virtual_clock_notices_a_deadlock():
    clock = VirtualClock()
    never = clock.create_future()
    with pytest.raises(Deadlock):
        clock.run_until_complete(never)
    clock.close()


def test_digest_is_stable():
    assert digest("a", 1) == digest("a", 1) != digest("a", 2)
