"""Mixtures, curricula, splits, prompts and verdicts of the environment `reasoning-gym`."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from miles_env_reasoning_gym import worker
from miles_env_reasoning_gym.config import ReasoningGymConfig
from miles_env_reasoning_gym.environment import ReasoningGym, VerifierError

from miles_core.config.binding import bind
from miles_core.contracts.environment import Environment, TaskSource
from miles_core.errors import ConfigError, DataError, EngineError
from miles_core.records import Message

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module", autouse=True)
def shared_children():
    """Environments with equal settings share their children; one that lives as long as the tests keeps them."""
    kept = [env(dataset="chain_sum"), mine()]
    yield
    del kept


def env(seed=7, name="rg", plain=False, asked=1, **options):
    options.setdefault("extract", ["whole"])
    config = bind(ReasoningGymConfig, options, "env")
    return ReasoningGym(config, name=name, seed=seed, folders=[HERE], plain=plain, asked=asked)


def mine(what="good", when="", seed=7, asked=1, items=10**6, **options):
    """The test's own data set."""
    own = {"dataset": "misbehaving", "options": {"what": what, "when": when, "items": items}}
    return env(seed, asked=asked, modules=["misbehaving.py"], deadline_s=2.0, **own, **options)


def score(environment, task, text, finish="stop"):
    return asyncio.run(environment.score(task, SimpleNamespace(text=text, finish=finish)))


def first(environment, count=30, split="train"):
    source = environment.tasks(split)
    return [source.task(i) for i in range(count)]


# --- tasks -----------------------------------------------------------------------------------------------------------


def test_tasks_come_from_their_position_alone():
    forwards, backwards = env(dataset="chain_sum").tasks("train"), env(dataset="chain_sum").tasks("train")
    ahead = [forwards.task(i) for i in (0, 5, 10**9)]
    assert ahead == [backwards.task(i) for i in (10**9, 5, 0)][::-1]
    assert [t.id for t in ahead] == ["rg:train:0", "rg:train:5", "rg:train:1000000000"]
    assert isinstance(env(dataset="chain_sum"), Environment) and isinstance(forwards, TaskSource)
    json.dumps(dict(ahead[0].metadata))


def test_seeds_move_training_and_leave_evaluation():
    one, two = env(seed=1, dataset="chain_sum"), env(seed=2, dataset="chain_sum")
    assert [t.prompt for t in first(one)] != [t.prompt for t in first(two)]
    assert first(one, split="eval") == first(two, split="eval")


def test_splits_share_no_question_over_seeds_and_levels():
    train = [mine(seed=s, items=200) for s in (1, 2, 3)] + [mine(seed=4, items=400)]
    asked = {t.prompt for e in train for t in first(e, 60)}
    held = {t.prompt for t in first(mine(seed=9, items=200, asked=30), 30, "eval")}
    assert len(held) == 30  # evaluation asks nothing twice
    assert not asked & held


def test_too_small_a_data_set_is_refused_before_the_run():
    # Ten questions, of which a quarter or so is held out.
    with pytest.raises(DataError, match=r"401 draws|161 draws") as refused:
        mine(items=10, asked=11).tasks("eval")
    assert "already held out; with these options it has too few different ones" in str(refused.value)
    assert "ask for fewer eval.tasks" in refused.value.fix
    with pytest.raises(DataError, match="give no question of split 'train'"):
        question = "0="
        share = 0.999 if worker.split_of(question, 0.999) == "eval" else 0.001
        mine(items=1, eval_share=share).tasks("train" if share > 0.5 else "eval")
        mine(items=1, eval_share=share).tasks("train")
    with pytest.raises(DataError, match="no split 'test'"):
        mine().tasks("test")


def test_items_that_cannot_be_made_are_passed_over():
    tasks = first(mine("unlucky"), 20)
    assert all(int(t.answer) % 2 == 0 for t in tasks)
    with pytest.raises(DataError, match=r"drawing an item of misbehaving ended its process|took longer"):
        mine("slow").tasks("train")


def test_items_do_not_depend_on_the_hash_seed(monkeypatch):
    options = {"datasets": {"isomorphic_strings": {}, "ransom_note": {}}}
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    one = [(t.prompt, t.answer) for t in first(env(**options, memory_mib=4001), 6)]
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert one == [(t.prompt, t.answer) for t in first(env(**options, memory_mib=4002), 6)]


@pytest.mark.parametrize("dataset", ["word_ladder", "gsm_symbolic", "list_functions"])
def test_data_sets_that_hold_a_list_have_no_end_either(dataset):
    environment = env(dataset=dataset)
    tasks = [environment.tasks("train").task(i) for i in (0, 1, 10**6)]
    assert len({t.prompt for t in tasks}) == 3
    assert all(score(environment, t, t.answer).reward == 1.0 for t in tasks)


# --- mixtures and curricula ------------------------------------------------------------------------------------------


def test_a_mixture_keeps_its_weights_in_every_stretch():
    weights = {"chain_sum": 5, "number_sorting": 3, "spell_backward": 2, "letter_counting": 0}
    environment = env(datasets={name: {"weight": w} for name, w in weights.items()})
    names = [environment.entry(i, 12345).name for i in range(1000)]
    for start in range(0, 1000, 100):
        counts = Counter(names[start : start + 100])
        assert all(abs(counts[name] - 10 * w) <= 4 for name, w in weights.items()), counts
    assert {t.metadata["dataset"] for t in first(environment)} == {"chain_sum", "number_sorting", "spell_backward"}


def test_one_data_set_may_stand_in_a_mixture_twice():
    environment = env(
        datasets={
            "short": {"dataset": "spell_backward", "options": {"max_word_len": 3}},
            "long": {"dataset": "spell_backward", "options": {"min_word_len": 8}},
        }
    )
    lengths = {(t.metadata["dataset"], len(t.answer) < 5) for t in first(environment)}
    assert lengths == {("short", True), ("long", False)}


def test_a_curriculum_moves_with_the_position():
    stages = [{"options": {"width": w}} for w in (10, 20, 30)]
    environment = mine(curriculum={"every": 5, "stages": stages})
    assert [len(t.prompt[0].content) - 1 for t in first(environment, 17)] == [10] * 5 + [20] * 5 + [30] * 7
    assert {len(t.prompt[0].content) - 1 for t in first(environment, 5, "eval")} == {30}
    easy = mine(curriculum={"every": 5, "stages": stages, "evaluate": "first"})
    assert {len(t.prompt[0].content) - 1 for t in first(easy, 5, "eval")} == {10}


def test_review_draws_earlier_stages():
    stages = [{"options": {"width": w}} for w in (10, 20, 30)]
    environment = mine(curriculum={"every": 1, "stages": stages, "review": 0.5})
    counts = Counter(t.metadata["stage"] for t in first(environment, 200))
    assert 70 < counts[2] < 130 and counts[0] > 25 and counts[1] > 25


def test_levels_come_from_the_data_sets_own_curriculum():
    assert {len(t.answer) for t in first(env(dataset="spell_backward", level=0, ranges="upper_bound"), 40)} <= {3, 4, 5}
    grown = env(dataset="chain_sum", curriculum={"every": 10, "levels": [0, 3]})
    terms = [t.prompt[0].content.count("+") + t.prompt[0].content.count("-") for t in first(grown, 30)]
    assert max(terms[:10]) < max(terms[10:])
    one = env(dataset="chain_sum", level={"num_digits": 1})
    assert one.tasks("train").task(0)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says", "fix"),
    [
        ({"dataset": "leter_counting"}, "no data set 'leter_counting'; close ones: letter_counting", "letter_counting"),
        ({"dataset": "zzzz"}, "reasoning-gym has no data set 'zzzz'", "choose one of ab, acre, advanced_geometry"),
        ({"dataset": "composite"}, "composite is a mixture", "list them under `datasets`"),
        ({"dataset": "chain_sum", "options": {"min_term": 2}}, "no option 'min_term'; it has min_terms", "min_terms"),
        ({"dataset": "chain_sum", "options": {"seed": 2}}, "seed is set by Miles", "remove seed"),
        ({"dataset": "chain_sum", "options": {"min_terms": 9}}, "refuses min_terms: 9", "change its options"),
        ({"dataset": "chain_sum", "options": {"min_terms": "two"}}, "chain_sum refuses min_terms: two", "options"),
        ({"dataset": "chain_sum", "level": 99}, "no level 99", "from 0 to"),
        ({"dataset": "chain_sum", "level": {"num_words": 1}}, "no level num_words: 1; it has", "choose among those"),
        ({"dataset": "list_functions", "level": 0}, "list_functions has no levels", "through options"),
        ({"dataset": "chain_sum", "level": 1, "options": {"min_terms": 2}}, "min_terms is set by level and", "drop"),
        ({"dataset": "game_of_life_halting"}, "any text that is not empty earns 1", "unsound: true"),
        ({"dataset": "puzzle24"}, "any four numbers that make 24 earn 1", "unsound: true"),
        ({"dataset": "chain_sum", "modules": ["absent.py"]}, "'absent.py', and there is no such file", "correct it"),
        ({"dataset": "chain_sum", "modules": ["absent"]}, "importing it fails: ModuleNotFoundError", "importable"),
    ],
)
def test_what_reasoning_gym_does_not_have(options, says, fix):
    with pytest.raises(ConfigError) as refused:
        env(**options).check()
    assert says in refused.value.message and fix in refused.value.fix


def test_an_unsound_verifier_may_be_had():
    environment = env(dataset="game_of_life_halting", unsound=True)
    environment.check()
    assert environment.tasks("train").task(0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "give dataset (one) or datasets (a mixture)"),
        ({"dataset": "a", "datasets": {"b": {}}}, "not both"),
        ({"datasets": {"b": {}}, "level": 1}, "level belong to the entries of datasets"),
        ({"datasets": {"b": {"weight": 0}}}, "every weight of datasets is 0"),
        ({"dataset": "a", "eval_share": 1.0}, "eval_share is 1.0"),
        ({"dataset": "a", "extract": []}, "extract is empty"),
        ({"dataset": "a", "tag": "<answer>"}, "tag is '<answer>'"),
        ({"dataset": "a", "prompt": {"template": "x"}}, "without {question}"),
        ({"dataset": "a", "curriculum": {"levels": [1]}}, "a curriculum of one stage"),
        ({"dataset": "a", "curriculum": {}}, "give levels or stages, one of them"),
        ({"dataset": "a", "extract": ["middle"]}, "must be one of: tag, boxed, last_number"),
    ],
)
def test_options_that_mean_nothing(options, says):
    with pytest.raises(ConfigError) as refused:
        bind(ReasoningGymConfig, options, "env")
    assert says in refused.value.message


# --- prompts and verdicts --------------------------------------------------------------------------------------------


def test_prompts_are_messages_or_text():
    said = {"system": "Be brief.", "template": "Q: {question}\nA:"}
    chat = env(dataset="spell_backward", extract=["tag"], prompt=said).tasks("train").task(0)
    system, user = chat.prompt
    assert system == Message(role="system", content="Be brief.") and user.role == "user"
    assert user.content.startswith("Q: Spell this word backward")
    assert user.content.endswith("\nGive the final answer between <answer> and </answer>.\nA:")
    assert chat.demonstrations == (f"<answer>{chat.answer}</answer>",)
    plain = env(plain=True, dataset="spell_backward", extract=["tag"], prompt=said).tasks("train").task(0)
    assert plain.prompt == f"Be brief.\n\n{user.content}"
    forced = env(plain=True, dataset="spell_backward", prompt={"form": "messages", "suffix": "!"}).tasks("train")
    assert forced.task(0).prompt[0].content.endswith("!") and forced.task(0).demonstrations == (forced.task(0).answer,)


def test_verdicts_say_why():
    environment = env(dataset="chain_sum", extract=["tag", "last_number"], threshold=1.0, format_reward=0.25)
    task = environment.tasks("train").task(0)
    assert environment.reward_range == (0.0, 1.25)
    right = score(environment, task, f"I think <answer>{task.answer}</answer>")
    assert right.reward == 1.25 and right.components == {"score": 1.0, "format": 0.25}
    assert right.info == {"extracted": task.answer, "verdict": "right", "why": "inside <answer>"}
    loose = score(environment, task, f"It is {task.answer}")
    assert loose.reward == 1.0 and loose.info["why"] == "the last number" and loose.components["format"] == 0.0
    wrong = score(environment, task, "<answer>0.5</answer>")
    assert wrong.reward == 0.25 and wrong.info["verdict"] == "wrong"
    cut = score(environment, task, "<answer>I cannot", finish="length")
    assert cut.reward == 0.0 and cut.info == {
        "verdict": "no answer",
        "why": "<answer> is never closed; no number in the text; the answer was cut off at max_new_tokens",
    }
    half = env(dataset="spell_backward")
    task = half.tasks("train").task(0)
    partly = score(half, task, task.answer[:-1] + "?")
    assert 0 < partly.reward < 1 and partly.info["verdict"].startswith("partly right (0.")


def test_a_megabyte_is_not_judged():
    environment = mine("spin")  # the verifier would hang
    task = environment.tasks("train").task(0)
    judged = score(environment, task, "7" * 2**20)
    assert judged.reward == 0.0 and judged.info["verdict"] == "too long"
    assert judged.info["why"] == "the answer has 1,048,576 characters, and at most 10,000 are judged"
    assert len(judged.info["extracted"]) < 400 and judged.info["extracted"].endswith("(1,048,576 characters)")
    allowed = mine(max_answer_chars=2**21)
    assert score(allowed, task, "7" * 2**20).info["verdict"] == "wrong"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("spin", "took longer than 2 s"),
        ("sleep", "took longer than 2 s"),
        ("die", "ended its process (exit code 3)"),
        ("raise", "raised RuntimeError: broken verifier of two lines"),
        ("above", "returned 7, outside its stated range of 0 to 1"),
        ("below", "returned -0.5, outside its stated range of 0 to 1"),
        ("nan", "returned nan"),
        ("none", "returned None, which is not a number"),
        ("memory", "raised MemoryError"),
        ("socket", "raised PermissionError: socket.__new__ is not allowed in a verifier"),
        ("fork", "raised PermissionError: os.fork is not allowed in a verifier"),
        ("exec", "raised PermissionError: subprocess.Popen is not allowed in a verifier"),
        ("write", "raised PermissionError: open is not allowed in a verifier"),
        ("low_level_write", "raised PermissionError: open is not allowed in a verifier"),
        ("remove", "raised PermissionError: os.remove is not allowed in a verifier"),
    ],
)
def test_a_verifier_that_misbehaves_fails_its_episode_alone(what, says):
    environment = mine(what, when="bad")
    task = environment.tasks("train").task(0)
    with pytest.raises(VerifierError) as failed:
        score(environment, task, "bad")
    assert str(failed.value) == f"the verifier of misbehaving {says}, answer 'bad'"
    assert score(environment, task, task.answer).reward == 1.0  # the next one is judged as ever


def test_raising_may_earn_nothing_instead():
    environment = mine("raise", unjudged="zero")
    judged = score(environment, environment.tasks("train").task(0), "7")
    assert judged.reward == 0.0 and judged.info["why"].startswith("the verifier raised RuntimeError: broken")


@pytest.mark.parametrize(
    ("dataset", "attack"),
    [
        ("spiral_matrix", "[entry['answer']]"),
        ("string_insertion", "entry['answer']"),
        ("puzzle24", "(1).__class__"),
        ("countdown", "__import__('os')._exit(1)"),
        ("polynomial_multiplication", "__import__('os')._exit(1)"),
        ("complex_arithmetic", "nan + 1j"),
    ],
)
def test_answers_are_not_run(dataset, attack):
    """Verifiers of reasoning-gym hand the answer to `eval`, where the reference is in view."""
    environment = env(dataset=dataset, unsound=dataset == "puzzle24")
    tasks = first(environment, 3)
    assert all(score(environment, t, t.answer).reward == 1.0 for t in tasks)
    assert all(score(environment, t, attack).reward < 0.2 for t in tasks)


def test_another_item_under_the_same_number_stops_the_run():
    environment = mine("clock")
    task = environment.tasks("train").task(0)
    environment._pool.ask({"op": "check", "specs": []}, 5.0)
    with pytest.raises(EngineError, match="cannot be made again: it is another question"):
        score(environment, replace(task, metadata={**task.metadata, "digest": "0" * 32}), "1")


def test_many_are_judged_at_once():
    environment = mine(workers=2)
    tasks = first(environment, 20)

    async def all_of_them():
        calls = [environment.score(t, SimpleNamespace(text=u.answer, finish="stop")) for t in tasks for u in tasks]
        return [found.reward for found in await asyncio.gather(*calls)]

    assert asyncio.run(all_of_them()) == [float(t is u) for t in tasks for u in tasks]


def test_equal_settings_share_their_children():
    assert mine()._pool is mine("spin")._pool
    assert mine()._pool is not mine(workers=2)._pool
