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

_PLAIN = ("tokens", "logprobs")
_WHOLE = (Finish.STOP, Finish.LENGTH)
_INT32 = np.dtype(np.int32)
_SAMPLED = np.uint8(Origin.SAMPLED)


def plain_trajectories(
    episodes: Sequence[str], prompt: Array, answers: Sequence[Any], sampling: Sampling
) -> list[Trajectory] | None:
    """One trajectory for each of `answers` to `prompt` (int32 [n]), which belong to `episodes`.

    They are valid (`columns.validate`), and share their columns (`records.Rows`). `None` where an answer is no
    `Completion`, was cut short by an error or an abort, has columns beside `tokens` and `logprobs`, or is not valid.
    """
    start = len(prompt)
    parts: list[Array] = []
    given: list[Array] = []
    counts: list[int] = []
    for answer in answers:
        if not isinstance(answer, Completion) or answer.finish not in _WHOLE or len(answer.columns) != len(_PLAIN):
            return None
        tokens, likely = map(answer.columns.get, _PLAIN)
        if not (isinstance(tokens, np.ndarray) and tokens.dtype == _INT32 and isinstance(likely, np.ndarray)):
            return None
        count = 0
        for span in answer.spans:
            if not count == span.start < span.end:
                return None
            count = span.end
        if not tokens.shape == likely.shape == (count,):
            return None
        parts += prompt, tokens
        given.append(likely)
        counts += start, count
    sampled = np.array([False, True] * len(answers)).repeat(counts)
    logprobs = np.concatenate(given)
    if not plausible(logprobs):
        return None
    columns: Mapping[str, Array] = {
        "tokens": np.concatenate(parts),
        "origin": sampled * _SAMPLED,  # the others are `Origin.PROMPT`, 0
        "trainable": sampled,
        "behaviour_logprobs": np.zeros(len(sampled), np.float32),
    }
    columns["behaviour_logprobs"][sampled] = logprobs
    spans: dict[tuple[int, ...], tuple[Span, ...]] = {}  # answers of a group share most of theirs; versions by identity
    found, at = [], 0
    for episode, answer, count in zip(episodes, answers, counts[1::2], strict=True):
        key = tuple([part for span in answer.spans for part in (span.end, id(span.version))])
        if (own := spans.get(key)) is None:
            moved = [Span(start=start + s.start, end=start + s.end, version=s.version) for s in answer.spans]
            own = spans[key] = tuple(moved)
        rows = Rows(columns, at, at := at + start + count)
        found.append(
            Trajectory(
                id=trajectory_id(episode, 0),
                length=start + count,
                columns=rows,
                spans=own,
                finish=answer.finish,
                sampling=sampling,
                engine=answer.engine,
            )
        )
    return found
