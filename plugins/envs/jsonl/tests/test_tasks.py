"""Files, rows, slices, splits, order and bad rows of the environment `jsonl`."""

import datetime
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_env_jsonl import tasks
from miles_env_jsonl.config import JsonlConfig
from miles_env_jsonl.environment import JsonlEnvironment
from miles_env_jsonl.files import split_slice
from miles_env_jsonl.tasks import Needs

from miles_core.contracts.environment import Environment, TaskSource
from miles_core.errors import DataError, LateDataError, MissingExtraError, PluginContractError
from miles_core.records import Message


def write(path, rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


def rows(count, start=0):
    return [{"prompt": f"q{i}", "answer": i} for i in range(start, start + count)]


def env(folder, seed=7, needs=None, renderer=None, **options):
    return JsonlEnvironment(
        JsonlConfig(**{"path": "tasks.jsonl", **options}),
        name="mine",
        seed=seed,
        policy="main",
        folders=(folder,),
        function=None,
        needs=needs or Needs(),
        renderer=renderer,
    )


def test_rows_become_tasks(tmp_path):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    whole = [*chat, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    lines = [
        {"prompt": "p", "answer": 4.5, "metadata": {"level": 1}, "extra": [1], "demonstration": "shown"},
        "",
        {"prompt": chat},
        {"messages": whole, "answer": "x"},
    ]
    environment = env(write(tmp_path / "tasks.jsonl", lines).parent, shuffle=False)
    assert isinstance(environment, Environment) and environment.task_splits == ("train",)
    source = environment.tasks("train")
    assert isinstance(source, TaskSource) and source.size == 3
    first, second, third = (source.task(i) for i in range(3))
    assert (first.id, first.prompt, first.answer, first.demonstrations) == ("mine:train:0", "p", "4.5", ("shown",))
    assert first.metadata == {"level": 1, "extra": [1]}
    assert second.prompt == (Message(role="system", content="s"), Message(role="user", content="u"))
    assert second.answer is None and second.demonstrations == ()
    assert third.prompt == second.prompt and third.answer == "x"
    assert third.demonstrations == ((Message(role="assistant", content="a"), Message(role="user", content="b")),)


def test_field_names(tmp_path):
    write(tmp_path / "tasks.jsonl", [{"question": "q", "target": "t", "meta": {"a": 1}, "gold": "g"}])
    names = {"prompt_field": "question", "answer_field": "target", "metadata_field": "meta"}
    task = env(tmp_path, demonstration_field="gold", **names).tasks("train").task(0)
    assert (task.prompt, task.answer, task.metadata, task.demonstrations) == ("q", "t", {"a": 1}, ("g",))


def test_parquet(tmp_path):
    table = pyarrow.Table.from_pylist(
        [
            {"prompt": [{"role": "user", "content": "u"}], "answer": 3, "metadata": {"day": datetime.date(2026, 1, 2)}},
            {"prompt": None, "answer": 4, "metadata": None},
        ]
    )
    pyarrow.parquet.write_table(table, tmp_path / "tasks.parquet")
    source = env(tmp_path, path="tasks.parquet@[:1]", shuffle=False).tasks("train")
    assert source.size == 1
    assert source.task(0).prompt == (Message(role="user", content="u"),)
    assert source.task(0).answer == "3" and source.task(0).metadata == {"day": "2026-01-02"}
    with pytest.raises(DataError, match=r"tasks.parquet: row 2: no field 'prompt'"):
        env(tmp_path, path="tasks.parquet").tasks("train")
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(DataError, match="no readable Parquet file"):
        env(tmp_path, path="bad.parquet").tasks("train")


def test_parquet_needs_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "tasks.parquet").write_text("x")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'miles-env-jsonl\[parquet\]'"):
        env(tmp_path, path="tasks.parquet").tasks("train")


@given(start=st.none() | st.integers(-12, 12), end=st.none() | st.integers(-12, 12))
def test_slices_are_pythons(tmp_path_factory, start, end):
    folder = tmp_path_factory.mktemp("s")
    write(folder / "tasks.jsonl", rows(10))
    text = f"tasks.jsonl@[{'' if start is None else start}:{'' if end is None else end}]"
    assert split_slice(text) == ("tasks.jsonl", slice(start, end))
    expected = list(range(10))[start:end]
    environment = env(folder, path=text, shuffle=False)
    if not expected:
        with pytest.raises(DataError, match=r"split 'train' is empty; .* has 10 rows before slicing"):
            environment.tasks("train")
        return
    source = environment.tasks("train")
    assert [source.task(i).answer for i in range(source.size)] == [str(i) for i in expected]
    assert source.task(0).id == f"mine:train:{expected[0]}"  # the row's number in the file, whatever the slice


def test_slices_that_are_none():
    for text in ("f.jsonl@[1]", "f.jsonl@[:1", "f.jsonl@[a:b]"):
        with pytest.raises(DataError, match="does not end in a slice"):
            split_slice(text)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 40), seed=st.integers(0, 5))
def test_shuffling_goes_on_from_a_position(tmp_path_factory, count, seed):
    folder = tmp_path_factory.mktemp("s")
    write(folder / "tasks.jsonl", rows(count))
    source = env(folder, seed=seed).tasks("train")
    order = [source.task(i).id for i in range(3 * count)]
    for epoch in range(3):
        assert len(set(order[epoch * count : (epoch + 1) * count])) == count
    resumed = env(folder, seed=seed).tasks("train")  # asked from the middle, backwards
    assert [resumed.task(i).id for i in reversed(range(3 * count))] == order[::-1]
    if count > 20:
        assert order[:count] != order[count : 2 * count]
        assert order[:count] != [env(folder, seed=seed + 1).tasks("train").task(i).id for i in range(count)]


@settings(max_examples=50, deadline=None)
@given(prompts=st.lists(st.integers(0, 15), min_size=1, max_size=40), fraction=st.floats(0.01, 0.99))
def test_held_out_prompts_are_disjoint(tmp_path_factory, prompts, fraction):
    folder = tmp_path_factory.mktemp("s")
    write(folder / "tasks.jsonl", [{"prompt": f"q{i}"} for i in prompts])
    environment = env(folder, eval_fraction=fraction)
    different = len(set(prompts))
    if different == 1:
        with pytest.raises(DataError, match=r"split 'eval' is empty|has one prompt in"):
            environment.tasks("train")
        return
    train, held = environment.tasks("train"), environment.tasks("eval")
    sides = [{source.task(i).prompt for i in range(source.size)} for source in (train, held)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == different
    assert train.size + held.size == len(prompts)
    assert abs(len(sides[1]) - fraction * different) <= 1
    other = env(folder, seed=99, eval_fraction=fraction).tasks("eval")  # the run's seed does not move the split
    assert [other.task(i).id for i in range(other.size)] == [held.task(i).id for i in range(held.size)]


def test_evaluation_file(tmp_path):
    write(tmp_path / "tasks.jsonl", rows(6))
    write(tmp_path / "held.jsonl", rows(2, start=50))
    environment = env(tmp_path, eval_path="held.jsonl")
    assert environment.task_splits == ("train", "eval")
    assert [environment.tasks("eval").task(i).id for i in range(3)] == ["mine:eval:0", "mine:eval:1", "mine:eval:0"]
    sliced = env(tmp_path, path="tasks.jsonl@[2:]", eval_path="tasks.jsonl@[:2]")
    assert sliced.tasks("train").size == 4 and sliced.tasks("eval").size == 2
    write(tmp_path / "held.jsonl", [{"prompt": "q50"}, {"prompt": "q3"}])
    with pytest.raises(
        DataError, match=r"the prompt of .*tasks.jsonl:4 is also that of the evaluation's .*held.jsonl:2"
    ):
        env(tmp_path, eval_path="held.jsonl").tasks("train")
    dropped = env(tmp_path, eval_path="held.jsonl", on_overlap="drop").tasks("train")
    assert sorted(dropped.task(i).prompt for i in range(dropped.size)) == ["q0", "q1", "q2", "q4", "q5"]


BAD = [
    ("{", r"not JSON"),
    ("[" * 100_000, r"not JSON"),
    ('{"prompt": "q", "answer": NaN}', "NaN is not a JSON number"),
    ("[1]", "holds a list, not an object"),
    ('{"question": "q", "answer": 1}', r"no field 'prompt' \(nor 'messages'\); it has answer, question"),
    ('{"prompt": ""}', "field 'prompt' is empty"),
    ('{"prompt": 3}', "field 'prompt' is a number"),
    ('{"prompt": []}', "field 'prompt' is an empty list"),
    ('{"prompt": ["q"]}', "message 0 is a string"),
    ('{"prompt": [{"role": "me", "content": "q"}]}', "message 0 has role 'me'"),
    ('{"prompt": [{"role": "user", "content": [1]}]}', "message 0 has a list as content"),
    ('{"prompt": [{"role": "assistant", "content": "q"}]}', "ends with an assistant's turn"),
    ('{"messages": [{"role": "assistant", "content": "q"}]}', "begins with an assistant's turn"),
    ('{"prompt": "q", "answer": [1]}', "field 'answer' is a list"),
    ('{"prompt": "q", "answer": true}', "field 'answer' is a boolean"),
    ('{"prompt": "q", "metadata": 3}', "field 'metadata' is a number"),
    ('{"prompt": "q", "demonstration": [{"role": "user", "content": "x"}]}', "no assistant's turn"),
]


@pytest.mark.parametrize(("line", "says"), BAD)
def test_bad_rows(tmp_path, line, says):
    write(tmp_path / "tasks.jsonl", [{"prompt": "fine"}, "", line])
    with pytest.raises(DataError, match=rf"environment 'mine': .*tasks.jsonl:3: .*{says}") as caught:
        env(tmp_path).tasks("train")
    assert caught.value.exit_code == 2 and caught.value.fix
    late = env(tmp_path, check_rows=1, shuffle=False).tasks("train")
    assert late.task(0).prompt == "fine"
    with pytest.raises(LateDataError, match=rf"tasks.jsonl:3: .*{says}") as caught:
        late.task(1)
    assert caught.value.exit_code == 3


def test_undecodable_bytes(tmp_path):
    (tmp_path / "tasks.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"tasks.jsonl:2: not JSON: 'utf-8' codec"):
        env(tmp_path).tasks("train")


def test_the_first_task_is_checked_wherever_the_shuffle_puts_it(tmp_path):
    write(tmp_path / "tasks.jsonl", [{"prompt": "fine"}] + ["{"] * 500)
    with pytest.raises(DataError, match="not JSON"):
        env(tmp_path, check_rows=1).tasks("train")


def test_needed_fields(tmp_path):
    write(tmp_path / "tasks.jsonl", [{"prompt": "q", "answer": None}])
    assert env(tmp_path).tasks("train").task(0).answer is None
    with pytest.raises(DataError, match="no field 'answer', which the reward needs"):
        env(tmp_path, needs=Needs(answer=True)).tasks("train")
    with pytest.raises(DataError, match="nothing to demonstrate"):
        env(tmp_path, needs=Needs(demonstration=True)).tasks("train")


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(DataError, match=r"no file 'tasks.jsonl'; looked at .*tasks.jsonl"):
        env(tmp_path).tasks("train")
    (tmp_path / "tasks.csv").write_text("x")
    with pytest.raises(DataError, match="neither JSONL"):
        env(tmp_path, path="tasks.csv").tasks("train")
    (tmp_path / "tasks.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"split 'train' is empty: 'tasks.jsonl' holds no rows"):
        env(tmp_path).tasks("train")
    write(tmp_path / "tasks.jsonl", rows(2))
    with pytest.raises(DataError, match=r"no split 'eval'\nFix: set env.eval_fraction"):
        env(tmp_path).tasks("eval")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": ""}, "path is empty"),
        ({"eval_path": "a", "eval_fraction": 0.5}, "give one of them"),
        ({"eval_fraction": 1.0}, "eval_fraction is 1.0"),
        ({"reward_range": [1, 0]}, r"reward_range is \[1, 0\]; write two numbers, the lesser first"),
        ({"reward": "score"}, "write it as module:function"),
        ({"reward": "score:"}, "write it as module:function"),
    ],
)
def test_options_that_mean_nothing(options, says):
    with pytest.raises(ValueError, match=says):
        JsonlConfig(**{"path": "x.jsonl", **options})


def test_many_rows_are_found_by_offset(tmp_path):
    write(tmp_path / "tasks.jsonl", [{"prompt": "é" * (i % 7) + f"q{i}"} for i in range(3000)])
    source = env(tmp_path, check_rows=10, shuffle=False).tasks("train")
    for i in np.random.default_rng(0).integers(0, 3000, 50):
        assert source.task(int(i)).prompt.endswith(f"q{i}")


def test_the_digest_says_whether_files_changed(tmp_path):
    ten = rows(10)
    held = write(tmp_path / "held.jsonl", rows(4, start=20))
    digest = env(write(tmp_path / "tasks.jsonl", ten).parent).digest
    assert len(digest) == 64 and env(tmp_path, seed=8, shuffle=False).digest == digest
    (tmp_path / "moved").mkdir()
    assert env(write(tmp_path / "moved" / "tasks.jsonl", ten).parent).digest == digest
    both = env(tmp_path, eval_path="held.jsonl").digest
    write(tmp_path / "tasks.jsonl", ten[::-1])
    assert env(tmp_path).digest != digest
    write(tmp_path / "tasks.jsonl", ten)
    assert env(tmp_path).digest == digest and env(tmp_path, eval_path="held.jsonl").digest == both
    write(held, rows(5, start=20))
    assert env(tmp_path).digest == digest and env(tmp_path, eval_path="held.jsonl").digest != both


def test_a_bad_row_behind_those_that_were_checked_may_be_repaired_in_its_place(tmp_path):
    good, bad = rows(12), [*rows(7), {"question": "q"}, *rows(4, start=8)]
    digests = {}
    for name, lines in {"bad": bad, "good": good, "short": bad[:-1], "early": [*rows(1, start=30), *good[1:]]}.items():
        write(tmp_path / "tasks.jsonl", lines)
        digests[name] = env(tmp_path, check_rows=5).digest
    assert digests["bad"] == digests["good"] and len(set(digests.values())) == 3
    write(tmp_path / "tasks.jsonl", good)
    every = env(tmp_path, check_rows=None).digest
    write(tmp_path / "tasks.jsonl", [*good[:-1], {"prompt": "q11", "answer": "other"}])
    assert env(tmp_path, check_rows=None).digest != every


class Letters:
    """A renderer that knows small letters and digits, and counts what it renders."""

    def __init__(self):
        self.rendered = []

    def prompt(self, prompt):
        self.rendered.append(prompt)
        if not prompt.isascii():
            raise DataError(f"no token for {prompt!r}", fix="change it")
        return [1] * len(prompt.strip())


def test_rows_are_rendered_before_the_run_as_many_as_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "RENDERED", 4)
    lines = [{"prompt": "q" * (1 + i % 3)} for i in range(8)]
    for checked, seen in ((None, 4), (2, 2), (6, 4)):
        write(tmp_path / "tasks.jsonl", [*lines, {"prompt": "é"}])
        renderer = Letters()
        found = env(tmp_path, renderer=renderer, shuffle=False, check_rows=checked)
        assert found.tasks("train").longest == (seen if seen < 3 else 3, f"{tmp_path}/tasks.jsonl:{min(seen, 3)}")
        assert len(renderer.rendered) == 1 + seen  # and the one that is handed out first
        found.tasks("train").task(0)
        assert len(renderer.rendered) == 1 + seen  # not again
        with pytest.raises(LateDataError, match=r"tasks.jsonl:9: no token for 'é'"):
            found.tasks("train").task(8)
        for row, says in ((0, "tasks.jsonl:1: no token for 'é'"), (seen - 1, f"tasks.jsonl:{seen}: no token")):
            write(tmp_path / "tasks.jsonl", [*lines[:row], {"prompt": "é"}, *lines[row + 1 :]])
            with pytest.raises(DataError, match=says):
                env(tmp_path, renderer=Letters(), shuffle=False, check_rows=checked).tasks("train")
    write(tmp_path / "tasks.jsonl", [*lines, {"prompt": " "}])
    with pytest.raises(DataError, match=r"tasks.jsonl:9: the renderer makes no token of the prompt"):
        env(tmp_path, path="tasks.jsonl@[8:]", renderer=Letters()).tasks("train")


@pytest.mark.parametrize("options", [{}, {"eval_fraction": 0.2}])
def test_long_rows_are_rendered_before_the_run_as_far_as_a_few_bytes_go(tmp_path, monkeypatch, options):
    monkeypatch.setattr(tasks, "RENDERED_BYTES", 200)
    write(tmp_path / "tasks.jsonl", [{"prompt": "q" * 50 + str(i)} for i in range(9)])
    renderer = Letters()
    found = env(tmp_path, renderer=renderer, shuffle=False, **options)
    assert len(found.tasks("train").checked) == 3
    assert len(renderer.rendered) == sum(1 + len(found.tasks(split).checked) for split in found.task_splits)
    assert len(found.tasks("train").indices) == (7 if options else 9)


def test_half_a_character_is_refused(tmp_path):
    for row, place in (
        ({"prompt": "a \ud800 b"}, "field 'prompt' holds U\\+D800"),
        ({"prompt": [{"role": "user", "content": "\udfff"}]}, "field 'prompt', message 0 holds U\\+DFFF"),
    ):
        write(tmp_path / "tasks.jsonl", [*rows(1), row])
        with pytest.raises(DataError, match=f"tasks.jsonl:2: {place}, half of a character"):
            env(tmp_path).tasks("train")


def test_a_number_that_no_float_holds_is_refused(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "q", "answer": -1e999}\n')
    with pytest.raises(DataError, match=r"tasks.jsonl:1: not JSON: -1e999 is not a JSON number"):
        env(tmp_path).tasks("train")


def test_a_renderer_that_breaks_is_blamed(tmp_path):
    class Broken:
        def prompt(self, prompt):
            return 1 / 0

    write(tmp_path / "tasks.jsonl", rows(1))
    with pytest.raises(PluginContractError, match=r"cannot render .*tasks.jsonl:1: ZeroDivisionError"):
        env(tmp_path, renderer=Broken()).tasks("train")


def test_a_share_of_one_prompt_cannot_be_held_out(tmp_path):
    write(tmp_path / "tasks.jsonl", [{"prompt": "q", "answer": i} for i in range(9)])
    with pytest.raises(DataError, match=r"'tasks.jsonl' has one prompt in 9 rows, and splits share no prompt"):
        env(tmp_path, eval_fraction=0.5).tasks("train")


@pytest.mark.parametrize("options", [{"eval_fraction": 0.2}, {"eval_path": "held.jsonl", "on_overlap": "drop"}])
def test_where_prompts_decide_on_splits_every_row_is_rendered_before_the_run(tmp_path, monkeypatch, options):
    """A repair could move a row from one split to the other: there is none that is late."""
    monkeypatch.setattr(tasks, "RENDERED", 2)
    write(tmp_path / "held.jsonl", rows(3, start=2))
    for row in (0, 11):
        lines = rows(12)
        write(tmp_path / "tasks.jsonl", lines)
        digest = env(tmp_path, check_rows=1, **options).digest
        lines[row] |= {"answer": "other"}
        write(tmp_path / "tasks.jsonl", lines)
        assert env(tmp_path, check_rows=1, **options).digest != digest
        lines[row] |= {"prompt": "é"}
        write(tmp_path / "tasks.jsonl", lines)
        with pytest.raises(DataError, match=rf"tasks.jsonl:{row + 1}: no token for 'é'"):
            env(tmp_path, check_rows=1, renderer=Letters(), **options).tasks("train")


def test_the_digest_of_parquet_and_of_a_file_that_is_missing(tmp_path):
    digests = []
    for first in ("p", "q"):
        table = pyarrow.table({"prompt": [first, "x"], "answer": [1, 2]})
        pyarrow.parquet.write_table(table, tmp_path / "tasks.parquet")
        digests.append(env(tmp_path, path="tasks.parquet", eval_fraction=0.5).digest)
    assert digests[0] != digests[1]
    with pytest.raises(DataError, match=r"no file 'tasks.jsonl'"):
        _ = env(tmp_path).digest
