"""Pairs of answers: rows with chosen and rejected, for preferences and for supervised training."""

import json
from types import SimpleNamespace

import pytest
from miles_env_jsonl.config import JsonlConfig
from miles_env_jsonl.environment import JsonlEnvironment, build
from miles_env_jsonl.tasks import Needs

from miles_core.config.schema import AlgorithmKeys, ScheduleConfig
from miles_core.errors import DataError
from miles_core.records import Message

PAIRS = Needs(demonstration=True, pair=True)
ASK = [{"role": "user", "content": "p"}]


def said(*turns):
    return [{"role": role, "content": content} for role, content in turns]


GOOD, BAD = said(("assistant", "a")), said(("assistant", "b"))


def first(folder, row, needs=PAIRS, **options):
    (folder / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    config = JsonlConfig(path="tasks.jsonl", **options)
    made = JsonlEnvironment(config, name="mine", seed=7, policy="main", folders=(folder,), function=None, needs=needs)
    return made.tasks("train").task(0)


def test_strings(tmp_path):
    task = first(tmp_path, {"prompt": "p", "chosen": "a", "rejected": "b", "answer": 1, "extra": 2})
    assert (task.prompt, task.demonstrations, task.answer) == ("p", ("a", "b"), "1")
    assert task.metadata == {"extra": 2}
    renamed = {"question": "p", "good": "a", "bad": "b"}
    names = {"prompt_field": "question", "chosen_field": "good", "rejected_field": "bad"}
    assert first(tmp_path, renamed, **names).demonstrations == ("a", "b")


@pytest.mark.parametrize("prompt", [None, "p", ASK])
def test_whole_conversations(tmp_path, prompt):
    row = {"chosen": ASK + GOOD, "rejected": ASK + BAD} | ({} if prompt is None else {"prompt": prompt})
    task = first(tmp_path, row)
    assert task.prompt == (Message(role="user", content="p"),)
    assert task.demonstrations == tuple((Message(role="assistant", content=c),) for c in "ab")


def test_answers_that_go_on_from_the_prompt(tmp_path):
    longer = said(("assistant", "a"), ("user", "and?"), ("assistant", "c"))
    task = first(tmp_path, {"prompt": ASK, "chosen": longer, "rejected": BAD})
    assert [len(d) for d in task.demonstrations] == [3, 1] and task.prompt == (Message(role="user", content="p"),)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p", "chosen": "a"}, "no field 'rejected', and the algorithm learns from pairs; it has prompt"),
        ({"prompt": "p", "rejected": "a"}, "no field 'chosen'"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same"),
        ({"prompt": "p", "chosen": "", "rejected": "a"}, "field 'chosen' is empty"),
        ({"chosen": "a", "rejected": "b"}, "no field 'prompt'"),
        ({"chosen": ASK + GOOD, "rejected": said(("user", "q")) + BAD}, "answer different prompts"),
        ({"prompt": "p", "chosen": GOOD, "rejected": ASK + BAD}, "answer different prompts"),
        ({"prompt": "q", "chosen": ASK + GOOD, "rejected": ASK + BAD}, "field 'prompt' says other than"),
        ({"prompt": "p", "chosen": ASK, "rejected": ASK + BAD}, "field 'chosen' has no assistant's turn"),
    ],
)
def test_bad_pairs_are_named(tmp_path, row, message):
    with pytest.raises(DataError, match=message) as found:
        first(tmp_path, row)
    assert "tasks.jsonl" in str(found.value)


def test_supervised_training_shows_the_chosen_answer(tmp_path):
    needs = Needs(demonstration=True)
    assert first(tmp_path, {"prompt": "p", "chosen": "a", "rejected": "b"}, needs).demonstrations == ("a",)
    task = first(tmp_path, {"chosen": ASK + GOOD, "rejected": ASK + BAD}, needs)
    assert task.prompt == (Message(role="user", content="p"),)
    assert task.demonstrations == ((Message(role="assistant", content="a"),),)
    own = {"prompt": "p", "chosen": "a", "demonstration": "d"}
    assert first(tmp_path, own, needs).demonstrations == ("d",)


def test_evaluation_needs_no_pairs(tmp_path):
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "q", "answer": "1"}) + "\n")
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "p", "chosen": "a", "rejected": "b"}) + "\n")
    config = JsonlConfig(path="tasks.jsonl", eval_path="held.jsonl")
    made = JsonlEnvironment(config, name="mine", seed=7, policy="main", folders=(tmp_path,), function=None, needs=PAIRS)
    assert made.tasks("eval").task(0).demonstrations == ("1",) and made.tasks("train").task(0).demonstrations == (
        "a",
        "b",
    )


def test_other_algorithms_find_them_in_the_metadata(tmp_path):
    task = first(tmp_path, {"prompt": "p", "answer": "1", "chosen": "a", "rejected": "b"}, Needs(answer=True))
    assert task.metadata == {"chosen": "a", "rejected": "b"} and task.demonstrations == ("1",)


@pytest.mark.parametrize(("size", "pair"), [(1, False), (2, True)])
def test_a_group_of_two_demonstrations_is_a_pair(tmp_path, size, pair):
    policy = SimpleNamespace(
        algorithm=SimpleNamespace(keys=AlgorithmKeys(episodes="demonstrations")),
        schedule=ScheduleConfig(group_size=size),
    )
    run = SimpleNamespace(run=SimpleNamespace(folder=str(tmp_path)), policies={"main": policy})
    context = SimpleNamespace(run=run, policy="main", name="mine", seed=0, renderer=None)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "p", "chosen": "a", "rejected": "b"}) + "\n")
    task = build(JsonlConfig(path="tasks.jsonl"), context).tasks("train").task(0)
    assert task.demonstrations == (("a", "b") if pair else ("a",))
