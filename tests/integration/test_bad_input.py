"""What bad input gets, through the command line: exit code 2, one readable message with code and fix, nothing created.

What stops a run that has begun is in `test_stopped_runs.py`.
"""

import json
import os
from pathlib import Path

import pytest

from miles_core.run import RunDir

ARCHITECTURE = (
    "{model_type: qwen3, vocab_size: 13, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 64, "
    "tie_word_embeddings: true, rope_theta: 10000.0, pad_token_id: 0, eos_token_id: 1}"
)
REAL = """
run: {name: real, seed: 7, steps: 2}
model:
  use: causal-lm
  tokenizer: chars
  alphabet: "0123456789>"
  architecture: ARCHITECTURE
env: {use: arithmetic, task: sort, digits: 1}
rollout: {use: local, slots: 16, max_new_tokens: 3}
backend: {use: fsdp}
sync: {use: bucketed}
algorithm: {use: dr_grpo}
schedule: {groups_per_step: 2, group_size: 4}
trackers: {jsonl: {}}
""".replace("ARCHITECTURE", ARCHITECTURE)


def everything(folder=Path()):
    return sorted(str(p) for p in folder.rglob("*") if "__pycache__" not in p.parts)


def refused(said, code, *words):
    """Exit code 2 and one readable message, on stderr alone."""
    assert said.code == 2, (said.code, said.err)
    assert said.out == ""
    assert said.err.startswith(f"{code}: "), said.err
    assert said.err.count("MILES-E") == 1 and said.err.count("\nFix: ") == 1, said.err
    assert said.err.rstrip().splitlines()[-1].removeprefix("Fix: ").strip(), said.err
    assert "Traceback" not in said.err and len(said.err) < 1000 and said.err.count("\n") <= 4, said.err
    for word in words:
        assert word in said.err, (word, said.err)


@pytest.fixture
def bad(miles):
    """Run with these overrides, and find it refused with nothing created."""

    def run(code, words, *overrides, file="toy.yaml"):
        before = everything()
        refused(miles("run", file, *overrides), code, *([words] if isinstance(words, str) else words))
        assert everything() == before

    return run


# --- keys, types, ranges ---------------------------------------------------------------------------------------------

KEYS = [
    ("MILES-E101", ["schedule.grops_per_step", "write schedule.groups_per_step"], "schedule.grops_per_step=3"),
    ("MILES-E101", ["environment is no known key", "write env"], "environment={}"),
    ("MILES-E101", ["env.delay is no known key", "write env.delay_s"], "env.delay=3"),
    ("MILES-E101", ["algorithm.los", "algorithm.loss"], "algorithm.los=toy"),
    ("MILES-E101", ["shedule", "schedule"], "shedule={}"),
    ("MILES-E101", ["optimizer.lrr is no known key", "write optimizer.lr"], "optimizer.lrr=1"),
    ("MILES-E001", ["sync: no sync plugin is named 'toyy'", "write 'toy'"], "sync=toyy"),
    ("MILES-E001", ["no env plugin is named 'toi'"], "env=toi"),
    ("MILES-E001", ["no algorithm plugin is named 'ttoy'"], "algorithm=ttoy"),
    ("MILES-E102", ["run.steps is 'many' (str); it must be int"], "run.steps=many"),
    ("MILES-E102", ["rollout.stop is 'x'", "list of str"], "rollout.stop=x"),
    ("MILES-E102", ["env.delay_s is 'long'"], "env.delay_s=long"),
    ("MILES-E102", ["model.alphabet", "quote it"], "model={use: toy, tokenizer: toy, alphabet: 0123}"),
    ("MILES-E103", ["run.steps is 0", "at least 1"], "run.steps=0"),
    ("MILES-E103", ["optimizer.max_grad_norm is 0", "at least 1e-30"], "optimizer.max_grad_norm=0"),
    ("MILES-E103", ["optimizer.beta1 is 1"], "optimizer.beta1=1"),
    ("MILES-E103", ["env.tasks is 1", "at least 5"], "env.tasks=1"),
    ("MILES-E103", ["rollout.temperature is 0", "above 0", "eval.temperature: 0"], "rollout.temperature=0"),
    ("MILES-E103", ["rollout.top_p is 0"], "rollout.top_p=0"),
    ("MILES-E103", ["run.name is '../up'", "run.dir"], "run.name=../up"),
    ("MILES-E100", ["sets nothing", "key=value"], "run.steps"),
    ("MILES-E10", ["schedule.order is 'best'", "slot"], "schedule.order=best"),
]


@pytest.mark.parametrize(("code", "words", "override"), KEYS, ids=[o for _, _, o in KEYS])
def test_keys_types_and_ranges(miles, code, words, override):
    before = everything()
    said = miles("run", "toy.yaml", override)
    refused(said, said.err[:10] if said.err.startswith(code) else code, *words)
    assert everything() == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: [", "is no YAML"),
        ("just words", "a run file is a mapping"),
        ("", "holds nothing"),
        ("run: {steps: 1, steps: 2}", "steps"),
        ("run: !!python/name:os.system {}", "tag"),
    ],
)
def test_files_that_are_no_run_files(bad, text, words):
    Path("odd.yaml").write_text(text)
    bad("MILES-E100", words, file="odd.yaml")


def test_a_missing_file_and_a_directory(bad):
    bad("MILES-E100", "absent.yaml does not exist", file="absent.yaml")
    Path("folder").mkdir()
    bad("MILES-E100", ["folder is a directory", "name a run file in it"], file="folder")


# --- combinations ----------------------------------------------------------------------------------------------------

COMBINATIONS = {
    "model gives neither": ["model.architecture=null"],
    "model gives both": ["model.source=here"],
    "model.architecture has no model_type": ["model.architecture.model_type=null"],
    "has no tokenizer of its own": ["model.tokenizer=null"],
    "an alphabet belongs to the tokenizer `chars`": ["model.alphabet=abc"],
    "model.tokenizer is 'chars' and model.alphabet is None": ["model.tokenizer=chars"],
    "a group is never split": ["schedule.updates_per_step=9"],
    "schedule.min_group_size is 9": ["schedule.min_group_size=9"],
    "schedule.publish_every is 2": ["schedule.publish_every=2"],
    "schedule.group_size is 8, but demonstrations": ["algorithm=toy-sft", "rollout=null", "sync=null"],
    "demonstrations are not sampled and cannot be stale": [
        *("algorithm=toy-sft", "rollout=null", "sync=null", "schedule.group_size=1", "schedule.max_staleness=1"),
    ],
    "names no off-policy correction": ["schedule.max_staleness=1"],
    "(toy) compares the episodes of a group": ["schedule.group_size=1"],
    "(group) compares the episodes of a group": ["algorithm=grpo", "schedule.group_size=1"],
    "(leave_one_out) compares the episodes of a group": ["algorithm=rloo", "schedule.group_size=1"],
    "algorithm.reward_kl is given": ["algorithm.reward_kl=toy-reward-kl", "algorithm.advantage=group"],
    "algorithm.loss has the coefficient 0": ["algorithm.loss.coef=0"],
    "there is no rollout whose max_new_tokens": [
        *("algorithm={use: toy-sft, aggregation: constant}", "rollout=null", "sync=null", "schedule.group_size=1"),
    ],
    "roles.x gives both init and source": ["roles={x: {init: actor, source: here}}"],
    "roles.x.init is 'actr', which is no role": ["roles={x: {init: actr}}"],
    "roles.x.init names no role to follow": ["roles={x: {update: copy}}"],
    "roles.x.init goes in a circle": ["roles={x: {init: y}, y: {init: x}}"],
    "the actor is what is trained": ["roles.actor.update=frozen"],
    "every weight is 0": ["env.weight=0"],
    "schedule.on_stale is 'mask', and schedule.max_staleness is 0": ["schedule.on_stale=mask"],
    "nothing reads the role 'x'": ["roles={x: {init: actor}}"],
    "side by side": ["envs={more: {use: toy}}"],
    "no section rollout": ["rollout=null"],
    "no section sync": ["sync=null"],
    "sync.min_engines is 2, and the run has 1": ["sync.min_engines=2"],
    "needs the role 'reference'": ["algorithm=toy-everything"],
    "needs column 'toy.reward_kl'": ["algorithm.advantage=toy-kl-advantage"],
}


@pytest.mark.parametrize("words", COMBINATIONS)
def test_combinations_that_mean_nothing(bad, words):
    bad("MILES-E104", words, *COMBINATIONS[words])


ENGINE = """
    from dataclasses import dataclass
    from miles_core import hookimpl
    from miles_core.provider import Provider
    @dataclass(frozen=True, kw_only=True)
    class Config:
        pass
    def build(config, context):
        raise RuntimeError("must never be built")
    @hookimpl
    def miles_rollout():
        return Provider(name="{name}", config=Config, build=build, offers={offers})
"""


@pytest.mark.parametrize("override", ["rollout.top_p=0.9", "rollout.top_k=5"])
def test_cutting_the_vocabulary_without_a_keep_mask(bad, site, override):
    offers = ["weights.tensors", "logprobs", "pause.in_place"]
    code = ENGINE.format(name="plain", offers=offers)
    site("acme-plain", "miles.rollout.v1", {"plain": "acme_plain"}, {"acme_plain": code})
    bad("MILES-E104", "does not offer keep_ids", "rollout={use: plain, max_new_tokens: 2}", override)


def test_several_policies_on_an_engine_that_serves_one(bad, site):
    code = ENGINE.format(name="one", offers=["weights.tensors", "logprobs", "pause.in_place"])
    site("acme-one", "miles.rollout.v1", {"one": "acme_one"}, {"acme_one": code})
    model = "{use: toy, tokenizer: toy, architecture: {model_type: toy}}"
    policy = f"{{model: {model}, renderer: toy, env: toy, algorithm: toy}}"
    rest = "rollout: {use: one}\nbackend: toy\nsync: toy\n"
    Path("two.yaml").write_text(f"policies: {{a: {policy}, b: {policy}}}\n{rest}")
    bad("MILES-E104", ["engine 'one' (one) serves one policy", "policies"], file="two.yaml")


# --- plugins ---------------------------------------------------------------------------------------------------------


def test_a_plugin_for_another_api_major(bad, site):
    site("acme-old", "miles.sync.v2", {"old": "acme_old"}, {"acme_old": "1 / 0"})
    bad("MILES-E004", ["acme-old", "v2", "v1"], "sync=old")


def test_two_distributions_with_one_name(bad, site):
    code = {"acme_twice": "1 / 0"}
    site("acme-one", "miles.sync.v1", {"twice": "acme_twice"}, code)
    site("acme-two", "miles.sync.v1", {"twice": "acme_twice"}, code)
    bad("MILES-E002", ["acme-one", "acme-two", "twice"], "sync=twice")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import nothing_of_that_name", "nothing_of_that_name"),
        ("def (", "SyntaxError"),
        ("raise SystemExit(0)", "SystemExit"),
    ],
)
def test_a_plugin_whose_import_fails(bad, site, code, words):
    site("acme-broken", "miles.sync.v1", {"broken": "acme_broken"}, {"acme_broken": code})
    bad("MILES-E003", ["acme-broken 1.0", words], "sync=broken")


def test_a_broken_plugin_that_nobody_names_harms_nobody(miles, site):
    site("acme-broken", "miles.sync.v1", {"broken": "acme_broken"}, {"acme_broken": "1 / 0"})
    assert miles("run", "toy.yaml", "run.steps=1").code == 0


def test_an_unmet_capability_names_both_sides_and_who_would_fit(bad, site):
    code = ENGINE.format(name="deaf", offers=["logprobs", "pause.in_place"])
    site("acme-deaf", "miles.rollout.v1", {"deaf": "acme_deaf"}, {"acme_deaf": code})
    words = ["sync 'toy' needs 'weights.tensors'", "rollout 'deaf' offers logprobs", "use one of:", "rollout 'toy'"]
    bad("MILES-E006", words, "rollout={use: deaf}")


def test_parts_in_processes_and_a_transport_within_one(bad):
    bad("MILES-E006", ["sync 'toy' needs 'in_process'"], "launcher=toy-processes")


@pytest.mark.parametrize("override", ["schedule.samplers=2", "backend.ranks=2"])
def test_what_the_inline_launcher_cannot_start(bad, override):
    bad("MILES-E006", ["launcher 'inline' was asked for 2 workers"], override)


@pytest.mark.parametrize(
    ("build", "code", "words"),
    [
        ("raise ValueError('no licence')", "MILES-E003", "ValueError: no licence"),
        ("import nothing_of_that_name", "MILES-E008", "nothing_of_that_name"),
        ("return object()", "MILES-E005", "generate() is missing"),
    ],
)
def test_an_engine_that_cannot_be_built(bad, site, build, code, words):
    text = ENGINE.format(name="ill", offers=["weights.tensors", "logprobs", "pause.in_place"])
    text = text.replace('raise RuntimeError("must never be built")', build)
    site("acme-ill", "miles.rollout.v1", {"ill": "acme_ill"}, {"acme_ill": text})
    bad(code, words, "rollout={use: ill}")


def test_an_engine_that_does_not_start(bad, monkeypatch):
    from miles_core.testing.toys.engine import ToyEngine

    async def start(self):
        raise OSError("port 1 is taken")

    monkeypatch.setattr(ToyEngine, "start", start)
    bad("MILES-E003", "OSError: port 1 is taken")


# --- models ----------------------------------------------------------------------------------------------------------

MODELS = [
    (["does not exist", "looked at"], ["model.architecture=null", "model.source=./nothing"]),
    (["model_type is 'nonsense', which transformers does not know"], ["model.architecture.model_type=nonsense"]),
    (["'qwen33'", "did you mean 'qwen3'"], ["model.architecture.model_type=qwen33"]),
    (
        ["'gpt2'", "is not verified", "model.unverified: true", "Qwen3ForCausalLM"],
        ["model.architecture.model_type=gpt2"],
    ),
    (["'model_typ'", "did you mean 'model_type'"], ["model.architecture.model_typ=x"]),
    (["'hidden_siz'", "did you mean 'hidden_size'"], ["model.architecture.hidden_siz=32"]),
    (["hidden_size", "int"], ["model.architecture.hidden_size=abc"]),
    (["num_attention_heads 2, num_key_value_heads 3"], ["model.architecture.num_key_value_heads=3"]),
    (["eos_token_id is 99, and its vocab_size is 13"], ["model.architecture.eos_token_id=99"]),
    (["eos_token_id is [1, 99], and its vocab_size is 13"], ["model.architecture.eos_token_id=[1, 99]"]),
    (["vocab_size is 5", "set model.architecture.vocab_size to 13"], ["model.architecture.vocab_size=5"]),
]


@pytest.mark.parametrize(("words", "overrides"), MODELS, ids=[o[-1] for _, o in MODELS])
def test_models_that_cannot_be(bad, words, overrides):
    Path("real.yaml").write_text(REAL)
    bad("MILES-E110", words, *overrides, file="real.yaml")


def test_the_local_engine_names_what_it_was_never_verified_with(bad):
    Path("real.yaml").write_text(REAL)
    bad("MILES-E006", ["rollout 'local' needs 'weights.dtype:float32'", "backend 'fsdp'"], "rollout.use=local")
    Path("olmo.yaml").write_text(REAL.replace("model_type: qwen3", "model_type: olmo2"))
    words = ["`local` was never verified with architecture 'olmo2'", "rollout.unverified=true", "qwen3"]
    bad("MILES-E110", words, "model.unverified=true", file="olmo.yaml")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "config.json cannot be read: JSONDecodeError"),
        ('{"model_type": "nonsense"}', "nonsense"),
        ('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}', "is not verified"),
        ("{}", "model_type"),
    ],
)
def test_model_folders_that_are_none(bad, config, words):
    folder = Path("model")
    folder.mkdir()
    Path("real.yaml").write_text(REAL.replace(f"architecture: {ARCHITECTURE}", "source: model"))
    bad("MILES-E110", "without config.json", file="real.yaml")
    (folder / "config.json").write_text(config)
    bad("MILES-E110", words, file="real.yaml")
    bad("MILES-E110", "has no tokenizer.json", "model.tokenizer=null", "model.alphabet=null", file="real.yaml")


def test_a_chat_prompt_without_a_chat_template(bad):
    Path("real.yaml").write_text(REAL)
    bad("MILES-E111", ["has no chat template", "renderer: text"], "renderer=chat", file="real.yaml")


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rows(bad):
    def run(text, words, *more, code="MILES-E800"):
        Path("tasks.jsonl").write_text(text)
        bad(code, words, "env={use: jsonl, path: tasks.jsonl}", *more)

    return run


GOOD = '{"prompt": "12>", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"prompt": "12>"}', "no field 'answer', which the reward needs"),
        ('{"question": "12>", "answer": "2"}', "no field 'prompt'"),
        ('{"prompt": "12>", "answer": {"a": 1}}', "field 'answer' is a object"),
        ('{"prompt": 7, "answer": "2"}', "field 'prompt' is a number"),
        ("{broken", "not JSON"),
        ("[1]", "holds a list, not an object"),
        ('{"prompt": "12>", "answer": "2"} {}', "not JSON"),
    ],
)
def test_a_row_without_the_needed_field_names_file_and_line(rows, row, words):
    rows(GOOD + row + "\n" + GOOD, ["tasks.jsonl:2: ", words])


ROWS_FOR_A_MODEL = [
    ('{"prompt": "1é2>", "answer": "2"}', "MILES-E800", ["character 'é'", "not in model.alphabet"], ()),
    (f'{{"prompt": "{"1" * 70}>", "answer": "2"}}', "MILES-E800", ["71 tokens", "'local' takes at most 63"], ()),
    ('{"prompt": [{"role": "user", "content": "1>"}], "answer": "2"}', "MILES-E111", ["no chat template"], ()),
    (
        '{"prompt": "12>", "answer": "é"}',
        "MILES-E800",
        ["character 'é'", "not in model.alphabet"],
        ("algorithm=sft", "schedule.group_size=1"),
    ),
]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("row", "code", "words", "more"), ROWS_FOR_A_MODEL)
def test_a_row_that_tokenizer_or_engine_cannot_take_names_file_and_line(bad, row, code, words, more, shuffle):
    Path("real.yaml").write_text(REAL)
    for place, eval_path in ((1, None), (2, None), (2, "held.jsonl")):  # also the first one, and one of the other split
        lines = [GOOD if at != place else row + "\n" for at in range(1, 4)]
        Path("tasks.jsonl").write_text(GOOD if eval_path else "".join(lines))
        Path("held.jsonl").write_text("".join(lines).replace("12>", "21>"))
        env = f"env={{use: jsonl, path: tasks.jsonl, shuffle: {shuffle}, eval_path: {eval_path or 'null'}}}"
        evaluated = ("eval={every: 1}",) if eval_path else ()
        where = f"{eval_path or 'tasks.jsonl'}:{place}: "
        bad(code, [where, *words], env, *more, *evaluated, file="real.yaml")


SHOWN = ("algorithm=sft", "schedule.group_size=1", "run.steps=1")
ROPE = "{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 64, rope_theta: 1e4}"


@pytest.mark.parametrize(
    ("held", "more", "said"),
    [
        ({"prompt": "1>", "answer": "1" * 90}, (), ""),  # it is sampled for, and compared; nobody learns from it
        ({"prompt": "1" * 40 + ">", "answer": "1"}, ("rollout.max_length=32",), "held.jsonl:1: a text of 41 tokens"),
    ],
)
def test_evaluations_of_demonstrated_algorithms_are_bounded_by_their_engine(miles, held, more, said):
    Path("real.yaml").write_text(REAL)
    Path("tasks.jsonl").write_text(GOOD)
    Path("held.jsonl").write_text(json.dumps(held) + "\n")
    env = "env={use: jsonl, path: tasks.jsonl, eval_path: held.jsonl}"
    found = miles("run", "real.yaml", env, *SHOWN, "eval={every: 1}", *more)
    assert (found.code, said in found.err) == (2 if said else 0, True), found.err
    assert Path("runs").exists() != bool(said)


def test_demonstrations_of_a_stretched_model_may_be_longer(miles):
    Path("real.yaml").write_text(REAL)
    Path("tasks.jsonl").write_text(json.dumps({"prompt": "1>", "answer": "1" * 90}) + "\n")
    run = ("run", "real.yaml", "env={use: jsonl, path: tasks.jsonl}", *SHOWN, "rollout=null", "sync=null")
    refused(miles(*run), "MILES-E800", "tasks.jsonl:1: a text of 93 tokens; the model takes at most 64")
    assert miles(*run, f"model.architecture.rope_parameters={ROPE}").code == 0


def test_an_empty_split(rows):
    rows("", "split 'train' is empty")
    rows(GOOD, "split 'train' is empty", "env.path=tasks.jsonl@[5:]")
    rows(GOOD, "no split 'eval'", "eval={every: 1}")
    rows(GOOD, "split 'eval' is empty", "env.eval_fraction=0.5", "eval={every: 1}")


def test_a_missing_data_file(bad):
    bad("MILES-E800", ["no file 'none.jsonl'", "looked at"], "env={use: jsonl, path: none.jsonl}")


def test_a_prompt_that_the_tokenizer_cannot_write(rows):
    rows('{"prompt": "x", "answer": "2"}\n', ["'x'"])


@pytest.mark.parametrize(
    ("code", "name", "words"),
    [
        (None, "absent.py:f", "no such file"),
        ("def g(text): return 1", "r.py:f", "has no function 'f'"),
        ("def f(foo): return 1", "r.py:f", "asks for 'foo'"),
        ("import nothing_of_that_name", "r.py:f", "nothing_of_that_name"),
        ("def (", "r.py:f", "SyntaxError"),
        ("f = 3", "r.py:f", "f"),
    ],
)
def test_a_reward_function_that_cannot_be_used(rows, code, name, words):
    if code is not None:
        Path("r.py").write_text(code)
    rows(GOOD, words, f"env.reward={name}", code="MILES-E100")


def test_an_environment_that_fails_at_its_first_task(bad, monkeypatch):
    from miles_core.testing.toys.envs import EchoTasks

    def task(self, position):
        raise KeyError("no such column")

    monkeypatch.setattr(EchoTasks, "task", task)
    bad("MILES-E800", ["environment 'toy'", "KeyError"])


# --- run directories -------------------------------------------------------------------------------------------------


def test_a_run_name_that_no_file_system_takes(bad):
    Path("runs").mkdir()  # else nothing is looked up below it
    bad("MILES-E903", ["cannot be made", "too long"], f"run.name={'x' * 300}")


def test_a_run_directory_that_exists(miles):
    assert miles("run", "toy.yaml", "run.steps=1").code == 0
    before = everything()
    refused(miles("run", "toy.yaml"), "MILES-E900", "runs/toy exists", "--resume", "run.name=")
    refused(miles("run", "runs/toy"), "MILES-E100", "runs/toy is a directory", "miles run runs/toy --resume, to go on")
    refused(miles("run", "runs"), "MILES-E100", "runs is a directory", "Fix: name a run file in it")
    Path("file").write_text("")
    refused(miles("run", "toy.yaml", "run.dir=file"), "MILES-E900", "file exists, and is no run directory")
    refused(miles("run", "toy.yaml", "run.name=toy/again"), "MILES-E903", "would lie inside the run directory")
    Path("empty").mkdir()
    for name, target in (("dangling", "nothing"), ("filled", "empty")):
        Path(name).symlink_to(target)
        told = f"{name} exists, and is no run directory"
        refused(miles("run", "toy.yaml", f"run.dir={name}"), "MILES-E900", told, "run.dir=")
        planned = miles("plan", "toy.yaml", f"run.dir={name}")
        assert planned.code == 2 and told in planned.out
    assert everything() == sorted([*before, "file", "empty", "dangling", "filled"])


def test_a_path_that_leaves_a_run_directory_lies_outside_of_it(miles, monkeypatch):
    assert miles("run", "toy.yaml", "run.steps=1").code == 0
    assert miles("run", "toy.yaml", "run.steps=1", "run.dir=runs/toy/../other").code == 0
    Path("link").symlink_to("runs/toy/checkpoints")
    refused(miles("run", "toy.yaml", "run.dir=link/../in"), "MILES-E903", "would lie inside the run directory")
    monkeypatch.chdir("runs/toy")
    assert miles("run", "../../toy.yaml", "run.steps=1", "run.dir=../third").code == 0
    refused(miles("run", "../../toy.yaml", "run.dir=../toy/in"), "MILES-E903", "would lie inside the run directory")
    assert sorted(path.name for path in Path("..").iterdir()) == ["other", "third", "toy"]


@pytest.mark.parametrize("where", ["/proc/none/run", "/proc/x", "file/run"])
def test_a_run_directory_that_cannot_be_made(bad, where):
    Path("file").write_text("")
    bad("MILES-E903", ["cannot be made", "run.dir"], f"run.dir={where}")


def test_no_space_for_the_run_directory(bad, monkeypatch):
    def rename(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", rename)
    bad("MILES-E903", "No space left on device")


def test_a_resume_of_nothing(bad):
    bad("MILES-E902", "is no run directory", "--resume")
    bad("MILES-E902", "runs/none is no run directory", "--resume", file="runs/none")
    bad("MILES-E100", "none.yaml does not exist", "--resume", file="none.yaml")
    Path("runs/toy").mkdir(parents=True)
    bad("MILES-E902", "is no run directory", "--resume")


@pytest.fixture
def made(miles):
    assert miles("run", "toy.yaml", "run.steps=2").code == 0
    return Path("runs/toy")


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        (["optimizer.lr: was 0.3, now 0.5"], ["optimizer.lr=0.5"]),
        (["schedule.group_size: was 8, now 4"], ["schedule.group_size=4"]),
        (["run.seed: was 7, now 8"], ["run.seed=8"]),
        (["run.steps: was 2, now 1"], ["run.steps=1"]),
        (["env.tasks: was 100, now 50", "model.tokenizer"], ["env.tasks=50", "model={tokenizer: chars, alphabet: ab}"]),
    ],
)
def test_a_resume_with_another_config_says_what_differs(made, miles, words, overrides):
    before = everything()
    for file in ("toy.yaml", str(made)):
        said = miles("run", file, "--resume", *(["run.steps=4"] if file == "toy.yaml" else []), *overrides)
        refused(said, "MILES-E901", "was started with another configuration", "What may change: launcher", *words)
    assert everything() == before


def test_a_resume_with_another_lock_says_what_differs(made, miles):
    file = made / "plugins.lock"
    lock = json.loads(file.read_text())
    before = everything()
    for name, change, words in (
        ("miles-testing-toys", {"version": "9.9"}, "miles-testing-toys is 0.1.0, locked 9.9"),
        ("miles-testing-toys", {"sha256": "0" * 64}, "miles-testing-toys 0.1.0 has other files"),
        ("acme-gone", {"version": "1.0", "sha256": ""}, "acme-gone 1.0 is not installed"),
    ):
        rows = lock["distributions"]
        changed = {**lock, "distributions": {**rows, name: {**rows.get(name, {}), **change}}}
        file.write_text(json.dumps(changed))
        said = miles("run", str(made), "--resume", "run.steps=4")
        refused(said, "MILES-E007", words, "run.name=NEW model.source=RUN")
    file.write_text("{")
    refused(miles("run", str(made), "--resume", "run.steps=4"), "MILES-E901", "plugins.lock cannot be read")
    assert everything() == before


def test_a_run_whose_plugin_was_mended_goes_on_in_a_new_run(made, miles):
    """The way out that the refusal names."""
    file = made / "plugins.lock"
    lock = json.loads(file.read_text())
    lock["distributions"]["miles-testing-toys"]["sha256"] = "0" * 64
    file.write_text(json.dumps(lock))
    model = (f"model.source={made}@2", "model.architecture=null", "model.tokenizer=null")
    assert miles("run", "toy.yaml", "run.name=new", *model).code == 0
    began = json.loads(Path("runs/new/plugins.lock").read_text())
    assert began["sources"]["main"]["actor"]["from_run"].endswith("runs/toy@2")
    assert began["distributions"] != lock["distributions"]


def test_a_resume_beside_a_run_that_is_alive_is_refused(made, miles, command):
    """One holds the run directory: a second process is told which, and touches nothing but its own way out."""
    before = {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file() and p.name != "lock"}
    with RunDir.open(made).hold():
        for run in (miles, command):
            said = run("run", str(made), "--resume", "run.steps=4")
            refused(said, "MILES-E905", f"process {os.getpid()} is running in runs/toy")
    assert {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file() and p.name != "lock"} == before
    assert miles("run", str(made), "--resume", "run.steps=4").code == 0, "the lock ends with its holder"


def test_a_resume_of_a_finished_run(made, miles):
    refused(miles("run", str(made), "--resume"), "MILES-E901", "has all of its 2 steps", "run.steps=4")


def test_a_refused_run_leaves_no_export_of_another(made, miles):
    """`model.source` may name a run, which is exported first; what is refused afterwards takes that back."""
    before = everything()
    model = ("model.architecture=null", "model.source=runs/toy", "model.tokenizer=null")
    refused(
        miles("run", "toy.yaml", "run.name=b", *model, "env={use: jsonl, path: no.jsonl}"), "MILES-E800", "no.jsonl"
    )
    assert everything() == before
    assert miles("run", "toy.yaml", "run.name=b", *model, "run.steps=1").code == 0
    assert (made / "exports/step_000002").is_dir()
    refused(
        miles("run", "toy.yaml", "run.name=c", *model, "env={use: jsonl, path: no.jsonl}"), "MILES-E800", "no.jsonl"
    )
    assert (made / "exports/step_000002").is_dir(), "what was there before stays"


def test_a_plugin_that_is_gone_is_missed_by_the_run_that_named_it(made, miles, monkeypatch):
    from miles_core.discovery import Catalogue

    load = Catalogue.load

    def gone(self, kind, name):
        return load(self, kind, "gone" if kind == "term" else name)

    monkeypatch.setattr(Catalogue, "load", gone)
    said = miles("export", str(made), "out")
    refused(said, "MILES-E001", "the run runs/toy cannot be read again: ", "no term plugin is named 'gone'")


def test_exports_that_cannot_be(made, miles):
    refused(miles("export", "runs/none", "out"), "MILES-E902", "is no run directory")
    refused(miles("export", str(made), "out", "--step", "7"), "MILES-E902", "no checkpoint of step 7; it has: 2")
    refused(miles("export", str(made), "runs"), "MILES-E900", "runs exists")
    Path("file").write_text("")
    refused(miles("export", str(made), "file/out"), "MILES-E904", "file/out cannot be written")
    refused(miles("export", str(made), "out", "--policy", "x"), "MILES-E090", "no policy 'x'")
    assert not Path("out").exists()
    refused_late = miles("show", str(made), "--png", "absent/x.png")
    assert refused_late.code == 2 and refused_late.err.startswith("MILES-E904: absent/x.png cannot be written")


def test_a_run_is_exported_and_resumed_from_any_working_directory(made, miles, monkeypatch):
    """What `model.source` meant is kept with the run: also where a better checkpoint, or nothing, lies there now."""
    model = ("model.architecture=null", "model.source=runs/toy", "model.tokenizer=null", "run.steps=2")
    Path("files").mkdir()
    os.rename("toy.yaml", "files/toy.yaml")  # so that the run file's own folder does not help
    assert miles("run", "files/toy.yaml", "run.name=b", *model).code == 0
    child = Path("runs/b").resolve()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert miles("export", str(child), "out").code == 0 and Path("out/config.json").is_file()
    assert miles("run", str(child), "--resume", "run.steps=3").code == 0
    assert RunDir.open(child).latest().step == 3


# --- the real command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words", "overrides"),
    [
        ("MILES-E101", "write schedule.groups_per_step", ["schedule.grops_per_step=3"]),
        ("MILES-E103", "rollout.temperature is 0", ["rollout.temperature=0"]),
        ("MILES-E104", "schedule.group_size is 1", ["schedule.group_size=1"]),
        ("MILES-E001", "write 'toy'", ["sync=toyy"]),
        ("MILES-E800", "tasks.jsonl:1: no field 'answer'", ["env={use: jsonl, path: tasks.jsonl}"]),
        ("MILES-E006", "launcher 'inline'", ["backend.ranks=2"]),
        ("MILES-E903", "cannot be made", ["run.dir=/proc/none/run"]),
    ],
)
def test_as_a_process(command, code, words, overrides):
    Path("tasks.jsonl").write_text('{"prompt": "12>"}\n')
    before = everything()
    refused(command("run", "toy.yaml", *overrides), code, words)
    assert everything() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "words", "overrides"),
    [
        ("MILES-E110", "'gpt2'", ["model.architecture.model_type=gpt2"]),
        ("MILES-E110", "vocab_size is 5", ["model.architecture.vocab_size=5"]),
        ("MILES-E111", "has no chat template", ["renderer=chat"]),
    ],
)
def test_real_models_as_a_process(command, code, words, overrides):
    Path("real.yaml").write_text(REAL)
    before = everything()
    refused(command("run", "real.yaml", *overrides), code, words)
    assert everything() == before
