"""The engines of a run as one place to ask for tokens: members, their gate, stickiness, load and quarantine.

Promises: a request runs only on a member whose gate is open for its policy; a member that dies or is quarantined loses
its requests to others, a bounded number of times, and the reasons are kept; a pause that aborts requests is invisible
to callers (they go on from the tokens so far); below `min_engines` every call stops with the reasons. The pool moves no
weights (`publish.py`) and knows nothing of trajectories (`session.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from miles_core.contracts.engine import Completion, Health, PauseMode, Request
from miles_core.errors import DeadlineError, EngineError, MilesError, QuorumError, bad_answer, clause
from miles_core.records import Finish, Span, Version
from miles_core.waits import GO_ON, cancel, contained, finish_all
from miles_core.weights import ServingGate

if TYPE_CHECKING:
    from miles_core.contracts.engine import Engine
    from miles_core.records import Array

_ABORT = Finish.ABORT  # CPython 3.11 calls a function for each look-up
#: How long a member may take to say how it is.
HEALTH_DEADLINE_S = 30.0
#: How often one request is started before the run stops.
ATTEMPTS = 3
#: Sticky sessions that the pool remembers; older ones fall back to least load.
STICKY_SESSIONS = 65_536


@dataclass(slots=True)
class _Member:
    """One engine. `held` while it is being given weights; `why` is set while it is quarantined."""

    engine: Engine
    held: bool = False
    why: str = ""
    load: int = 0  # requests that run on it


@dataclass(slots=True, eq=False)
class _Call:
    """One wait for a member: of a request, or of several that are answered together."""

    member: str = ""  # where it runs, empty while it waits for a member
    task: asyncio.Task[Any] = field(default_factory=lambda: cast("asyncio.Task[Any]", asyncio.current_task()))
    aborted: set[str] = field(default_factory=set)  # request ids
    lost: bool = False  # its member was quarantined under it, and `task` cancelled to tell it so


class _LostError(Exception):
    """The member of a call was quarantined under it."""


class Pool:
    """Members by name, their serving gate, and `generate`."""

    def __init__(
        self, engines: Mapping[str, Engine], *, on_event: Callable[[str, Mapping[str, Any]], None] | None = None
    ) -> None:
        """`on_event(kind, fields)` hears of quarantine and return.

        In a sampler process the pool holds clients built at `Place.SAMPLER`; its gate follows the controller's through
        `follow()`.
        """
        self.gate = ServingGate()
        self.min_engines = 1
        self.losses = Counter[str]()  # quarantines by member: connections made before the last one may be stale
        self.updating = asyncio.Lock()  # one publication at a time, over all policies
        self._members = {name: _Member(engine) for name, engine in engines.items()}
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._calls: dict[str, _Call] = {}  # by request id
        self._changed = asyncio.Event()
        self._followed: Mapping[str, Any] = {"gate": {"serves": {}}, "held": ()}  # the controller's last word
        self._on_event = on_event or (lambda kind, fields: None)

    # --- members -----------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> dict[str, Engine]:
        return {name: member.engine for name, member in self._members.items()}

    def members(self) -> tuple[str, ...]:
        """Names of members that are not quarantined."""
        return tuple(name for name, member in self._members.items() if not member.why)

    def quarantined(self) -> dict[str, str]:
        """Name -> reason."""
        return {name: member.why for name, member in self._members.items() if member.why}

    async def start(self, deadline_s: float = 600.0) -> None:
        """Start every engine at once; the first failure surfaces with its own text."""
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.gather(*(contained(member.engine.start()) for member in self._members.values()))
        except TimeoutError:
            what = f"engines {list(self._members)} did not start within {deadline_s:g} s"
            raise DeadlineError(what, fix="see their logs, or allow them more time") from None

    async def health(self, name: str) -> Health:
        """The member's own word; an exception or silence counts as not ok."""
        try:
            async with asyncio.timeout(HEALTH_DEADLINE_S):
                return await contained(self._members[name].engine.health())
        except TimeoutError:
            return Health(ok=False, detail=f"no answer to a health check within {HEALTH_DEADLINE_S:g} s")
        except Exception as error:
            return Health(ok=False, detail=f"health check failed: {clause(error)}")

    def quarantine(self, name: str, reason: str) -> None:
        """Close the member's gate; its requests move to other members. It returns through a full resync only."""
        member = self._members[name]
        if not member.why:
            self._on_event("engine_quarantined", {"engine": name, "reason": reason})
        self.losses[name] += 1
        member.why = reason or "no reason given"
        self.gate.revoke(name)
        self._drop_calls(name)
        self._wake()

    def readmit(self, name: str) -> None:
        """Take a member back, once the gate has admitted its receipt."""
        member = self._members[name]
        if member.why:
            self._on_event("engine_returned", {"engine": name, "was": member.why})
        member.why = ""
        self._wake()

    def check_quorum(self, publishing: bool = False) -> None:
        """Raise `QuorumError` with every reason where fewer than `min_engines` members remain. While a publication goes
        on, which may bring members back, it is for that (`publishing`) to say."""
        remain = self.members()
        if len(remain) < self.min_engines and (publishing or not (self.updating.locked() or self._followed["held"])):
            reasons = "; ".join(f"{name}: {why}" for name, why in self.quarantined().items())
            raise QuorumError(
                f"{len(remain)} of {len(self._members)} engines remain, sync.min_engines is {self.min_engines}"
                f" ({reasons or 'none was ever there'})",
                fix="repair the engines and resume the run, or lower sync.min_engines",
            )

    async def hold(self, name: str, mode: PauseMode) -> None:
        """Pause a member for an update. Where its requests end (`abort`), they wait here and go on afterwards."""
        self._members[name].held = True
        await contained(self._members[name].engine.pause(mode))

    async def release(self, name: str) -> None:
        """Let a held member sample again."""
        await contained(self._members[name].engine.resume())
        self._members[name].held = False
        self._wake()

    def alias(self, old: Version, new: Version) -> None:
        """Publish `new`, which holds the weights of `old`; no engine is touched."""
        self.gate.alias(old, new)
        self._wake()

    def state(self, held: Sequence[str] = ()) -> dict[str, Any]:
        """Plain data that pools in sampler processes `follow`; `held` are given weights next."""
        return {"gate": self.gate.state(), "quarantined": self.quarantined(), "quorum": self.min_engines, "held": held}

    def follow(self, state: Mapping[str, Any]) -> None:
        """Take over gate, quarantine and quorum from the controller's pool; members are matched by name. One that was
        lost here alone comes back when it was sent weights again. Raises `QuorumError`."""
        before, self._followed, self.min_engines = self._followed["gate"]["serves"], state, state["quorum"]
        self.gate.follow(state["gate"])
        for name, member in self._members.items():
            stays = member.why if before.get(name) == state["gate"]["serves"].get(name) else ""
            why = state["quarantined"].get(name, "") or stays
            if why and not member.why:
                self.losses[name] += 1
                self._drop_calls(name)
            member.why, member.held = why, name in state["held"]
        self._wake()
        self.check_quorum()

    def _drop_calls(self, name: str) -> None:
        for call in set(self._calls.values()):
            if call.member == name and not call.lost:
                call.lost = True
                call.task.cancel()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate_many(self, requests: Sequence[Request]) -> list[Completion | Exception]:
        """`generate` for requests of one policy that come together, a `DeadlineError` in the place of its answer.
        Members that can are asked for all of theirs at once; what does not end there goes on alone."""
        began = asyncio.get_running_loop().time()
        names = [n for n in self._candidates(requests[0].policy) if hasattr(self._members[n].engine, "generate_many")]
        names = sorted(names, key=lambda name: self._members[name].load)[: len(requests)]
        parts: dict[str, list[Completion]] = {}
        asked = [self._many(name, requests[i :: len(names)], parts) for i, name in enumerate(names)]
        found: list[Completion | Exception | None] = [None] * len(requests)
        for i, some in enumerate([await asked[0]] if len(asked) == 1 else await finish_all(asked)):  # one needs no task
            found[i :: len(names)] = some
        if rest := [request for request, result in zip(requests, found, strict=True) if result is None]:
            alone = [asyncio.ensure_future(self._alone(r, parts.get(r.id, ()), began + r.deadline_s)) for r in rest]
            try:
                ended = iter(await asyncio.gather(*alone))
            finally:  # the first error stops the run: nobody waits for the others
                await cancel(alone)
            return [next(ended) if result is None else result for result in found]
        return found  # type: ignore[return-value]  # nothing is missing

    async def _alone(self, request: Request, parts: Sequence[Completion], deadline: float) -> Completion | Exception:
        try:
            return await self.generate(request, parts, deadline)
        except DeadlineError as error:
            return error

    async def _many(
        self, name: str, requests: Sequence[Request], parts: dict[str, list[Completion]]
    ) -> list[Completion | Exception | None]:
        """One member's answers; `None` for a request that did not end there, with any of its tokens in `parts`."""
        member, call, ids = self._members[name], _Call(name), [request.id for request in requests]
        found: list[Completion | Exception | None] = [None] * len(requests)
        self._calls |= dict.fromkeys(ids, call)
        member.load += len(ids)
        try:
            results = await _answer(call, member.engine.generate_many(requests))  # type: ignore[attr-defined]
        except Exception:  # each alone will meet it again, and deal with it
            return [_nothing(request) if request.id in call.aborted else None for request in requests]
        finally:
            member.load -= len(ids)
            for request_id in ids:
                del self._calls[request_id]
        if not isinstance(results, list | tuple) or len(results) != len(ids):
            raise bad_answer(name, ids[0], f"{results!r:.80} where {len(ids)} answers were due")
        for i, result in enumerate(results):
            if isinstance(result, DeadlineError):
                found[i] = result
            elif not isinstance(result, BaseException):
                done = self._named(_checked(name, requests[i], result))
                if done.finish != _ABORT or ids[i] in call.aborted:
                    found[i] = done
                elif _count(done):
                    parts[ids[i]] = [done]
        return found

    async def generate(
        self, request: Request, parts: Sequence[Completion] = (), deadline: float | None = None
    ) -> Completion:
        """Sample `request` on a member that may serve its policy.

        Spans carry published versions (aliases resolved). Returns with finish `abort` only after `abort()`. Raises
        `DeadlineError` where no member serves the policy by `request.deadline_s`, `QuorumError` where too few members
        remain, and what an engine that is otherwise healthy raised. Engines keep the deadline once they have the
        request; for one that hangs there is the episode's own (`sampler.py`), which cancels this call. `parts` are what
        an earlier call of this request got, which goes on until `deadline` (a time of the loop).
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.deadline_s if deadline is None else deadline
        parts, failures, changed = list(parts), list[str](), self._changed
        call = self._calls[request.id] = _Call()
        try:
            while True:
                name = self._pick(request)
                if request.id in call.aborted:
                    return _joined(request, [*parts, _nothing(request)])
                if parts and sum(map(_count, parts)) >= request.sampling.max_new_tokens:
                    return _joined(request, parts)
                if name is None:
                    await self._wait(request, deadline)
                    continue
                done = await self._once(name, call, _rest(request, parts, deadline - loop.time()), failures)
                if done is not None:
                    parts.append(self._named(done))
                    if done.finish != _ABORT or request.id in call.aborted:
                        return parts[0] if len(parts) == 1 else _joined(request, parts)
                    # Publications end requests: sampler processes learn of each before and after it (`follow`).
                    changed, before = self._changed, changed
                    if not _count(done) and changed is before and not self._members[name].held:
                        failures.append(f"{name}: ended the request without a token and without being asked")
                if len(failures) >= ATTEMPTS:
                    what = f"request {request.id!r} failed {len(failures)} times ({'; '.join(failures)})"
                    raise EngineError(what, fix="see the engines' logs, then resume the run")
        finally:
            del self._calls[request.id]

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests (all where `None`): their `generate` returns what was sampled, with finish `abort`."""
        by_member: dict[str, list[str]] = {}
        for request_id in self._calls if request_ids is None else request_ids:
            if call := self._calls.get(request_id):
                call.aborted.add(request_id)
                if call.member:
                    by_member.setdefault(call.member, []).append(request_id)
        self._wake()
        await asyncio.gather(*(contained(self._members[name].engine.abort(found)) for name, found in by_member.items()))

    def _candidates(self, policy: str) -> list[str]:
        """The members among those with the policy's newest version that take requests."""
        newest: Version | None = None
        names: list[str] = []
        for name, member in self._members.items():
            if not member.why and not member.held:
                version = self.gate.version(name, policy)
                if version is not None and (newest is None or version >= newest):
                    names = [*names, name] if version == newest else [name]
                    newest = version
        return names

    def _pick(self, request: Request) -> str | None:
        """The session's member, else the least loaded of the candidates; `None`: wait."""
        names = self._candidates(request.policy)
        if not names:
            self.check_quorum()
            return None
        sticky = None if request.session is None else self._sticky.get(request.session)
        if sticky not in names:
            sticky = min(names, key=lambda name: self._members[name].load)
        if request.session is None:
            return sticky
        self._sticky[request.session] = sticky
        self._sticky.move_to_end(request.session)
        if len(self._sticky) > STICKY_SESSIONS:
            self._sticky.popitem(last=False)
        return sticky

    async def _wait(self, request: Request, deadline: float) -> None:
        changed = self._changed
        try:
            async with asyncio.timeout_at(deadline):
                await changed.wait()
        except TimeoutError:
            raise DeadlineError(
                f"request {request.id!r} of policy {request.policy!r} had no answer within {request.deadline_s:g} s "
                "(no member serves its policy)",
                fix="raise schedule.episode_deadline_s, or find out why the engines are slow",
            ) from None

    async def _once(self, name: str, call: _Call, request: Request, failures: list[str]) -> Completion | None:
        """One call of one member; `None` where the member was lost and the request may start elsewhere."""
        member, losses = self._members[name], self.losses[name]
        member.load += 1
        call.member = name
        try:
            return _checked(name, request, await _answer(call, member.engine.generate(request)))
        except _LostError:
            failures.append(f"{name}: {member.why}")
            return None
        except (EngineError, OSError) as error:
            # This call noticed; a quarantine, also one by another call, cancels the rest.
            call.member = ""
            health = await _answer(call, self.health(name))
            if losses == self.losses[name]:  # else another call saw to it, and the member may be back already
                if health.ok and not isinstance(error, OSError):
                    raise
                self.quarantine(name, f"{clause(error)} ({health.detail or 'connection failed'})")
                self.check_quorum()
            failures.append(f"{name}: {clause(error)}")
            return None
        except MilesError:
            raise
        except Exception as error:
            what = f"engine {name!r} failed at request {request.id!r}: {clause(error)}"
            raise EngineError(what, fix=GO_ON) from error
        finally:
            member.load -= 1
            call.member, call.lost = "", False

    def _named(self, completion: Completion) -> Completion:
        if not self.gate.aliases:
            return completion
        spans = tuple(replace(span, version=self.gate.named(span.version)) for span in completion.spans)
        return replace(completion, spans=spans)


async def _answer(call: _Call, asked: Awaitable[Any]) -> Any:
    """What a member answers. Where the member was lost meanwhile, or the caller was cancelled, that alone counts,
    whatever the member's client made of the cancellation: an answer, or an error of its own."""
    answer, error, before = None, None, call.task.cancelling()  # some libraries leave what they cancelled
    try:
        answer = await contained(asked)
    except (Exception, asyncio.CancelledError) as raised:
        error = raised
    if call.lost and call.task.uncancel() <= before:
        raise _LostError
    if call.task.cancelling() > before:  # by somebody else (too)
        raise asyncio.CancelledError from error
    if isinstance(error, asyncio.CancelledError):
        raise OSError("its client cancelled the request") from error
    if error is not None:
        raise error
    return answer


def _checked(name: str, request: Request, answer: Any) -> Completion:
    """The border to an engine: what it answered is an answer, and to that request."""
    left = request.sampling.max_new_tokens - (0 if request.resume is None else len(request.resume))
    columns = getattr(answer, "columns", None)
    if not isinstance(answer, Completion):
        wrong = f"{type(answer).__name__}, which is no completion"
    elif answer.request != request.id:
        wrong = f"the answer to {answer.request!r}"
    elif not isinstance(answer.finish, Finish):
        wrong = f"finish {answer.finish!r}, which is no Finish"
    elif not isinstance(columns, (dict, Mapping)) or getattr(columns.get("tokens"), "ndim", 0) != 1:  # a dict, mostly
        wrong = "no array of tokens"
    elif len(tokens := columns["tokens"]) > left:
        wrong = f"{len(tokens)} tokens, {left} were asked for"
    elif not _are_spans(answer.spans):
        wrong = f"version spans {answer.spans!r:.300}"
    else:
        return answer
    raise bad_answer(name, request.id, wrong)


def _are_spans(spans: Any) -> bool:
    for span in spans if isinstance(spans, (tuple, list)) else (None,):
        if not isinstance(span, Span) or not isinstance(v := span.version, Version) or type(v.policy) is not str:
            return False
        if not type(span.start) is type(span.end) is type(v.lineage) is type(v.number) is int:
            return False
    return True


def _rest(request: Request, parts: Sequence[Completion], left_s: float) -> Request:
    """The request that goes on after `parts`."""
    if not parts:
        return request if left_s > 0.99 * request.deadline_s else replace(request, deadline_s=max(left_s, 0.001))
    before = [] if request.resume is None else [request.resume]
    tokens = np.concatenate([*before, *(np.asarray(part.columns["tokens"]) for part in parts)]).astype(np.int32)
    return replace(request, resume=tokens, deadline_s=max(left_s, 0.001))


def _count(completion: Completion) -> int:
    return len(np.asarray(completion.columns["tokens"]))


def _nothing(request: Request) -> Completion:
    empty: dict[str, Array] = {"tokens": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32)}
    if "keep_ids" in request.want:
        empty |= {"keep_ids": np.zeros(0, np.int32), "keep_counts": np.zeros(0, np.int32)}
    return Completion(request=request.id, columns=empty, spans=(), finish=_ABORT, engine="")


def _joined(request: Request, parts: Sequence[Completion]) -> Completion:
    """Consecutive completions of one request as one: columns end to end, spans shifted and merged."""
    spans: list[Span] = []
    start = 0
    for part in parts:
        for span in part.spans:
            moved = Span(start=span.start + start, end=span.end + start, version=span.version)
            if spans and spans[-1].end == moved.start and spans[-1].version == moved.version:
                moved = replace(moved, start=spans.pop().start)
            spans.append(moved)
        start += _count(part)
    names = {name for part in parts for name in part.columns}
    columns = {
        name: np.concatenate([np.asarray(part.columns[name]) for part in parts if name in part.columns])
        for name in names
    }
    finish = parts[-1].finish
    if finish == _ABORT and start >= request.sampling.max_new_tokens:
        finish = Finish.LENGTH
    engine = next((part.engine for part in reversed(parts) if part.engine), "")
    info = {key: value for part in parts for key, value in part.info.items()}
    return Completion(request=request.id, columns=columns, spans=tuple(spans), finish=finish, engine=engine, info=info)
