"""Questions, splits, noise, delays and verdicts of the environment `arithmetic`."""

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_env_arithmetic.config import ArithmeticConfig, Match, Symbols, TaskKind
from miles_env_arithmetic.environment import Arithmetic, split_of
from miles_env_arithmetic.plugin import miles_env
from miles_env_arithmetic.questions import corrupt, draw

from miles_core.contracts.environment import Environment, TaskSource
from miles_core.errors import DataError

CONFIGS = st.builds(
    ArithmeticConfig,
    task=st.sampled_from(TaskKind),
    digits=st.integers(3, 9),
    min_digits=st.sampled_from([None, 3]),
    symbols=st.sampled_from(Symbols),
    terms=st.integers(2, 4),
    modulus=st.integers(2, 30),
    padded=st.booleans(),
    reversed_answer=st.booleans(),
    reference_noise=st.sampled_from([0.0, 0.5, 1.0]),
    eval_share=st.sampled_from([0.05, 0.1, 0.5]),
)


def solve(config, question):
    """The answer again, from the text of the question alone and written another way."""
    body = question[:-1]
    match config.task:
        case TaskKind.sort:
            return "".join(c * body.count(c) for c in sorted(set(body)))
        case TaskKind.reverse:
            return "".join(body[len(body) - 1 - i] for i in range(len(body)))
        case TaskKind.occurrences:
            text, wanted = body.split(",")
            return str(sum(c == wanted for c in text))
        case TaskKind.maximum:
            return str(sorted(map(int, body.split(",")))[-1])
        case TaskKind.modular:
            terms, modulus = body.split(" mod ")
            return str(sum(map(int, terms.split("+"))) % int(modulus))
        case TaskKind.subtract:
            a, b = map(int, body.split("-"))
            return str(a - b)
    sign = "+" if config.task == TaskKind.add else "*"
    numbers = list(map(int, body.split(sign)))
    value = sum(numbers) if sign == "+" else numbers[0] * numbers[1]
    return str(value), value


def context(text="", seed=0):
    return SimpleNamespace(text=text, rng=np.random.default_rng(seed))


def env(config=None, seed=7, **options):
    return Arithmetic(config or ArithmeticConfig(**options), name="arithmetic", seed=seed)


def score(environment, task, text, seed=0):
    return asyncio.run(environment.score(task, context(text, seed)))


@given(config=CONFIGS, seed=st.integers(0, 2**32))
def test_answers_are_right(config, seed):
    question, answer = draw(config, random.Random(seed))
    expected = solve(config, question)
    if isinstance(expected, tuple):
        text, value = expected
        shown = answer[::-1] if config.reversed_answer else answer
        assert int(shown) == value
        if config.padded:
            widest = config.terms * (10**config.digits - 1)
            assert len(shown) == (len(str(widest)) if config.task == TaskKind.add else 2 * config.digits)
        else:
            assert shown == text
    else:
        assert answer == expected


@settings(max_examples=60)
@given(config=CONFIGS, seeds=st.tuples(st.integers(0, 5), st.integers(0, 5)), start=st.integers(0, 10**6))
def test_splits_never_overlap(config, seeds, start):
    train = env(config, seeds[0]).tasks("train")
    held = env(config, seeds[1]).tasks("eval")
    questions = {train.task(start + i).metadata["question"] for i in range(20)}
    held_questions = {held.task(start + i).metadata["question"] for i in range(20)}
    assert not questions & held_questions
    assert {split_of(q, config.eval_share) for q in questions} == {"train"}
    assert {split_of(q, config.eval_share) for q in held_questions} == {"eval"}


@given(config=CONFIGS, position=st.integers(0, 10**9), seed=st.integers(0, 100))
def test_a_position_always_gives_the_same_task(config, position, seed):
    first = env(config, seed).tasks("train").task(position)
    assert first == env(config, seed).tasks("train").task(position)
    assert first.id == f"arithmetic:train:{position}"


def test_seeds_move_training_and_leave_evaluation():
    a, b = env(seed=1), env(seed=2)
    assert [a.tasks("train").task(i).prompt for i in range(5)] != [b.tasks("train").task(i).prompt for i in range(5)]
    assert [a.tasks("eval").task(i) for i in range(5)] == [b.tasks("eval").task(i) for i in range(5)]


@given(config=CONFIGS, seed=st.integers(0, 2**32))
def test_corruption_replaces_one_character(config, seed):
    rng = random.Random(seed)
    _, answer = draw(config, rng)
    wrong = corrupt(answer, rng)
    changed = [(a, b) for a, b in zip(answer, wrong, strict=True) if a != b]
    assert len(changed) == 1
    assert changed[0][0].isdigit() == changed[0][1].isdigit() and changed[0][1].isalnum()


@pytest.mark.parametrize(("noise", "low", "high"), [(0.0, 1.0, 1.0), (1.0, 0.0, 0.0), (0.8, 0.15, 0.25)])
def test_reference_noise(noise, low, high):
    source = env(reference_noise=noise).tasks("train")
    tasks = [source.task(i) for i in range(2000)]
    right = sum(t.demonstrations == (t.answer,) for t in tasks) / len(tasks)
    assert low <= right <= high
    clean = env().tasks("train")
    assert [(t.prompt, t.answer) for t in tasks[:50]] == [
        (clean.task(i).prompt, clean.task(i).answer) for i in range(50)
    ]


def test_recipe_a():
    task = env(digits=5).tasks("train").task(0)
    assert len(task.prompt) == 6 and task.prompt.endswith(">")
    assert task.answer == "".join(sorted(task.prompt[:-1]))
    assert isinstance(env(), Environment) and isinstance(env().tasks("train"), TaskSource)


def test_verdicts():
    environment = env(digits=5)
    task = environment.tasks("train").task(3)
    assert score(environment, task, task.answer).reward == 1.0
    assert score(environment, task, f" {task.answer}\n").reward == 1.0
    wrong = score(environment, task, task.answer + "1")
    assert wrong.reward == 0.0 and wrong.info == {"answer": task.answer + "1", "verdict": "wrong"}
    assert score(environment, task, "").reward == 0.0
    chatty = env(digits=5, match=Match.last)
    assert score(chatty, task, f"The answer is {task.answer}.").reward == 1.0
    assert score(environment, task, f"The answer is {task.answer}.").reward == 0.0
    assert score(chatty, replace(task, answer="-12"), "so -12!").reward == 1.0


def test_template():
    task = env(template="Sort {question} now").tasks("train").task(0)
    assert task.prompt == f"Sort {task.metadata['question']} now"


def test_delay_has_a_long_tail(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    environment = env(delay_s=0.1, delay_tail=1.5, delay_max_s=2.0)
    task = environment.tasks("train").task(0)

    async def many():
        for seed in range(2000):
            await environment.score(task, context("", seed))

    asyncio.run(many())
    assert min(slept) >= 0.1 and max(slept) == 2.0
    assert np.median(slept) == pytest.approx(0.1 * 2 ** (1 / 1.5), rel=0.1)
    assert np.quantile(slept, 0.99) > 10 * np.median(slept)
    again = list(slept)
    slept.clear()
    asyncio.run(many())
    assert slept == again  # from the episode's seed, not the clock


def test_too_few_questions():
    tiny = env(task=TaskKind.sort, digits=1, eval_share=1e-9)
    assert tiny.tasks("train")
    with pytest.raises(DataError, match="none of 20000 questions of sort with digits 1 belongs to split 'eval'"):
        tiny.tasks("eval")
    with pytest.raises(DataError, match="no split 'test'"):
        tiny.tasks("test")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"min_digits": 6}, "min_digits is 6, above digits, which is 5"),
        ({"template": "sort"}, "without {question}"),
        ({"eval_share": 1.0}, "eval_share is 1.0"),
        ({"delay_s": 20.0}, "delay_max_s is 10.0, below delay_s, which is 20.0"),
    ],
)
def test_options_that_mean_nothing(options, says):
    with pytest.raises(ValueError, match=says):
        ArithmeticConfig(**options)


def test_provider():
    provider = miles_env()
    built = provider.build(ArithmeticConfig(), SimpleNamespace(name="sums", seed=3, policy="main"))
    assert built.tasks("train").task(1).id == "sums:train:1"
