"""Token-in-token-out: a tree of token segments, as environments see it, and the trajectories of its leaves.

What an engine produced is authoritative and is never re-tokenised; only new environment text is encoded, and what was
stored before stays a bit-exact prefix. Promises: the tree only grows; a turn that was cut off (`length`, `abort`)
cannot be extended; a turn that several leaves share is trainable in exactly one of them, the earliest committed one;
every sampled token keeps its log-probability and version. Nothing here knows rewards, groups or seeds (`sampler.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from miles_core.columns import Align, ColumnSpec, Level, validate
from miles_core.contracts.engine import Completion, Request
from miles_core.contracts.environment import Turn
from miles_core.errors import DeadlineError, RecordError, bad_answer
from miles_core.records import Finish, Message, Origin, Sampling, Span, Trajectory, trajectory_id

if TYPE_CHECKING:
    from miles_core.contracts.rendering import Renderer
    from miles_core.records import Array, Prompt

#: What `Session` samples with: the pool's `generate`, with the run's extensions around it. Returns the completion and
#: the columns that extensions collected from it.
Generate = Callable[[Request], Awaitable[tuple[Completion, Mapping[str, Any]]]]

#: Columns of a completion that every engine gives, or gives where `keep_ids` is wanted; others belong to extensions.
STANDARD_COLUMNS = frozenset({"tokens", "logprobs", "keep_ids", "keep_counts"})


@dataclass(slots=True, eq=False)
class _Node:
    """One turn: all that the model saw before it (the turns above included), and what was sampled."""

    parent: _Node | None
    before: Array  # int32
    completion: Completion
    tokens: Array  # int32, sampled
    sampling: Sampling
    extra: Mapping[str, Any]
    children: int = 0

    @property
    def start(self) -> int:
        return len(self.before)

    @property
    def end(self) -> int:
        return len(self.before) + len(self.tokens)

    def path(self) -> list[_Node]:
        """From the root to this turn."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]


@dataclass(kw_only=True, eq=False, slots=True)
class Session:
    """The session of one episode. Keeps `contracts.environment.Session`; environments use nothing else of it."""

    id: str
    policy: str
    prompt: Prompt
    renderer: Renderer
    generate: Generate
    sampling: Sampling
    seed_of: Callable[[int], int]  # the seed of the turn-th call, counted from 0 in call order
    request_id: str  # of its requests: what stands before the turn
    want: frozenset[str] = frozenset()
    columns: Mapping[str, ColumnSpec] | None = None  # what trajectories are checked against
    deadline: float | None = None  # a time of the running event loop
    root: Callable[[], Array] | None = None  # ids of `prompt`, where the episodes of a group encode it once
    failure: BaseException | None = None  # what an engine raised, however the environment dealt with it
    _nodes: list[_Node] = field(default_factory=list)
    _calls: int = 0

    async def sample(self, new: Prompt | Sequence[Message] = (), *, parent: int | None = None, **sampling: Any) -> Turn:
        """Encode `new` after `parent` and sample; see the contract.

        `parent=None` is the latest turn, or the root where there is none; `parent=-1` is the root, a new branch from
        the start, where `new` is the prompt (the task's own where empty). Raises `EpisodeFailedError` for a parent that
        was cut off, and `RecordError` for one that does not exist or a branch that would mix distributions.
        """
        node = await self._advance(len(self._nodes) - 1 if parent is None else parent, new, sampling)
        ids = node.tokens.tolist()
        return Turn(
            node=len(self._nodes) - 1,
            text=self.renderer.text(ids),
            message=self.renderer.parse(ids),
            finish=str(node.completion.finish),
            tokens=len(ids),
        )

    async def answer(self) -> None:
        """The only turn of a single-turn episode."""
        await self._advance(-1, (), {})

    async def _advance(self, parent: int, new: Prompt | Sequence[Message], sampling: Mapping[str, Any]) -> _Node:
        shape = replace(self.sampling, **sampling) if sampling else self.sampling
        before = self._context(parent, new, shape)
        turn, self._calls = self._calls, self._calls + 1
        request = Request(
            id=f"{self.request_id}/{turn}",
            policy=self.policy,
            prompt={"tokens": before},
            sampling=shape,
            seed=self.seed_of(turn),
            want=self.want,
            deadline_s=600.0 if self.deadline is None else self._left(),
            session=self.id,
        )
        try:
            completion, extra = await self.generate(request)
            return self._commit(parent, before, completion, shape, extra)
        except BaseException as error:
            self.failure = self.failure or error
            raise

    def _left(self) -> float:
        assert self.deadline is not None
        left = self.deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineError(f"episode {self.id!r} passed its deadline", fix="raise schedule.episode_deadline_s")
        return left

    def _context(self, parent: int, new: Prompt | Sequence[Message], shape: Sampling) -> Array:
        """All token ids that the model sees: int32 [n]."""
        if parent == -1:
            if self.root is not None and len(new) == 0:
                return self.root()
            prompt = self.prompt if len(new) == 0 else (new if isinstance(new, str) else tuple(new))
            return np.asarray(self.renderer.prompt(prompt), np.int32)
        if not 0 <= parent < len(self._nodes):
            what = f"session {self.id!r} has no turn {parent}; it has {len(self._nodes)}"
            raise RecordError(what, fix="pass a Turn.node of this session")
        node = self._nodes[parent]
        if node.completion.finish != Finish.STOP:
            ended = f"turn {parent} ended with {str(node.completion.finish)!r} and cannot be extended"
            raise EpisodeFailedError(f"{ended} (look at Turn.finish, or raise max_new_tokens)")
        own = (node.sampling.temperature, node.sampling.top_p, node.sampling.top_k)
        if own != (shape.temperature, shape.top_p, shape.top_k):
            raise RecordError(
                f"a turn after {parent} of {self.id!r} would sample with temperature, top_p, top_k = "
                f"{(shape.temperature, shape.top_p, shape.top_k)}, the branch has {own}",
                fix="use one distribution along a branch: training applies it per trajectory",
            )
        messages = [Message(role="user", content=new)] if isinstance(new, str) else list(new)
        before = np.concatenate([node.before, node.tokens])
        return np.concatenate([before, np.asarray(self.renderer.extend(before.tolist(), messages), np.int32)])

    def _commit(
        self, parent: int, before: Array, completion: Completion, shape: Sampling, extra: Mapping[str, Any]
    ) -> _Node:
        if completion.finish == Finish.ERROR:
            detail = completion.info.get("error", "no reason given")
            raise EpisodeFailedError(f"engine {completion.engine!r} ended request {completion.request!r}: {detail}")
        if completion.finish == Finish.ABORT:
            raise EpisodeFailedError("aborted")
        tokens = np.asarray(completion.columns["tokens"])
        _check(completion, tokens, self.want)
        above = None if parent == -1 else self._nodes[parent]
        if above is not None:
            above.children += 1
        node = _Node(above, before, completion, tokens.astype(np.int32), shape, extra)
        self._nodes.append(node)
        return node

    # --- trajectories ------------------------------------------------------------------------------------------------

    def trajectories(self) -> tuple[Trajectory, ...]:
        """One trajectory per leaf, in the order in which leaves were committed, each valid (`columns.validate`)."""
        claimed: set[_Node] = set()
        found: list[Trajectory] = []
        for node in self._nodes:
            if not node.children:
                path = node.path()
                trajectory = self._trajectory(len(found), path, [turn not in claimed for turn in path])
                if self.columns is not None:
                    validate(trajectory, self.columns)
                found.append(trajectory)
                claimed.update(path)
        return tuple(found)

    def _trajectory(self, leaf: int, path: list[_Node], trainable: list[bool]) -> Trajectory:
        last = path[-1]
        n = last.end
        bare = True  # tokens and logprobs alone
        for node in path:
            bare = bare and len(node.completion.columns) == 2 and not node.extra
        origin = np.zeros(n, np.uint8)
        origin[path[0].start :] = Origin.ENVIRONMENT
        train = np.zeros(n, bool)
        logprobs = np.zeros(n, np.float32)
        spans: list[Span] = []
        for node, own in zip(path, trainable, strict=True):
            here = slice(node.start, node.end)
            origin[here] = Origin.SAMPLED
            train[here] = own
            logprobs[here] = cast("Array", node.completion.columns["logprobs"])
            at = node.start
            spans += [Span(start=s.start + at, end=s.end + at, version=s.version) for s in node.completion.spans]
        columns: dict[str, Any] = {
            "tokens": np.concatenate([last.before, last.tokens]),
            "origin": origin,
            "trainable": train,
            "behaviour_logprobs": logprobs,
        }
        if not bare and any("keep_counts" in node.completion.columns for node in path):
            counts = np.zeros(n, np.int32)
            for node in path:
                counts[node.start : node.end] = np.asarray(node.completion.columns["keep_counts"])
            columns["keep_counts"] = counts
            columns["keep_ids"] = np.concatenate([np.asarray(node.completion.columns["keep_ids"]) for node in path])
        for name in () if bare else {name for node in path for name in node.extra}:
            columns[name] = self._extra(name, path, n)
        return Trajectory(
            id=trajectory_id(self.id, leaf),
            length=n,
            columns=columns,
            spans=tuple(spans),
            finish=last.completion.finish,
            sampling=last.sampling,
            engine=last.completion.engine,
        )

    def _extra(self, name: str, path: list[_Node], n: int) -> Any:
        """A collected column along the whole path.

        Per completion, a unit column has a row for each sampled token, or (fed-in columns, which know the context too)
        a row for each token that was fed in: the context and all sampled tokens but the last, or all of them. Other
        levels keep the last turn's value.
        """
        spec = (self.columns or {}).get(name)
        if spec is None or spec.level != Level.UNIT:
            return next(node.extra[name] for node in reversed(path) if name in node.extra)
        inner = next(np.asarray(node.extra[name]).shape[1:] for node in path if name in node.extra)
        column = np.full((n, *inner), spec.fill, dtype=spec.dtype)
        for node in path:
            if name not in node.extra:
                continue
            rows = np.asarray(node.extra[name])
            if len(rows) == len(node.tokens):
                column[node.start : node.end] = rows
            elif spec.align == Align.INPUT and len(rows) in (node.end - 1, node.end):
                column[: len(rows)] = rows
            else:
                raise RecordError(
                    f"column {name!r} of {self.id!r} has {len(rows)} rows for {len(node.tokens)} sampled tokens",
                    fix="collect one row per sampled token (or, with align: input, per token that was fed in)",
                )
        return column


class EpisodeFailedError(Exception):
    """An episode that cannot be finished, through no fault of the environment; its text is the reason."""


def _check(completion: Completion, tokens: Array, want: frozenset[str]) -> None:
    """An engine's answer at the border: `EngineError` names engine and request."""
    broken = partial(bad_answer, completion.engine, completion.request)
    n = len(tokens)
    if not _are_ids(tokens):
        raise broken(f"tokens that are no ids: {tokens.tolist()!r:.100}")
    for name in ("logprobs", "keep_counts"):
        column = completion.columns.get(name)
        due = name == "logprobs" or "keep_ids" in want
        if column is None and due:
            raise broken(f"no column {name}, which it promises to give")
        if column is not None and ((array := np.asarray(column)).shape != (n,) or array.dtype.kind not in "fiu"):
            raise broken(f"{n} tokens and {name} of shape {array.shape} and dtype {array.dtype}")
    if "keep_counts" in completion.columns or "keep_ids" in want:
        counts, kept = (np.asarray(completion.columns.get(name)) for name in ("keep_counts", "keep_ids"))
        if counts.dtype.kind not in "iu" or not _are_ids(kept) or (n and counts.min() < 0) or counts.sum() != len(kept):
            raise broken(f"keep_counts {counts.tolist()!r:.60} and keep_ids {kept.tolist()!r:.60}, which do not fit")
    at = 0
    for span in completion.spans:
        if span.start != at or span.end <= at:
            raise broken(f"a version span {span.start!r}:{span.end!r} where one from {at} was due")
        at = span.end
    if at != n:
        raise broken(f"version spans over {at} of {n} tokens")


def _are_ids(ids: Array) -> bool:
    return ids.ndim == 1 and (not len(ids) or bool(ids.dtype.kind in "iu" and ids.min() >= 0 and ids.max() < 2**31))
