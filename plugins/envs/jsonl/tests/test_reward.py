"""The user's reward function: where it is found, what it is given, what it may return, and its deadline."""

import asyncio
import functools
import json
import re
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from miles_env_jsonl import reward
from miles_env_jsonl.config import JsonlConfig
from miles_env_jsonl.plugin import miles_env
from miles_env_jsonl.reward import Runner

from miles_core.config.schema import EpisodeSource
from miles_core.errors import ConfigError, DataError, RewardError
from miles_core.records import Score, Task
from miles_core.session import EpisodeFailedError

TASK = Task(id="mine:train:0", prompt="p", answer="42", metadata={"level": 1})


def context(folder, episodes=EpisodeSource.sampled):
    algorithm = SimpleNamespace(keys=SimpleNamespace(episodes=episodes))
    policy = SimpleNamespace(algorithm=algorithm, schedule=SimpleNamespace(group_size=1))
    run = SimpleNamespace(run=SimpleNamespace(folder=str(folder)), policies={"main": policy})
    return SimpleNamespace(name="mine", seed=0, policy="main", run=run, renderer=None)


def build(folder, spec, **options):
    return miles_env().build(JsonlConfig(path="tasks.jsonl", reward=spec, **options), context(folder))


def score(environment, text="42", task=TASK):
    return asyncio.run(environment.score(task, SimpleNamespace(text=text, finish="stop")))


def call(function, deadline_s=5.0, threads=2, **offered):
    given = dict.fromkeys(reward.OFFERED) | offered
    return asyncio.run(Runner(function, "m:f", deadline_s, threads).call(given, "t"))


def test_found_beside_the_run_file_before_what_is_installed(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("from helper import VALUE\ndef score(text):\n    return VALUE\n")
    (tmp_path / "helper.py").write_text("VALUE = 0.5\n")
    before = list(sys.path)
    assert score(build(tmp_path, "json:score")).reward == 0.5
    assert sys.path == before and hasattr(sys.modules["json"], "dumps")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "r.py").write_text("def score(text):\n    return 2\n")
    assert score(build(tmp_path, "code/r.py:score")).reward == 2.0
    assert score(build(tmp_path, "code.r:score")).reward == 2.0
    monkeypatch.chdir(tmp_path)
    assert score(build(tmp_path / "elsewhere", "code.r:score")).reward == 2.0


def test_packages_and_installed_modules(tmp_path):
    package = tmp_path / "acme_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "base.py").write_text("VALUE = 3\n")
    (package / "r.py").write_text("from .base import VALUE\ndef score(text):\n    return VALUE\n")
    assert score(build(tmp_path, "acme_rewards.r:score")).reward == 3.0
    with pytest.raises(ConfigError, match="asks for"):
        reward.load("math:sqrt", [tmp_path])


def test_what_is_given(tmp_path):
    source = "def score(text, answer, prompt, metadata, finish, task, other=1):\n"
    source += "    seen = len([text, answer, prompt, metadata, finish, task])\n"
    source += "    return {'reward': 1, 'seen': seen, 'why': f'{task.id} {finish}'}\n"
    (tmp_path / "r.py").write_text(source)
    found = score(build(tmp_path, "r:score"))
    assert found == Score(reward=1.0, components={"seen": 6.0}, info={"why": "mine:train:0 stop"})
    (tmp_path / "k.py").write_text("def score(**everything):\n    return len(everything)\n")
    assert score(build(tmp_path, "k:score")).reward == 6.0


def test_exact_comparison_without_a_function(tmp_path):
    environment = build(tmp_path, None)
    assert score(environment, " 42\n") == Score(reward=1.0, info={"verdict": "right"})
    assert score(environment, "43").reward == 0.0
    assert score(environment, task=Task(id="t", prompt="p")).reward is None


def test_answers_are_asked_for_where_they_are_needed(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "q"}\n')
    (tmp_path / "r.py").write_text("def a(text, answer): ...\ndef b(text, answer=None): ...\ndef c(text): ...\n")
    for spec in (None, "r:a"):
        with pytest.raises(DataError, match="no field 'answer', which the reward needs"):
            build(tmp_path, spec).tasks("train")
    for spec in ("r:b", "r:c"):
        assert build(tmp_path, spec).tasks("train").size == 1
    supervised = miles_env().build(
        JsonlConfig(path="tasks.jsonl", reward="r:a"), context(tmp_path, EpisodeSource.demonstrations)
    )
    with pytest.raises(DataError, match="nothing to demonstrate"):
        supervised.tasks("train")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nowhere:score", r"no such file or module; looked at .*nowhere.py.* installed module 'nowhere'"),
        ("no/where.py:score", r"no such file or module; looked at .*no/where.py\n"),
        ("r:missing", r"has no function 'missing'\nFix: name one of its functions: score"),
        ("r:VALUE", "has no function 'VALUE'"),
        ("broken:score", r"importing .*broken.py fails at .*broken.py:2: ZeroDivisionError"),
        ("unread:score", r"fails at [^<]*unread.py:2: SyntaxError: expected ':'"),
        ("leaves:score", r"importing .*leaves.py fails at .*leaves.py:2: SystemExit: 0"),
        ("package.leaves:score", r"importing package.leaves fails at .*leaves.py:1: SystemExit"),
        ("needy:score", r"fails at .*needy.py:1: ModuleNotFoundError: No module named 'not_installed'"),
        ("odd:score", r"asks for 'completion', which is not offered by name\nFix: use parameters among text, answer"),
        ("odd:only", "asks for 'text'"),
    ],
)
def test_functions_that_cannot_be_used(tmp_path, spec, says):
    (tmp_path / "r.py").write_text("VALUE = 1\ndef score(text):\n    return 1\n")
    (tmp_path / "broken.py").write_text("x = 1\n1 / 0\n")
    (tmp_path / "unread.py").write_text("import math\ndef score(text)\n    return 1\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "leaves.py").write_text("raise SystemExit\n")
    (tmp_path / "needy.py").write_text("import not_installed\n")
    (tmp_path / "odd.py").write_text("def score(completion): ...\ndef only(text, /): ...\n")
    with pytest.raises(ConfigError, match=says) as caught:
        build(tmp_path, spec)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("value", [1, 0.25, True, np.float32(0.5), np.int64(3), np.bool_(True), np.array(2.0)])
def test_numbers(value):
    found = call(lambda text: value).reward
    assert type(found) is float and found == float(value)


def test_tensors_and_scores():
    torch = pytest.importorskip("torch")
    assert call(lambda text: torch.tensor(0.5)).reward == 0.5
    given = Score(reward=None, components={"a": 1}, info={"b": "c"})
    assert call(lambda text: given) == Score(reward=None, components={"a": 1.0}, info={"b": "c"})
    assert np.isnan(call(lambda text: float("nan")).reward)  # the sampler makes that a failed episode


@pytest.mark.parametrize(
    "value", [None, "1.0", [1], {"score": 1}, {"reward": None}, {"reward": 1, "x": [2]}, 1j, np.array([1.0])]
)
def test_what_is_no_number(value):
    with pytest.raises(RewardError, match=r"reward function 'm:f' on task t: .* not a number\nFix: return a number"):
        call(lambda text: value)


def test_async_functions():
    async def later(text):
        await asyncio.sleep(0)
        return 0.5

    class Callable:
        async def __call__(self, text):
            return 0.25

    assert call(later).reward == 0.5
    assert call(Callable()).reward == 0.25
    assert call(lambda text: later(text)).reward == 0.5  # a plain function that hands out a coroutine


@pytest.mark.parametrize("asked", ["metadata", "task"])
def test_a_reward_that_changes_what_it_is_given_changes_nothing_for_the_next(tmp_path, asked):
    given = "metadata" if asked == "metadata" else "task.metadata"
    (tmp_path / "r.py").write_text(f"def score({asked}):\n    {given}['n'].append(1)\n    return len({given}['n'])\n")
    environment, task = build(tmp_path, "r:score"), replace(TASK, metadata={"n": []})
    told = SimpleNamespace(text="x", finish="stop")
    assert [asyncio.run(environment.score(task, told)).reward for _ in range(3)] == [1.0, 1.0, 1.0]
    assert task.metadata == {"n": []}


def test_what_a_reward_raises_is_told_with_its_line():
    shared = ValueError("the same object each time")

    def raises(text):
        raise shared

    def within(text):
        json.loads("{")

    class Late(Exception):
        __notes__ = None

    def odd(text):
        raise Late("no notes")

    class Judge:
        def __call__(self, text):
            return 1 / 0

    for function, says in (
        (raises, "ValueError: the same object each time"),
        (raises, "ValueError: the same object each time"),
        (within, "JSONDecodeError: Expecting property name"),
        (odd, "Late: no notes"),
        (Judge(), "ZeroDivisionError: division by zero"),
        (functools.partial(lambda text, more: more + text, more=1), "TypeError: unsupported operand"),
    ):
        with pytest.raises(EpisodeFailedError) as failed:
            call(function)
        told = str(failed.value)
        assert told.startswith(says) and re.search(rf"\({re.escape(__file__)}:\d+\)$", told) and told.count("(/") == 1
    assert not hasattr(shared, "__notes__")


def test_exceptions_pass_through():
    def fails(text):
        raise KeyError("x")

    def leaves(text):
        sys.exit(3)

    def stops(text):
        raise StopIteration

    def own(text):
        raise TimeoutError("my own")

    for function, error, says in (
        (fails, EpisodeFailedError, "KeyError: 'x'"),
        (leaves, RuntimeError, "SystemExit: 3"),
        (stops, RuntimeError, "StopIteration"),
        (own, EpisodeFailedError, "TimeoutError: my own"),
    ):
        with pytest.raises(error, match=says):
            call(function)


def test_deadlines():
    async def never(text):
        await asyncio.Event().wait()

    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"'m:f' took longer than 0.05 s on task t"):
        call(never, deadline_s=0.05)
    with pytest.raises(TimeoutError, match="took longer"):
        call(lambda text: release.wait(), deadline_s=0.05)
    release.set()


def test_a_call_that_hangs_costs_a_thread_and_not_the_others():
    release = threading.Event()
    runner = Runner(lambda text: release.wait() if text == "hang" else 1, "m:f", 2.0, threads=2)

    async def main():
        given = dict.fromkeys(reward.OFFERED)
        texts = ["hang", "a", "b", "hang", "c", "d"]
        return await asyncio.gather(*(runner.call(given | {"text": t}, t) for t in texts), return_exceptions=True)

    for _ in range(2):  # a second event loop uses the same runner
        found = asyncio.run(main())
        assert [type(f) for f in found] == [TimeoutError, Score, Score, TimeoutError, Score, Score]
    assert len(runner._hanging) == 4
    release.set()


def test_too_many_hanging_calls_stop_the_run(monkeypatch):
    monkeypatch.setattr(reward, "MAX_HANGING", 2)
    release = threading.Event()
    runner = Runner(lambda text: release.wait(), "m:f", 0.02, threads=1)
    given = dict.fromkeys(reward.OFFERED)

    async def main():
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await runner.call(given, "t")
        with pytest.raises(RewardError, match=r"2 calls of reward function 'm:f' hang past their deadline of 0.02 s"):
            await runner.call(given, "t")
        release.set()
        runner._deadline_s = 30.0  # what follows is to succeed
        for _ in range(200):  # the threads come back, and so does the function
            if not any(worker.busy for worker in runner._hanging):
                break
            await asyncio.sleep(0.01)
        assert (await runner.call(given, "t")).reward == 1.0

    asyncio.run(main())


def test_plain_functions_run_beside_each_other_within_their_limit():
    together = threading.Barrier(3)  # passes only if three calls run at once
    active, most = [], []

    def meets(text):
        active.append(text)
        together.wait(timeout=10)
        most.append(len(active))
        active.remove(text)
        return 1

    runner = Runner(meets, "m:f", 30.0, threads=3)
    given = dict.fromkeys(reward.OFFERED)

    async def main():
        return await asyncio.gather(*(runner.call(given | {"text": i}, "t") for i in range(12)))

    assert [s.reward for s in asyncio.run(main())] == [1.0] * 12
    assert max(most) <= 3 and len(runner._idle) == 3
