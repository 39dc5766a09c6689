"""Run files: sugar, presets, precedence, origins, and what bad input gets."""

import json
import pickle
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles_core.config.compose import from_tree, load, reload
from miles_core.config.reading import parse, read_origins, read_overrides, read_yaml
from miles_core.errors import (
    CombinationError,
    ConfigError,
    ConfigRangeError,
    ConfigTypeError,
    MilesError,
    PluginContractError,
    UnknownKeyError,
    UnknownPluginError,
)
from miles_core.run import annotated_yaml, flatten

BASE = """
run: {name: quickstart, seed: 7, steps: 60}
model: {use: causal-lm, source: ./tiny}
env: {use: arithmetic, digits: 5}
rollout: {use: toy, max_new_tokens: 12}
backend: {use: sgd}
sync: {use: bucketed, bucket_mib: 64}
algorithm: {use: grpo, advantage: {use: group, scale: none}}
schedule: {groups_per_step: 16, group_size: 8}
"""


@pytest.fixture
def compose(plugins, tmp_path):
    catalogue = plugins.parts().catalogue()

    def run(text=BASE, *overrides, **more):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return load(path, overrides, catalogue=catalogue, **more)

    run.catalogue = catalogue
    run.plugins = plugins
    return run


def refused(error_type, compose, text, *overrides):
    with pytest.raises(error_type) as error:
        compose(text, *overrides)
    return f"{error.value.message}\nFix: {error.value.fix}"


# --- what a file means -----------------------------------------------------------------------------------------------


def test_the_blueprints_example(compose, tmp_path):
    run = compose()
    assert (run.run.name, run.run.seed, run.run.steps, run.run.folder) == ("quickstart", 7, 60, str(tmp_path))
    main = run.policies["main"]
    assert list(run.policies) == ["main"] and main.share == 1
    assert main.model.core.source == "./tiny" and main.model.use == "causal-lm"
    assert list(main.envs) == ["arithmetic"] and main.envs["arithmetic"].options.digits == 5
    assert main.envs["arithmetic"].core.weight == 1.0
    engine = run.engines["toy"]
    assert (engine.core.count, engine.core.max_new_tokens, engine.options.slots) == (1, 12, 64)
    assert (run.sync.options.bucket_mib, run.sync.core.verify) == (64, "live")
    assert main.schedule.groups_per_step == 16 and main.schedule.max_staleness == 0
    assert run.launcher.use == "inline" and list(run.trackers) == ["console", "jsonl"]
    assert main.renderer.use == "text" and main.roles["actor"].update == "trained"
    algorithm = main.algorithm
    assert algorithm.preset == "grpo" and algorithm.keys.aggregation == "episode_mean"
    assert algorithm.one("advantage").options.scale == "none"
    assert (algorithm.one("loss").use, algorithm.one("loss").core.coef, algorithm.one("loss").options.lo) == (
        *("clip", 1.0),
        0.2,
    )
    assert algorithm.one("kl").core.coef == 0.0 and algorithm.one("value") is None


def test_origins_name_every_leaf(compose):
    run = compose(BASE, "schedule.group_size=4", "algorithm.kl.coef=0.1")
    o = run.origins
    assert o["run.seed"] == "file" and o["run.threads"] == "default"
    assert o["schedule.group_size"] == "command line" and o["schedule.groups_per_step"] == "file"
    assert o["algorithm.advantage.scale"] == "file" and o["algorithm.advantage.eps"] == "default"
    assert o["algorithm.loss.lo"] == "preset grpo" and o["algorithm.loss.hi"] == "default"
    assert o["algorithm.kl.coef"] == "command line" and o["algorithm.kl.estimator"] == "preset grpo"
    assert o["launcher.use"] == "default"

    def leaves(tree, path=""):
        for key, value in tree.items():
            at = f"{path}.{key}" if path else key
            yield from leaves(value, at) if isinstance(value, dict) and value else [at]

    assert set(leaves(run.tree)) == set(o)


def test_the_same_plugin_keeps_the_presets_keys_and_another_discards_them(compose):
    text = BASE.replace("advantage: {use: group, scale: none}", "loss: {use: clip, hi: 0.28}, kl: {coef: 0.5}")
    loss = compose(text).policies["main"].algorithm.one("loss")
    assert (loss.options.lo, loss.options.hi) == (0.2, 0.28)
    run = compose(BASE, "algorithm.loss=reinforce")
    assert run.policies["main"].algorithm.one("loss").use == "reinforce" and "lo" not in run.tree["algorithm"]["loss"]


def test_another_plugin_over_a_preset_discards_even_cores_keys(compose):
    [kl] = compose(BASE, "algorithm.kl.use=other_kl").policies["main"].algorithm.many("kl")
    assert kl.core.coef == 1.0  # the preset's 0 was meant for its own plugin
    text = BASE.replace("algorithm: {use: grpo,", "algorithm: {use: grpo, kl: {use: kl, coef: 0.5},")
    [kl] = compose(text, "algorithm.kl.use=other_kl").policies["main"].algorithm.many("kl")
    assert kl.core.coef == 0.5  # the file's own word stays


def test_parts_have_different_names(compose):
    algorithm = compose(BASE, "algorithm.advantage=batch", "algorithm.reward_kl=kl").policies["main"].algorithm
    assert [p.name for field in ("reward_kl", "kl") for p in algorithm.many(field)] == ["kl", "kl-kl"]
    message = refused(ConfigError, compose, BASE, "algorithm.corrections.group.use=opsm")
    assert message == ("algorithm.corrections.group: another part of algorithm has that name\nFix: rename the instance")


def test_choosing_another_plugin_on_the_command_line_keeps_cores_keys(compose):
    run = compose(BASE.replace("bucket_mib: 64", "bucket_mib: 64, min_engines: 1, deadline_s: 5"), "sync.use=p2p")
    assert run.sync.use == "p2p" and run.sync.core.deadline_s == 5.0
    assert run.origins["sync.deadline_s"] == "file" and run.origins["sync.use"] == "command line"
    run = compose(BASE, "rollout.use=plain")
    assert run.engines["plain"].core.max_new_tokens == 12


def test_null_removes_an_instance_and_a_part(compose):
    run = compose(BASE, "trackers.console=null", "trackers.paper={}", "algorithm.kl=null", "algorithm.entropy=null")
    assert list(run.trackers) == ["jsonl", "paper"]
    assert list(run.policies["main"].algorithm.parts) == ["advantage", "loss"]


def test_presets_build_on_presets_and_take_options(compose):
    run = compose(BASE.replace("algorithm: {use: grpo, advantage: {use: group, scale: none}}", "algorithm: dr_grpo"))
    algorithm = run.policies["main"].algorithm
    assert (algorithm.preset, algorithm.keys.aggregation) == ("dr_grpo", "constant")
    assert algorithm.one("advantage").options.scale == "none" and algorithm.one("loss").options.lo == 0.2
    assert run.origins["algorithm.advantage.scale"] == "preset dr_grpo"
    assert run.origins["algorithm.loss.lo"] == "preset grpo"
    run = compose(BASE, "algorithm.use=cispo", "algorithm.hi=0.3")
    assert run.policies["main"].algorithm.one("loss").options.hi == 0.3
    assert run.tree["algorithm"]["hi"] == 0.3
    assert run.policies["main"].algorithm.one("advantage").options.scale == "none"  # the file's own word stays


def test_plural_sections_and_policies(compose):
    text = """
engines:
  main: {use: toy, count: 4}
  judge: {use: plain}
backend: sgd
sync: bucketed
policies:
  alice:
    share: 2
    model: {use: causal-lm, source: a}
    envs: {math: {use: arithmetic, weight: 0.7}, jsonl: {}}
    algorithm: {use: grpo}
    optimizer: {lr: 1e-3}
  bob:
    model: {use: causal-lm, source: b}
    env: arithmetic
    algorithm:
      advantage: batch
      loss: reinforce
      corrections: {tis: {high: 3}, second: {use: opsm}}
    schedule: {max_staleness: 2}
    roles: {reference: {init: actor}}
"""
    run = compose(text)
    assert list(run.engines) == ["main", "judge"] and run.engines["judge"].use == "plain"
    alice, bob = run.policies["alice"], run.policies["bob"]
    assert (alice.share, bob.share) == (2, 1)
    assert [(e.name, e.use, e.core.weight) for e in alice.envs.values()] == [
        *[("math", "arithmetic", 0.7), ("jsonl", "jsonl", 1.0)]
    ]
    assert alice.roles["actor"].optimizer.lr == 1e-3
    assert [(c.name, c.kind) for c in bob.algorithm.many("corrections")] == [("tis", "stage"), ("second", "term")]
    assert bob.algorithm.many("corrections")[0].core is None and bob.algorithm.many("corrections")[1].core is None
    assert bob.algorithm.preset == "" and bob.roles["reference"].update == "frozen"
    assert run.origins["policies.alice.algorithm.loss.lo"] == "preset grpo"
    assert {p.kind for p in run.parts()} >= {"rollout", "backend", "sync", "model", "env", "stage", "term", "renderer"}


def test_demonstrations_need_no_engine_and_one_episode_a_task(compose):
    text = "model: {use: causal-lm, source: a}\nenv: arithmetic\nbackend: sgd\nalgorithm: sft\n"
    run = compose(text)
    assert run.engines == {} and run.sync is None
    assert run.policies["main"].schedule.group_size == 1 and run.origins["schedule.group_size"] == "default"


REFERENCE = "roles: {reference: {init: actor}}\n"
SHOWN = "model: {use: causal-lm, source: a}\nenv: arithmetic\nbackend: sgd\n"


def test_preferences_are_pairs_of_demonstrations(compose):
    run = compose(SHOWN + REFERENCE + "algorithm: dpo\n")
    assert run.policies["main"].schedule.group_size == 2 and run.origins["schedule.group_size"] == "default"
    with pytest.raises(
        CombinationError, match=r"schedule.group_size is 1, but demonstrations are a pair .*\n.*write 2"
    ):
        compose(SHOWN + REFERENCE + "algorithm: dpo\n", "schedule.group_size=1")
    with pytest.raises(CombinationError, match=r"algorithm.loss \(dpo\) learns from pairs .*episodes are sampled"):
        compose(BASE + REFERENCE, "algorithm.loss=dpo")
    with pytest.raises(CombinationError, match=r"\(dpo\) needs the role 'reference'; roles: actor\nFix: add roles.ref"):
        compose(SHOWN + "algorithm: dpo\n")


def test_a_sequence_ratio_needs_an_aggregation_that_somebody_chose(compose):
    loss = "algorithm: {advantage: batch, loss: sequence}"
    text = BASE.replace("algorithm: {use: grpo, advantage: {use: group, scale: none}}", loss)
    with pytest.raises(
        CombinationError, match=r"\(sequence\) weighs whole .*algorithm.aggregation is left to its defa"
    ):
        compose(text)
    assert compose(text, "algorithm.aggregation=episode_mean")
    assert compose(BASE, "algorithm.loss=sequence")  # the preset said it


def test_demonstrations_have_no_behaviour_to_correct_for(compose):
    with pytest.raises(CombinationError, match=r"opsm\) compares with what an engine sampled"):
        compose(SHOWN + "algorithm: {use: sft, corrections: {opsm: {}}}\n")


TEACHER = "scorers: {far: {use: remote}}\nroles: {teacher: {scorer: far}}\n"


def test_a_scorer_cannot_be_asked_for_ids_that_the_student_chose(compose):
    assert compose(BASE + TEACHER).policies["main"].roles["teacher"].scorer == "far"
    with pytest.raises(CombinationError, match=r"\(student\) scores ids .*roles.teacher is the scorer 'far'"):
        compose(BASE + TEACHER, "algorithm.distill=student")
    assert compose(BASE + "roles: {teacher: {source: b}}\n", "algorithm.distill=student")
    for key in ("init=actor", "source=b", "update=trained"):
        with pytest.raises(CombinationError, match=r"roles.teacher is the scorer 'far' and a model too"):
            compose(BASE + TEACHER, f"roles.teacher.{key}")
    with pytest.raises(CombinationError, match=r"roles.teacher.scorer is 'near'; scorers: far"):
        compose(BASE + TEACHER, "roles.teacher.scorer=near")


JUDGED = (
    BASE.replace("rollout: {use: toy, max_new_tokens: 12}", "engines: {main: {use: toy}, judge: {use: reader}}")
    + "roles: {teacher: {source: b, engine: judge}}\n"
)


def test_an_engine_may_hold_a_role_and_then_samples_nothing(compose):
    run = compose(JUDGED)
    assert list(run.engines) == ["main"] and list(run.judges) == ["judge"]
    assert {p.name for p in run.parts() if p.kind == "rollout"} == {"main", "judge"}
    assert list(from_tree(json.loads(json.dumps(run.tree)), compose.catalogue).judges) == ["judge"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "roles.teacher={init: actor, source: '', engine: judge}",
            r"is the engine .judge., and has init",
        ),
        ("roles.teacher.update=trained", r"and has init, scorer or an update too"),
        ("roles.teacher.engine=jury", r"roles.teacher.engine is 'jury'; engines: main, judge"),
        ("engines.judge.use=plain", r"is 'plain', which does not offer prompt_logprobs, weights.checkpoint"),
        ("engines.judge.count=2", r"engines.judge has count 2 and 1 roles; it holds one model, once"),
        ("roles.other={engine: judge}", r"has count 1 and 2 roles"),
        ("engines.main.temperature=0.7", r"engines.main samples with temperature 0.7.*scores prompts at temperature 1"),
        ("engines.main.top_k=5", r"engines.main samples with .*top_k 5.*scores prompts at temperature 1"),
        ("algorithm.distill=student", r"roles.teacher is the engine 'judge', which chooses its own"),
    ],
)
def test_what_does_not_suit_a_role_in_an_engine(compose, override, said):
    with pytest.raises(CombinationError, match=said):
        compose(JUDGED, override)


def test_an_extension_may_change_the_draft_and_the_command_line_stays_above_it(compose):
    run = compose(BASE, "extensions.faster={}", "sync.bucket_mib=32")
    assert run.policies["main"].schedule.groups_per_step == 32
    assert run.origins["schedule.groups_per_step"] == "extension faster"
    assert run.origins["schedule.group_size"] != "extension faster"
    assert run.origins["env.use"] == "file"
    assert run.sync.options.bucket_mib == 32 and run.origins["sync.bucket_mib"] == "command line"


def test_the_optimizer_section_is_the_actors(compose):
    assert compose(BASE, "optimizer.lr=0.5").policies["main"].roles["actor"].optimizer.lr == 0.5
    run = compose(BASE, "roles.actor.optimizer.lr=0.25")
    assert run.policies["main"].roles["actor"].optimizer.lr == 0.25 and run.tree["optimizer"]["lr"] == 0.25
    critic = "roles: {critic: {init: actor, update: trained, head: value, optimizer: {lr: 0.1}}}\n"
    shared = compose(BASE + critic, "roles.critic.update=shares", "roles.critic.optimizer=null")
    assert shared.policies["main"].roles["critic"].update == "shares"
    message = refused(CombinationError, compose, BASE, "optimizer.lr=0.5", "roles.actor.optimizer.lr=0.25")
    assert message == "optimizer and roles.actor.optimizer are one section, given twice\nFix: keep one"


def test_the_resolved_tree_is_a_run_file(compose, tmp_path):
    run = compose(
        BASE, "algorithm.use=cispo", "algorithm.hi=0.3", "trackers.console=null", "roles.reference.init=actor"
    )
    again = from_tree(json.loads(json.dumps(run.tree)), compose.catalogue)
    assert again.tree == run.tree and again == from_tree(again.tree, compose.catalogue)
    assert again.policies == run.policies and again.origins["run.seed"] == "resolved"
    assert from_tree(run.tree, compose.catalogue, run.origins) == run
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text("\n".join(annotated_yaml(run.tree, run.origins)) + "\n")
    assert read_yaml(resolved) == run.tree
    assert load(resolved, catalogue=compose.catalogue).tree == run.tree
    assert reload(tmp_path, catalogue=compose.catalogue) == run
    assert pickle.loads(pickle.dumps(run.tree)) == run.tree


def test_what_was_removed_stays_removed_when_the_tree_is_read_as_a_file(compose, tmp_path):
    run = compose(BASE, "algorithm.kl=null", "trackers.console=null")
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text("\n".join(annotated_yaml(run.tree, run.origins)) + "\n")
    again = load(resolved, catalogue=compose.catalogue)
    assert again.tree == run.tree and again.policies["main"].algorithm.one("kl") is None
    assert list(again.trackers) == ["jsonl"]


def test_a_map_that_was_removed_stays_removed_too(compose, tmp_path):
    run = compose(BASE, "trackers=null")
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text("\n".join(annotated_yaml(run.tree, run.origins)) + "\n")
    assert run.trackers == {} and load(resolved, catalogue=compose.catalogue).trackers == {}


def test_a_resume_takes_command_line_values_and_asks_nobody_again(compose):
    run = compose(BASE, "extensions.faster={}")
    again = from_tree(run.tree, compose.catalogue, run.origins, ["run.steps=99"])
    assert (again.run.steps, again.origins["run.steps"]) == (99, "command line")
    assert again.policies["main"].schedule.groups_per_step == 32
    assert again.origins["schedule.groups_per_step"] == "extension faster"


def test_the_result_is_frozen(compose):
    run = compose()
    with pytest.raises(TypeError, match="frozen"):
        run.tree["run"]["seed"] = 8
    with pytest.raises(TypeError, match="frozen"):
        run.policies.pop("main")
    with pytest.raises(AttributeError):
        run.run.seed = 8


NUMBERS = {
    **{"schedule.group_size": 2, "schedule.groups_per_step": 2, "run.seed": 0, "run.steps": 1, "eval.tasks": 1},
    **{"rollout.max_new_tokens": 1, "rollout.slots": 1, "env.digits": 1, "sync.bucket_mib": 1, "optimizer.lr": 0},
    **{"algorithm.loss.lo": 0, "algorithm.kl.coef": 0, "algorithm.advantage.eps": 0, "algorithm.loss.coef": 1},
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(sorted(NUMBERS)), st.integers(0, 500)), max_size=12))
def test_the_last_word_wins_and_its_origin_is_kept(compose, words):
    words = [(key, NUMBERS[key] + value) for key, value in words]
    run, last = compose(BASE, *(f"{key}={value}" for key, value in words)), dict(words)
    plain = compose(BASE)

    def at(tree, key):
        for name in key.split("."):
            tree = tree[name]
        return tree

    for key in NUMBERS:
        assert at(run.tree, key) == last.get(key, at(plain.tree, key))
        assert run.origins[key] == ("command line" if key in last else plain.origins[key])
    assert from_tree(run.tree, compose.catalogue).tree == run.tree


# --- what bad input gets ---------------------------------------------------------------------------------------------

WRONG = [
    (UnknownKeyError, "schedul.group_size=2", r"schedul is no known key; a run file has: .*\nFix: write schedule, .*"),
    (
        UnknownKeyError,
        "schedule.max_stalenes=2",
        r"schedule.max_stalenes is no known key; schedule has: .*\nFix: write schedule.max_staleness, if .*",
    ),
    (
        UnknownKeyError,
        "sync.bucket_mb=2",
        r"sync.bucket_mb is no known key; sync has: bucket_mib, .*, use, verify.*\n"
        r"Fix: write sync.bucket_mib, if that was meant",
    ),
    (UnknownKeyError, "run.group_size=2", r"run.group_size is no known key; .*\nFix: write schedule.group_size, if .*"),
    (
        UnknownKeyError,
        "algorithm.advantage={use:acme}",
        r".*use:acme is no .*\nFix: write a space after the colon: use: acme, .*",
    ),
    (UnknownKeyError, "run.zzz=2", r"run.zzz is no known key; .*\nFix: remove run.zzz"),
    (
        UnknownKeyError,
        "algorithm.advantag=group",
        r"algorithm.advantag is no known key; .*\nFix: write .*advantage, .*",
    ),
    (UnknownKeyError, "trackers.paper.x=1", r"trackers.paper.x is no known key; trackers.paper has: use\n.*"),
    (UnknownKeyError, "algorithm.loss.coeff=1", r"(?s).*\nFix: write algorithm.loss.coef, if that was meant"),
    (
        UnknownPluginError,
        "algorithm.corrections={icepop: {}}",
        r".* no stage plugin is named 'icepop'; .*\nFix: pip install miles-algo-correction",
    ),
    (UnknownPluginError, "rollout.use=toyy", r"rollout: no rollout plugin is named 'toyy'; .*\nFix: write 'toy', .*"),
    (UnknownPluginError, "algorithm.loss=clap", r"algorithm.loss: no term plugin is named 'clap'; .*\n.*'clip'.*"),
    (UnknownPluginError, "algorithm.use=grpoo", r"no algorithm plugin is named 'grpoo'; .*\nFix: write 'grpo', .*"),
    (ConfigTypeError, "run.steps=many", r"run.steps is 'many' \(str\); it must be int\nFix: write an int"),
    (ConfigTypeError, "run.steps=1.5", r"run.steps is 1.5 \(float\); it must be int\n.*"),
    (ConfigTypeError, "run.steps=true", r"run.steps is True \(bool\); it must be int\n.*"),
    (ConfigTypeError, "run.steps=null", r"run.steps is None \(null\); it must be int\n.*"),
    (ConfigTypeError, "run.name=0123", r'run.name is 123 \(int\); it must be str\nFix: quote it: "123"'),
    (ConfigTypeError, "env.ops=sort", r"env.ops is 'sort' \(str\); it must be list of str\n.*"),
    (ConfigTypeError, "env.ops=[sort, 3]", r"env.ops\[1\] is 3 \(int\); it must be str\n.*"),
    (ConfigTypeError, "schedule=3", r"schedule is 3 \(int\); it must be a mapping\n.*"),
    (ConfigTypeError, "backend=3", r"backend is 3 \(int\); it must be a mapping\n.*"),
    (ConfigTypeError, "trackers=[paper]", r"trackers is \['paper'\] \(list\); it must be a mapping from names .*\n.*"),
    (ConfigTypeError, "backend.use=3", r"backend.use is 3 \(int\); it must be a plugin's name\n.*"),
    (
        ConfigTypeError,
        "schedule.order=slots",
        r"schedule.order is 'slots' \(str\); it must be one of: slot, ready\nFix: write schedule.order: slot",
    ),
    (
        ConfigRangeError,
        "schedule.group_size=0",
        r"schedule.group_size is 0; it must be at least 1 \(episodes sampled for one task\)\nFix: change .*",
    ),
    (ConfigRangeError, "sync.bucket_mib=5000", r"sync.bucket_mib is 5000; it must be from 1 to 4096 .*\n.*"),
    (ConfigRangeError, "optimizer.lr=.inf", r"optimizer.lr is inf; it must be a finite number .*\n.*"),
    (ConfigRangeError, "optimizer.lr=.nan", r"optimizer.lr is nan; it must be a finite number .*\n.*"),
    (ConfigError, "algorithm.use=cispo", r"algorithm.hi must be given \(upper bound\)\nFix: add algorithm.hi .*"),
    (ConfigError, "algorithm.use=ring", r"algorithm: presets build on each other in a circle: ring, ring2\n.*"),
    (PluginContractError, "algorithm.use=odd", r"the preset 'odd' gives 'los'; a preset gives a mapping .*\n.*"),
    (PluginContractError, "algorithm.use=listed", r"the preset 'listed' gives \['clip'\]; a preset gives .*\n.*"),
    (ConfigError, "backend=null", r"the run file has no section backend; installed backend plugins: adam, sgd\n.*"),
    (ConfigError, "model=null", r"the run file has no section model; .*\nFix: add `model: {use: …}`"),
    (ConfigError, "env=null", r"the run file has no section env; .*\n.*"),
    (ConfigError, "algorithm=null", r"the run file has no section algorithm; installed algorithm plugins: .*\n.*"),
    (ConfigError, "algorithm.loss=null", r"algorithm has no loss; installed presets: .*\n.*"),
    (ConfigError, "algorithm.distill={}", r"algorithm.distill names no plugin; installed: .*\nFix: add .*distill.use"),
    (CombinationError, "algorithm.loss=kl", r"algorithm.loss: the term 'kl' stands in 'kl', not in 'loss'\n.*"),
    (CombinationError, "envs.math.use=arithmetic", r"env and envs stand side by side\n.*"),
    (
        CombinationError,
        "policies.a.share=1",
        r"'model' stands beside `policies`; .*\nFix: move it to policies.<name>.*",
    ),
    (CombinationError, "model.architecture={model_type: x}", r"model gives both of source and architecture; .*\n.*"),
    (CombinationError, "model.source=null", r"model gives neither of source and architecture; .*\n.*"),
    (CombinationError, "model.alphabet=abc", r"model.tokenizer is None and model.alphabet is 'abc'; .*\n.*"),
    (
        CombinationError,
        "schedule.updates_per_step=17",
        r"schedule.updates_per_step is 17, and a group is never split; it must be at most 16\n.*",
    ),
    (
        CombinationError,
        "schedule.min_group_size=9",
        r"schedule.min_group_size is 9, and a group has 8 episodes; .* at most 8\n.*",
    ),
    (
        CombinationError,
        "schedule.publish_every=2",
        r"schedule.publish_every is 2, and schedule.max_staleness is 0: .* at most 1\n.*",
    ),
    (
        CombinationError,
        "schedule.max_staleness=1",
        r".* is 1 \(asynchronous\), and .*\nFix: write schedule.off_policy=uncorrected, or .*=0, or add .*: tis, opsm",
    ),
    (CombinationError, "schedule.group_size=1", r"schedule.group_size is 1, and algorithm.advantage \(group\) .*\n.*"),
    (
        CombinationError,
        "algorithm.reward_kl={}",
        r"algorithm.reward_kl is given, and algorithm.advantage \(group\).*\n.*",
    ),
    (CombinationError, "algorithm.loss.coef=0", r"algorithm.loss has the coefficient 0: nothing would be learned\n.*"),
    (CombinationError, "rollout=null", r"episodes are sampled, and the run file has no section rollout; .*\n.*"),
    (
        CombinationError,
        "sync=null",
        r"engines sample from the trained model, and the run file has no section sync.*\n.*",
    ),
    (CombinationError, "sync.min_engines=2", r"sync.min_engines is 2, and the run has 1 engines; .* at most 1\n.*"),
    (CombinationError, "env.weight=0", r"envs: every weight is 0, so no task can be drawn\n.*"),
    (CombinationError, "roles.reference.update=copy", r"roles.reference.update is 'copy' and .* names no role .*\n.*"),
    (CombinationError, "roles.old.init=actr", r"roles.old.init is 'actr', which is no role; roles: actor, old\n.*"),
    (CombinationError, "roles.old.init=old", r"roles.old.init goes in a circle: old -> old\n.*"),
    (
        CombinationError,
        "roles.actor.update=frozen",
        r"roles.actor.update is 'frozen'; the actor is what is trained\n.*",
    ),
    (CombinationError, "roles.old.optimizer.lr=1", r"roles.old.optimizer is given, but its update is 'frozen'\n.*"),
    (ConfigRangeError, "rollout.stop=['']", r"rollout.stop holds an empty string, which ends every .*\n.*"),
    (ConfigRangeError, r'rollout.stop=["\ud800"]', r"rollout.stop holds half of a surrogate pair.*\n.*"),
    (ConfigRangeError, "eval.tasks=999999999", r"eval.tasks.*100000.*\n.*"),
    (ConfigRangeError, "rollout.temperature=0", r"rollout.temperature is 0; training needs .*\n.*greedy.*"),
    (ConfigRangeError, "eval.engines=pinned", r"eval.engines is .pinned., which is not built yet.*\n.*pool"),
    (ConfigRangeError, "rollout.temperature=1e-40", r"rollout.temperature is 1e-40; .* above 0 \(1e-30 to .*\n.*"),
    (ConfigRangeError, "rollout.temperature=1e40", r"rollout.temperature is 1e\+40; .*1e-30 to .*\n.*"),
    (ConfigRangeError, "eval.temperature=1e-40", r"eval.temperature is 1e-40; it must be 0, or from .*\n.*"),
    (ConfigRangeError, "rollout.top_p=0", r"rollout.top_p is 0; it must be above 0 .*\n.*"),
    (ConfigRangeError, "rollout.top_p=1e-60", r"rollout.top_p is 1e-60; it must be above 0 \(1e-30.*\n.*"),
    (ConfigError, "run.seed", r"'run.seed' on the command line sets nothing\nFix: write key=value.*"),
    (ConfigError, "run.seed={", r"command line, run.seed, line 1 is no YAML: .*\n.*"),
]


@pytest.mark.parametrize(("error_type", "override", "pattern"), WRONG, ids=[o for _, o, _ in WRONG])
def test_bad_input_gets_one_readable_message(compose, error_type, override, pattern):
    message = refused(error_type, compose, BASE, override)
    assert re.fullmatch(pattern, message), message


@pytest.mark.parametrize("override", ["rollout.top_p=0.9", "rollout.top_k=20"])
def test_cutting_the_vocabulary_needs_a_keep_mask(compose, override):
    compose(BASE, override)
    message = refused(CombinationError, compose, BASE, "rollout.use=plain", override)
    assert "'plain' does not offer keep_ids" in message


def test_a_stage_that_says_siblings_is_refused_alone(compose):
    assert "(mine)" in refused(CombinationError, compose, BASE, "algorithm.advantage=mine", "schedule.group_size=1")
    compose(BASE, "algorithm.advantage=batch", "schedule.group_size=1")


def test_asynchronous_runs_name_a_correction_or_say_that_there_is_none(compose):
    compose(BASE, "schedule.max_staleness=1", "algorithm.corrections.tis={}")
    compose(BASE, "schedule.max_staleness=1", "schedule.off_policy=uncorrected")


@pytest.mark.parametrize("override", ["schedule.group_size=2", "schedule.max_staleness=1"])
def test_demonstrations_refuse_what_belongs_to_sampling(compose, override):
    text = "model: {use: causal-lm, source: a}\nenv: arithmetic\nbackend: sgd\nalgorithm: sft\n"
    assert "demonstrations are" in refused(CombinationError, compose, text, override)


def test_a_plugin_may_not_repeat_cores_keys(compose):
    more = """
        @dataclass(frozen=True)
        class Repeats:
            count: int = 1

        @hookimpl(specname="miles_rollout")
        def more():
            return Provider(name="repeats", config=Repeats, build=build)
    """
    compose.plugins.module(compose.plugins.modules[-1], "")
    compose.plugins.modules.pop()
    compose.plugins.parts(more)
    entries = compose.plugins.folder / "acme_parts-2.0.dist-info" / "entry_points.txt"
    module = compose.plugins.modules[-1]
    entries.write_text(entries.read_text().replace("[miles.rollout.v1]", f"[miles.rollout.v1]\nrepeats = {module}"))
    with pytest.raises(PluginContractError) as error:
        load_with(compose, "rollout.use=repeats")
    assert error.value.message == (
        "rollout plugin 'repeats' (acme-parts 2.0): its config repeats count, which core owns in rollout"
    )


def load_with(compose, *overrides):
    path = compose.plugins.folder.parent / "run.yaml"
    path.write_text(BASE)
    return load(path, overrides, catalogue=compose.plugins.catalogue())


def test_rules_can_be_left_to_the_caller(compose):
    run = compose(BASE, "schedule.group_size=1", check=False)
    from miles_core.config.rules import violations

    assert [type(e) for e in violations(run, compose.catalogue)] == [CombinationError]


def test_every_error_of_a_file_exits_with_2(compose):
    for _, override, _ in WRONG:
        with pytest.raises(MilesError) as error:
            compose(BASE, override)
        assert error.value.exit_code == 2, override


BOMB = "\n".join(["a0: &a0 [1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9))])

# --- the reader ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"), ("off", "off"), ("yes", "yes"), ("no", "no"), ("y", "y"), ("true", True), ("False", False),
        ("1e-3", 1e-3), ("1E5", 1e5), (".5", 0.5), ("1.", 1.0), ("-2", -2), ("0123", 123), ("0o17", 15), ("0x1F", 31),
        ("1_000", "1_000"), ("12:30", "12:30"), ("2020-01-01", "2020-01-01"), ("~", None), ("", None), ("null", None),
        ('"1"', "1"), ("'true'", "true"), (".inf", float("inf")), ("-.inf", float("-inf")), ("[1, on]", [1, "on"]),
        ("{a: {b: 1}}", {"a": {"b": 1}}), ("<<", "<<"),
    ],
)  # fmt: skip
def test_yaml_1_2_scalars(text, value):
    found = parse(text, "test")
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "test, line 3: the key 'a' stands here twice"),
        ("a: [1\nb: 2", "test, line 2 is no YAML: expected ',' or ']', but got ':'"),
        (
            "a: !!python/object:os.system x",
            "test, line 1: the tag tag:yaml.org,2002:python/object:os.system is not read",
        ),
        ("a: !include x", "test, line 1: the tag !include is not read"),
        ("? [a]\n: 1", "test, line 1: a key is not a string"),
        ("a: &x [*x]", "test, line 1: an alias to this value is not read"),
        (BOMB, "test, line 1: an alias to this value is not read"),
    ],
)
def test_what_the_reader_refuses(text, message):
    with pytest.raises(ConfigError) as error:
        parse(text, "test")
    assert error.value.message == message


def test_nesting_without_end_is_no_yaml():
    with pytest.raises(ConfigError, match=r"test is no YAML: Exceeds the limit \(4300 digits\)"):
        parse("a: " + "9" * 5000, "test")
    with pytest.raises(ConfigError, match="test is no YAML: maximum recursion depth"):
        parse("[" * 10_000, "test")


def test_files_that_are_no_run_files(tmp_path):
    with pytest.raises(ConfigError, match=r"absent.yaml does not exist"):
        read_yaml(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match=r"list.yaml holds a list; a run file is a mapping"):
        read_yaml(tmp_path / "list.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bytes.yaml cannot be read"):
        read_yaml(tmp_path / "bytes.yaml")


def test_overrides_are_read_like_the_file():
    assert read_overrides(["a.b=1e-3", "c=on", "d={x: [1, null]}", "e="]) == [
        *[{"a": {"b": 1e-3}}, {"c": "on"}, {"d": {"x": [1, None]}}, {"e": None}]
    ]


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
trees = st.dictionaries(
    st.text(min_size=1), st.recursive(scalars, lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=8)
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(trees)
def test_what_resolved_yaml_holds_is_read_back_exactly(tmp_path_factory, tree):
    origins = {path: f"preset {i}" for i, path in enumerate(flatten(tree))}
    text = "\n".join(annotated_yaml(tree, origins))
    assert (parse(text, "test") or {}) == tree
    file = tmp_path_factory.getbasetemp() / "resolved.yaml"
    file.write_text(text + "\n")
    assert read_origins(file) == origins
