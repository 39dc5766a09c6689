"""The scorer against a teacher behind a real socket: both dialects, and everything that a service can do wrong."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from miles_algo_opd import plugin
from miles_algo_opd.config import HttpTeacherConfig, Style, Vocabulary
from miles_algo_opd.loopback import Loopback, send, status

from miles_core.errors import CapabilityError, CombinationError, EngineError, LearnerError, MilesError
from miles_core.provider import Place
from miles_core.records import Sampling, Task, Trajectory
from miles_core.testing.suite import minimal_context
from miles_core.testing.suites import batches

VOCAB = 12
ROWS = [
    batches.trajectory("one", [3, 4], [5, 6, 11]),
    batches.trajectory("two", [2], [7]),
    batches.trajectory("all", [], [8, 9, 1]),
]
STYLES = [Style.sglang, Style.vllm]
Array = np.ndarray[Any, Any]


class Letters:
    """A tokenizer whose ids are letters."""

    vocab_size = VOCAB

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join(chr(97 + i) for i in ids)


def build(teacher: Loopback | None = None, tokenizer: Any = None, run: Any = None, **options: Any) -> Any:
    given: dict[str, Any] = {"vocabulary": Vocabulary.same, "backoff_s": 0.0, "retries": 2, "deadline_s": 5.0}
    given |= {"url": teacher.url} if teacher is not None else {}
    context = minimal_context(Place.CONTROLLER, "judge")
    context = replace(context, renderer=tokenizer and SimpleNamespace(tokenizer=tokenizer), run=run or context.run)
    return plugin.miles_scorer().build(HttpTeacherConfig(**given | options), context)


def score(
    scorer: Any, rows: Sequence[Trajectory] = ROWS, want: Sequence[str] = ("t.logprobs",), tasks: Any = ()
) -> Any:
    return asyncio.run(scorer.score(rows, want, tasks))


def truth(teacher: Loopback, row: Trajectory, temperature: float = 1.0) -> tuple[Array, Array]:
    """[length, vocabulary] of the teacher, and which positions count."""
    tokens, live = np.asarray(row.columns["tokens"]), np.array(row.columns["trainable"])
    live[0] = False
    full = np.zeros((row.length, VOCAB))
    for t in range(1, row.length):
        full[t] = teacher.logprobs(int(tokens[t - 1]), temperature)
    return full, live


@pytest.mark.parametrize("style", STYLES)
def test_columns_are_what_the_teacher_says(style: Style) -> None:
    want = ("teacher.logprobs", "teacher.topk_ids", "teacher.topk_logprobs")
    with Loopback(VOCAB).serving() as teacher:
        found = score(build(teacher, style=style, k=3), want=want)
    assert set(found) == set(want)
    for i, row in enumerate(ROWS):
        full, live = truth(teacher, row)
        top = np.argsort(-full, axis=1)[:, :3]
        logprobs, ids, values = (np.asarray(found[name][i]) for name in want)
        assert (logprobs.dtype, ids.dtype, values.dtype) == (np.float32, np.int32, np.float32)
        own = full[np.arange(row.length), np.asarray(row.columns["tokens"])]
        np.testing.assert_allclose(logprobs, np.where(live, own, 0), rtol=1e-6)
        np.testing.assert_array_equal(ids, np.where(live[:, None], top, 0))
        np.testing.assert_allclose(values, np.where(live[:, None], np.take_along_axis(full, top, 1), 0), rtol=1e-6)
    bodies = teacher.requests
    key = "input_ids" if style is Style.sglang else "prompt"
    assert sorted(map(len, (b[key] for b in bodies))) == [2, 3, 5]
    assert all(isinstance(t, int) for b in bodies for t in b[key])  # ids, never text
    assert all("logprob_temperature" not in b for b in bodies)


def test_nothing_trainable_is_not_asked() -> None:
    context = replace(ROWS[0], columns={**ROWS[0].columns, "trainable": np.zeros(5, bool)})
    with Loopback(VOCAB).serving() as teacher:
        found = score(build(teacher), [context])
    assert not teacher.requests and not np.asarray(found["t.logprobs"][0]).any()


# --- what goes wrong ------------------------------------------------------------------------------------------------


def failing(error: type[MilesError], faults: Sequence[Callable[..., Any]], **options: Any) -> tuple[str, int]:
    """The message, and how many requests there were."""
    with Loopback(VOCAB).serving() as teacher:
        teacher.faults = list(faults)
        with pytest.raises(error) as caught:
            score(build(teacher, **options), ROWS[:1])
        return caught.value.message, len(teacher.requests)


@pytest.mark.parametrize("code", [408, 429, 500, 503])
def test_a_busy_service_is_asked_again(code: int) -> None:
    with Loopback(VOCAB).serving() as teacher:
        teacher.faults = [status(code, "later"), status(code, "later")]
        found = score(build(teacher), ROWS[:1])
        assert len(teacher.requests) == 3 and np.asarray(found["t.logprobs"][0])[2:].all()


def test_it_is_not_asked_for_ever() -> None:
    message, count = failing(EngineError, [status(500, "CUDA error:\n out of memory")] * 9)
    assert count == 3 and "HTTP 500: CUDA error: out of memory (3 attempts)" in message
    assert "teacher 'teacher'" in message and "trajectory 'one'" in message


def test_what_will_not_change_is_not_asked_again() -> None:
    message, count = failing(EngineError, [status(400, "prompt_logprobs is above --max-logprobs")] * 9)
    assert count == 1 and "HTTP 400: prompt_logprobs is above" in message


def test_a_service_that_hangs_meets_the_deadline() -> None:
    def hang(answer: Any, handler: Any) -> None:
        time.sleep(3.0)

    message, count = failing(EngineError, [hang] * 9, deadline_s=1.0, retries=1)
    assert count == 2 and "no answer within 1 s (2 attempts)" in message


def test_half_an_answer_and_none_at_all() -> None:
    def half(answer: Any, handler: Any) -> None:
        send(handler, 200, b'{"meta', Content_Length="4000")

    def hang_up(answer: Any, handler: Any) -> None:
        handler.close_connection = True

    for fault in (half, hang_up):
        message, count = failing(EngineError, [fault] * 9, retries=1)
        assert count == 2 and "2 attempts" in message
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(EngineError, match="did not score trajectory"):
            score(build(url=nobody, retries=0))


def test_chunked_answers_are_read() -> None:
    def chunked(answer: Any, handler: Any) -> None:
        data = json.dumps(answer).encode()
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for part in (data[:7], data[7:]):
            handler.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        handler.wfile.write(b"0\r\n\r\n")

    with Loopback(VOCAB).serving() as teacher:
        plain = score(build(teacher), ROWS[:1])
        teacher.faults = [chunked]
        assert np.array_equal(score(build(teacher), ROWS[:1])["t.logprobs"][0], plain["t.logprobs"][0])


def change(edit: Callable[[Any], Any]) -> Callable[..., Any]:
    def fault(answer: Any, handler: Any) -> Any:
        edit(answer)
        return answer

    return fault


def rows(answer: Any) -> Any:
    return answer["meta_info"]["input_token_logprobs"]


def prompts(answer: Any) -> Any:
    return answer["choices"][0]["prompt_logprobs"]


@pytest.mark.parametrize(
    ("style", "edit", "error", "words"),
    [
        ("sglang", lambda a: rows(a).pop(), EngineError, "has 4 entries for 5 tokens"),
        ("sglang", lambda a: rows(a)[3].__setitem__(1, 2), EngineError, r"\[3\] is about token 2; token 6 was sent"),
        ("sglang", lambda a: rows(a)[3].__setitem__(0, None), EngineError, "has the log-probability None"),
        (
            "sglang",
            lambda a: rows(a)[3].__setitem__(0, float("nan")),
            LearnerError,
            "token 3 of trajectory 'one'.* nan",
        ),
        ("sglang", lambda a: rows(a)[3].__setitem__(0, float("-inf")), LearnerError, "-inf"),
        ("sglang", lambda a: rows(a)[3].__setitem__(0, 0.5), LearnerError, "log-probability 0.5"),
        ("sglang", lambda a: rows(a).__setitem__(2, "x"), EngineError, "was expected"),
        ("sglang", lambda a: a.pop("meta_info"), EngineError, "has no meta_info"),
        ("vllm", lambda a: prompts(a)[2].pop("5"), EngineError, "lacks token 5"),
        ("vllm", lambda a: prompts(a).insert(1, None), EngineError, "has 6 entries for 5 tokens"),
        ("vllm", lambda a: prompts(a)[3]["6"].__setitem__("logprob", float("nan")), LearnerError, "nan"),
        ("vllm", lambda a: prompts(a)[3]["6"].pop("logprob"), EngineError, "log-probability None"),
        ("vllm", lambda a: a["choices"].clear(), EngineError, "choices has 0 entries"),
        ("vllm", lambda a: a.clear(), EngineError, "has no choices"),
    ],
)
def test_an_answer_that_does_not_fit_is_never_taken(
    style: str, edit: Callable[[Any], Any], error: type[MilesError], words: str
) -> None:
    import re

    message, count = failing(error, [change(edit)], style=Style[style])
    assert count == 1 and re.search(words, message), message


@pytest.mark.parametrize("style", STYLES)
def test_a_top_k_with_a_hole_is_not_taken(style: Style) -> None:
    def drop(answer: Any) -> None:
        if style is Style.sglang:
            answer["meta_info"]["input_top_logprobs"][2].pop()
        else:
            entries = prompts(answer)[2]
            entries.pop(next(key for key in entries if key != "5"))

    with Loopback(VOCAB).serving() as teacher:
        # the sampled token is not the likeliest, so that a hole in the top is a hole
        teacher.logits[4, 5] = -9
        teacher.faults = [change(drop)]
        with pytest.raises(EngineError, match=r"position 2 has 1 of the 2 most likely"):
            score(build(teacher, style=style, k=2), ROWS[:1], ["t.topk_ids"])


def test_text_that_is_no_json() -> None:
    message, count = failing(EngineError, [lambda answer, handler: send(handler, 200, b"<html>")])
    assert count == 1 and "the answer is no JSON" in message


def test_the_first_error_ends_the_others() -> None:
    with Loopback(VOCAB).serving() as teacher:
        teacher.faults = [status(400, "no")]
        teacher.slow_s = 0.05
        with pytest.raises(EngineError, match="HTTP 400"):
            score(build(teacher, concurrency=1), ROWS * 20)
        assert len(teacher.requests) < 10


def test_no_more_requests_at_a_time_than_allowed() -> None:
    with Loopback(VOCAB).serving() as teacher:
        teacher.slow_s = 0.1
        score(build(teacher, concurrency=3), ROWS * 4)
        assert 2 <= teacher.most <= 3


# --- routes ---------------------------------------------------------------------------------------------------------


def task(name: str, **metadata: Any) -> Task:
    return Task(id=name, prompt="", metadata=metadata)


def test_each_task_goes_to_its_teacher() -> None:
    with Loopback(VOCAB, seed=1).serving() as math, Loopback(VOCAB, seed=2).serving() as code:
        teachers = {"math": math.url, "code": code.url}
        for options, tasks in (
            ({"route": "subject"}, [task("e:train:0", subject=s) for s in ("math", "code", "math")]),
            ({}, [task(f"{env}:train:{i}") for i, env in enumerate(("math", "code", "math"))]),
            (
                {"route": "subject", "default": "math"},
                [task("e:train:0"), task("e:train:1", subject="code"), task("x")],
            ),
        ):
            found = score(build(teachers=teachers, **options), tasks=tasks)
            for row, teacher, column in zip(ROWS, (math, code, math), found["t.logprobs"], strict=True):
                full, live = truth(teacher, row)
                own = full[np.arange(row.length), np.asarray(row.columns["tokens"])]
                np.testing.assert_allclose(column, np.where(live, own, 0), rtol=1e-6)
        scorer = build(teachers=teachers, route="subject")
        for given, words in (
            (task("x", subject="art"), "is 'art'"),
            (task("x"), "is None"),
            (task("x", subject=[1]), "1"),
        ):
            with pytest.raises(LearnerError, match=r"teachers: \['code', 'math'\]") as caught:
                score(scorer, ROWS[:1], tasks=[given])
            assert words in caught.value.message and "'one'" in caught.value.message
        with pytest.raises(LearnerError, match="no teacher for trajectory 'one'"):
            score(scorer, ROWS[:1])  # nobody said which task it is


# --- what cannot be compared ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_vocabularies_are_compared_once_before_the_first_score(style: Style) -> None:
    with Loopback(VOCAB).serving() as teacher:
        teacher.texts = lambda token: f" {chr(97 + token)}" if token else "�"
        scorer = build(teacher, Letters(), vocabulary=Vocabulary.check, style=style)
        score(scorer)
        score(scorer)
        assert len(teacher.requests) == 1 + 2 * len(ROWS)
        sent = teacher.requests[0]["input_ids" if style is Style.sglang else "prompt"]
        assert sent == [0, *range(VOCAB)]
        teacher.texts = lambda token: chr(98 + token)
        with pytest.raises(CombinationError, match="token 0 is 'a' to the student and 'b' to teacher 'teacher'"):
            score(build(teacher, Letters(), vocabulary=Vocabulary.check, style=style))
        teacher.texts = lambda token: None
        with pytest.raises(EngineError, match="does not tell the texts of token ids"):
            score(build(teacher, Letters(), vocabulary=Vocabulary.check, style=style))


def test_a_teacher_with_fewer_tokens_is_refused_by_itself() -> None:
    with Loopback(VOCAB).serving() as teacher:
        teacher.faults = [status(400, "token id 11 is out of vocabulary")]
        with pytest.raises(EngineError, match="did not score 12 ids to compare vocabularies: HTTP 400"):
            score(build(teacher, Letters(), vocabulary=Vocabulary.check))


@pytest.mark.parametrize("style", STYLES)
def test_another_temperature_needs_its_echo(style: Style) -> None:
    warm = replace(ROWS[0], sampling=Sampling(max_new_tokens=3, temperature=0.7))
    with Loopback(VOCAB, echoes_temperature=True).serving() as teacher:
        with pytest.raises(LearnerError, match=r"sampled at temperature 0\.7.*at temperature 1"):
            score(build(teacher, style=style), [warm])
        assert not teacher.requests
        found = score(build(teacher, style=style, echoes_temperature=True), [warm])
        full, live = truth(teacher, warm, 0.7)
        own = full[np.arange(5), np.asarray(warm.columns["tokens"])]
        np.testing.assert_allclose(found["t.logprobs"][0], np.where(live, own, 0), rtol=1e-6)
        teacher.echoes_temperature = False
        with pytest.raises(EngineError, match=r"logprob_temperature is None; 0\.7 was asked for"):
            score(build(teacher, style=style, echoes_temperature=True), [warm])


def test_cut_distributions_are_refused() -> None:
    with Loopback(VOCAB).serving() as teacher:
        for cut in (Sampling(max_new_tokens=3, top_p=0.9), Sampling(max_new_tokens=3, top_k=5)):
            with pytest.raises(LearnerError, match="over the whole vocabulary"):
                score(build(teacher), [replace(ROWS[0], sampling=cut)])


def test_columns_that_it_does_not_have() -> None:
    scorer = build(url="http://127.0.0.1:9")
    with pytest.raises(CapabilityError, match=r"no column 't\.token_logprobs'"):
        score(scorer, ROWS, ["t.token_logprobs"])
    with pytest.raises(CapabilityError, match="not told how many"):
        score(scorer, ROWS, ["t.topk_ids"])


# --- before the run -------------------------------------------------------------------------------------------------


def run_with(**sampling: Any) -> Any:
    keys = SimpleNamespace(**{"temperature": 1.0, "top_p": 1.0, "top_k": None, **sampling})
    distill = SimpleNamespace(options=SimpleNamespace(k=5))
    policy = SimpleNamespace(algorithm=SimpleNamespace(one=lambda field: distill if field == "distill" else None))
    return SimpleNamespace(engines={"main": SimpleNamespace(at="rollout", core=keys)}, policies={"main": policy})


def test_a_run_that_does_not_fit_is_refused_before_it_starts() -> None:
    url = "http://127.0.0.1:9"
    for sampling, words in (
        ({"temperature": 0.8}, r"rollout\.temperature is 0\.8.*scores prompts at temperature 1"),
        ({"top_p": 0.9}, "samples with top_p 0.9 and top_k None"),
        ({"top_k": 20}, "top_k 20"),
    ):
        with pytest.raises(CombinationError, match=words):
            build(run=run_with(**sampling), url=url)
    build(run=run_with(temperature=0.8), url=url, echoes_temperature=True)
    with pytest.raises(CombinationError, match="would compare vocabularies"):
        build(url=url, vocabulary=Vocabulary.check)


def test_k_is_that_of_the_run() -> None:
    with Loopback(VOCAB).serving() as teacher:
        found = score(build(teacher, run=run_with()), ROWS[:1], ["t.topk_ids"])
    assert np.asarray(found["t.topk_ids"][0]).shape == (5, 5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "neither given"),
        ({"url": "http://a", "teachers": {"b": "http://b"}}, "both given"),
        ({"url": "a:30000"}, "must start with http"),
        ({"teachers": {"b": 3}}, "the address of teacher 'b' is 3"),
        ({"teachers": {"b": "http://b"}, "default": "c"}, r"which is no teacher; teachers: \['b'\]"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        HttpTeacherConfig(**options)
