"""Toy engine: continuous decoding of table models, several policies at once, with every promise of the contract.

One task decodes all running requests step by step on the event loop (a step takes microseconds). A request's draws
depend on its seed and the token's number only, and rows never influence each other, so it is batch invariant for free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import load_file

from miles_core.contracts.engine import Completion, Health, PauseMode, Request
from miles_core.contracts.weights import Tensor, TensorSpec
from miles_core.errors import CapabilityError, DeadlineError, EngineError
from miles_core.records import Finish, Ref, Version, spans_of
from miles_core.testing.toys.table import Array, cut, log_softmax, stream_logits, uniform
from miles_core.weights import piece_digests

if TYPE_CHECKING:
    from miles_core.contracts.rendering import Renderer

#: What `Request.want` may name. `toy.previous` is the id of the token before each sampled one, int32 [n].
WANTS = frozenset({"logprobs", "keep_ids", "toy.previous"})


@dataclass
class _Weights:
    """One policy's model as the engine holds it: decoding reads `tensors`, ports write them while `loading` is set."""

    tensors: dict[str, Array] = field(default_factory=dict)
    version: Version | None = None
    loading: Version | None = None
    order: int = 0


@dataclass(eq=False)
class _Running:
    request: Request
    tokens: list[int]  # everything before the next token
    first: int  # index in `tokens` of the first token that this call returns
    done: asyncio.Future[Finish]
    drawn: int  # tokens sampled by earlier calls
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    kept: list[Array] = field(default_factory=list)
    previous: list[int] = field(default_factory=list)
    cached: Version | None = None
    prefills: int = 0


class ToyEngine:
    """Serves every policy whose weights came through a port. `step_s` stretches a decode step for tests of timing."""

    def __init__(
        self,
        name: str,
        *,
        renderer: Renderer | None = None,
        step_s: float = 0.0,
        slots: int = 256,
    ) -> None:
        self.name = name
        self._renderer = renderer
        self._stop_ids = frozenset(renderer.stop_ids if renderer is not None else (1,))
        self._step_s = step_s
        self._slots = slots
        self._weights: dict[str, _Weights] = {}
        self._running: list[_Running] = []
        self._waiting: list[_Running] = []
        self._paused: PauseMode | None = None
        self._loop: asyncio.Task[None] | None = None
        self._wake: asyncio.Event | None = None
        self._idle: asyncio.Event | None = None
        self._failure: BaseException | None = None
        self._closed = False

    def stop_on(self, ids: Sequence[int]) -> None:
        """End answers at these ids (an engine without a renderer cannot know them)."""
        self._stop_ids = frozenset(ids)

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._loop is None:
            self._wake, self._idle = asyncio.Event(), asyncio.Event()
            self._loop = asyncio.create_task(self._decode(), name=f"toy-engine-{self.name}")

    async def health(self) -> Health:
        ok = self._loop is not None and not self._loop.done() and not self._closed
        detail = "" if ok else ("closed" if self._closed else f"not running: {self._failure!r}")
        return Health(ok=ok, detail=detail, running=len(self._running), waiting=len(self._waiting))

    async def close(self) -> None:
        self._closed = True
        await self.abort()
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        row = self._admit(request)
        self._waiting.append(row)
        self._kick()
        try:
            finish = await asyncio.wait_for(asyncio.shield(row.done), request.deadline_s)
        except TimeoutError:
            raise DeadlineError(
                f"engine {self.name!r}: request {request.id!r} was not done after {request.deadline_s:g} s "
                f"({len(row.sampled)} tokens; paused: {self._paused})",
                fix="raise the episode deadline, or look at why the engine is paused",
            ) from None
        finally:
            self._drop(row)
        return self._completion(row, finish)

    async def generate_many(self, requests: Sequence[Request]) -> list[Completion | Exception]:
        done = await asyncio.gather(*map(self.generate, requests), return_exceptions=True)
        return [d if isinstance(d, Completion | Exception) else EngineError(repr(d), fix="see the cause") for d in done]

    def _admit(self, request: Request) -> _Running:
        if self._loop is None or self._loop.done() or self._closed:
            raise EngineError(
                f"engine {self.name!r} is not running: {self._failure!r}", fix="start it, or look at its failure"
            )
        for want in sorted(request.want - WANTS):
            raise CapabilityError(
                f"engine {self.name!r} was asked for {want!r}; it offers {sorted(WANTS)}",
                fix="choose an engine that offers it",
            )
        held = self._weights.get(request.policy)
        if held is None or (held.version is None and held.loading is None):
            raise EngineError(
                f"engine {self.name!r} has no weights of policy {request.policy!r}",
                fix="publish version 0 before the first request",
            )
        if request.sampling.stop and self._renderer is None:
            raise CapabilityError(f"engine {self.name!r} has no renderer for stop strings", fix="give it one")
        prompt = request.prompt["tokens"]
        if isinstance(prompt, Ref):
            raise CapabilityError("the toy engine resolves no references", fix="send the prompt's tokens")
        earlier = [] if request.resume is None else [int(t) for t in request.resume]
        tokens = [int(t) for t in prompt] + earlier
        row = _Running(request, tokens, len(tokens), asyncio.get_running_loop().create_future(), len(earlier))
        if len(earlier) >= request.sampling.max_new_tokens:
            row.done.set_result(Finish.LENGTH)
        return row

    def _drop(self, row: _Running) -> None:
        for rows in (self._running, self._waiting):
            if row in rows:
                rows.remove(row)
        self._settle()

    def _completion(self, row: _Running, finish: Finish) -> Completion:
        n = len(row.sampled)
        columns: dict[str, Array | Ref] = {
            "tokens": np.array(row.sampled, np.int32),
            "logprobs": np.array(row.logprobs, np.float32),
        }
        if "keep_ids" in row.request.want:
            columns["keep_ids"] = np.concatenate([np.zeros(0, np.int32), *row.kept]).astype(np.int32)
            columns["keep_counts"] = np.array([len(k) for k in row.kept], np.int32).reshape(n)
        if "toy.previous" in row.request.want:
            columns["toy.previous"] = np.array(row.previous, np.int32)
        return Completion(
            request=row.request.id,
            columns=columns,
            spans=spans_of(row.versions),
            finish=finish,
            engine=self.name,
            info={"prefills": str(row.prefills)},
        )

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        for row in [*self._running, *self._waiting]:
            if request_ids is None or row.request.id in request_ids:
                self._finish(row, Finish.ABORT)
        self._settle()

    async def pause(self, mode: PauseMode) -> None:
        if mode not in ("in_place", "recompute", "abort", "finish"):
            raise CapabilityError(
                f"engine {self.name!r} has no pause mode {mode!r}", fix="use in_place, recompute, abort or finish"
            )
        self._paused = mode
        if mode == "abort":
            await self.abort()
        if mode == "recompute":
            for row in self._running:
                row.cached = None
        if mode == "finish":
            self._kick()
            while self._running and self._idle is not None:
                self._idle.clear()
                await self._idle.wait()

    async def resume(self) -> None:
        self._paused = None
        self._kick()

    # --- decoding ----------------------------------------------------------------------------------------------------

    def _kick(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def _settle(self) -> None:
        if self._idle is not None and not self._running:
            self._idle.set()

    def _finish(self, row: _Running, finish: Finish) -> None:
        for rows in (self._running, self._waiting):
            if row in rows:
                rows.remove(row)
        if not row.done.done():
            row.done.set_result(finish)

    async def _decode(self) -> None:
        assert self._wake is not None
        try:
            while True:
                if self._paused is None:
                    room = self._slots - len(self._running)
                    self._running += self._waiting[:room]
                    del self._waiting[:room]
                rows = [] if self._paused not in (None, "finish") else self._ready()
                if rows:
                    self._step(rows)
                    self._settle()
                    await asyncio.sleep(self._step_s)
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except BaseException as error:
            self._failure = error
            for row in [*self._running, *self._waiting]:
                if not row.done.done():
                    row.done.set_exception(EngineError(f"engine {self.name!r} failed: {error!r}", fix="see the cause"))
            if not isinstance(error, asyncio.CancelledError):
                return
            raise

    def _ready(self) -> list[_Running]:
        return [r for r in self._running if self._weights[r.request.policy].loading is None]

    def _step(self, rows: list[_Running]) -> None:
        by_policy: dict[str, list[_Running]] = {}
        for row in rows:
            by_policy.setdefault(row.request.policy, []).append(row)
        for policy, mine in by_policy.items():
            held = self._weights[policy]
            assert held.version is not None
            self._sample(held, held.version, mine)

    def _sample(self, held: _Weights, version: Version, rows: list[_Running]) -> None:
        ctx = np.zeros((len(rows), held.order), np.int64)
        for i, row in enumerate(rows):
            last = row.tokens[: -held.order - 1 : -1]
            ctx[i, : len(last)] = last
            if row.cached != version:  # a cache of another version is never read
                row.cached = version
                row.prefills += 1
        sampling = [r.request.sampling for r in rows]
        temperature = np.array([s.temperature for s in sampling])
        greedy = temperature == 0
        logits = stream_logits(held.tensors, held.order, ctx)
        keep = cut(logits, temperature, np.array([s.top_k for s in sampling]), np.array([s.top_p for s in sampling]))
        logp = log_softmax(logits / np.where(greedy, 1.0, temperature)[:, None], keep)
        u = uniform(
            np.array([r.request.seed % 2**64 for r in rows], np.uint64),
            np.array([r.drawn + len(r.sampled) for r in rows], np.uint64),
        )
        cumulative = np.cumsum(np.exp(logp), axis=1)
        chosen = (cumulative <= u[:, None] * cumulative[:, -1:]).sum(axis=1)
        best = np.where(keep, logits, -np.inf).argmax(axis=1)
        last_kept = keep.shape[1] - 1 - keep[:, ::-1].argmax(axis=1)
        chosen = np.where(greedy, best, np.minimum(chosen, last_kept))
        for i, row in enumerate(rows):
            token = int(chosen[i])
            row.previous.append(row.tokens[-1] if row.tokens else 0)
            row.sampled.append(token)
            row.tokens.append(token)
            row.logprobs.append(0.0 if greedy[i] else float(logp[i, token]))
            row.versions.append(version)
            row.kept.append(np.zeros(0, np.int64) if keep[i].all() else np.flatnonzero(keep[i]))
            self._maybe_finish(row)

    def _maybe_finish(self, row: _Running) -> None:
        sampling = row.request.sampling
        text = ""
        if sampling.stop and self._renderer is not None:
            start = len(row.tokens) - row.drawn - len(row.sampled)
            text = self._renderer.text(row.tokens[start:])
        if row.sampled[-1] in self._stop_ids or any(s in text for s in sampling.stop):
            self._finish(row, Finish.STOP)
        elif row.drawn + len(row.sampled) >= sampling.max_new_tokens:
            self._finish(row, Finish.LENGTH)

    # --- weights -----------------------------------------------------------------------------------------------------

    def port(self, name: str) -> ToyPort:
        ports = {"tensors": ToyTensorsPort, "checkpoint": ToyCheckpointPort}
        if name not in ports:
            raise CapabilityError(
                f"engine {self.name!r} has no weight port {name!r}; it has {sorted(ports)}",
                fix="choose a transport that speaks one of them",
            )
        return ports[name](self)

    def held(self, policy: str) -> _Weights:
        return self._weights.setdefault(policy, _Weights())


class ToyPort:
    """What both ports share. Writes go straight into the tensors that decoding reads, while decoding is held."""

    def __init__(self, engine: ToyEngine) -> None:
        self._engine = engine
        self._policy: str | None = None

    async def begin(self, version: Version) -> None:
        """A second `begin` starts over: what an interrupted transfer wrote is overwritten by the next one."""
        self._policy = version.policy
        self._engine.held(version.policy).loading = version

    def _open(self) -> _Weights:
        held = self._engine.held(self._policy) if self._policy is not None else None
        if held is None or held.loading is None:
            raise EngineError(
                f"engine {self._engine.name!r}: weights were handed over outside begin and end", fix="call begin first"
            )
        return held

    def _write(self, spec: TensorSpec, value: Array) -> None:
        if spec.dtype != "F32" or value.dtype != np.float32 or value.shape != spec.shape:
            raise EngineError(
                f"tensor {spec.name!r} is {value.dtype}{list(value.shape)}; its spec says "
                f"{spec.dtype}{list(spec.shape)}, and the toy engine holds F32 only",
                fix="send what the spec announces",
            )
        self._open().tensors[spec.name] = np.array(value)

    async def end(self, version: Version) -> None:
        held = self._open()
        if held.loading != version:
            raise EngineError(
                f"engine {self._engine.name!r}: end({version}) after begin({held.loading})", fix="end what was begun"
            )
        held.order = order_of(held.tensors)
        held.version, held.loading = version, None
        self._engine._kick()

    async def evidence(self, version: Version, tensors: Sequence[TensorSpec]) -> Mapping[str, tuple[str, ...]]:
        held = self._engine.held(version.policy)
        if version not in (held.version, held.loading):
            raise EngineError(
                f"engine {self._engine.name!r} holds {held.version}, not {version}", fix="transfer that version first"
            )
        missing = [s.name for s in tensors if s.name not in held.tensors]
        if missing:
            raise EngineError(f"engine {self._engine.name!r} has no tensor {missing[0]!r}", fix="transfer it")
        return {s.name: piece_digests(s, held.tensors[s.name]) for s in tensors}


class ToyTensorsPort(ToyPort):
    """Port `tensors`."""

    async def load(self, bucket: Sequence[tuple[TensorSpec, Tensor]]) -> None:
        for spec, tensor in bucket:
            self._write(spec, np.asarray(tensor))


class ToyCheckpointPort(ToyPort):
    """Port `checkpoint`: every `*.safetensors` file of a folder."""

    async def load(self, path: str, specs: Sequence[TensorSpec]) -> None:
        found: dict[str, Array] = {}
        for file in sorted(Path(path).glob("*.safetensors")):
            found |= load_file(file)
        for spec in specs:
            if spec.name not in found:
                raise EngineError(f"{path} has no tensor {spec.name!r}", fix="write every tensor of the version")
            self._write(spec, found[spec.name])


def order_of(tensors: Mapping[str, Array]) -> int:
    """The order of the model that a weight stream describes. Raises `EngineError` where it describes none."""
    order = sum(name.startswith("table.") for name in tensors)
    names = {"bias", *(f"table.{k}.weight" for k in range(order))}
    if not order or set(tensors) != names:
        raise EngineError(
            f"a toy model has the tensors {sorted(names)}; the engine was given {sorted(tensors)}",
            fix="transfer all of them before end",
        )
    return order
