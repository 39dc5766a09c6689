"""The trajectories of a group whose episodes were one plain answer each, made together.

Most groups are like that: one prompt, and answers that are tokens and log-probabilities. What is more than that, or not
as an engine should answer, is for `session.py`, which takes one answer after the other and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.columns import FEW, plausible
from miles_core.contracts.engine import Completion
from miles_core.records import Finish, Origin, Rows, Sampling, Span, Trajectory, trajectory_id

if TYPE_CHECKING:
    from miles_core.records import Array

_WHOLE = (Finish.STOP, Finish.LENGTH)
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


def plain_trajectories(
    episodes: Sequence[str], prompt: Array, answers: Sequence[Any], sampling: Sampling
) -> list[Trajectory] | None:
    """One trajectory for each of `answers` to `prompt` (int32 [n]), which belong to `episodes`.

    They are valid (`columns.validate`), and share their columns (`records.Rows`). `None` where an answer is no
    `Completion`, was cut short by an error or an abort, has columns beside `tokens` and `logprobs`, or is not valid.
    """
    start, unknown = len(prompt), np.zeros(len(prompt), np.float32)
    tokens_of: list[Array] = []
    logprobs_of: list[Array] = []
    counts: list[int] = []
    keys: list[tuple[int, ...]] = []
    for answer in answers:
        if not isinstance(answer, Completion) or answer.finish not in _WHOLE or len(answer.columns) != 2:
            return None
        tokens: Any = answer.columns.get("tokens")
        likely: Any = answer.columns.get("logprobs")
        if getattr(tokens, "dtype", None) != _INT32 or getattr(likely, "dtype", None) != _FLOAT32:
            return None
        count = 0
        ends: tuple[int, ...] = ()
        for span in answer.spans:
            if not count == span.start < span.end:
                return None
            count = span.end
            ends += count, id(span.version)
        if not tokens.shape == likely.shape == (count,):
            return None
        tokens_of += prompt, tokens
        logprobs_of += unknown, likely
        counts += start, count
        keys.append(ends)
    ids, logprobs = np.concatenate(tokens_of), np.concatenate(logprobs_of)
    if (min(ids.tolist(), default=0) if len(ids) < FEW else ids.min()) < 0 or not plausible(logprobs):
        return None
    origin = np.array([Origin.PROMPT, Origin.SAMPLED] * len(answers), np.uint8).repeat(counts)
    columns: Mapping[str, Array] = {
        "tokens": ids,
        "origin": origin,
        "trainable": origin.astype(bool),
        "behaviour_logprobs": logprobs,
    }
    spans: dict[tuple[int, ...], tuple[Span, ...]] = {}  # answers of a group share most of theirs; versions by identity
    found, at = [], 0
    for episode, answer, count, key in zip(episodes, answers, counts[1::2], keys, strict=True):
        if (own := spans.get(key)) is None:
            moved = [Span(start=start + s.start, end=start + s.end, version=s.version) for s in answer.spans]
            own = spans[key] = tuple(moved)
        found.append(
            Trajectory(
                id=trajectory_id(episode, 0),
                length=start + count,
                columns=Rows(columns, at, at := at + start + count),
                spans=own,
                finish=answer.finish,
                sampling=sampling,
                engine=answer.engine,
            )
        )
    return found
