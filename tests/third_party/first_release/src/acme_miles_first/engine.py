"""An engine: every request is a coroutine of its own that samples a token, lets others run, and samples the next.

A model is `bias` and `table.0.weight`, `table.1.weight`, …: the logits of a token are the sum of the rows that the last
tokens name (0 stands for what lies before the start). Rows never meet, so neighbours change nothing.
"""

import asyncio
from dataclasses import dataclass, field

import numpy as np

from acme_miles_first.config import Nothing
from miles_core import hookimpl
from miles_core.contracts.engine import Completion, Health
from miles_core.errors import CapabilityError, DeadlineError, EngineError
from miles_core.provider import Provider
from miles_core.records import Finish, spans_of
from miles_core.seeds import generator
from miles_core.weights import piece_digests

WANTS = frozenset()


@dataclass
class Row:
    request: object
    context: list
    earlier: int
    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    versions: list = field(default_factory=list)
    finish: Finish | None = None


@dataclass
class Held:
    """Weights of one policy: those that serve, and those on their way in."""

    tensors: dict = field(default_factory=dict)
    version: object = None
    incoming: dict = field(default_factory=dict)
    loading: object = None


class FirstEngine:
    def __init__(self, name, renderer):
        self.name = name
        self.renderer = renderer
        self.held = {}
        self.rows = []
        self.paused = self.started = self.closed = False
        self.changed = asyncio.Event()

    def wake(self):
        before, self.changed = self.changed, asyncio.Event()
        before.set()

    async def start(self):
        self.started = True

    async def health(self):
        ok = self.started and not self.closed
        return Health(ok=ok, detail="" if ok else "closed" if self.closed else "not started", running=len(self.rows))

    async def close(self):
        self.closed = True
        await self.abort()

    async def generate(self, request):
        row = self.admit(request)
        self.rows.append(row)
        try:
            async with asyncio.timeout(request.deadline_s):
                while row.finish is None:
                    if self.paused or self.held[request.policy].loading is not None:
                        await self.changed.wait()
                    else:
                        self.step(row)
                        await asyncio.sleep(0)
        except TimeoutError:
            raise DeadlineError(
                f"engine {self.name!r}: request {request.id!r} was not done after {request.deadline_s:g} s",
                fix="raise the episode deadline",
            ) from None
        finally:
            self.rows.remove(row)
        columns = {"tokens": np.array(row.tokens, np.int32), "logprobs": np.array(row.logprobs, np.float32)}
        return Completion(
            request=request.id, columns=columns, spans=spans_of(row.versions), finish=row.finish, engine=self.name
        )

    def admit(self, request):
        if not self.started or self.closed:
            raise EngineError(f"engine {self.name!r} is not running", fix="start it")
        for want in sorted(request.want - WANTS):
            raise CapabilityError(f"engine {self.name!r} does not offer {want!r}", fix="choose an engine that does")
        held = self.held.get(request.policy)
        if held is None or (held.version is None and held.loading is None):
            raise EngineError(f"engine {self.name!r} has no weights of {request.policy!r}", fix="publish them first")
        earlier = [] if request.resume is None else [int(t) for t in request.resume]
        row = Row(request, [int(t) for t in request.prompt["tokens"]] + earlier, len(earlier))
        if len(earlier) >= request.sampling.max_new_tokens:
            row.finish = Finish.LENGTH
        return row

    def step(self, row):
        held, sampling = self.held[row.request.policy], row.request.sampling
        logits = held.tensors["bias"].astype(np.float64)
        for k in range(len(held.tensors) - 1):
            before = row.context[-1 - k] if k < len(row.context) else 0
            logits = logits + held.tensors[f"table.{k}.weight"][before]
        order = np.argsort(-logits, kind="stable")
        if sampling.temperature == 0:
            token, logprob = int(order[0]), 0.0
        else:
            logp = log_softmax(logits / sampling.temperature, order, sampling.top_k, sampling.top_p)
            drawn = generator(row.request.seed, "token", row.earlier + len(row.tokens)).random()
            mass = np.cumsum(np.exp(logp[order]))
            token = int(order[min(int((mass <= drawn * mass[-1]).sum()), int(np.isfinite(logp).sum()) - 1)])
            logprob = float(logp[token])
        row.tokens.append(token)
        row.context.append(token)
        row.logprobs.append(logprob)
        row.versions.append(held.version)
        text = self.renderer.text(row.context[len(row.request.prompt["tokens"]) :]) if sampling.stop else ""
        if token in self.renderer.stop_ids or any(s in text for s in sampling.stop):
            row.finish = Finish.STOP
        elif row.earlier + len(row.tokens) >= sampling.max_new_tokens:
            row.finish = Finish.LENGTH

    async def abort(self, request_ids=None):
        for row in self.rows:
            if row.finish is None and (request_ids is None or row.request.id in request_ids):
                row.finish = Finish.ABORT
        self.wake()

    async def pause(self, mode):
        if mode not in ("in_place", "abort"):
            raise CapabilityError(f"engine {self.name!r} has no pause mode {mode!r}", fix="use in_place or abort")
        self.paused = True
        if mode == "abort":
            await self.abort()

    async def resume(self):
        self.paused = False
        self.wake()

    def port(self, name):
        if name != "tensors":
            raise CapabilityError(f"engine {self.name!r} has no weight port {name!r}", fix="use the port tensors")
        return FirstPort(self)


def log_softmax(scaled, order, top_k, top_p):
    """float64 [vocabulary], -inf where cut: first to the top_k largest, then to the smallest set with mass top_p."""
    kept = order[:top_k] if top_k else order
    if top_p < 1:
        mass = np.exp(scaled[kept] - scaled[kept].max())
        mass /= mass.sum()
        kept = kept[np.cumsum(mass) - mass < top_p]
    cut = np.full(len(scaled), -np.inf)
    cut[kept] = scaled[kept]
    shifted = cut - cut.max()
    return shifted - np.log(np.exp(shifted).sum())


class FirstPort:
    def __init__(self, engine):
        self.engine = engine
        self.policy = None

    async def begin(self, version):
        self.policy = version.policy
        held = self.engine.held.setdefault(version.policy, Held())
        held.loading, held.incoming = version, {}

    def opened(self):
        held = self.engine.held.get(self.policy)
        if held is None or held.loading is None:
            raise EngineError("weights were handed over outside begin and end", fix="call begin first")
        return held

    async def load(self, bucket):
        held = self.opened()
        for spec, tensor in bucket:
            array = np.asarray(tensor)
            if (array.shape, array.dtype, spec.dtype) != (spec.shape, np.dtype("f4"), "F32"):
                raise EngineError(
                    f"tensor {spec.name!r} is {array.dtype} {array.shape}, its spec {spec.dtype} {spec.shape}",
                    fix="send float32 tensors as their specs announce them",
                )
            held.incoming[spec.name] = np.array(array)

    async def end(self, version):
        held = self.opened()
        if held.loading != version:
            raise EngineError(f"end({version}) after begin({held.loading})", fix="end what was begun")
        names = {"bias", *(f"table.{k}.weight" for k in range(len(held.incoming) - 1))}
        if set(held.incoming) != names or len(names) < 2:
            raise EngineError(f"a model of tables is not {sorted(held.incoming)}", fix="transfer all of its tensors")
        held.tensors, held.version, held.loading = held.incoming, version, None
        self.engine.wake()

    async def evidence(self, version, tensors):
        held = self.engine.held.get(version.policy, Held())
        if held.version != version:
            raise EngineError(f"{version} is not held, but {held.version}", fix="transfer that version first")
        return {spec.name: piece_digests(spec, held.tensors[spec.name]) for spec in tensors}


@hookimpl
def miles_rollout():
    return Provider(
        name="first",
        config=Nothing,
        build=lambda config, context: FirstEngine(context.name, context.need("renderer")),
        offers=("weights.tensors", "logprobs", "batch_invariant", "policies", "pause.in_place", "pause.abort"),
        summary="sums of tables, in NumPy",
    )
