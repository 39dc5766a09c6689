"""Splits, orders, prompts and verdicts of the environment `math`."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from miles_env_math.config import MathConfig
from miles_env_math.environment import MathEnvironment, VerifierError

from miles_core.config.binding import bind
from miles_core.contracts.environment import Environment, TaskSource
from miles_core.errors import ConfigError, DataError, LateDataError
from miles_core.records import Message, Task


@pytest.fixture(scope="module", autouse=True)
def shared_children():
    """Environments with equal settings share their children; ones that live as long as the tests keep them."""
    kept = [env(), env(deadline_s=1.0)]
    yield
    del kept


def env(folder=None, seed=7, plain=False, **options):
    config = bind(MathConfig, {"path": "p.jsonl", **options}, "env")
    return MathEnvironment(config, name="m", seed=seed, folders=[folder] if folder else [], plain=plain)


@pytest.fixture
def problems(tmp_path):
    def write(rows, name="p.jsonl", **options):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        return env(tmp_path, **options)

    return write


def sums(count, start=0):
    return [{"problem": f"{i}+1?", "answer": str(i + 1)} for i in range(start, start + count)]


def score(environment, reference, text, finish="stop", **metadata):
    task = Task(id="m:train:0", prompt="?", answer=reference, metadata=metadata)
    return asyncio.run(environment.score(task, SimpleNamespace(text=text, finish=finish)))


# --- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "answer", "equal"),
    [
        ("72", "72.0", True),
        (r"\frac12", "0.5", True),
        ("1,234", "1234", True),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        ("x^2+2x+1", "(x+1)^2", True),
        (r"\{1, 2\}", "2, 1", True),
        ("3", "x = 3", True),
        ("x = 3", "3", True),
        (r"50\%", "50", True),
        ("5", r"\$5", True),
        ("3", r"3 \text{ cm}", True),
        ("[0,1)", "[0, 1)", True),
        ("-7", "−7", True),
        (r"\text{Evelyn}", "evelyn", True),
        ("yes", "Yes.", True),
        ("yes", "no", False),
        ("72", "73", False),
        ("1/2", "1/2 or 3", False),
        ("0.333", "1/3", False),
        ("5", "nan", False),
        ("5", r"\infty", False),
        ("5", "}{", False),
        ("5", "$", False),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", False),
    ],
)
def test_equal_as_mathematics_or_as_text(reference, answer, equal):
    judged = score(env(extract=["whole", "last_line"], deadline_s=5.0), reference, f"$x$ is \\boxed{{{answer}}}")
    boxed = score(env(), reference, rf"So \boxed{{{answer}}}." if "}{" not in answer else f"\\boxed{{{answer[::-1]}}}")
    assert boxed.reward == float(equal), boxed
    if "}{" not in answer and answer != "$":
        assert judged.reward == float(equal), judged


def test_verdicts_say_why():
    environment = env(extract=["boxed", "last_number"], format_reward=0.5)
    assert environment.reward_range == (0.0, 1.5)
    right = score(environment, "1/2", r"Thus \boxed{0.50}.")
    assert right.reward == 1.5 and right.components == {"format": 0.5}
    assert right.info == {"extracted": "0.50", "verdict": "right", "why": r"inside \boxed{}"}
    loose = score(environment, "12", "I get 12.")
    assert loose.reward == 1.0 and loose.info["why"] == "the last number" and loose.components == {"format": 0.0}
    wrong = score(environment, "12", r"\boxed{\text{a dozen}}")
    assert wrong.reward == 0.5 and wrong.info["verdict"] == "wrong"
    none = score(environment, "12", "I get twelve", finish="length")
    assert none.reward == 0.0 and none.info == {
        "verdict": "no answer",
        "why": r"no \boxed{} in the text; no number in the text; the answer was cut off at max_new_tokens",
    }
    searched = score(env(extract=["whole"]), "1/2", "The final answer is $\\frac{1}{2}$. I hope it is correct.")
    assert searched.reward == 1.0 and searched.info["read"] == r"\frac{1}{2}"


def test_multiple_choice():
    environment = env(extract=["boxed", "last_line"])
    options = ["21", "27", "29", "33"]
    assert score(environment, "C", r"\boxed{C}", choices=options).info["option"] == "C"
    assert score(environment, "C", r"\boxed{29}", choices=options).reward == 1.0
    wrong = score(environment, "C", "I think\nthe answer is (B)", choices=options)
    assert wrong.reward == 0.0 and wrong.info == {
        **{"extracted": "the answer is (B)", "option": "B", "verdict": "wrong"},
        "why": "the last line; after the word answer",
    }
    vague = score(environment, "C", "B or C", choices=options)
    assert vague.reward == 0.0 and vague.info["verdict"] == "no answer" and "it names B, C" in vague.info["why"]


HOSTILE = [
    "9^9^9^9",
    *[
        pytest.param(text, marks=pytest.mark.slow)
        for text in (
            "9^{9^{9^{9^9}}}",
            "9**9**9**9**9",
            "(((((9^9)^9)^9)^9)^9)^9",
            "100000000!",
            r"\sum_{i=1}^{10000000000} i^i",
            r"\int_0^1 x^{x^{x^x}} dx",
        )
    ],
    "(" * 1900,
    r"\frac{" * 300,
    "1/0",
    "__import__('os')._exit(1)",
    "\x00",
    "1e" + "9" * 400,
    "9" * 1990,
]


@pytest.mark.parametrize("answer", HOSTILE)
def test_hostile_answers_cost_an_episode_at_most(answer):
    environment = env(extract=["last_line"], deadline_s=1.0)
    try:
        assert score(environment, "5", answer).reward == 0.0
    except VerifierError as failed:
        assert str(failed).startswith("math-verify could not judge it: ")
    assert score(environment, "5", "5").reward == 1.0  # the next one is judged as ever


def test_an_answer_without_end_is_counted_with_its_reason():
    environment = env(extract=["last_line"], deadline_s=1.0)
    with pytest.raises(VerifierError, match=r"could not judge it: took longer than 1 s"):
        score(environment, "5", "(((((9^9)^9)^9)^9)^9)^9 + 100000000!")
    zero = env(extract=["last_line"], deadline_s=1.0, unjudged="zero")
    judged = score(zero, "5", "(((((9^9)^9)^9)^9)^9)^9 + 100000000!")
    assert judged.reward == 0.0 and judged.info["verdict"] == "unjudged"
    assert judged.info["why"] == "math-verify could not judge it: took longer than 1 s"


@pytest.mark.parametrize("place", ["boxed", "tag", "last_line", "last_number", "whole"])
def test_a_megabyte_is_not_judged(place):
    text = {"boxed": "\\boxed{%s}", "tag": "<answer>%s</answer>"}.get(place, "%s") % ("7" * 2**20)
    judged = score(env(extract=[place]), "5", text)
    assert judged.reward == 0.0 and len(judged.info["extracted"]) < 400
    assert judged.info["verdict"] == ("wrong" if place == "whole" else "too long")


# --- tasks -----------------------------------------------------------------------------------------------------------


def test_orders_and_splits(problems):
    environment = problems(sums(40), eval_fraction=0.25)
    train, held = environment.tasks("train"), environment.tasks("eval")
    assert isinstance(environment, Environment) and isinstance(train, TaskSource)
    assert (train.size, held.size) == (30, 10)
    epochs = [[train.task(30 * e + i).id for i in range(30)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    assert not {train.task(i).prompt for i in range(30)} & {held.task(i).prompt for i in range(10)}
    assert [held.task(i) for i in range(10)] == [
        problems(sums(40), seed=1, eval_fraction=0.25).tasks("eval").task(i) for i in range(10)
    ]
    assert problems(sums(40), seed=1).tasks("train").task(0) != problems(sums(40)).tasks("train").task(0)
    still = problems(sums(5), shuffle=False).tasks("train")
    assert [still.task(i).id for i in range(6)] == [f"m:train:{i % 5}" for i in range(6)]


def test_twins_stay_on_one_side(problems, tmp_path):
    environment = problems([*sums(6), *sums(6)], eval_fraction=0.3)
    sides = [{environment.tasks(s).task(i).prompt for i in range(environment.tasks(s).size)} for s in ("train", "eval")]
    assert not sides[0] & sides[1] and environment.tasks("eval").size == 4


def test_two_files(problems, tmp_path):
    (tmp_path / "e.jsonl").write_text("\n".join(map(json.dumps, sums(4, start=8))))
    with pytest.raises(DataError, match=r"p.jsonl:9 is also that of the evaluation's \S+e.jsonl:1, and 1 more are"):
        problems(sums(10), eval_path="e.jsonl").tasks("train")
    environment = problems(sums(10), eval_path="e.jsonl", on_overlap="drop")
    assert (environment.tasks("train").size, environment.tasks("eval").size) == (8, 4)


def test_prompts(problems):
    rows = [{"problem": "1+1?", "answer": "2"}, {"problem": "Which?", "answer": 1, "choices": ["x", "y"]}]
    environment = problems(rows, shuffle=False, prompt={"system": "Be exact."})
    plain, choice = (environment.tasks("train").task(i) for i in range(2))
    said = "Put the final answer inside \\boxed{}."
    assert plain.prompt == (
        Message(role="system", content="Be exact."),
        Message(role="user", content=f"1+1?\n{said}"),
    )
    assert (plain.answer, plain.demonstrations, plain.metadata) == ("2", ("\\boxed{2}",), {"where": "p.jsonl:1"})
    assert choice.prompt[1].content == "Which?\nA. x\nB. y\nPut the letter of the right option inside \\boxed{}."
    assert (choice.answer, choice.metadata["choices"]) == ("B", ["x", "y"])
    text = problems(rows, plain=True, shuffle=False, extract=["tag"]).tasks("train").task(0)
    assert text.prompt == "1+1?\nGive the final answer between <answer> and </answer>."


@pytest.mark.parametrize("check", [10, 0])
def test_a_reference_that_cannot_be_read(problems, check):
    rows = [*sums(3), {"problem": "big?", "answer": "(((((9^9)^9)^9)^9)^9)^9 + 100000000!"}]
    options = {"deadline_s": 1.0, "shuffle": False, "check_references": check}
    with pytest.raises(DataError if check else LateDataError, match=r"p.jsonl:4: math-verify cannot read the answer"):
        problems(rows, **options).tasks("train").task(3)


def test_what_there_is_not(problems):
    with pytest.raises(DataError, match="no split 'eval'"):
        problems(sums(2)).tasks("eval")
    with pytest.raises(DataError, match=r"split 'eval' is empty; p.jsonl has 1 problems"):
        problems(sums(1), eval_fraction=0.5).tasks("train")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": ""}, "path is empty"),
        ({"path": "a", "eval_path": "b", "eval_fraction": 0.1}, "give one"),
        ({"path": "a", "eval_fraction": 1.0}, "eval_fraction is 1.0"),
        ({"path": "a", "extract": []}, "extract is empty"),
        ({"path": "a", "tag": "a b"}, "tag is 'a b'"),
        ({"path": "a", "deadline_s": 0}, "deadline_s is 0"),
    ],
)
def test_options_that_mean_nothing(options, says):
    with pytest.raises(ConfigError) as refused:
        bind(MathConfig, options, "env")
    assert says in refused.value.message
