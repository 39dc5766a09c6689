"""Problem files, read and checked as a whole before the run: JSONL, or Parquet through pyarrow."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core.errors import DataError, MissingExtraError
from miles_core.verifying.extract import Extract, find
from miles_env_math import choices
from miles_env_math.config import MathConfig, Reference

LONGEST_REFERENCE = 1000  # a longer one is a solution, not an answer
#: Names under which other data sets keep the same thing.
_PROBLEMS = ("problem", "question", "prompt", "query", "instruction", "input")
_ANSWERS = ("answer", "final_answer", "expected_answer", "target", "solution", "output", "label")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """`where` is file and line (or row), for messages. `answer` is a letter where there are `choices`."""

    where: str
    text: str
    answer: str
    choices: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> bytes:
        """What splits must not share: the problem's words and options."""
        words = json.dumps([self.text.split(), self.choices]).encode()
        return hashlib.sha256(words).digest()[:16]


def find_file(path: str, folders: Sequence[Path]) -> Path:
    """The file, absolute; relative paths are looked up in `folders` in order. Raises `DataError`."""
    places = [Path(path)] if Path(path).is_absolute() else [folder / path for folder in folders]
    for place in places:
        if place.is_file():
            return place.resolve()
    looked = ", ".join(dict.fromkeys(map(str, places)))
    raise DataError(
        f"no file {path!r}; looked at {looked}", fix="correct the path, relative to the run file or working directory"
    )


def load(path: Path, config: MathConfig) -> list[Problem]:
    """Every problem of a file. Raises `DataError` naming file and line, and what was found there."""
    if path.suffix in (".jsonl", ".ndjson"):
        rows = _jsonl(path)
    elif path.suffix in (".parquet", ".pq"):
        rows = _parquet(path, config)
    else:
        raise DataError(
            f"{path} is neither JSONL (.jsonl, .ndjson) nor Parquet (.parquet, .pq)",
            fix="convert it: one JSON object a line, in a file that ends in .jsonl",
        )
    found = [_problem(where, row, config) for where, row in rows]
    if not found:
        raise DataError(f"{path} holds no problems", fix="write one JSON object a line")
    return found


def _jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                value = json.loads(line.decode("utf-8-sig")) if line.strip() else None
            except ValueError as error:
                raise DataError(f"{where}: not JSON: {error}", fix="repair or remove the line") from error
            if isinstance(value, Mapping):
                yield where, value
            elif line.strip():
                raise DataError(f"{where}: holds no JSON object", fix="write one object a line")


def _parquet(path: Path, config: MathConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(
            f"{path} is a Parquet file, and pyarrow is not installed", fix="pip install 'miles-env-math[parquet]'"
        ) from error
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is no readable Parquet file: {error}", fix="write the file again") from error
    columns = {column.name: str(column.type) for column in table.schema}
    for name, key, also in (
        (config.problem_field, "problem_field", _PROBLEMS),
        (config.answer_field, "answer_field", _ANSWERS),
    ):
        if name not in columns:
            told = ", ".join(f"{column} ({kind})" for column, kind in columns.items()) or "none"
            raise DataError(f"{path} has no column {name!r}; its columns: {told}", fix=_rename(key, columns, also))
    wanted = [config.problem_field, config.answer_field, *([config.choices_field] if config.choices_field else [])]
    table = table.select([name for name in dict.fromkeys([*wanted, *config.keep_fields]) if name in columns])
    number = 0
    for batch in table.to_batches(max_chunksize=1000):
        for row in batch.to_pylist():
            number += 1
            yield f"{path}: row {number}", row


def _rename(key: str, found: Mapping[str, Any], also: Sequence[str]) -> str:
    other = next((name for name in also if name in found), "")
    return f"set env.{key}: {other}" if other else f"name the right one with env.{key}"


def _problem(where: str, row: Mapping[str, Any], config: MathConfig) -> Problem:
    text, answer = row.get(config.problem_field), row.get(config.answer_field)
    for name, value, key, also in (
        (config.problem_field, text, "problem_field", _PROBLEMS),
        (config.answer_field, answer, "answer_field", _ANSWERS),
    ):
        if value is None:
            told = ", ".join(sorted(map(str, row))) or "nothing"
            raise DataError(f"{where}: no field {name!r}; it has {told}", fix=_rename(key, row, also))
    if not isinstance(text, str) or not text.strip():
        raise _bad(where, config.problem_field, text, "a text that is not empty")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise _bad(where, config.answer_field, answer, "a text or a number")
    options = row.get(config.choices_field) if config.choices_field else None
    kept = {name: row[name] for name in config.keep_fields if name in row}
    try:
        json.dumps(kept, allow_nan=False)
    except (TypeError, ValueError):  # Parquet holds dates and decimals; metadata is JSON
        kept = {name: str(value) for name, value in kept.items()}
    if options is None:
        return Problem(where=where, text=text, answer=_reference(where, answer, config), metadata=kept)
    if not isinstance(options, list | tuple) or not 2 <= len(options) <= choices.MOST:
        raise _bad(where, str(config.choices_field), options, f"a list of 2 to {choices.MOST} options")
    texts = tuple(str(option) for option in options)
    letter = choices.letter_of(answer if isinstance(answer, int) else str(answer), texts)
    if not letter:
        raise _bad(where, config.answer_field, answer, "a letter, a number from 0, or the text of one option")
    return Problem(where=where, text=text, answer=letter, choices=texts, metadata=kept)


def _reference(where: str, answer: str | float, config: MathConfig) -> str:
    text = str(answer).strip()
    how = config.reference
    if "####" in text and how in (Reference.auto, Reference.hashes):
        text = text.rpartition("####")[2].strip()
    elif "\\boxed{" in text and how in (Reference.auto, Reference.boxed):
        text = find(text, [Extract.boxed], "").answer or ""
    elif how in (Reference.boxed, Reference.hashes):
        text = ""
    if not text:
        raise _bad(where, config.answer_field, answer, f"an answer (env.reference is {how.value})")
    if len(text) > LONGEST_REFERENCE:
        raise _bad(where, config.answer_field, answer, f"an answer of at most {LONGEST_REFERENCE} characters")
    return text


def _bad(where: str, name: str, value: Any, wanted: str) -> DataError:
    found = repr(value)
    return DataError(
        f"{where}: field {name!r} is {found if len(found) < 60 else found[:57] + '…'}; it must be {wanted}",
        fix="repair or remove the row, or name another field",
    )
