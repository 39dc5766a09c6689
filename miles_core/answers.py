"""The trajectories of a group whose episodes were one plain answer each, made together.

Most groups are like that: one prompt, and answers that are tokens and log-probabilities. What is more than that, or not
as an engine should answer, is for `session.py`, which takes one answer after the other and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from miles_core.columns import FEW, plausible
from miles_core.contracts.engine import Completion
from miles_core.drafts import drafts, seal
from miles_core.records import Array, Finish, Origin, Rows, Sampling, Span, Trajectory, trajectory_id

_WHOLE, _Draft = (Finish.STOP, Finish.LENGTH), drafts(Trajectory)
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


def plain_trajectories(
    episodes: Sequence[str], prompt: Array, answers: Sequence[Any], sampling: Sampling
) -> list[Trajectory] | None:
    """One trajectory for each of `answers` to `prompt` (int32 [n]), which belong to `episodes`.

    They are valid (`columns.validate`), and share their columns (`records.Rows`). `None` where an answer is no
    `Completion`, was cut short by an error or an abort, has columns beside `tokens` and `logprobs`, or is not valid.
    """
    start, at, unknown = len(prompt), 0, np.zeros(len(prompt), np.float32)
    tokens_of, logprobs_of, counts = list[Array](), list[Array](), list[int]()
    columns: dict[str, Array] = {}  # of all, filled at the end
    spans: dict[tuple[int, ...], tuple[Span, ...]] = {}  # answers of a group share most of theirs; versions by identity
    found = []
    for episode, answer in zip(episodes, answers, strict=True):
        if not isinstance(answer, Completion) or answer.finish not in _WHOLE or len(answer.columns) != 2:
            return None
        tokens: Any = answer.columns.get("tokens")
        likely: Any = answer.columns.get("logprobs")
        if getattr(tokens, "dtype", None) != _INT32 or getattr(likely, "dtype", None) != _FLOAT32:
            return None
        count = 0
        key: tuple[int, ...] = ()
        for span in answer.spans:
            if not count == span.start < span.end:
                return None
            count = span.end
            key += count, id(span.version)
        if not tokens.shape == likely.shape == (count,):
            return None
        if (own := spans.get(key)) is None:
            moved = [Span(start=start + s.start, end=start + s.end, version=s.version) for s in answer.spans]
            own = spans[key] = tuple(moved)
        trajectory = _Draft(
            id=trajectory_id(episode, 0),
            length=start + count,
            columns=Rows(columns, at, at := at + start + count),
            spans=own,
            finish=answer.finish,
            sampling=sampling,
            engine=answer.engine,
        )
        seal(trajectory, Trajectory)
        found.append(trajectory)
        tokens_of += prompt, tokens
        logprobs_of += unknown, likely
        counts += start, count
    ids, logprobs = np.concatenate(tokens_of), np.concatenate(logprobs_of)
    if (min(ids.tolist(), default=0) if len(ids) < FEW else ids.min()) < 0 or not plausible(logprobs):
        return None
    origin = np.array([Origin.PROMPT, Origin.SAMPLED] * len(answers), np.uint8).repeat(counts)
    columns |= {"tokens": ids, "origin": origin, "trainable": origin.astype(bool), "behaviour_logprobs": logprobs}
    return found
