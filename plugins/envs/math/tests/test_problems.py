"""Problem files: what is read, what is refused, and in which words."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from miles_env_math.config import MathConfig, Reference
from miles_env_math.problems import find_file, load

from miles_core.errors import DataError

ROW = {"problem": "1+1?", "answer": "2"}


@pytest.fixture
def jsonl(tmp_path):
    def write(*rows, name="p.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
        return path

    return write


def config(**options):
    return MathConfig(path="p.jsonl", **options)


def refusal(path, **options):
    with pytest.raises(DataError) as refused:
        load(path, config(**options))
    return str(refused.value).replace(str(path.parent) + "/", "").removeprefix("MILES-E800: ").split("\nFix: ")


def test_rows(jsonl):
    path = jsonl("\ufeff" + json.dumps(ROW), "", {**ROW, "answer": 7, "subject": "algebra", "other": 1})
    first, second = load(path, config(keep_fields=["subject", "absent"]))
    assert (first.text, first.answer, first.where) == ("1+1?", "2", f"{path}:1")
    assert (second.answer, second.where, second.metadata) == ("7", f"{path}:3", {"subject": "algebra"})
    assert first.key == second.key != replace(first, text="1+2?").key
    assert first.key == replace(first, text=" 1+1?\n").key != replace(first, choices=("1", "2")).key


@pytest.mark.parametrize(
    ("reference", "answer", "read"),
    [
        ("auto", "so 3\n#### 1,234", "1,234"),
        ("auto", r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("auto", "5", "5"),
        ("whole", "#### 5", "#### 5"),
        ("hashes", "x #### 5", "5"),
        ("boxed", r"5 \boxed{6}", "6"),
    ],
)
def test_where_a_reference_stands(jsonl, reference, answer, read):
    path = jsonl({**ROW, "answer": answer})
    assert load(path, config(reference=Reference(reference)))[0].answer == read


@pytest.mark.parametrize(
    ("row", "options", "says", "fix"),
    [
        ("{", {}, "p.jsonl:2: not JSON: ", "repair or remove the line"),
        ("[1]", {}, "p.jsonl:2: holds no JSON object", "write one object a line"),
        (
            {"question": "1?", "solution": "2"},
            {},
            "p.jsonl:2: no field 'problem'; it has question, solution",
            "set env.problem_field: question",
        ),
        ({"problem": "1?", "sol": "2"}, {}, "p.jsonl:2: no field 'answer'; it has problem, sol", "env.answer_field"),
        ({**ROW, "problem": " "}, {}, "field 'problem' is ' '; it must be a text that is not empty", "repair"),
        ({**ROW, "problem": 3}, {}, "field 'problem' is 3; it must be a text", "repair"),
        ({**ROW, "answer": [1]}, {}, "field 'answer' is [1]; it must be a text or a number", "repair"),
        ({**ROW, "answer": True}, {}, "field 'answer' is True; it must be", "repair"),
        ({**ROW, "answer": "x" * 1001}, {}, "must be an answer of at most 1000 characters", "repair"),
        ({**ROW, "answer": ""}, {}, "field 'answer' is ''; it must be an answer (env.reference is auto)", "repair"),
        (ROW, {"reference": Reference.boxed}, "must be an answer (env.reference is boxed)", "repair"),
        ({**ROW, "choices": ["1"]}, {}, "field 'choices' is ['1']; it must be a list of 2 to 26 options", "repair"),
        ({**ROW, "choices": ["1", "3"]}, {}, "field 'answer' is '2'; it must be a letter, a number from 0", "repair"),
    ],
)
def test_rows_that_cannot_be_used(jsonl, row, options, says, fix):
    if options:
        path = jsonl("", row)
    else:
        path = jsonl(ROW, row)
    message, told = refusal(path, **options)
    assert says in message and "p.jsonl:2" in message and fix in told


def test_files_that_cannot_be_used(jsonl, tmp_path):
    assert refusal(jsonl("", name="p.jsonl"))[0] == "p.jsonl holds no problems"
    assert "neither JSONL" in refusal(jsonl(ROW, name="p.csv"))[0]
    assert "no readable Parquet file" in refusal(jsonl(ROW, name="p.parquet"))[0]
    with pytest.raises(DataError, match=r"no file 'absent.jsonl'; looked at /a/absent.jsonl, /b/absent.jsonl"):
        find_file("absent.jsonl", [type(tmp_path)("/a"), type(tmp_path)("/b")])


def test_parquet(tmp_path):
    path = tmp_path / "p.parquet"
    table = pa.table({"problem": ["1+1?", "Which?"], "answer": ["2", "B"], "choices": [None, ["x", "y"]], "n": [1, 2]})
    pq.write_table(table, path)
    first, second = load(path, config(keep_fields=["n"]))
    assert (first.text, first.answer, first.choices, first.metadata) == ("1+1?", "2", (), {"n": 1})
    assert (second.answer, second.choices, second.where) == ("B", ("x", "y"), f"{path}: row 2")


def test_a_parquet_file_with_another_schema(tmp_path):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"question": ["1+1?"], "final_answer": pa.array([2], pa.int32())}), path)
    message, fix = refusal(path)
    assert message == "p.parquet has no column 'problem'; its columns: question (string), final_answer (int32)"
    assert fix == "set env.problem_field: question"
    message, fix = refusal(path, problem_field="question")
    assert message.startswith("p.parquet has no column 'answer'") and fix == "set env.answer_field: final_answer"
    assert load(path, config(problem_field="question", answer_field="final_answer"))[0].answer == "2"
    pq.write_table(pa.table({"problem": [1], "answer": [None]}), path)
    assert "p.parquet: row 1: no field 'answer'" in refusal(path)[0]
