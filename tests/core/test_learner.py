"""The learner: what is excluded, which passes run, what each phase sees, how a step is cut, when roles move."""

import asyncio

import numpy as np
import pytest

from miles_core.columns import CORE_COLUMNS, ColumnSpec
from miles_core.config.schema import (
    Algorithm,
    AlgorithmKeys,
    Part,
    Policy,
    RoleConfig,
    RoleUpdate,
    ScheduleConfig,
    Truncated,
)
from miles_core.contracts.learning import LOGPROBS, Output, StageOutput, TermInfo, UpdateResult
from miles_core.errors import CombinationError, LearnerError
from miles_core.learner import Learner
from miles_core.numerics.host import group_advantages, to_units, whiten
from miles_core.records import Episode, Finish, Group, Sampling, Span, Status, Task, Trajectory, Version

VERSION = Version(policy="main", lineage=0, number=0)


def trajectory(name, new=2, finish=Finish.STOP, behaviour=-1.0):
    """One prompt token, then `new` sampled ones."""
    return Trajectory(
        id=name,
        length=1 + new,
        columns={
            "tokens": np.arange(1 + new, dtype=np.int32),
            "origin": np.array([0] + [1] * new, np.uint8),
            "trainable": np.array([False] + [True] * new),
            "behaviour_logprobs": np.array([0.0] + [behaviour] * new, np.float32),
        },
        spans=(Span(start=1, end=1 + new, version=VERSION),),
        finish=finish,
        sampling=Sampling(max_new_tokens=8),
    )


def episode(group, member, reward, **more):
    name = f"{group}/{member}"
    rows = more.pop("rows", None)
    given = (trajectory(f"{name}/0", **more.pop("row", {})),) if rows is None else rows
    return Episode(id=name, member=member, trajectories=given, reward=reward, **more)


def failed(group, member):
    return episode(group, member, None, rows=(), status=Status.FAILED, error="boom")


def group(slot, *rewards, **more):
    name = f"toy:train:{slot}#0"
    episodes = [r if isinstance(r, Episode) else episode(name, i, r, **more) for i, r in enumerate(rewards)]
    task = Task(id=f"toy:train:{slot}", prompt="?")
    return Group(id=name, policy="main", slot=slot, attempt=0, task=task, episodes=tuple(episodes))


class Stage:
    def __init__(self, formula, gives=("advantages",), needs=("reward",), metrics=None):
        self.formula, self.needs, self.metrics = formula, frozenset(needs), metrics or {}
        self.gives = tuple(CORE_COLUMNS.get(name) or spec(name) for name in gives)

    def __call__(self, batch, rng):
        value = self.formula(batch)
        columns = value if isinstance(value, dict) else {self.gives[0].name: value}
        return StageOutput(columns=columns, metrics=self.metrics)


def spec(name):
    if name.startswith("reward."):
        return ColumnSpec(name=name, level="episode", dtype="float64")
    return ColumnSpec(name=name, level="unit", dtype="float32")


def centred():
    return Stage(lambda b: to_units(b, group_advantages(b.columns["reward"], b.group_of, scale="none")))


def term(name="clip", needs=("advantages",), weighted=True, **more):
    given = {"role": "actor", "dynamic": False, "level": "unit", "mask": "kept", "aggregation": None, "coef": 1.0}
    given |= {"outputs": (LOGPROBS,)} | more
    return TermInfo(name=name, needs=frozenset(needs), weighted=weighted, **given)


class Trainer:
    """Remembers what it was asked; scores −1.5 everywhere unless told otherwise."""

    def __init__(self, scores=None, results=()):
        self.scores, self.results = scores or {}, list(results)
        self.scored, self.updates, self.blends, self.order = [], [], [], []

    async def score(self, batch, outputs):
        self.scored.append((batch, tuple(outputs)))
        self.order.append("score")
        names = [o.column for o in outputs]
        return {name: self.scores.get(name, np.full(batch.units, -1.5, np.float32)) for name in names}

    async def update(self, minibatch):
        self.updates.append(minibatch)
        self.order.append("update")
        if self.results:
            return self.results.pop(0)
        return UpdateResult(metrics={"loss": (2.0, 1.0), "lr": (0.1, 1.0), "clip/max_x": (3.0, 1.0)}, grad_norm=4.0)

    async def blend(self, policy, dst, src, decay):
        self.blends.append((policy, dst, src, decay))
        self.order.append("blend")


def policy(keys=None, roles=None, **schedule):
    part = Part(kind="model", name="m", use="m", options=None)
    return Policy(
        name="main",
        share=1,
        model=part,
        renderer=part,
        envs={},
        algorithm=Algorithm(preset="toy", keys=keys or AlgorithmKeys(), parts={}),
        schedule=ScheduleConfig(**schedule),
        roles={"actor": RoleConfig(update=RoleUpdate.trained)} | (roles or {}),
    )


def learner(trainer, *, stages=None, terms=None, specs=None, max_new_tokens=None, scorers=None, **about):
    stages = {"advantage": [("centred", centred())]} if stages is None else stages
    all_specs = dict(CORE_COLUMNS) | {s.name: s for parts in stages.values() for _, st in parts for s in st.gives}
    all_specs |= {s.name: s for s in specs or ()}
    terms = [term()] if terms is None else terms
    more = {"max_new_tokens": max_new_tokens, "scorers": scorers}
    return Learner(policy(**about), 7, stages, terms, trainer, all_specs, **more)


def step(made, groups, number=0):
    return asyncio.run(made.step(number, groups))


# --- the plain step -------------------------------------------------------------------------------------------------


def test_a_step_gives_advantages_weights_and_metrics():
    trainer = Trainer()
    metrics = step(learner(trainer), [group(0, 1.0, 0.0), group(1, 1.0, 1.0, 0.0)])
    (batch,) = trainer.updates
    per_episode = [0.5, -0.5, 1 / 3, 1 / 3, -2 / 3]
    want = np.concatenate([[0, a, a] for a in per_episode]).astype(np.float32)
    np.testing.assert_array_equal(batch.columns["advantages"], want)
    np.testing.assert_allclose(batch.columns["weight.clip"], np.where(batch.columns["trainable"], 0.1, 0))
    assert batch.columns["weight.clip"].dtype == np.float32
    assert metrics["train/loss"] == (2.0, 1.0) and metrics["train/lr"] == (0.1, 1.0)
    assert metrics["train/grad_norm"] == (4.0, 1.0) and metrics["train/skipped_updates"] == (0.0, 1.0)
    assert trainer.order == ["update"]  # one update a step, and no part that needs a pass


def test_groups_are_trained_in_slot_order_whatever_the_order_of_arrival():
    trainer = Trainer()
    step(learner(trainer), [group(2, 1.0, 0.0), group(0, 0.0, 1.0), group(1, 1.0, 0.0)])
    assert trainer.updates[0].group_ids == ("toy:train:0#0", "toy:train:1#0", "toy:train:2#0")


def test_a_step_is_cut_into_runs_of_whole_groups_and_scored_once():
    trainer = Trainer()
    groups = [group(i, 1.0, 0.0) for i in range(5)]
    metrics = step(learner(trainer, updates_per_step=2), groups)
    assert [b.n_groups for b in trainer.updates] == [3, 2]
    assert trainer.order == ["score", "update", "update"]
    assert trainer.scored[0][1] == (Output(name="logprobs"),)
    for batch in trainer.updates:  # denominators are those of each minibatch
        np.testing.assert_allclose(batch.columns["weight.clip"].sum(), 1.0, rtol=1e-6)
    assert metrics["train/loss"] == (4.0, 2.0)
    assert metrics["train/grad_norm"] == (8.0, 2.0)
    num, den = metrics["train/mismatch/abs"]
    assert num / den == pytest.approx(0.5)


def test_maxima_of_several_updates_are_maxima():
    results = [UpdateResult(metrics={"clip/max_x": (value, 1.0)}, grad_norm=1.0) for value in (5.0, 3.0)]
    metrics = step(learner(Trainer(results=results), updates_per_step=2), [group(0, 1.0, 0.0), group(1, 1.0, 0.0)])
    assert metrics["train/clip/max_x"] == (5.0, 1.0)


# --- exclusion ------------------------------------------------------------------------------------------------------


def cut_off(slot=0):
    name = f"toy:train:{slot}#0"
    return group(
        slot, episode(name, 0, 1.0), episode(name, 1, 0.0, row={"finish": Finish.LENGTH}), episode(name, 2, 0.0)
    )


def test_truncated_train():
    trainer = Trainer()
    step(learner(trainer), [cut_off()])
    assert trainer.updates[0].columns["trainable"].sum() == 6


@pytest.mark.parametrize(("counts", "want"), [(True, 2 / 3), (False, 0.5)])
def test_truncated_mask_keeps_the_episode_in_b_and_perhaps_in_the_baseline(counts, want):
    trainer = Trainer()
    keys = AlgorithmKeys(truncated=Truncated.mask, excluded_count_in_baseline=counts, aggregation="episode_mean")
    step(learner(trainer, keys=keys), [cut_off()])
    (batch,) = trainer.updates
    assert batch.columns["trainable"].tolist() == [False, True, True, False, False, False, False, True, True]
    np.testing.assert_allclose(batch.columns["weight.clip"][[1, 4, 7]], [1 / 6, 0, 1 / 6])  # B is 3
    assert batch.columns["advantages"][1] == np.float32(want) and batch.columns["advantages"][4] == 0


def test_truncated_drop_group_removes_groups_before_minibatches_are_cut():
    trainer = Trainer()
    keys = AlgorithmKeys(truncated=Truncated.drop_group)
    groups = [group(0, 1.0, 0.0), cut_off(1), group(2, 1.0, 0.0)]
    metrics = step(learner(trainer, keys=keys, updates_per_step=2), groups)
    assert [b.group_ids for b in trainer.updates] == [("toy:train:0#0",), ("toy:train:2#0",)]
    assert metrics["rollout/dropped_groups"] == (1.0, 1.0)


def test_a_status_of_truncated_counts_whatever_the_finish_reason():
    trainer = Trainer()
    name = "toy:train:0#0"
    with_status = group(0, episode(name, 0, 1.0), episode(name, 1, 0.0, status=Status.TRUNCATED))
    step(learner(trainer, keys=AlgorithmKeys(truncated=Truncated.mask)), [with_status])
    assert trainer.updates[0].columns["trainable"].sum() == 2


def test_a_failed_episode_counts_in_b_and_in_no_statistic():
    trainer = Trainer()
    keys = AlgorithmKeys(aggregation="episode_mean")
    name = "toy:train:0#0"
    step(learner(trainer, keys=keys), [group(0, episode(name, 0, 1.0), failed(name, 1), episode(name, 2, 0.0))])
    (batch,) = trainer.updates
    assert batch.n_episodes == 3
    assert batch.columns["advantages"].tolist() == [0, 0.5, 0.5, 0, -0.5, -0.5]
    np.testing.assert_allclose(batch.columns["weight.clip"][[1, 4]], 1 / 6)


def test_a_step_without_anything_to_train_makes_no_update():
    trainer = Trainer()
    name = "toy:train:0#0"
    made = learner(trainer)
    made.changed = True
    metrics = step(made, [group(0, failed(name, 0), failed(name, 1))])
    assert made.changed is False and trainer.order == [] and metrics["train/skipped_updates"] == (1.0, 1.0)
    keys = AlgorithmKeys(truncated=Truncated.mask)
    everything = group(0, episode(name, 0, 1.0, status=Status.TRUNCATED))
    metrics = step(learner(trainer, keys=keys), [everything])
    assert trainer.order == [] and metrics["train/skipped_updates"] == (1.0, 1.0)


def test_an_episode_without_a_reward_must_not_be_trainable():
    with pytest.raises(LearnerError, match=r"'advantages' from the stage 'centred' is nan .* 'toy:train:0#0/1/0'"):
        step(learner(Trainer()), [group(0, 1.0, None, 0.0)])


# --- penalties, phases, corrections -----------------------------------------------------------------------------------


def test_only_what_penalties_write_is_added_to_the_reward():
    seen = {}

    def penalty(batch):
        seen["reward"] = batch.columns["reward"].tolist()
        return np.array([-0.25, 0.0])

    def advantage(batch):
        seen["total"] = batch.columns["reward"].tolist()
        return to_units(batch, batch.columns["reward"])

    stages = {
        "penalties": [
            ("short", Stage(penalty, gives=("reward.short",))),
            ("zero", Stage(lambda b: np.zeros(2), ("reward.zero",))),
        ],
        "advantage": [("a", Stage(advantage))],
    }
    name = "toy:train:0#0"
    given = group(0, *(episode(name, i, r, components={"format": 0.5}) for i, r in enumerate((1.0, 0.0))))
    trainer = Trainer()
    metrics = step(learner(trainer, stages=stages), [given])
    assert seen == {"reward": [1.0, 0.0], "total": [0.75, 0.0]}  # the component is reported, not added
    assert trainer.updates[0].columns["reward.format"].tolist() == [0.5, 0.5]
    assert metrics["rollout/reward_penalised"] == (0.75, 2.0)
    assert metrics["rollout/reward.short"] == (-0.25, 2.0)


def test_a_penalty_may_not_take_the_name_of_a_component():
    stages = {
        "penalties": [("p", Stage(lambda b: np.zeros(2), gives=("reward.format",)))],
        "advantage": [("a", centred())],
    }
    name = "toy:train:0#0"
    given = group(0, *(episode(name, i, 1.0, components={"format": 0.5}) for i in range(2)))
    with pytest.raises(LearnerError, match=r"penalty 'p' writes 'reward.format'"):
        step(learner(Trainer(), stages=stages), [given])


def test_phases_run_in_their_fixed_order_whatever_the_order_of_the_config():
    seen = []

    def noting(name, value):
        def formula(batch):
            seen.append(name)
            return value(batch)

        return formula

    advantages = lambda b: b.columns["advantages"]  # noqa: E731
    stages = {
        "corrections": [
            ("tis", Stage(noting("tis", lambda b: np.ones(b.units)), gives=("correction_weight",), needs=()))
        ],
        "whiten": [
            (
                "w",
                Stage(noting("whiten", lambda b: whiten(advantages(b), b.columns["trainable"])), needs=("advantages",)),
            )
        ],
        "distill": [("d", Stage(noting("distill", lambda b: advantages(b) + 1), needs=("advantages",)))],
        "advantage": [("a", Stage(noting("advantage", lambda b: to_units(b, b.columns["reward"]))))],
        "penalties": [("p", Stage(noting("penalty", lambda b: np.zeros(b.n_episodes)), gives=("reward.p",)))],
    }
    trainer = Trainer()
    step(learner(trainer, stages=stages), [group(0, 1.0, 0.0)])
    assert seen == ["penalty", "advantage", "distill", "whiten", "tis"]
    got = trainer.updates[0].columns["advantages"]
    x = np.array([2.0, 2, 1, 1])
    want = (x - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(got[[1, 2, 4, 5]], want, rtol=1e-6)
    assert got[[0, 3]].tolist() == [0, 0]


def test_corrections_multiply_their_weights_and_unite_their_rejections():
    def one(batch):
        assert "rejected" not in batch.columns and "correction_weight" not in batch.columns
        return {"correction_weight": np.full(batch.units, 0.5), "rejected": np.arange(batch.units) == 1}

    def two(batch):
        assert "rejected" not in batch.columns  # every correction sees the mask before rejection
        weight = np.where(batch.columns["trainable"], 3.0, np.nan)
        return {"correction_weight": weight, "rejected": np.arange(batch.units) == 4}

    shared = ("correction_weight", "rejected")
    stages = {
        "advantage": [("a", centred())],
        "corrections": [("one", Stage(one, shared)), ("two", Stage(two, shared, needs=("proximal_logprobs",)))],
    }
    trainer = Trainer()
    metrics = step(learner(trainer, stages=stages), [group(0, 1.0, 0.0)])
    (batch,) = trainer.updates
    assert batch.columns["correction_weight"].tolist() == [0, 1.5, 1.5, 0, 1.5, 1.5]
    assert np.flatnonzero(batch.columns["rejected"]).tolist() == [1, 4]
    np.testing.assert_allclose(batch.columns["weight.clip"], [0, 0, 0.25, 0, 0, 0.25])
    assert metrics["train/rejected"] == (2.0, 4.0)
    assert trainer.order == ["score", "update"]  # a correction needs the proximal pass


def test_stages_get_the_same_random_numbers_at_the_same_step():
    draws = []

    class Drawing(Stage):
        def __call__(self, batch, rng):
            draws.append(rng.random())
            return super().__call__(batch, rng)

    stages = {"advantage": [("a", Drawing(lambda b: to_units(b, b.columns["reward"])))]}
    for number in (3, 3, 4):
        step(learner(Trainer(), stages=stages), [group(0, 1.0, 0.0)], number)
    assert draws[0] == draws[1] != draws[2]


# --- score passes and roles -----------------------------------------------------------------------------------------


REFERENCE = {"reference": RoleConfig(init="actor", update=RoleUpdate.copy, every=2)}


def test_passes_follow_from_needs():
    trainer = Trainer()
    made = learner(trainer, terms=[term(), term("kl", ("reference.logprobs",), weighted=False)], roles=REFERENCE)
    assert made.outputs == (Output(name="logprobs", role="reference"),)
    step(made, [group(0, 1.0, 0.0)])
    np.testing.assert_allclose(trainer.updates[0].columns["reference.logprobs"], -1.5)
    assert "proximal_logprobs" not in trainer.updates[0].columns


def test_values_come_from_the_critic_where_there_is_one():
    roles = {"critic": RoleConfig(update=RoleUpdate.trained, head="value")}
    stages = {"advantage": [("a", Stage(lambda b: b.columns["values"], needs=("values", "reward")))]}
    trainer = Trainer()
    step(learner(trainer, stages=stages, roles=roles), [group(0, 1.0, 0.0)])
    assert trainer.scored[0][1] == (Output(name="values", role="critic"),)
    assert trainer.updates[0].columns["advantages"].tolist() == [0, -1.5, -1.5, 0, -1.5, -1.5]


def stage_that(needs, scores=None, gives=lambda b: np.zeros(b.units)):
    made = Stage(gives, needs=needs)
    if scores is not None:
        made.scores = scores
    return {"advantage": [("a", made)]}


def test_what_is_scored_at_scored_ids_comes_in_a_later_pass():
    ids = np.arange(12, dtype=np.int32).reshape(6, 2)
    scores = {
        "actor.topk_ids": Output(name="topk_ids", k=2),
        "teacher.token_logprobs": Output(name="token_logprobs", role="teacher", inputs=("actor.topk_ids",)),
    }
    trainer = Trainer({"actor.topk_ids": ids, "teacher.token_logprobs": -ids.astype(np.float32)})
    roles = {"teacher": RoleConfig(init="actor")}
    step(learner(trainer, stages=stage_that(scores, scores), roles=roles), [group(0, 1.0, 0.0)])
    assert [[o.name for o in outputs] for _, outputs in trainer.scored] == [["topk_ids"], ["token_logprobs"]]
    assert "actor.topk_ids" in trainer.scored[1][0].columns
    found = trainer.updates[0].columns
    assert found["actor.topk_ids"].dtype == np.int32 and found["actor.topk_ids"].tolist() == ids.tolist()
    assert found["teacher.token_logprobs"].shape == (6, 2)


def test_one_output_with_two_sizes_is_refused():
    scores = {"actor.topk_ids": Output(name="topk_ids", k=2)}
    terms = [term(scores={"actor.topk_ids": Output(name="topk_ids", k=3)})]
    with pytest.raises(CombinationError, match=r"'topk_ids' of role 'actor' with k=3 .*another part needs it with k=2"):
        learner(Trainer(), stages=stage_that(scores, scores), terms=terms)


def test_the_value_after_a_trajectory_is_its_last_units():
    trainer = Trainer({"actor.bootstrap_value": np.array([9, 9, 1, 9, 9, 2], np.float32)})
    step(learner(trainer, stages=stage_that(("bootstrap_value",))), [group(0, 1.0, 0.0)])
    assert trainer.updates[0].columns["bootstrap_value"].tolist() == [1, 2]


class Scorer:
    def __init__(self, answer=None):
        self.answer, self.asked = answer, []

    async def score(self, trajectories, want, tasks=()):
        self.asked.append(([t.id for t in trajectories], list(want), [t.id for t in tasks]))
        if self.answer is not None:
            return self.answer(trajectories)
        return {n: [0.5 if n.endswith(".reward") else np.full(t.length, -3.0) for t in trajectories] for n in want}

    async def close(self):
        pass


FAR = {"teacher": RoleConfig(scorer="far")}


def test_a_role_may_be_a_scorer_and_a_scorer_may_reward():
    scorer, trainer = Scorer(), Trainer()
    stages = stage_that(("teacher.logprobs", "far.reward", "proximal_logprobs"))
    made = learner(trainer, stages=stages, roles=FAR, scorers={"far": scorer})
    step(made, [group(0, 1.0, 0.0)])
    ids = ["toy:train:0#0/0/0", "toy:train:0#0/1/0"]
    assert scorer.asked == [(ids, ["far.reward", "teacher.logprobs"], ["toy:train:0"] * 2)]
    assert [o.name for o in trainer.scored[0][1]] == ["logprobs"]  # the backend has no teacher
    assert trainer.updates[0].columns["teacher.logprobs"].tolist() == [-3.0] * 6
    assert trainer.updates[0].columns["far.reward"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda rows: {}, r"scorer 'far' scored \[\], not 'teacher.logprobs'"),
        (lambda rows: {"teacher.logprobs": [np.zeros(3)]}, r"gave 1 arrays for 2 trajectories"),
        (
            lambda rows: {"teacher.logprobs": [np.zeros(3), np.zeros(2)]},
            r"shape \(2,\) for trajectory 'toy.*/1/0' of 3",
        ),
        (lambda rows: {"teacher.logprobs": [np.full(3, np.nan)] * 2}, r"'teacher.logprobs' from the score pass is nan"),
        (lambda rows: 1 / 0, r"scorer 'far' failed: .*division"),
    ],
)
def test_a_scorer_that_lies_is_named(answer, said):
    stages = stage_that(("teacher.logprobs",))
    made = learner(Trainer(), stages=stages, roles=FAR, scorers={"far": Scorer(answer)})
    with pytest.raises(LearnerError, match=said):
        step(made, [group(0, 1.0, 0.0)])


def test_a_scorer_is_not_asked_at_chosen_ids():
    scores = {"teacher.token_logprobs": Output(name="token_logprobs", role="teacher", inputs=("tokens",))}
    with pytest.raises(CombinationError, match=r"the scorer 'far' cannot be asked for chosen ids"):
        learner(Trainer(), stages=stage_that(scores, scores), roles=FAR, scorers={"far": Scorer()})


@pytest.mark.parametrize(("update", "moves"), [("trained", False), ("shares", True)])
def test_a_role_waits_for_its_first_step_and_only_the_actors_weights_count_as_changed(update, moves):
    roles = {
        "actor": RoleConfig(update=RoleUpdate.trained, from_step=2),
        "critic": RoleConfig(init="actor", update=RoleUpdate(update), head="value"),
    }
    trainer = Trainer()
    made = learner(trainer, terms=[term(), term("value", weighted=False, role="critic")], roles=roles)
    step(made, [group(0, 1.0, 0.0)], 1)
    columns = trainer.updates[0].columns
    assert not columns["weight.clip"].any() and columns["weight.value"].any()
    assert made.changed is moves
    step(made, [group(0, 1.0, 0.0)], 2)
    assert trainer.updates[1].columns["weight.clip"].any() and made.changed


def test_demonstrations_with_several_updates_need_no_pass():
    trainer = Trainer()
    made = learner(trainer, stages={}, terms=[term("sft", (), weighted=False)], updates_per_step=2)
    step(made, [group(0, None), group(1, None)])
    assert trainer.order == ["update", "update"] and made.changed


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_score_names_the_trajectory_and_a_masked_one_does_not_matter(bad):
    values = np.full(6, -1.0, np.float32)
    values[3] = bad  # a prompt token
    about = {"terms": [term(needs=("advantages", "proximal_logprobs"))]}
    step(learner(Trainer({"proximal_logprobs": values.copy()}), **about), [group(0, 1.0, 0.0)])
    values[5] = bad
    with pytest.raises(
        LearnerError, match=r"'proximal_logprobs' from the score pass is .* token 2 of .*'toy:train:0#0/1/0'"
    ):
        step(learner(Trainer({"proximal_logprobs": values}), **about), [group(0, 1.0, 0.0)])


def test_roles_are_refreshed_after_the_updates_of_their_step():
    roles = REFERENCE | {"old": RoleConfig(init="actor", update=RoleUpdate.ema, decay=0.9)}
    trainer = Trainer()
    made = learner(trainer, roles=roles, terms=[term(needs=("reference.logprobs", "old.logprobs"))])
    for number in range(3):
        step(made, [group(0, 1.0, 0.0)], number)
    old = ("main", "old", "actor", 0.9)
    assert trainer.blends == [old, old, ("main", "reference", "actor", 0.0), old]
    assert [done for done in trainer.order if done != "score"][:2] == ["update", "blend"]


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"roles": REFERENCE}, "nothing reads the role 'reference'"),
        ({"stages": {}}, "needs column 'advantages', and nothing writes it"),
        ({"terms": []}, "has no term"),
        ({"terms": [term(dynamic=True)]}, "has no term"),
        ({"terms": [term(needs=("reference.logprobs",))]}, "needs the role 'reference'"),
        ({"keys": AlgorithmKeys(aggregation="constant")}, "constant_length"),
        ({"stages": {"advantages": []}}, "holds no stages"),
        ({"stages": {"advantage": [("a", centred()), ("b", centred())]}}, "which 'a' .advantage. writes too"),
        ({"stages": {"penalties": [("p", centred())]}}, "a penalty writes reward.<name>"),
        (
            {
                "stages": {
                    "reward_kl": [("rkl", Stage(lambda b: b, gives=("reward_kl",)))],
                    "advantage": [("group", centred())],
                }
            },
            "reward_kl is set, and the advantage .'group'. does not use it",
        ),
        (
            {
                "stages": {
                    "penalties": [("p", Stage(lambda b: b, ("reward.p",), needs=("advantages",)))],
                    "advantage": [("a", centred())],
                }
            },
            "is written only after it",
        ),
        (  # every advantage would be NaN
            {
                "stages": {"advantage": [("a", Stage(lambda b: b, ("advantages",), needs=("reward",)))]},
                "keys": AlgorithmKeys(episodes="demonstrations"),
            },
            "the stage 'a' .advantage. reads the reward, and demonstrations have none",
        ),
        (
            {
                "stages": {"corrections": [("tis", Stage(lambda b: b, ("correction_weight",)))]},
                "terms": [term(weighted=False, needs=())],
            },
            "the correction 'tis' weighs the policy term, and there is none",
        ),
        (
            {"stages": {}, "terms": [term(weighted=False, needs=()), term(dynamic=True, needs=())]},
            "weighs the policy term, and there is none",
        ),
    ],
)
def test_parts_that_cannot_work_together_are_refused_before_the_run(about, message):
    with pytest.raises(CombinationError, match=message):
        learner(Trainer(), **about)


def test_an_extension_column_satisfies_a_need():
    made = learner(Trainer(), terms=[term(needs=("advantages", "r3.mass"))], specs=[spec("r3.mass")])
    assert made.outputs == ()


def test_max_new_tokens_is_the_length_of_constant():
    trainer = Trainer()
    step(learner(trainer, keys=AlgorithmKeys(aggregation="constant"), max_new_tokens=8), [group(0, 1.0, 0.0)])
    np.testing.assert_allclose(trainer.updates[0].columns["weight.clip"][1], 1 / 16)


def test_a_stage_writes_what_it_declares():
    stages = {"advantage": [("a", Stage(lambda b: {"advantages": np.zeros(b.units), "more": np.zeros(b.units)}))]}
    with pytest.raises(LearnerError, match=r"declares \['advantages'\] and wrote \['advantages', 'more'\]"):
        step(learner(Trainer(), stages=stages), [group(0, 1.0, 0.0)])


def test_a_backend_that_does_not_score_what_was_asked_is_named():
    class Lazy(Trainer):
        async def score(self, batch, outputs):
            return {"something": np.zeros(batch.units)}

    with pytest.raises(LearnerError, match=r"scored \['something'\], not 'proximal_logprobs'"):
        step(learner(Lazy(), terms=[term(needs=("advantages", "proximal_logprobs"))]), [group(0, 1.0, 0.0)])


def test_a_gradient_that_is_not_finite_stops_the_run():
    trainer = Trainer(results=[UpdateResult(metrics={}, grad_norm=float("nan"))])
    with pytest.raises(LearnerError, match="step 3, update 0: the gradient norm is nan"):
        step(learner(trainer), [group(0, 1.0, 0.0)], 3)


def test_an_update_that_the_backend_skipped_is_counted():
    trainer = Trainer(results=[UpdateResult(metrics={}, grad_norm=0.0, skipped="zero denominator")])
    made = learner(trainer)
    metrics = step(made, [group(0, 1.0, 0.0)])
    assert made.changed is False and metrics["train/skipped_updates"] == (1.0, 1.0) and "train/grad_norm" not in metrics
