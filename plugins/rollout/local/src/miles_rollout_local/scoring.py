"""Log-probabilities of prompts (capability `prompt_logprobs`): one forward over whole prompts, no cache, no sampling.

Prompts that are scored together go through the model in batches of like length; the vocabulary's log-probabilities are
made for a few tokens at a time, so that never more than 16 MiB of them exist.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from miles_core.records import Version
    from miles_rollout_local.jobs import Job
    from miles_rollout_local.slots import Slots

Array = np.ndarray[Any, Any]
WISH = "prompt_logprobs"
_TOP = re.compile(r"prompt_top_logprobs:([1-9][0-9]{0,8})")
_CHUNK_NUMBERS = 2**22  # float32: 16 MiB
_ROOM = 256  # tokens of one forward in constant shapes, as in a prefill


def asked(want: frozenset[str]) -> tuple[int | None, frozenset[str]]:
    """How many likeliest tokens of each prompt position are wanted (0: none; `None`: nothing about the prompt), and
    the capabilities that this needs. A `prompt_top_logprobs:K` that is alone, or beside another, stays among them."""
    if WISH not in want:
        return None, want
    tops = [name for name in want if _TOP.fullmatch(name)]
    if len(tops) != 1:
        return 0, want
    return int(tops[0].partition(":")[2]), want - {tops[0]}


@dataclass(frozen=True, slots=True)
class Scores:
    """`logprobs` float32 [n], `ids` int32 [n, k], `top` float32 [n, k], of `version`; zeros at the first token."""

    logprobs: Array
    ids: Array
    top: Array
    version: Version

    def columns(self, k: int) -> dict[str, Array]:
        """The completion's columns, its own copies."""
        found = {"prompt_logprobs": self.logprobs.copy()}
        if k:
            found |= {"prompt_topk_ids": self.ids[:, :k].copy(), "prompt_topk_logprobs": self.top[:, :k].copy()}
        return found


def score(slots: Slots, jobs: Sequence[Job]) -> None:
    """Set `scored` of these jobs, with the weights that serve now. Equal prompts of one adapter are computed once."""
    groups: dict[tuple[int, bytes], list[Job]] = {}
    for job in jobs:
        groups.setdefault((slots.adapter(job), job.prompt.tobytes()), []).append(job)
    waiting = sorted(groups.items(), key=lambda group: len(group[0][1]), reverse=True)
    while waiting:
        width = slots.width(len(waiting[0][1][0].prompt))
        rows = max(1, (_ROOM if slots.invariant else slots.prefill_tokens) // width)
        batch: list[tuple[tuple[int, bytes], list[Job]]] = []
        for group in waiting[:rows]:
            length = len(group[1][0].prompt)
            if slots.width(length) != width if slots.invariant else 2 * length < width:
                break  # padding would cost more than a forward of its own
            batch.append(group)
        waiting = waiting[len(batch) :]
        _forward(slots, batch, width, rows if slots.invariant else len(batch))


def _forward(slots: Slots, batch: Sequence[tuple[tuple[int, bytes], list[Job]]], width: int, rows: int) -> None:
    ids = np.zeros((rows, width), np.int64)
    adapters = np.zeros(rows, np.int64)
    lengths = []
    for row, ((adapter, _), jobs) in enumerate(batch):
        prompt = jobs[0].prompt
        ids[row, : len(prompt)], adapters[row] = prompt, adapter
        lengths.append(len(prompt))
    k = max(job.asks or 0 for _, jobs in batch for job in jobs)
    logits = slots.forward.every(torch.from_numpy(ids), None if slots.forward.adapters is None else adapters)
    own = np.concatenate([row * width + np.arange(n - 1) for row, n in enumerate(lengths)])  # each predicts its next
    places = np.arange(rows * width) if slots.invariant else own
    following = torch.from_numpy(np.append(ids.reshape(-1)[1:], 0))
    logprobs = np.zeros(rows * width, np.float32)
    top_ids, top = np.zeros((rows * width, k), np.int32), np.zeros((rows * width, k), np.float32)
    step = max(16, _CHUNK_NUMBERS // len(slots.is_stop) // 16 * 16)
    if slots.invariant:  # chunks of one size: a smaller last one could have other bits
        step = min(step, len(places))
        places = np.pad(places, (0, -len(places) % step), mode="edge")
    for start in range(0, len(places), step):
        here = places[start : start + step]
        where = torch.from_numpy(here)
        logp = torch.log_softmax(logits(where), -1)
        logprobs[here] = logp.gather(1, following[where][:, None])[:, 0].numpy()
        if k:
            values, chosen = logp.topk(k, -1)
            top_ids[here], top[here] = chosen.numpy(), values.numpy()
    for row, (_, jobs) in enumerate(batch):
        inside = slice(row * width, row * width + lengths[row] - 1)
        version = slots.versions[jobs[0].request.policy]
        found = Scores(_behind(logprobs[inside]), _behind(top_ids[inside]), _behind(top[inside]), version)
        for job in jobs:
            job.scored = found


def _behind(values: Array) -> Array:
    """With a zero before the first: nothing stands before the first token."""
    return np.concatenate([np.zeros_like(values, shape=(1, *values.shape[1:])), values])
