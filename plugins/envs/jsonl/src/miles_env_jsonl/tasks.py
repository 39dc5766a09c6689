"""From rows to tasks: what a row must hold, which rows make a split, and the order in which they come."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.columns import Array
from miles_core.errors import DataError, LateDataError, MilesError, PluginContractError, blamed
from miles_core.records import Message, Prompt, Task
from miles_core.seeds import generator
from miles_env_jsonl.config import JsonlConfig
from miles_env_jsonl.files import BadRow, Rows, kind_of

if TYPE_CHECKING:
    from miles_core.contracts.rendering import Renderer

ROLES = ("system", "user", "assistant", "tool")
#: Most rows that are rendered before a run, and most bytes of rows: this takes ten times as long as to read them.
RENDERED, RENDERED_BYTES = 10_000, 20_000_000


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What rows must hold beside a prompt."""

    answer: bool = False
    demonstration: bool = False
    pair: bool = False  # two demonstrations, chosen and rejected


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """One row, checked."""

    prompt: Prompt
    answer: str | None
    demonstrations: tuple[Prompt, ...]
    metadata: Mapping[str, Any]


class Reader:
    """Reads and checks single rows. Raises `BadRow` with file and line."""

    def __init__(self, rows: Rows, config: JsonlConfig, needs: Needs, renderer: Renderer | None = None) -> None:
        self.rows, self._config, self._needs, self._renderer = rows, config, needs, renderer

    def rendered(self, row: int) -> tuple[Parsed, int, int]:
        """`parse`, and how many tokens the renderer makes of the prompt, and of it with the longest demonstration that
        is learnt from (0 without a renderer). Raises `BadRow` also for what it cannot render."""
        parsed, renderer, where = self.parse(row), self._renderer, self.rows.where(row)
        if renderer is None:
            return parsed, 0, 0
        fix = "see where with --traceback, then mend the renderer or use another"
        try:
            with blamed(f"the renderer cannot render {where}", PluginContractError, fix):
                tokens = len(renderer.prompt(parsed.prompt))
                learnt = parsed.demonstrations if self._needs.demonstration else ()
                shown = max([len(renderer.demonstration(parsed.prompt, one)[0]) for one in learnt], default=0)
        except PluginContractError:
            raise
        except MilesError as error:
            raise BadRow(where, error.message, error.fix) from error
        if not tokens:
            raise BadRow(where, "the renderer makes no token of the prompt", "remove the row, or fill the field")
        return parsed, tokens, shown

    def parse(self, row: int) -> Parsed:
        c = self._config
        value = dict(self.rows.read(row))
        where = self.rows.where(row)
        tail: Prompt = ()
        own, judged = self._judged(value, where)
        prompt: Prompt
        if own:
            self._agrees(value.pop(c.prompt_field, None), own, where)
            prompt = own
        elif value.get(c.prompt_field) is not None:
            prompt = _text_or_messages(value.pop(c.prompt_field), where, c.prompt_field)
            if not isinstance(prompt, str) and prompt[-1].role == "assistant":
                fix = "put whole conversations under `messages`, or end the prompt with the user's turn"
                raise BadRow(where, f"field {c.prompt_field!r} ends with an assistant's turn", fix)
        elif value.get("messages") is not None:
            prompt, tail = _conversation(value.pop("messages"), where)
        else:
            found = ", ".join(sorted(key for key in value if value[key] is not None)) or "nothing"
            fix = "add the field, or name yours with env.prompt_field"
            raise BadRow(where, f"no field {c.prompt_field!r} (nor 'messages'); it has {found}", fix)
        answer = self._answer(value.pop(c.answer_field, None), where)
        shown = value.pop(c.demonstration_field, None)
        if self._needs.pair:
            return Parsed(prompt=prompt, answer=answer, demonstrations=judged, metadata=self._metadata(value, where))
        if shown is not None:
            demonstration = _text_or_messages(shown, where, c.demonstration_field)
        else:
            demonstration = tail or (judged[0] if judged else "") or answer or ()
        if self._needs.demonstration and not demonstration:
            fix = f"add {c.demonstration_field!r} or {c.answer_field!r}, or an assistant's turn in `messages`"
            raise BadRow(where, "nothing to demonstrate, and the algorithm trains on demonstrations", fix)
        if isinstance(demonstration, tuple) and demonstration and all(m.role != "assistant" for m in demonstration):
            raise BadRow(where, "the demonstration has no assistant's turn", "add one")
        return Parsed(
            prompt=prompt,
            answer=answer,
            demonstrations=(demonstration,) if demonstration else (),
            metadata=self._metadata(value, where),
        )

    def _judged(self, value: dict[str, Any], where: str) -> tuple[tuple[Message, ...], tuple[Prompt, ...]]:
        """Chosen and rejected answer where pairs are needed; the chosen one where supervised training meets pairs. With
        the prompt, where they are whole conversations."""
        c = self._config
        if not self._needs.pair:
            shows = self._needs.demonstration and value.get(c.demonstration_field) is None
            fields = [c.chosen_field] if shows and value.get(c.chosen_field) is not None else []
        else:
            fields = [c.chosen_field, c.rejected_field]
        prompts, answers = [], []
        for field in fields:
            if value.get(field) is None:
                found = ", ".join(sorted(value)) or "nothing"
                fix = "add the field, or name yours with env.chosen_field and env.rejected_field"
                raise BadRow(where, f"no field {field!r}, and the algorithm learns from pairs; it has {found}", fix)
            told = _text_or_messages(value.pop(field), where, field)
            cut = 0 if isinstance(told, str) else _first_answer(told)
            if not told[cut:]:
                raise BadRow(where, f"field {field!r} has no assistant's turn", "add one")
            prompts.append(() if isinstance(told, str) else told[:cut])
            answers.append(told[cut:])
        if len(set(answers)) < len(answers):
            raise BadRow(where, "chosen and rejected are the same", "remove the row: it says nothing")
        if len(set(prompts)) > 1:
            raise BadRow(where, "chosen and rejected answer different prompts", "begin both with the same messages")
        return (prompts[0] if prompts else ()), tuple(answers)

    def _agrees(self, given: Any, own: tuple[Message, ...], where: str) -> None:
        """Refuse a prompt beside conversations that begin with another one."""
        field = self._config.prompt_field
        if given is not None:
            prompt = _text_or_messages(given, where, field)
            if prompt != (own[-1].content if isinstance(prompt, str) else own):
                fix = "remove one of them, or let the conversations begin with the answer"
                raise BadRow(where, f"field {field!r} says other than what the conversations begin with", fix)

    def _answer(self, value: Any, where: str) -> str | None:
        field = self._config.answer_field
        if value is None:
            if self._needs.answer:
                fix = "add the field, name yours with env.answer_field, or give a reward function that needs none"
                raise BadRow(where, f"no field {field!r}, which the reward needs", fix)
            return None
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise BadRow(where, f"field {field!r} is a {kind_of(value)}", "make it a string or a number")
        return str(value)

    def _metadata(self, rest: dict[str, Any], where: str) -> dict[str, Any]:
        own = rest.pop(self._config.metadata_field, None)
        if own is not None and not isinstance(own, Mapping):
            raise BadRow(where, f"field {self._config.metadata_field!r} is a {kind_of(own)}", "make it an object")
        merged = {**rest, **(own or {})}
        try:
            json.dumps(merged, allow_nan=False)
        except (TypeError, ValueError):  # Parquet holds dates and decimals; task metadata is JSON
            merged = json.loads(json.dumps(_finite(merged), default=str))
        return merged


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _text_or_messages(value: Any, where: str, field: str) -> Prompt:
    if isinstance(value, str):
        if not value:
            raise BadRow(where, f"field {field!r} is empty", "remove the row, or fill the field")
        return _whole(value, where, f"field {field!r}")
    return _messages(value, where, field)


def _messages(value: Any, where: str, field: str) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not len(value):
        found = "an empty list" if isinstance(value, Sequence) else f"a {kind_of(value)}"
        raise BadRow(where, f"field {field!r} is {found}", "make it a string or a list of messages")
    messages = []
    for index, item in enumerate(value):
        place = f"field {field!r}, message {index}"
        if not isinstance(item, Mapping):
            raise BadRow(where, f"{place} is a {kind_of(item)}", 'write {"role": "user", "content": "…"}')
        role, content = item.get("role"), item.get("content")
        if role not in ROLES:
            raise BadRow(where, f"{place} has role {role!r}", "use one of " + ", ".join(ROLES))
        if not isinstance(content, str):
            raise BadRow(where, f"{place} has a {kind_of(content)} as content", "make it a string: only text is read")
        messages.append(Message(role=role, content=_whole(content, where, place)))
    return tuple(messages)


def _whole(text: str, where: str, place: str) -> str:
    """Refuse half of a character (a lone surrogate), of which no tokenizer makes tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{place} holds U+{ord(text[error.start]):04X}, half of a character"
        raise BadRow(where, half, "write the character whole, or remove the row") from error
    return text


def _conversation(value: Any, where: str) -> tuple[Prompt, Prompt]:
    """Prompt and demonstration: cut before the first assistant's turn."""
    messages = _messages(value, where, "messages")
    cut = _first_answer(messages)
    if cut == 0:
        raise BadRow(where, "field 'messages' begins with an assistant's turn", "begin it with the user's")
    return messages[:cut], messages[cut:]


def _first_answer(messages: Sequence[Message]) -> int:
    return next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))


def prompt_key(prompt: Prompt) -> bytes:
    """A digest of the prompt: what splits must not share."""
    plain = prompt if isinstance(prompt, str) else [[m.role, m.content] for m in prompt]
    return hashlib.sha256(json.dumps(plain, ensure_ascii=False).encode("utf-8", "surrogatepass")).digest()[:16]


class FileTasks:
    """Keeps the contract `TaskSource` over some rows of a file. Row numbers of the file are the tasks' indices.

    `checked` are the rows that `check` rendered, and `longest` says tokens and place of their longest prompt, and
    `longest_shown` of the longest with its demonstration. Others
    are rendered when they are handed out, and may be repaired in their place while the run stands.
    """

    def __init__(
        self,
        reader: Reader,
        rows: Array,
        *,
        name: str,
        split: str,
        shuffled: Callable[[int], Array] | None,
    ) -> None:
        self.reader, self.indices = reader, rows
        self.size: int | None = len(rows)
        self.checked: list[int] = []
        self.longest = self.longest_shown = (0, "")
        self._name, self._split = name, split
        self._shuffled = None if shuffled is None else lru_cache(maxsize=2)(shuffled)

    def check(self, count: int | None, *, every: bool) -> None:
        """Before the run: read the first `count` rows (all where null), and render as many of them as `RENDERED`, or
        every row, as far as `RENDERED_BYTES` go, and the one that is handed out first. Raises `DataError`, or what the
        renderer raised, naming file and line."""
        rows, first = self.indices[:count].tolist(), int(self.indices[self._place(0)])
        wanted = self.indices.tolist() if every else rows[:RENDERED]
        sizes = accumulate(len(self.reader.rows.raw(row)) for row in wanted)
        within = takewhile(lambda at: at[1] <= RENDERED_BYTES, zip(wanted, sizes, strict=True))
        self.checked = [row for row, _ in within]
        for row in (first, *self.checked):
            with _before_the_run(self._name):
                _, tokens, shown = self.reader.rendered(row)
            self.longest = max(self.longest, (tokens, self.reader.rows.where(row)), key=itemgetter(0))
            self.longest_shown = max(self.longest_shown, (shown, self.reader.rows.where(row)), key=itemgetter(0))
        for row in rows[len(self.checked) :]:
            with _before_the_run(self._name):
                self.reader.parse(row)

    def _place(self, position: int) -> int:
        epoch, place = divmod(position, len(self.indices))
        return place if self._shuffled is None else int(self._shuffled(epoch)[place])

    def task(self, position: int) -> Task:
        """Raises `LateDataError` naming file and line."""
        place = self._place(position)
        row = int(self.indices[place])
        try:
            parsed = self.reader.parse(row) if place < len(self.checked) else self.reader.rendered(row)[0]
        except BadRow as bad:
            fix = f"{bad.fix}; where the run goes on, leave as many rows as there were"
            raise LateDataError(f"environment {self._name!r}: {bad}", fix=fix) from bad
        return Task(
            id=f"{self._name}:{self._split}:{row}",
            prompt=parsed.prompt,
            answer=parsed.answer,
            demonstrations=parsed.demonstrations,
            metadata=parsed.metadata,
        )


def shuffler(seed: int, policy: str, name: str, count: int) -> Callable[[int], Array]:
    """epoch -> int64 [count], a permutation that depends on nothing else."""
    return lambda epoch: generator(seed, policy, "jsonl", name, epoch).permutation(count)


@contextmanager
def _before_the_run(name: str) -> Iterator[None]:
    """Raises `DataError` instead of `BadRow`, or what the renderer raised."""
    try:
        yield
    except BadRow as bad:
        kind = type(bad.__cause__) if isinstance(bad.__cause__, MilesError) else DataError
        raise kind(f"environment {name!r}: {bad}", fix=bad.fix) from bad


def _key(reader: Reader, row: int, name: str) -> bytes:
    with _before_the_run(name):
        return prompt_key(reader.parse(row).prompt)


def hold_out(reader: Reader, rows: Array, fraction: float, name: str) -> tuple[Array, Array]:
    """(train, eval) rows: the share `fraction` of the different prompts, those with the lowest digests, is held out. At
    least one prompt goes to each side where there are two."""
    keys = [_key(reader, int(row), name) for row in rows]
    different = sorted(set(keys))
    count = min(max(1, round(fraction * len(different))), len(different) - 1)
    held = set(different[:count]) if count > 0 else set()
    mask = np.array([key in held for key in keys], bool)
    return rows[~mask], rows[mask]


def without_overlap(train: Reader, rows: Array, held: Reader, held_rows: Array, *, drop: bool, name: str) -> Array:
    """The training rows whose prompt the evaluation rows do not hold. Raises `DataError` for one unless `drop`."""
    seen = {_key(held, int(row), name): int(row) for row in held_rows}
    kept = []
    for row in map(int, rows):
        twin = seen.get(_key(train, row, name))
        if twin is None:
            kept.append(row)
        elif not drop:
            raise DataError(
                f"environment {name!r}: the prompt of {train.rows.where(row)} is also that of the evaluation's"
                f" {held.rows.where(twin)}",
                fix="remove one of them, choose disjoint slices, or set env.on_overlap: drop",
            )
    return np.array(kept, np.int64)
