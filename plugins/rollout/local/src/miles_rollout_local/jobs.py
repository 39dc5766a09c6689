"""One request on its way through the engine."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from miles_core.contracts.engine import Request
from miles_core.records import Version
from miles_rollout_local.scoring import Scores, asked

Array = np.ndarray[Any, Any]

_NO_TOKENS: Array = np.zeros(0, np.int32)
_NO_LOGPROBS: Array = np.zeros(0, np.float32)
_SEED_BITS = 2**64 - 1


class Job:
    """One request inside the engine. `tokens`, `logprobs`: what was sampled before it last lost its slot."""

    __slots__ = (
        "asks",
        "batch",
        "context",
        "encoded",
        "index",
        "keep",
        "limit",
        "logprobs",
        "marks",
        "offset",
        "prompt",
        "request",
        "scored",
        "seed",
        "tail",
        "tokens",
    )

    def __init__(self, request: Request, batch: Any, index: int) -> None:
        """`batch` and `index` are the engine's: what it came with, and its place there. The worker opens it."""
        self.request, self.batch, self.index = request, batch, index

    def open(self, prompt: Array, max_length: int) -> None:
        """Get ready to be sampled: `prompt` int64 [n] is the request's. Raises for a request that cannot be read."""
        request, resume = self.request, self.request.resume
        if not isinstance(request.deadline_s, float | int) or math.isnan(request.deadline_s):
            raise ValueError("its deadline is no number")
        self.seed = operator.index(request.seed) & _SEED_BITS
        self.prompt = prompt
        self.asks, _ = asked(request.want)  # about the prompt: how many likeliest tokens; `None`: nothing
        self.scored: Scores | None = None
        self.offset = 0 if resume is None else len(resume)  # draws already made by earlier calls
        self.context = prompt if resume is None else np.concatenate([prompt, np.asarray(resume, np.int64)])
        self.limit = min(request.sampling.max_new_tokens - self.offset, max_length - len(self.context))
        self.tokens, self.logprobs = _NO_TOKENS, _NO_LOGPROBS
        self.marks: list[tuple[int, Version]] = []  # from which token on which version sampled
        self.keep: list[tuple[int, Array]] = []  # (token, kept ids), where wanted
        self.encoded: tuple[Version, Array] | None = None  # what lies in its row since it got a slot, by which weights
        self.tail = 0  # tokens to decode when looking for stop strings; 0 without any
        stops = request.sampling.stop
        if stops:
            self.tail = max(len(stop.encode()) for stop in stops) + 8
