"""Mixtures that mean nothing are refused before anything starts, with the reason; those that mean something bind."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from miles_core.config.compose import load
from miles_core.discovery import scan
from miles_core.driver import execute
from miles_core.errors import CombinationError, ConfigError

RUN = """
run: {name: mixture, seed: 7, steps: 2}
model: {use: toy, tokenizer: toy, architecture: {model_type: toy}}
renderer: toy
env: {use: toy}
rollout: {use: toy, max_new_tokens: 8}
backend: {use: toy}
sync: {use: toy}
schedule: {groups_per_step: 4, group_size: 4}
trackers: {jsonl: {}}
"""
ROLE = "roles.reference={init: actor, update: frozen}"


@pytest.fixture
def bind(tmp_path):
    """The run file with this section `algorithm`, under command-line values."""

    def load_it(algorithm, *overrides):
        (tmp_path / "run.yaml").write_text(f"{RUN}algorithm: {{{algorithm}}}\n")
        return load(tmp_path / "run.yaml", overrides, catalogue=scan())

    return load_it


REFUSED = [
    ("use: grpo, reward_kl: {use: reward_kl, coef: 0.1}", [ROLE], "algorithm.advantage (group) does not read it"),
    ("use: rloo, reward_kl: {use: reward_kl, coef: 0.1}", [ROLE], "algorithm.advantage (leave_one_out) does not read"),
    ("use: reinforce_pp, reward_kl: {coef: 0.1}", [], "algorithm.reward_kl (reward_kl) needs the role 'reference'"),
    ("use: grpo, kl: {coef: 0.1}", [], "algorithm.kl (kl) needs the role 'reference'"),
    ("use: grpo, kl: {estimator: k1, coef: 0.1}", [ROLE], "its gradient is 0 in expectation; use k2, or unbiased"),
    ("use: grpo, kl: {estimator: k2, unbiased: true}", [ROLE], "it corrects k1 and k3 only"),
    ("use: grpo, loss: {dual: 0.5}", [], "dual is 0.5; it must be above 1"),
    ("use: cispo", [], "algorithm.loss.hi must be given (how far the weight may rise above 1)"),
    (
        "advantage: {use: group}, loss: {use: clip, level: sequence}",
        [],
        "algorithm.loss (clip) weighs whole trajectories, and algorithm.aggregation is left to its default",
    ),
    ("use: grpo", ["schedule.group_size=1"], "algorithm.advantage (group) compares the episodes of a group"),
    ("use: rloo", ["schedule.group_size=1"], "algorithm.advantage (leave_one_out) compares"),
    ("use: reinforce_pp_baseline", ["schedule.group_size=1"], "algorithm.advantage (centred) compares"),
    ("use: dapo, advantage: {use: batch}", ["schedule.group_size=1"], "dynamic_sampling) compares the episodes"),
    ("use: dapo", ["schedule.max_staleness=1"], "algorithm.corrections names no off-policy correction"),
    ("use: dapo, penalties: {overlong: {max_length: 10, buffer: 11}}", [], "buffer is 11; it must be above 0"),
    ("use: grpo, loss: {lo: 1.5}", [], "algorithm.loss.lo is 1.5"),
]


@pytest.mark.parametrize(("text", "more", "words"), REFUSED, ids=[r[0] + " ".join(r[1]) for r in REFUSED])
def test_refused(bind, text, more, words):
    with pytest.raises(ConfigError) as error:
        bind(text, *more)
    assert words in str(error.value) and "Fix: " in str(error.value)


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("use: grpo, reward_kl: {use: reward_kl, coef: 0}", []),  # not built
        ("use: reinforce_pp, reward_kl: {coef: 0.1}", [ROLE]),
        ("use: reinforce_pp", ["schedule.group_size=1"]),
        ("use: reinforce_pp, advantage: {use: batch}", ["schedule.group_size=1"]),
        ("use: grpo, kl: {estimator: k1, unbiased: true, coef: 0.1}", [ROLE]),
        ("use: gspo", []),
        ("advantage: {use: group}, loss: {use: clip, level: sequence}, aggregation: token_mean", []),
        ("use: cispo, loss: {hi: 0.28}", []),
        ("use: dapo, loss: {dual: 3.0}", []),
        ("use: dr_grpo", []),
    ],
)
def test_bound(bind, text, more):
    assert bind(text, *more).policies


def run(run_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return asyncio.run(execute(run_file, scan(), threading.Event()))


#: Every preset's stages, penalties and filters over a toy policy; its torch term is replaced by the toys' own.
TOY_TERMS = "loss: {use: toy}, kl: null, entropy: null"
PRESETS = ["grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo", "reinforce_pp", "reinforce_pp_baseline"]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_presets_stages_run(bind, tmp_path, monkeypatch, preset):
    result = run(bind(f"use: {preset}, {TOY_TERMS}"), tmp_path, monkeypatch)
    assert result.status == "finished"


def metrics(name):
    lines = [json.loads(line) for line in Path("runs/mixture/metrics.jsonl").read_text().splitlines()]
    return [line[name]["value"] for line in lines if name in line]


@pytest.mark.parametrize("preset", ["reinforce_pp", "reinforce_pp_baseline"])
def test_kl_in_the_reward_is_scored_and_read(bind, tmp_path, monkeypatch, preset):
    text = f"use: {preset}, {TOY_TERMS}, reward_kl: {{coef: 0.5}}"
    assert run(bind(text, ROLE, "optimizer.lr=0.3", "run.steps=3"), tmp_path, monkeypatch).status == "finished"
    kl = metrics("train/reward_kl/kl")
    assert kl[0] == 0.0 and kl[-1] != 0.0  # the reference stays where the actor began


def test_the_penalty_of_dapo_is_added_to_the_reward(bind, tmp_path, monkeypatch):
    text = f"use: dapo, {TOY_TERMS}, penalties: {{overlong: {{max_length: 1, buffer: 1}}}}"
    assert run(bind(text), tmp_path, monkeypatch).status == "finished"
    penalised, penalty = metrics("rollout/reward_penalised"), metrics("rollout/reward.overlong")
    assert penalty == [-1.0, -1.0]
    assert penalised == pytest.approx([r - 1.0 for r in metrics("rollout/reward")])


def test_a_stage_that_does_not_read_the_kl_of_the_reward_is_refused(bind, tmp_path, monkeypatch):
    text = f"use: reinforce_pp, {TOY_TERMS}, reward_kl: {{coef: 0.5}}, advantage: {{use: batch}}"
    with pytest.raises(CombinationError, match=r"the advantage \['batch'\] does not use it"):
        run(bind(text, ROLE), tmp_path, monkeypatch)


def test_filters_are_counted(bind, tmp_path, monkeypatch):
    run(bind(f"use: dapo, {TOY_TERMS}"), tmp_path, monkeypatch)
    events = [json.loads(line) for line in Path("runs/mixture/events.jsonl").read_text().splitlines()]
    words = json.dumps(events) + Path("runs/mixture/metrics.jsonl").read_text()
    assert "dynamic_sampling" in words or "all rewards are equal" in words
