"""How a finished group becomes a journal frame and comes back, every array bit for bit.

The JSON header says what a group is; arrays travel as raw blocks behind it. One block holds one column of all
trajectories that share its dtype and inner shape, rows laid end to end, in the byte order that the dtype string says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

import numpy as np

from miles_core.errors import RecordError
from miles_core.records import (
    Array,
    Episode,
    Finish,
    Group,
    Message,
    Prompt,
    Ref,
    Sampling,
    Span,
    Status,
    Task,
    Trajectory,
    Version,
    shared_columns,
)

Header = dict[str, Any]
#: A block's row count for values that are no arrays along the trajectory: 0-d arrays, and scalars.
_ZERO_D, _SCALAR = -1, -2
#: An episode is a row of its own fields, in their order, and the number of its trajectories.
_EPISODE = tuple(f.name for f in fields(Episode) if f.name != "trajectories")
_SAMPLING = tuple(f.name for f in fields(Sampling))


def encode_group(group: Group, *, omit: frozenset[str] = frozenset()) -> tuple[Header, list[bytes]]:
    """Header and raw blocks. Columns named in `omit` are left out, and the header says so.

    Raises `RecordError` for an array that is not plain data (objects, structured dtypes).
    """
    versions: dict[Version, int] = {}
    samplings: dict[Sampling | None, int] = {}
    episodes: list[Any] = []
    rows: list[Any] = []
    trajectories = [t for e in group.episodes for t in e.trajectories]
    for e in group.episodes:
        reward = None if e.reward is None else _number(e.reward)
        components = {k: _number(v) for k, v in e.components.items()} if e.components else {}
        row = [e.id, e.member, reward, components, dict(e.info), e.status, e.error, e.preference, len(e.trajectories)]
        episodes.append(row)
    last = same = cast("Any", samplings)  # of no trajectory: most of a group share these objects; to hash them is slow
    for t in trajectories:
        if t.spans is not same:
            same, spans = t.spans, [[s.start, s.end, versions.setdefault(s.version, len(versions))] for s in t.spans]
        if t.sampling is not last:
            last, sampling = t.sampling, samplings.setdefault(t.sampling, len(samplings))
        rows.append([t.id, t.length, t.finish, sampling, t.engine, t.axis, spans])
    blocks: list[Any] = []
    chunks: list[bytes] = []
    refs: list[Any] = []
    omitted: list[Any] = []
    shared = shared_columns(trajectories)
    everyone, lengths = list(range(len(rows))), [t.length for t in trajectories]
    for name in shared or dict.fromkeys(name for t in trajectories for name in t.columns):
        if name in omit:
            omitted += [[index, name] for index, t in enumerate(trajectories) if name in t.columns]
            continue
        if shared is not None:
            column = shared[name]
            alike = [_Block(column.dtype, column.shape[1:], everyone, lengths, [column])]
        else:
            alike = _alike(name, trajectories, refs)
        for block in alike:
            if block.dtype.hasobject or block.dtype.kind == "V":
                raise RecordError(
                    f"column {name!r} of {trajectories[block.owners[0]].id!r} has dtype {block.dtype}, which is not "
                    "plain data",
                    fix="store numbers or booleans in columns",
                )
            chunks.append(b"".join([array.tobytes() for array in block.arrays]))
            owners = [] if len(block.owners) == len(rows) else block.owners  # all of them
            blocks.append([name, block.dtype.str, list(block.inner), owners, block.counts, len(chunks[-1])])
    head = {name: getattr(group, name) for name in ("id", "policy", "slot", "attempt")}
    header = {
        "group": {**head, "task": _task_out(group.task)},
        "episodes": episodes,
        "trajectories": rows,
        "versions": [[v.policy, v.lineage, v.number] for v in versions],
        "samplings": [None if s is None else {name: getattr(s, name) for name in _SAMPLING} for s in samplings],
        "blocks": blocks,
    }
    return header | ({"refs": refs} if refs else {}) | ({"omitted": omitted} if omitted else {}), chunks


def _alike(name: str, trajectories: Sequence[Trajectory], refs: list[Any]) -> list[_Block]:
    """Its values in blocks; what is a reference goes to `refs`."""
    alike: list[_Block] = []
    for index, trajectory in enumerate(trajectories):
        if name not in trajectory.columns:
            continue
        value = trajectory.columns[name]
        if isinstance(value, Ref):
            refs.append([index, name, value.key, value.nbytes, value.digest, value.durable])
            continue
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
        inner = array.shape[1:]
        block = next((block for block in alike if (block.dtype, block.inner) == (array.dtype, inner)), None)
        if block is None:
            alike.append(block := _Block(array.dtype, inner))
        block.owners.append(index)
        # a scalar comes back as a NumPy scalar
        block.counts.append(array.shape[0] if array.ndim else _ZERO_D if array is value else _SCALAR)
        block.arrays.append(array)
    return alike


@dataclass(slots=True)
class _Block:
    """What several trajectories have of a column, alike in dtype and inner shape."""

    dtype: np.dtype[Any]
    inner: tuple[int, ...]
    owners: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    arrays: list[Array] = field(default_factory=list)


def restorable(header: Mapping[str, Any]) -> bool:
    """Whether all of the group is in the frame, or in references that outlive the process."""
    return not header.get("omitted") and all(ref[5] for ref in header.get("refs", ()))


def decode_group(header: Mapping[str, Any], body: memoryview | bytes) -> Group:
    """The group of a frame, arrays freshly allocated. Omitted columns are absent (see `restorable`)."""
    rows = header["trajectories"]
    columns: list[dict[str, Array | Ref | Any]] = [{} for _ in rows]
    offset = 0
    for name, dtype_str, inner, owners, counts, nbytes in header["blocks"]:
        dtype = np.dtype(dtype_str)
        flat = np.frombuffer(body, dtype=dtype, count=nbytes // dtype.itemsize if dtype.itemsize else 0, offset=offset)
        offset += nbytes
        at = 0
        size = math.prod(inner)
        for index, count in zip(owners or range(len(rows)), counts, strict=True):
            n = 1 if count < 0 else count * size
            part = flat[at : at + n].copy()
            at += n
            shape = () if count == _ZERO_D else (count, *inner)
            columns[index][name] = part[0] if count == _SCALAR else part.reshape(shape)
    for index, name, key, size, digest, durable in header.get("refs", ()):
        columns[index][name] = Ref(key=key, nbytes=size, digest=digest, durable=durable)
    versions = [Version(policy=p, lineage=lineage, number=n) for p, lineage, n in header["versions"]]
    samplings = [None if s is None else Sampling(**{**s, "stop": tuple(s["stop"])}) for s in header["samplings"]]
    trajectories = [
        Trajectory(
            id=id_,
            length=length,
            columns=columns[index],
            spans=tuple(Span(start=a, end=b, version=versions[v]) for a, b, v in spans),
            finish=Finish(finish),
            sampling=samplings[sampling],
            engine=engine,
            axis=axis,
        )
        for index, (id_, length, finish, sampling, engine, axis, spans) in enumerate(rows)
    ]
    episodes: list[Episode] = []
    at = 0
    for *row, count in header["episodes"]:
        found = dict(zip(_EPISODE, row, strict=True))
        found["reward"] = None if found["reward"] is None else float(found["reward"])
        found["components"] = {k: float(v) for k, v in found["components"].items()}
        found["status"] = Status(found["status"])
        episodes.append(Episode(**found, trajectories=tuple(trajectories[at : at + count])))
        at += count
    head = header["group"]
    return Group(**{**head, "task": _task_in(head["task"])}, episodes=tuple(episodes))


def _number(value: float) -> float | str:
    """JSON has no NaN and no infinity: those are spelled as strings."""
    value = float(value)
    return value if math.isfinite(value) else repr(value)


def _prompt_out(prompt: Prompt) -> Any:
    return prompt if isinstance(prompt, str) else [[m.role, m.content] for m in prompt]


def _prompt_in(data: str | Sequence[Sequence[str]]) -> Prompt:
    return data if isinstance(data, str) else tuple(Message(role=role, content=content) for role, content in data)


def _task_out(task: Task) -> Header:
    """What a task does not have is left out."""
    shown = [_prompt_out(d) for d in task.demonstrations]
    rest = {"answer": task.answer, "demonstrations": shown, "metadata": dict(task.metadata)}
    given = {k: v for k, v in rest.items() if v not in (None, [], {})}
    return {"id": task.id, "prompt": _prompt_out(task.prompt), **given}


def _task_in(data: Mapping[str, Any]) -> Task:
    shown = tuple(_prompt_in(d) for d in data.get("demonstrations", ()))
    return Task(**{**data, "prompt": _prompt_in(data["prompt"]), "demonstrations": shown})
