"""Mixtures that mean nothing, over the plugins of this repository: each is refused before anything starts, with its
reason and a way out, and without it the file is fine. Nothing is built: this is what `miles plan` and `miles run` do
with a file before they look at a model."""

import re

import pytest

from miles_core.compatibility import match_capabilities
from miles_core.config.compose import load
from miles_core.config.rules import violations
from miles_core.discovery import scan
from miles_core.errors import MilesError
from miles_core.provider import Provider

BASE = """
run: {name: mixture}
model: {use: causal-lm, source: ./tiny}
env: {use: arithmetic}
rollout: {use: local, max_new_tokens: 8}
backend: {use: fsdp}
sync: {use: bucketed}
algorithm: {use: grpo}
schedule: {groups_per_step: 4, group_size: 4}
"""
REFERENCE = "roles.reference={init: actor, update: frozen}"
TEACHER = ("scorers={far: {use: http-teacher, url: 'http://127.0.0.1:1'}}", "roles.teacher={scorer: far}")
#: name -> (what both have, what makes it fine, what makes it a mixture, what the message says, what the fix says).
SFT = ("algorithm={use: sft}", "schedule.group_size=1")
DPO = ("algorithm={use: dpo}", "schedule.group_size=2")
PPO = ("algorithm={use: ppo}",)
CRITIC = "roles.critic={init: actor, update: trained, head: value}"
MIXTURES = {
    # --- off-policy ---
    "asynchronous without a choice": (
        [],
        [],
        ["schedule.max_staleness=1"],
        r"max_staleness is 1 \(asynchronous\), and algorithm.corrections names no off-policy correction",
        r"off_policy=uncorrected, or schedule.max_staleness=0, or add a correction .*: .*tis.*opsm",
    ),
    "a correction of demonstrations": (
        SFT,
        [],
        ["algorithm.corrections={tis: {}}"],
        r"corrections.tis \(tis\) compares with what an engine sampled, and demonstrations have no behaviour",
        "remove algorithm.corrections.tis",
    ),
    "a dynamic weight of demonstrations": (
        SFT,
        [],
        ["algorithm.corrections={opsm: {}}"],
        r"corrections.opsm \(opsm\) compares with what an engine sampled",
        "remove algorithm.corrections.opsm",
    ),
    "bypass beside another correction": (
        [],
        ["algorithm.corrections={bypass: {}, opsm: {}}"],
        ["algorithm.corrections={bypass: {}, tis: {}}"],
        r"bypass puts π_b in place of π_p: the ratio corrects all, algorithm.corrections.tis would do so once more",
        "remove algorithm.corrections.bypass or algorithm.corrections.tis",
    ),
    "bypass without a ratio": (
        ["algorithm.corrections={bypass: {}}"],
        [],
        ["algorithm.loss={use: reinforce}"],
        r"bypass leaves all to the ratio of the policy term, and algorithm.loss \(reinforce\) has none",
        "use clip",
    ),
    "a weight that compares π with itself": (
        ["algorithm.corrections={opsm: {base: proximal}}"],
        ["schedule.updates_per_step=2"],
        [],
        r"opsm\) compares π with π_p, and they are the same while schedule.updates_per_step is 1",
        "remove algorithm.corrections.opsm, or compare with what the engine sampled",
    ),
    "the mean of geometric means": (
        [],
        ["algorithm.corrections={mis: {normalize: batch}}"],
        ["algorithm.corrections={mis: {normalize: batch, level: geometric}}"],
        r"normalize is 'batch' with level 'geometric'",
        "change the values under algorithm.corrections.mis",
    ),
    "a lower bound of what has none": (
        [],
        ["algorithm.corrections={mis: {low: 0.3, mode: clip}}"],
        ["algorithm.corrections={mis: {low: 0.3}}"],
        r"low is 0.3 with mode 'truncate', which has no lower bound",
        "change the values",
    ),
    "an average that forgets all": (
        ["algorithm.kl={coef: 0.1}"],
        ["roles.reference={init: actor, update: ema, decay: 0.9}"],
        ["roles.reference={init: actor, update: ema}"],
        r"roles.reference.update is 'ema' and its decay is 0: a copy",
        "give roles.reference.decay, e.g. 0.99, or write copy",
    ),
    "bounds without 1": (
        [],
        ["algorithm.corrections={icepop: {low: 0.9}}"],
        ["algorithm.corrections={icepop: {low: 1.1}}"],
        r"low is 1.1 and high is 5; on-policy tokens have w = 1",
        "change the values",
    ),
    # --- sampling ---
    "top-p without a keep-mask": (
        ["rollout.top_p=0.9"],
        [],
        ["no keep_ids"],
        r"rollout.top_p is 0.9, and 'local' does not offer keep_ids: training could not know which tokens were kept",
        "top_p: 1.0",
    ),
    "greedy sampling to train on": ([], [], ["rollout.temperature=0"], "temperature is 0", "write 1.0"),
    # --- ratios and aggregation ---
    "sequence ratios with the aggregation left implicit": (
        ["no preset", "algorithm={loss: {use: clip, level: sequence}, advantage: {use: group}}"],
        ["algorithm.aggregation=token_mean"],
        [],
        r"algorithm.loss \(clip\) weighs whole trajectories, and algorithm.aggregation is left to its default",
        "aggregation=episode_mean",
    ),
    "a constant length that nobody gives": (
        [*SFT, "algorithm.aggregation=constant", "rollout=null", "sync=null"],
        ["algorithm.constant_length=8"],
        [],
        "aggregation is constant, and there is no rollout whose max_new_tokens could be its length",
        "add algorithm.constant_length",
    ),
    "a dual bound that is none": ([], [], ["algorithm.loss={dual: 1.0}"], "dual is 1.0; it must be above 1", "change"),
    "cispo without an upper bound": (
        ["algorithm={use: cispo}"],
        ["algorithm.loss.hi=4.0"],
        [],
        r"algorithm.loss.hi must be given",
        "add algorithm.loss.hi",
    ),
    # --- KL ---
    "plain k1 as a loss": (
        [REFERENCE, "algorithm.kl={coef: 0.1, estimator: k1}"],
        ["algorithm.kl.unbiased=true"],
        [],
        r"estimator is 'k1': its gradient is 0 in expectation",
        "change the values under algorithm.kl",
    ),
    "unbiased k2": (
        [REFERENCE, "algorithm.kl={coef: 0.1, estimator: k2}"],
        [],
        ["algorithm.kl.unbiased=true"],
        "it corrects k1 and k3 only",
        "change the values under algorithm.kl",
    ),
    "a KL in the reward that the advantage does not read": (
        [REFERENCE, "algorithm.reward_kl={coef: 0.1}"],
        ["algorithm.advantage={use: centred}"],
        [],
        r"algorithm.reward_kl is given, and algorithm.advantage \(group\) does not read it",
        "use algorithm.kl",
    ),
    # --- groups ---
    "a group of one with a group baseline": (
        [],
        [],
        ["schedule.group_size=1"],
        r"group_size is 1, and algorithm.advantage \(group\) compares the episodes of a group: nothing to learn",
        "group_size=8",
    ),
    "a rank in a group of one": (
        [*PPO, CRITIC, "schedule.group_size=1"],
        [],
        ["algorithm.penalties={rank: {}}"],
        r"penalties.rank \(rank\) compares the episodes of a group",
        "group_size=8",
    ),
    "more updates than groups": ([], [], ["schedule.updates_per_step=5"], "a group is never split", "or less"),
    "nothing to learn": (
        [],
        ["algorithm.loss={coef: 0.5}"],
        ["algorithm.loss={coef: 0.0}"],
        "loss has the coefficient 0",
        "give it one",
    ),
    # --- demonstrations and preferences ---
    "demonstrations that are stale": (
        SFT,
        [],
        ["schedule.max_staleness=1"],
        "demonstrations are not sampled and cannot be stale",
        "write 0",
    ),
    "preferences out of samples": (
        [*DPO, REFERENCE],
        [],
        ["algorithm.episodes=sampled"],
        r"\(dpo\) learns from pairs of demonstrations, and episodes are sampled",
        "episodes=demonstrations",
    ),
    "preferences that are no pairs": (
        ["algorithm={use: dpo}", REFERENCE],
        ["schedule.group_size=2"],
        ["schedule.group_size=3"],
        r"demonstrations are a pair \(chosen, rejected\) a task",
        "write 2",
    ),
    # --- roles and distillation ---
    "an advantage over values that no critic gives": (
        PPO,
        [CRITIC],
        [],
        r"\((gae|value)\) needs the role 'critic'",
        "roles.critic",
    ),
    "a critic without a value head": (
        PPO,
        [CRITIC],
        ["roles.critic={init: actor, update: trained}"],
        r"roles.critic.head is 'lm', and algorithm.advantage needs its values",
        "roles.critic.head: value",
    ),
    "a value loss for a critic that is not trained": (
        PPO,
        ["roles.critic={init: actor, update: frozen, head: value}", "algorithm.value.coef=0"],
        ["roles.critic={init: actor, update: frozen, head: value}"],
        r"roles.critic.update is 'frozen', and algorithm.value would train it",
        "update: trained, or shares",
    ),
    "a trained critic that no term trains": (
        [],
        ["roles.critic={init: actor, update: frozen, head: value}"],
        [CRITIC],
        r"roles.critic.update is 'trained', and no term trains it: algorithm.value trains 'critic', others the actor",
        "remove roles.critic, give algorithm.value a plugin and a coefficient, or write roles.critic.update: frozen",
    ),
    "a trained critic whose term is off": (
        [*PPO, CRITIC],
        [],
        ["algorithm.value.coef=0"],
        r"roles.critic.update is 'trained', and no term trains it",
        "roles.critic.update: frozen",
    ),
    "a trained role that no term can train": (
        ["algorithm.kl={coef: 0.1}"],
        [REFERENCE],
        ["roles.reference={init: actor, update: trained}"],
        r"roles.reference.update is 'trained', and no term trains it",
        "remove roles.reference, or write roles.reference.update: frozen where it is only scored",
    ),
    "a policy that waits on a critic's trunk that moves": (
        [*PPO, "roles.actor={from_step: 5}"],
        [CRITIC],
        ["roles.critic={init: actor, update: shares, head: value}"],
        r"roles.actor.from_step is 5, and roles.critic shares the actor's model: the value loss would move it",
        "update: trained, or from_step: 0",
    ),
    "a reference that is not in the run": (DPO, [REFERENCE], [], "needs the role 'reference'", "roles.reference"),
    "student support with an HTTP teacher": (
        ["algorithm={use: opd_topk, distill: {k: 4}}", *TEACHER],
        ["algorithm.distill.support=teacher"],
        ["algorithm.distill.support=student"],
        "scores ids that the trainer chooses, and roles.teacher is the scorer 'far'",
        r"source instead of a scorer, or let the role choose the ids \(support: teacher\)",
    ),
    "the union's support with an HTTP teacher": (
        ["algorithm={use: opd_topk, distill: {k: 4}}", *TEACHER],
        ["algorithm.distill.support=teacher"],
        ["algorithm.distill.support=union"],
        "scores ids that the trainer chooses",
        "support: teacher",
    ),
    "distillation of demonstrations": (
        [*SFT, "roles.teacher={init: actor, update: frozen}"],
        [],
        ["algorithm.distill={use: opd}"],
        r"\(opd\) compares with what an engine sampled",
        "remove algorithm.distill",
    ),
    # --- rewards ---
    "a composition of nothing": (
        [],
        ["algorithm.penalties={mix: {use: compose, base: 0.5}}"],
        ["algorithm.penalties={mix: {use: compose}}"],
        "nothing would be composed",
        "change the values under algorithm.penalties.mix",
    ),
    "a pattern that is none": (
        [],
        ["scorers={tidy: {use: format, pattern: '[0-9]'}}"],
        ["scorers={tidy: {use: format, pattern: '['}}"],
        "no regular expression",
        "change the values under scorers.tidy",
    ),
}


def refusals(tmp_path, overrides):
    """Every reason for which this file does not run, as `miles plan` lists them."""
    text = BASE
    if "no preset" in overrides:
        text = text.replace("algorithm: {use: grpo}\n", "")
    (tmp_path / "run.yaml").write_text(text)
    given = [o for o in overrides if "=" in o]
    try:
        run_file = load(tmp_path / "run.yaml", given, catalogue=scan(), check=False)
    except MilesError as error:
        return [error]
    found = list(violations(run_file, scan()))
    try:
        match_capabilities(run_file, scan())
    except MilesError as error:
        found.append(error)
    return found


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_is_refused_with_its_reason(name, tmp_path, monkeypatch):
    both, fine, mixed, message, fix = MIXTURES[name]
    assert [str(e) for e in refusals(tmp_path, [*both, *fine])] == []
    if "no keep_ids" in mixed:
        offered = Provider.offered
        monkeypatch.setattr(Provider, "offered", lambda self, config: offered(self, config) - {"keep_ids"})
    found = refusals(tmp_path, [*both, *mixed])
    assert found and all(e.exit_code == 2 and e.fix for e in found)
    told = [e for e in found if re.search(message, e.message)]
    assert told and re.search(fix, told[0].fix), [str(e) for e in found]
