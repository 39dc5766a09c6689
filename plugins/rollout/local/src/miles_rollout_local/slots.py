"""Continuous batching: requests wait, are prefilled into slots, decoded together, and leave one by one.

Plain synchronous code, run by one thread (`engine.py`). Live requests always fill rows 0 … n-1 of the KV arena: one
that leaves is replaced by the last. Per step there is one forward, one draw for all rows, and Python only for requests
that join, leave, or carry stop strings or kept ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from miles_core.contracts.engine import Completion
from miles_core.errors import EngineError
from miles_core.records import Finish, Span, Version
from miles_rollout_local.jobs import Job
from miles_rollout_local.prefixes import Prefixes
from miles_rollout_local.sampling import Kept, Knobs, sample, uniform
from miles_rollout_local.scoring import score

Array = np.ndarray[Any, Any]
_FIELDS = "temperature top_k top_p seed draw count limit length last tail adapter".split()
_PATIENCE_STEPS = 4


class Forward(Protocol):
    """What computes: `fused.FusedForward` or `plain.PlainForward`."""

    adapters: Any  # `adapters.Adapters`, or `None` where no policy has one
    takes_past: bool

    def prefill(
        self, ids: torch.Tensor, lengths: torch.Tensor, which: Any = None, past: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def decode(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        arena: torch.Tensor,
        span: int,
        mask: torch.Tensor | None,
        which: Any = None,
    ) -> torch.Tensor: ...

    def every(self, ids: torch.Tensor, which: Any = None) -> Callable[[torch.Tensor], torch.Tensor]: ...


class Slots:
    """The batch. `finished` collects (job, completion or error) until the engine takes them."""

    def __init__(
        self,
        forward: Forward,
        *,
        name: str,
        slots: int,
        max_length: int,
        vocabulary: int,
        prefill_tokens: int,
        stop_ids: Sequence[int],
        decode_text: Callable[[Sequence[int]], str],
        invariant: bool = False,
        share_prefixes: bool = True,
    ) -> None:
        self.forward, self.name, self.max_length = forward, name, max_length
        self.prefill_tokens, self.decode_text = prefill_tokens, decode_text
        self.invariant, self.slots = invariant, slots
        self.rows = -(-slots // 16) * 16 if invariant else slots  # matrix kernels treat a last odd row apart
        self.capacity = -(-max_length // 16) * 16 if invariant else 0
        self.arena: torch.Tensor | None = None
        self.versions: dict[str, Version] = {}  # policy -> what its tokens carry
        self.waiting: deque[Job] = deque()
        self.unscored: deque[Job] = deque()  # nothing but the scores of their prompts is wanted: they take no slot
        self.jobs: list[Job] = []
        self.patience = _PATIENCE_STEPS
        self.prefixes = Prefixes() if share_prefixes and forward.takes_past and not invariant else None
        self.encoded = 0  # tokens of prompts that were computed so far, padding included
        self.finished: list[tuple[Job, Completion | Exception]] = []
        self.is_stop = np.zeros(vocabulary, bool)
        self.is_stop[[i for i in stop_ids if 0 <= i < vocabulary]] = True
        kinds = dict(temperature=np.float32, top_p=np.float32, seed=np.uint64)
        self.state = {name: np.zeros(self.rows, kinds.get(name, np.int64)) for name in _FIELDS}
        self.out = np.zeros((self.rows, 16), np.int32)
        self.scores = np.zeros((self.rows, 16), np.float32)

    # --- between two steps -------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self.jobs or self.waiting or self.unscored)

    def enqueue(self, job: Job) -> None:
        only_scored = job.asks is not None and job.limit <= 0
        (self.unscored if only_scored else self.waiting).append(job)

    def activate(self, version: Version) -> None:
        """Tokens of its policy that are sampled from now on carry `version`."""
        self.versions[version.policy] = version
        for row, job in enumerate(self.jobs):
            if job.request.policy == version.policy:
                self._mark(job, int(self.state["count"][row]))
        for job in self.waiting:
            if job.marks and job.request.policy == version.policy:
                self._mark(job, len(job.tokens))

    def preempt(self) -> None:
        """Every running request gives up its slot and cache, and waits, first in line, with its tokens kept."""
        for row, count in enumerate(self.state["count"][: len(self.jobs)].tolist()):
            job = self.jobs[row]
            job.tokens, job.logprobs = self.out[row, :count].copy(), self.scores[row, :count].copy()
        self.waiting.extendleft(reversed(self.jobs))
        self.jobs = []

    def abort(self, chosen: Callable[[Job], bool]) -> None:
        """End the requests that `chosen` picks, with what they have sampled so far."""
        rows = [row for row, job in enumerate(self.jobs) if chosen(job)]
        self._leave(rows, [Finish.ABORT] * len(rows))
        gone = [job for job in (*self.waiting, *self.unscored) if chosen(job)]
        if gone:
            self.waiting = deque(job for job in self.waiting if job not in gone)
            self.unscored = deque(job for job in self.unscored if job not in gone)
            self.finished += [(job, self._complete(job, Finish.ABORT)) for job in gone]

    def take_finished(self) -> list[tuple[Job, Completion | Exception]]:
        done, self.finished = self.finished, []
        return done

    # --- a step ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Score prompts that wait for nothing else, admit what fits, decode one token for every running request."""
        if self.unscored:
            self._score()
        if self._should_admit():
            self._admit()
        n = len(self.jobs)
        if not n:
            return
        s = self.state
        run = self.rows if self.invariant else n
        if run > n:  # idle rows compute on their first entry, so that no softmax is empty
            s["length"][n:] = s["last"][n:] = 0
        positions = s["length"][:run]
        span = self.capacity if self.invariant else int(positions.max()) + 1
        self._reserve(span)
        where = torch.from_numpy(positions)
        mask = None
        if self.invariant or int(positions.min()) + 1 < span:
            mask = (torch.arange(span)[None] <= where[:, None])[:, None, None]
        assert self.arena is not None
        which = None if self.forward.adapters is None else s["adapter"][:run]
        logits = self.forward.decode(torch.from_numpy(s["last"][:run]), where, self.arena, span, mask, which)
        s["length"][:n] += 1
        self._emit(0, n, logits[:n])

    def _score(self) -> None:
        """As many prompts, in their order, as `prefill_tokens` hold; the others after the next decode step."""
        jobs = [self.unscored.popleft()]
        room = self.prefill_tokens - self.width(len(jobs[0].prompt))
        while self.unscored and (room := room - self.width(len(self.unscored[0].prompt))) >= 0:
            jobs.append(self.unscored.popleft())
        score(self, jobs)
        self.finished += [(job, self._complete(job, Finish.LENGTH)) for job in jobs]

    def _should_admit(self) -> bool:
        """A prefill costs about as much as a decode step: collect some free slots first, but for four steps at most."""
        if not self.waiting:
            self.patience = _PATIENCE_STEPS
            return False
        free = self.slots - len(self.jobs)
        if free < min(len(self.waiting), max(1, self.slots // 8)) and self.jobs and self.patience > 0:
            self.patience -= free > 0
            return False
        self.patience = _PATIENCE_STEPS
        return free > 0

    def _admit(self) -> None:
        """Prefill waiting requests, each distinct context once, at most `prefill_tokens` between two decode steps."""
        contexts: dict[tuple[int, bytes], int] = {}
        unique: list[Array] = []
        adapters: list[int] = []
        joined: list[tuple[Job, int]] = []
        widest = 0
        free = self.slots - len(self.jobs)
        while self.waiting and len(joined) < free:
            job = self.waiting[0]
            if job.limit - len(job.tokens) <= 0:
                self.waiting.popleft()
                self.finished.append((job, self._complete(job, Finish.LENGTH)))
                continue
            context = np.concatenate([job.context, job.tokens]) if len(job.tokens) else job.context
            key = (self.adapter(job), context.tobytes())
            if key not in contexts:
                width = max(widest, self.width(len(context)))
                if unique and width * (len(unique) + 1) > self.prefill_tokens:
                    break
                widest = width
                contexts[key] = len(unique)
                unique.append(context)
                adapters.append(key[0])
            job.encoded = (self.versions[job.request.policy], context)
            joined.append((self.waiting.popleft(), contexts[key]))
        if not joined:
            return
        score(self, [job for job, _ in joined if job.asks is not None and job.scored is None])
        first = len(self.jobs)
        index = np.array([which for _, which in joined])
        lengths = np.array([len(c) for c in unique])
        owners = {job.encoded[0] for job, _ in joined if job.encoded}
        logits = None
        if self.prefixes is not None and len(owners) == 1:
            logits = self._prefill_the_rest(self.prefixes, owners.pop(), unique, first, index, adapters[0])
        if logits is None:
            logits = self._prefill(unique, lengths, first, index, np.array(adapters))
        self._seat(first, [job for job, _ in joined], lengths[index])
        self._emit(first, len(self.jobs), logits[torch.from_numpy(index)])

    def width(self, length: int) -> int:
        """Padded length of a prefill row: its own; a power of two in constant shapes, by its own length only."""
        if not self.invariant:
            return length
        return min(max(16, 1 << (length - 1).bit_length()), self.capacity)

    def adapter(self, job: Job) -> int:
        """The adapter of its policy; 0 where this forward has none."""
        adapters = self.forward.adapters
        return 0 if adapters is None else int(adapters.number[job.request.policy])

    def _prefill(
        self, contexts: list[Array], lengths: Array, first: int, index: Array, adapters: Array
    ) -> torch.Tensor:
        """Compute `contexts`, each with its adapter; write their entries to rows `first …` (row first + i takes context
        index[i])."""
        widths = np.array([self.width(int(n)) for n in lengths])
        chunks: list[tuple[Array, int, int]] = []  # contexts, rows, width
        if self.invariant:
            for width in np.unique(widths).tolist():
                members, rows = np.flatnonzero(widths == width), max(1, 256 // width)
                chunks += [(members[i : i + rows], rows, width) for i in range(0, len(members), rows)]
        else:
            chunks = [(np.arange(len(contexts)), len(contexts), int(widths.max()))]
        results: list[torch.Tensor | None] = [None] * len(contexts)
        self._reserve(int(lengths.max()))
        for members, rows, width in chunks:
            ids = np.zeros((rows, width), np.int64)
            sizes = np.ones(rows, np.int64)
            for row, member in enumerate(members):
                ids[row, : lengths[member]] = contexts[member]
                sizes[row] = lengths[member]
            which = None if self.forward.adapters is None else adapters[members]
            self.encoded += ids.size
            logits, entries = self.forward.prefill(torch.from_numpy(ids), torch.from_numpy(sizes), which)
            arena = self._room(entries)
            source = np.full(len(contexts), -1)
            source[members] = np.arange(len(members))
            taken = np.flatnonzero(source[index] >= 0)
            span = min(width, arena.shape[3])
            chosen = entries[:, torch.from_numpy(source[index[taken]]), :, :span]
            arena[:, torch.from_numpy(first + taken), :, :span] = chosen
            for row, member in enumerate(members):
                results[member] = logits[row]
        return torch.stack(results)  # type: ignore[arg-type]

    def _prefill_the_rest(
        self, prefixes: Prefixes, owner: Version, contexts: list[Array], first: int, index: Array, adapter: int
    ) -> torch.Tensor | None:
        """As `_prefill`, with the first entries of each context taken from where they were computed already; `None`,
        and nothing written, where that is not worth it."""

        def compute(ids: Array, sizes: Array, past: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
            self.encoded += ids.size
            which = None if self.forward.adapters is None else np.full(len(ids), adapter)
            return self.forward.prefill(torch.from_numpy(ids), torch.from_numpy(sizes), which, past)

        def encode(ids: Array) -> torch.Tensor:
            return compute(ids[None].astype(np.int64), np.array([len(ids)]))[1]

        running = [
            (row, job.encoded[1]) for row, job in enumerate(self.jobs) if job.encoded and job.encoded[0] == owner
        ]
        past = prefixes.before(owner, contexts, running, self.arena, encode)
        if past is None:
            return None
        lengths = np.array([len(context) for context in contexts])
        own = lengths - past[1].numpy()
        ids = np.zeros((len(contexts), int(own.max())), np.int64)
        for row, context in enumerate(contexts):
            ids[row, : own[row]] = context[-own[row] :]
        logits, entries = compute(ids, own, past)
        self._reserve(int(lengths.max()))
        arena = self._room(entries)
        for i, (before, length) in enumerate(zip(past[1].tolist(), lengths.tolist(), strict=True)):
            rows = torch.from_numpy(first + np.flatnonzero(index == i))
            arena[:, rows, :, :before] = past[0][:, i : i + 1, :, :before]
            arena[:, rows, :, before:length] = entries[:, i : i + 1, :, : length - before]
        return logits

    def _seat(self, first: int, jobs: list[Job], lengths: Array) -> None:
        """Put jobs into rows `first …`; `lengths` int64 [jobs] entries are in the cache."""
        rows = slice(first, first + len(jobs))
        sampling = [job.request.sampling for job in jobs]
        values = {
            "temperature": [s.temperature for s in sampling],
            "top_k": [s.top_k for s in sampling],
            "top_p": [s.top_p for s in sampling],
            "seed": [job.seed for job in jobs],
            "draw": [job.offset for job in jobs],
            "count": [len(job.tokens) for job in jobs],
            "limit": [job.limit for job in jobs],
            "tail": [job.tail for job in jobs],
            "adapter": [self.adapter(job) for job in jobs],
            "length": lengths,
        }
        for name, value in values.items():
            self.state[name][rows] = value
        for row in (first + np.flatnonzero(self.state["count"][rows])).tolist():
            job, count = jobs[row - first], len(jobs[row - first].tokens)
            self._widen(count)
            self.out[row, :count], self.scores[row, :count] = job.tokens, job.logprobs
        for job in jobs:
            if not job.marks:
                self._mark(job, 0)
        self.jobs += jobs

    def _emit(self, start: int, end: int, logits: torch.Tensor) -> None:
        """Sample one token for rows start … end-1, note it, and let go of those that are done."""
        s, rows = self.state, slice(start, end)
        count = s["count"][rows]
        knobs = Knobs(s["temperature"][rows], s["top_k"][rows], s["top_p"][rows])
        tokens, scores, kept = sample(logits, uniform(s["seed"][rows], s["draw"][rows] + count), knobs)
        self._widen(int(count.max()) + 1)
        where = np.arange(start, end)
        self.out[where, count], self.scores[where, count] = tokens, scores
        if kept is not None:
            self._note_kept(start, kept)
        count += 1  # a view of the state
        s["last"][rows] = tokens
        stopped, full, broken = self.is_stop[tokens], count >= s["limit"][rows], ~np.isfinite(scores)
        for i in np.flatnonzero((s["tail"][rows] > 0) & ~stopped).tolist():
            stopped[i] = self._says_stop(start + i)
        done = stopped | full | broken
        if done.any():
            leaving = np.flatnonzero(done)
            reasons = [Finish.ERROR if broken[i] else Finish.STOP if stopped[i] else Finish.LENGTH for i in leaving]
            self._leave((leaving + start).tolist(), reasons)

    def _note_kept(self, start: int, kept: Kept) -> None:
        parts = np.split(kept.ids, np.cumsum(kept.counts)[:-1])
        for row, ids in zip((kept.rows + start).tolist(), parts, strict=True):
            job = self.jobs[row]
            if "keep_ids" in job.request.want and len(ids) < len(self.is_stop):
                job.keep.append((int(self.state["count"][row]), ids))

    def _says_stop(self, row: int) -> bool:
        """Whether a stop string stands in the text, across token borders. Only the tail can hold a new one."""
        job, count = self.jobs[row], int(self.state["count"][row])
        ids = self.out[row, max(0, count - job.tail) : count].tolist()
        if count < job.tail and job.offset:  # reach back into what an earlier call sampled
            back = min(job.offset, job.tail - count)
            ids = job.context[len(job.context) - back :].tolist() + ids
        text = self.decode_text(ids)
        return any(stop in text for stop in job.request.sampling.stop)

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _leave(self, rows: list[int], reasons: list[Finish]) -> None:
        """Complete the requests in `rows` (ascending) and close the gaps with the last rows."""
        if not rows:
            return
        counts = self.state["count"][rows]
        tokens, scores = self.out[rows, : counts.max()], self.scores[rows, : counts.max()]  # copies
        for i, (row, count, reason) in enumerate(zip(rows, counts.tolist(), reasons, strict=True)):
            job = self.jobs[row]
            job.tokens, job.logprobs = tokens[i, :count], scores[i, :count]
            if reason is Finish.ERROR:
                if self.arena is not None:
                    self.arena[:, row] = 0  # masked entries count 0 times, and 0 x NaN would reach the next tenant
                self.finished.append((job, self._not_finite(job, f"at token {len(job.tokens) - 1}")))
            else:
                self.finished.append((job, self._complete(job, reason)))
        n, gone = len(self.jobs), set(rows)
        left = n - len(rows)
        holes = [row for row in rows if row < left]
        if holes:
            movers = [row for row in range(left, n) if row not in gone]
            for value in (*self.state.values(), self.out, self.scores):
                value[holes] = value[movers]
            for hole, mover in zip(holes, movers, strict=True):
                self.jobs[hole] = self.jobs[mover]
            if self.arena is not None:
                span = int(self.state["length"][holes].max())
                self.arena[:, holes, :, :span] = self.arena[:, movers, :, :span]
        del self.jobs[left:]

    def _not_finite(self, job: Job, where: str) -> EngineError:
        return EngineError(
            f"engine {self.name!r}: the model gave a log-probability that is not finite for request "
            f"{job.request.id!r} {where}, with weights {self.versions[job.request.policy]}",
            fix="look for NaN in the weights or a learning rate that is too high",
        )

    def _complete(self, job: Job, finish: Finish) -> Completion | EngineError:
        n = len(job.tokens)
        columns: dict[str, Array] = {"tokens": job.tokens, "logprobs": job.logprobs}
        info = {}
        if job.scored is not None:
            if not np.isfinite(job.scored.logprobs).all():
                return self._not_finite(job, "in its prompt")
            columns |= job.scored.columns(job.asks or 0)
            info = {"prompt_version": str(job.scored.version)}
        if "keep_ids" in job.request.want:
            counts = np.zeros(n, np.int32)
            for token, ids in job.keep:
                counts[token] = len(ids)
            columns["keep_counts"] = counts
            columns["keep_ids"] = np.concatenate([np.zeros(0, np.int32), *(ids for _, ids in job.keep)])
        starts = [*(start for start, _ in job.marks), n]
        spans = tuple(
            [
                Span(start=starts[i], end=starts[i + 1], version=version)
                for i, (_, version) in enumerate(job.marks)
                if starts[i + 1] > starts[i]
            ]
        )
        return Completion(
            request=job.request.id, columns=columns, spans=spans, finish=finish, engine=self.name, info=info
        )

    def _mark(self, job: Job, start: int) -> None:
        version = self.versions[job.request.policy]
        if job.marks and job.marks[-1][0] == start:
            job.marks[-1] = (start, version)
        else:
            job.marks.append((start, version))

    # --- memory ------------------------------------------------------------------------------------------------------

    def _reserve(self, span: int) -> None:
        """Let the arena hold `span` entries a row. It grows with what is used; constant shapes never grow."""
        if self.invariant or span <= self.capacity:
            return
        self.capacity = max(span, min(self.max_length, max(32, 2 * self.capacity)))
        if self.arena is not None:
            layers, rows, heads, held, width = self.arena.shape
            wider = self.arena.new_zeros(layers, rows, heads, self.capacity, width)
            used = len(self.jobs)
            wider[:, :used, :, :held] = self.arena[:, :used]
            self.arena = wider

    def _room(self, entries: torch.Tensor) -> torch.Tensor:
        """The arena [layers, rows, heads, capacity, head dim], made when the first entries show their shape."""
        if self.arena is None:
            layers, _, heads, _, width = entries.shape
            self.arena = entries.new_zeros(layers, self.rows, heads, self.capacity, width)
        return self.arena

    def _widen(self, count: int) -> None:
        width = self.out.shape[1]
        if count > width:
            more = ((0, 0), (0, max(width, count - width)))
            self.out, self.scores = np.pad(self.out, more), np.pad(self.scores, more)
