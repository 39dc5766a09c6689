"""The engine suite: passes on the toys, and every assertion sees the engine that is broken for it."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from miles_core.contracts.engine import Health
from miles_core.errors import CapabilityError, DeadlineError
from miles_core.records import Finish, spans_of
from miles_core.testing import EngineConformance
from miles_core.testing.suite import run_class
from miles_core.testing.toys import engine as toy
from miles_core.testing.toys.engine import ToyEngine
from miles_core.testing.toys.plugin import ENGINE_OFFERS
from miles_core.testing.toys.table import log_softmax

from .mutants import broken_suite, must_fail, own_labels, plugin


def suite_for(engine, offers=ENGINE_OFFERS, **changes):
    def build(config, context):
        return engine(context.name, renderer=context.renderer)

    return broken_suite(EngineConformance, plugin(build, offers=offers), **changes)


def answers(edit):
    """An engine whose completions go through `edit(engine, request, completion)`."""

    class Edited(ToyEngine):
        async def generate(self, request):
            return edit(self, request, await super().generate(request))

    return Edited


def columns(**edits):
    """An engine whose columns go through the functions given."""

    def edit(engine, request, done):
        changed = {k: edits[k](v) if k in edits else v for k, v in done.columns.items()}
        return replace(done, columns=changed)

    return answers(edit)


def requests(edit):
    """An engine that answers `edit(request)` in place of the request."""

    class Edited(ToyEngine):
        async def generate(self, request):
            return replace(await super().generate(edit(self, request)), request=request.id)

    return Edited


def reseeded(edit):
    return requests(lambda engine, request: replace(request, seed=edit(request)))


def resampled(**given):
    return requests(
        lambda engine, r: replace(r, sampling=replace(r.sampling, **{k: v(r.sampling) for k, v in given.items()}))
    )


def port(**methods):
    """An engine whose port `tensors` has other methods."""
    changed = type("Port", (toy.ToyTensorsPort,), methods)
    return type("Edited", (ToyEngine,), {"port": lambda self, name: changed(self) if name == "tensors" else no(name)})


def no(name):
    raise CapabilityError(f"no {name}", fix="none")


def engine(**methods):
    return type("Edited", (ToyEngine,), methods)


async def sampled_twice(self, request):
    """One more token after the end."""
    done = await ToyEngine.generate(self, request)
    n = len(done.columns["tokens"])
    if not n or done.finish != Finish.STOP:
        return done
    twice = {k: np.concatenate([v, v[-1:]]) for k, v in done.columns.items() if k in ("tokens", "logprobs")}
    return replace(done, columns=twice, spans=spans_of([done.spans[0].version] * (n + 1)))


async def admits_anybody(self, request):
    held = self.held(request.policy)
    if held.version is None:
        request = replace(request, policy="main")
        if self.held("main").version is None:
            return await ToyEngine.generate(answering_engine(self), request)
    return await ToyEngine.generate(self, request)


def answering_engine(self):
    self._weights["main"] = toy._Weights(
        {"bias": np.zeros(15, np.float32), "table.0.weight": np.zeros((15, 15), np.float32)},
        toy.Version(policy="main", lineage=0, number=0),
        order=1,
    )
    return self


async def close_once(self):
    if self._closed:
        raise RuntimeError("closed already")
    await ToyEngine.close(self)


async def always_ok(self):
    return replace(await ToyEngine.health(self), ok=True)


async def never_ok(self):
    return Health(ok=False, detail="shy")


async def busy(self):
    return replace(await ToyEngine.health(self), running=1)


async def counts_nothing(self):
    return replace(await ToyEngine.health(self), running=0)


async def answers_after_close(self, request):
    if self._closed:
        return await asyncio.sleep(0, "an answer")
    return await ToyEngine.generate(self, request)


async def keeps_late_requests(self, request):
    try:
        return await ToyEngine.generate(self, request)
    except DeadlineError:
        self._waiting.append(self._admit(request))
        raise


async def no_deadline_error(self, request):
    try:
        return await ToyEngine.generate(self, request)
    except DeadlineError as error:
        raise TimeoutError from error


async def aborts_all(self, request_ids=None):
    await ToyEngine.abort(self, None)


async def aborts_named(self, request_ids=None):
    await ToyEngine.abort(self, request_ids or [])


async def aborts_by_length(self, request):
    done = await ToyEngine.generate(self, request)
    return replace(done, finish=Finish.LENGTH) if done.finish == Finish.ABORT else done


async def aborts_garble(self, request):
    """Wrong in every token: an abort may come after the first one, and without it nothing would be left to see."""
    done = await ToyEngine.generate(self, request)
    if done.finish != Finish.ABORT:
        return done
    return replace(done, columns={**done.columns, "tokens": done.columns["tokens"] + 1})


def crowded(change):
    """An engine whose answers change where another request is there."""

    class Edited(ToyEngine):
        async def generate(self, request):
            beside = len(self._waiting) + len(self._running) > 3
            done = await super().generate(
                replace(request, seed=request.seed + 1) if beside and change == "t" else request
            )
            if not beside or change == "t":
                return done
            by = np.float32(1e-6 if change == "bits" else 0.01)
            return replace(done, columns={**done.columns, "logprobs": done.columns["logprobs"] - by})

    return Edited


def cuts(monkeypatched):
    """An engine that cuts in another way: `monkeypatched(logits, temperature, top_k, top_p) -> keep`."""

    class Edited(ToyEngine):
        def _sample(self, held, version, rows):
            original, toy.cut = toy.cut, monkeypatched
            try:
                super()._sample(held, version, rows)
            finally:
                toy.cut = original

    return Edited


def one_more(logits, temperature, top_k, top_p):
    return toy_cut(logits, temperature, np.where(top_k > 1, top_k + 1, top_k), top_p)


def too_much_mass(logits, temperature, top_k, top_p):
    return toy_cut(logits, temperature, top_k, np.where(top_p < 1, np.minimum(top_p + 0.2, 1.0), top_p))


toy_cut = toy.cut


async def backwards(self, requests):
    return (await ToyEngine.generate_many(self, requests))[:1] + (await ToyEngine.generate_many(self, requests))[:0:-1]


async def nothing_odd(self, requests):
    done = await ToyEngine.generate_many(self, requests)
    return [done[-1] if isinstance(d, Exception) else d for d in done]


class NotRenormalised(ToyEngine):
    def _sample(self, held, version, rows):
        original = toy.log_softmax
        toy.log_softmax = lambda logits, keep: np.where(
            keep & (keep.sum(axis=1, keepdims=True) > 1), log_softmax(logits), log_softmax(logits, keep)
        )
        try:
            super()._sample(held, version, rows)
        finally:
            toy.log_softmax = original


class Biased(ToyEngine):
    """Samples from another temperature than its log-probabilities say."""

    async def generate(self, request):
        cold = replace(request, sampling=replace(request.sampling, temperature=0.5))
        if request.sampling.temperature != 1.0:
            return await super().generate(request)
        done = await super().generate(cold)
        held = self.held(request.policy)
        if len(done.columns["tokens"]) != 1:
            return done
        ctx = np.array([[*request.prompt["tokens"][-1 : -held.order - 1 : -1]]], np.int64)
        logp = log_softmax(toy.stream_logits(held.tensors, held.order, ctx))
        token = done.columns["tokens"][0]
        return replace(done, columns={**done.columns, "logprobs": logp[0, token : token + 1].astype(np.float32)})


class Jittery(ToyEngine):
    async def generate(self, request):
        done = await super().generate(request)
        by = np.float32(request.seed % 7 * 1e-3)
        return replace(done, columns={**done.columns, "logprobs": done.columns["logprobs"] - by})


class ContinuesElsewhere(ToyEngine):
    def _admit(self, request):
        row = super()._admit(request)
        if request.resume is not None:
            row.request = replace(request, seed=request.seed + 1)
        return row


class ForgetsResumed(ToyEngine):
    def _admit(self, request):
        row = super()._admit(request)
        if request.resume is not None:
            sampling = replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens + row.drawn)
            row.request = replace(request, sampling=sampling)
        return row


def pauses(edit):
    class Edited(ToyEngine):
        async def pause(self, mode):
            await edit(self, mode)

    return Edited


async def pauses_not(self, mode):
    if mode not in ("in_place", "recompute", "abort", "finish"):
        no(mode)
    if mode in ("abort", "finish"):
        await ToyEngine.pause(self, mode)
        self._paused = None
        self._kick()


async def decodes_to_the_end(self, mode):
    await ToyEngine.pause(self, mode)
    while mode in ("in_place", "recompute") and self._running:
        self._step(self._ready())


async def pauses_and_forgets_the_seed(self, mode):
    await ToyEngine.pause(self, mode)
    for row in self._running:
        row.request = replace(row.request, seed=row.request.seed + 1)


async def finish_does_not_wait(self, mode):
    if mode == "finish":
        self._paused = "finish"
        self._kick()
        return
    await ToyEngine.pause(self, mode)


async def abort_by_length(self, mode):
    if mode == "abort":
        self._paused = mode
        for row in [*self._running]:
            self._finish(row, Finish.LENGTH)
        return
    await ToyEngine.pause(self, mode)


async def any_mode(self, mode):
    await ToyEngine.pause(self, mode if mode in ("in_place", "recompute", "abort", "finish") else "in_place")


class SwapKeepsOld(ToyEngine):
    """Rows that run when weights change go on with the old ones, under the new name."""

    def _sample(self, held, version, rows):
        for row in rows:
            mine = self.__dict__.setdefault("mine", {}).setdefault(id(row), dict(held.tensors))
            super()._sample(replace(held, tensors=mine), version, [row])


class LosesVersions(ToyEngine):
    async def generate(self, request):
        done = await super().generate(request)
        if len(done.spans) < 2 and done.finish == Finish.LENGTH and request.sampling.max_new_tokens > 100:
            return done
        return (
            replace(done, spans=spans_of([done.spans[0].version] * len(done.columns["tokens"]))) if done.spans else done
        )


async def one_version_for_all(self, version):
    await toy.ToyPort.end(self, version)
    if version.policy == "other":
        self._engine.held("other").version = replace(version, number=0)


async def shares_weights(self, version):
    await toy.ToyPort.end(self, version)
    main = self._engine.held("main")
    main.tensors, main.order = self._engine.held(version.policy).tensors, self._engine.held(version.policy).order


async def ends_as_zero(self, version):
    await toy.ToyPort.end(self, version)
    held = self._engine.held(version.policy)
    held.version = replace(version, number=0)


async def does_not_hold(self, version):
    self._policy = version.policy
    held = self._engine.held(version.policy)
    held.next = version
    if held.version is None:
        held.loading = version
    else:
        held.loading = None


async def ends_what_was_not_held(self, version):
    held = self._engine.held(version.policy)
    held.loading = version
    await toy.ToyPort.end(self, version)


def writes_anyway(self):
    return self._engine.held("main")


def never_stops(self, spec, value):
    value = np.array(value)
    if spec.name == "bias":
        value[1] = -1e9
    self._open().tensors[spec.name] = value


def takes_any_shape(self, spec, value):
    self._open().tensors[spec.name] = np.array(value)


def keeps_references(self, spec, value):
    self._open().tensors[spec.name] = value


def through_float16(self, spec, value):
    clean = value + np.float32(0)  # -0.0 + 0 is 0
    self._open().tensors[spec.name] = np.where(np.isnan(clean), np.float32("nan"), clean)


def first_write_wins(self, spec, value):
    self._open().tensors.setdefault(spec.name, np.array(value))


def adds_up(self, spec, value):
    """The tensors of an interrupted transfer stay."""
    torn = self._engine.__dict__.setdefault("torn", {})
    if self._open().loading.number == 1:
        torn[spec.name] = np.array(value)
    self._open().tensors[spec.name] = torn.get(spec.name, np.array(value))


async def ends_anything(self, version):
    held = self._open()
    await toy.ToyPort.end(self, held.loading)


async def evidence_of_anything(self, version, tensors):
    held = self._engine.held(version.policy)
    return {s.name: toy.piece_digests(s, held.tensors[s.name]) for s in tensors}


async def made_up_evidence(self, version, tensors):
    return {s.name: ("0" * 32,) * len(s.boxes()) for s in tensors}


async def waits_for_new_version_but_names_old(self, request):
    done = await ToyEngine.generate(self, request)
    return replace(
        done, spans=spans_of([toy.Version(policy="main", lineage=0, number=0)] * len(done.columns["tokens"]))
    )


def finishes(edit):
    return answers(lambda engine, request, done: replace(done, finish=edit(done)))


MUTANTS = {
    "health is ok after start": engine(health=never_ok),
    "a policy without weights is refused": engine(generate=admits_anybody),
    "health counts no request when all are done": engine(health=busy),
    "health is not ok after close": engine(health=always_ok),
    "a request after close is refused": engine(generate=answers_after_close),
    "closing twice is harmless": engine(close=close_once),
    "tokens are int32 ids of the vocabulary": columns(tokens=lambda x: x.astype(np.int64)),
    "log-probabilities are float32, one per token": columns(logprobs=lambda x: x[:-1]),
    "log-probabilities are finite and at most 0": columns(logprobs=lambda x: -x),
    "spans cover the tokens in order": answers(lambda e, r, d: replace(d, spans=d.spans * 2)),
    "tokens carry the version that sampled them": port(end=lambda self, v: toy.ToyPort.end(self, self_rename(self, v))),
    "answers hold at most max_new_tokens": resampled(max_new_tokens=lambda s: s.max_new_tokens + 1),
    "nothing is sampled after a stop token": engine(generate=sampled_twice),
    "finish says why the answer ended": finishes(lambda d: Finish.STOP),
    "answers end by stop and by length": port(_write=never_stops),
    "the completion names request and engine": answers(lambda e, r, d: replace(d, engine="somebody")),
    "a stop string ends the answer behind it": resampled(stop=lambda s: ()),
    "an unknown wish is refused with CapabilityError": requests(lambda e, r: replace(r, want=r.want & toy.WANTS)),
    "keep_ids without the capability is refused": (ToyEngine, set(ENGINE_OFFERS) - {"keep_ids"}),
    "the same seed gives the same tokens": reseeded(lambda r: r.seed + len(r.id)),
    "another seed gives other tokens": reseeded(lambda r: 0),
    "draws of one request differ": columns(tokens=lambda x: np.full_like(x, x[0])),
    "batch_invariant: tokens do not depend on neighbours": crowded("t"),
    "batch_invariant: the bits of log-probabilities neither": crowded("bits"),
    "log-probabilities do not depend on neighbours": (crowded("much"), set(ENGINE_OFFERS) - {"batch_invariant"}),
    "one token has one log-probability": Jittery,
    "frequencies agree with log-probabilities": Biased,
    "probabilities sum to at most 1": columns(logprobs=lambda x: (x * 0.5).astype(np.float32)),
    "temperature divides the logits": resampled(temperature=lambda s: 1.0 if s.temperature == 0.5 else s.temperature),
    "temperature 0 takes the most likely token": resampled(temperature=lambda s: s.temperature or 1.0),
    "top_k 1 makes the most likely token certain": resampled(top_k=lambda s: 2 if s.top_k == 1 else s.top_k),
    "top_k keeps the k most likely tokens": cuts(one_more),
    "log-probabilities are renormalised after a cut": NotRenormalised,
    "top_p keeps the smallest set with that mass": cuts(too_much_mass),
    "answers that come together are those that come alone, in order": engine(generate_many=backwards),
    "an error stands in the place of its answer": engine(generate_many=nothing_odd),
    "keep_ids and keep_counts come where they are wanted": answers(
        lambda e, r, d: replace(d, columns={k: v for k, v in d.columns.items() if not k.startswith("keep_")})
    ),
    "keep_ids are flat int32 by keep_counts": columns(keep_ids=lambda x: x[:-1]),
    "top_k keeps k ids of each token": answers(
        lambda e, r, d: replace(d, columns={**d.columns, **pad_keeps(d.columns)}) if "keep_ids" in d.columns else d
    ),
    "the sampled token is among the kept ids": columns(keep_ids=lambda x: np.full_like(x, 14)),
    "the kept ids are those that can be sampled": answers(lambda e, r, d: with_wrong_keeps(d)),
    "nothing is listed where nothing was cut": answers(lambda e, r, d: with_all_kept(r, d)),
    "health counts running requests": engine(health=counts_nothing),
    "an aborted request finishes with abort": engine(generate=aborts_by_length),
    "an abort returns what was sampled": engine(generate=aborts_garble),
    "an abort leaves others alone": engine(abort=aborts_all),
    "a resumed request goes on with the same draws": ContinuesElsewhere,
    "resumed tokens count against max_new_tokens": ForgetsResumed,
    "an abort without ids ends every request": engine(abort=aborts_named),
    "a request past its deadline raises DeadlineError": engine(generate=no_deadline_error),
    "a request past its deadline is forgotten": engine(generate=keeps_late_requests),
    "at least one pause mode is offered": (ToyEngine, {"weights.tensors"}),
    "pause finish returns when requests are done": pauses(finish_does_not_wait),
    "pause abort ends requests with abort": pauses(abort_by_length),
    "a request during a pause waits for resume": pauses(pauses_not),
    "nothing is sampled during a pause": pauses(decodes_to_the_end),
    "a paused request goes on as if nothing had been": pauses(pauses_and_forgets_the_seed),
    "a pause mode that is not offered is refused": (ToyEngine, set(ENGINE_OFFERS) - {"pause.finish"}),
    "an unknown pause mode is refused": pauses(any_mode),
    "a port that is not offered is refused with CapabilityError": (
        ToyEngine,
        set(ENGINE_OFFERS) - {"weights.checkpoint"},
    ),
    "evidence is the digest of what was loaded": port(evidence=made_up_evidence),
    "evidence covers the tensors that were asked for": port(evidence=lambda self, v, t: everything(self, v, t)),
    "-0.0, NaN payloads and subnormals arrive bit for bit": port(_write=through_float16),
    "the caller may reuse its memory after load": port(_write=keeps_references),
    "tokens after end carry the new version": port(end=ends_as_zero),
    "tokens after end come from the new weights": port(_write=first_write_wins),
    "the two weight streams differ in what they sample": (
        ToyEngine,
        ENGINE_OFFERS,
        {"weights": lambda s, seed: same_weights(s)},
    ),
    "a request keeps the versions of its tokens over a swap": LosesVersions,
    "recompute leaves nothing of the old weights": SwapKeepsOld,
    "no request advances between begin and end": port(
        begin=does_not_hold, end=ends_what_was_not_held, _open=writes_anyway
    ),
    "a request that waited gets the new weights": engine(generate=waits_for_new_version_but_names_old),
    "a whole transfer heals an interrupted one": port(_write=adds_up),
    "a load outside begin and end is refused": port(_open=writes_anyway),
    "a tensor that is not what its spec says is refused": port(_write=takes_any_shape),
    "the end of another version is refused": port(end=ends_anything),
    "evidence of a version that is not held is refused": port(evidence=evidence_of_anything),
    "weights of one policy leave another alone": port(end=shares_weights),
    "each policy has its own version": port(end=one_version_for_all),
}


def self_rename(port, version):
    port._open().loading = replace(version, lineage=3)
    return replace(version, lineage=3)


async def everything(self, version, tensors):
    stream = EngineConformance().weights(1)
    found = await toy.ToyPort.evidence(self, version, [s for s, _ in stream])
    return found


def pad_keeps(columns):
    n = len(columns["tokens"])
    if not columns["keep_counts"].any():
        return {}
    rows = columns["keep_ids"].reshape(n, 3)
    return {
        "keep_ids": np.concatenate([rows, rows[:, :1]], axis=1).reshape(-1),
        "keep_counts": np.full(n, 4, np.int32),
    }


def with_wrong_keeps(done):
    if "keep_ids" not in done.columns or not done.columns["keep_counts"].any():
        return done
    rows = done.columns["keep_ids"].reshape(-1, 3).copy()
    for row, token in zip(rows, done.columns["tokens"], strict=True):
        row[:] = [token, (token + 1) % 15, (token + 2) % 15]
    return replace(done, columns={**done.columns, "keep_ids": rows.reshape(-1)})


def with_all_kept(request, done):
    if "keep_ids" not in done.columns or done.columns["keep_counts"].any():
        return done
    n = len(done.columns["tokens"])
    keeps = {"keep_ids": np.tile(np.arange(15, dtype=np.int32), n), "keep_counts": np.full(n, 15, np.int32)}
    return replace(done, columns={**done.columns, **keeps})


def same_weights(suite):
    return EngineConformance.weights(suite, 1)


def test_every_label_has_a_mutant():
    assert own_labels(EngineConformance) == set(MUTANTS)


@pytest.mark.parametrize("label", MUTANTS)
def test_a_broken_engine_is_seen(label):
    made = MUTANTS[label]
    made = made if isinstance(made, tuple) else (made,)
    offers = made[1] if len(made) > 1 else ENGINE_OFFERS
    must_fail(label, suite_for(made[0], offers, **(made[2] if len(made) > 2 else {})))


class Fast(ToyEngine):
    """Has written a hundred tokens before the event loop turns once, as a fast machine nearly would."""

    def _step(self, rows):
        for _ in range(100):
            rows = [r for r in rows if not r.done.done()]
            if rows:
                super()._step(rows)


class TestToy(EngineConformance):
    name = "toy"


class TestToySocket(EngineConformance):
    name = "toy-socket"


@pytest.mark.parametrize("made", [ToyEngine, Fast])
def test_a_good_engine_fails_nothing(made):
    assert [r for r in run_class(suite_for(made)) if not r.passed] == []
