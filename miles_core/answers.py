"""The trajectories of a group whose episodes were one plain answer each, made together.

Most groups are like that: one prompt, and answers that are tokens and log-probabilities. What is more than that, or not
as an engine should answer, is for `session.py`, which takes one answer after the other and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.columns import plausible
from miles_core.contracts.engine import Completion
from miles_core.records import Finish, Origin, Rows, Sampling, Span, Trajectory, trajectory_id

if TYPE_CHECKING:
    from miles_core.records import Array

_PLAIN = frozenset({"tokens", "logprobs"})
_WHOLE = (Finish.STOP, Finish.LENGTH)
_INT32 = np.dtype(np.int32)


def plain_trajectories(
    episodes: Sequence[str], prompt: Array, answers: Sequence[Any], sampling: Sampling
) -> list[Trajectory] | None:
    """One trajectory for each of `answers` to `prompt` (int32 [n]), which belong to `episodes`.

    They are valid (`columns.validate`), and share their columns (`records.Rows`). `None` where an answer is no
    `Completion`, was cut short by an error or an abort, has columns beside `tokens` and `logprobs`, or is not valid.
    """
    if not all(map(_is_plain, answers)):
        return None
    start, counts = len(prompt), [len(answer.columns["tokens"]) for answer in answers]
    sampled = np.repeat(np.array([False, True] * len(answers)), [n for count in counts for n in (start, count)])
    logprobs = np.concatenate([answer.columns["logprobs"] for answer in answers])
    if not plausible(logprobs):
        return None
    columns: Mapping[str, Array] = {
        "tokens": np.concatenate([part for answer in answers for part in (prompt, answer.columns["tokens"])]),
        "origin": np.where(sampled, np.uint8(Origin.SAMPLED), np.uint8(Origin.PROMPT)),
        "trainable": sampled,
        "behaviour_logprobs": np.zeros(len(sampled), np.float32),
    }
    columns["behaviour_logprobs"][sampled] = logprobs
    spans: dict[tuple[int, int, int], Span] = {}  # answers of a group share most of theirs; versions by identity
    found, at = [], 0
    for episode, answer, count in zip(episodes, answers, counts, strict=True):
        own = []
        for span in answer.spans:
            key = (span.start, span.end, id(span.version))
            if key not in spans:
                spans[key] = Span(start=start + span.start, end=start + span.end, version=span.version)
            own.append(spans[key])
        rows = Rows(columns, at, at := at + start + count)
        found.append(
            Trajectory(
                id=trajectory_id(episode, 0),
                length=start + count,
                columns=rows,
                spans=tuple(own),
                finish=answer.finish,
                sampling=sampling,
                engine=answer.engine,
            )
        )
    return found


def _is_plain(answer: Any) -> bool:
    if not isinstance(answer, Completion) or answer.finish not in _WHOLE or answer.columns.keys() != _PLAIN:
        return False
    tokens, logprobs = answer.columns["tokens"], answer.columns["logprobs"]
    if not (isinstance(tokens, np.ndarray) and tokens.dtype == _INT32 and isinstance(logprobs, np.ndarray)):
        return False
    at = 0
    for span in answer.spans:
        if not at == span.start < span.end:
            return False
        at = span.end
    return bool(tokens.shape == logprobs.shape == (at,))
