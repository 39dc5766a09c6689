"""What every engine promises: answers, distributions, seeds, interruptions, weights and policies, numerically."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from miles_core.contracts.engine import Completion, Request
from miles_core.contracts.weights import TensorSpec
from miles_core.errors import CapabilityError, MilesError
from miles_core.provider import Place
from miles_core.records import Finish, Message, Prompt, Sampling, Version
from miles_core.testing.suite import Conformance, check, refuses, refuses_async
from miles_core.testing.suites.engine_interruptions import EngineInterruptions, tokens_of
from miles_core.testing.suites.engine_weights import EngineWeights
from miles_core.testing.toys.table import initial_weights

POLICY = "main"
STOP_ID = 1


class PlainRenderer:
    """Writes each id as `[id]`; `stop_ids` may be empty, so that answers end by length only."""

    def __init__(self, vocab_size: int, stop_ids: tuple[int, ...]) -> None:
        self.stop_ids = stop_ids
        self.tokenizer: Any = self
        self.vocab_size = vocab_size
        self.pad_id = 0
        self.eos_ids = stop_ids
        self.chat_template: str | None = None
        self.special_tokens: dict[str, str] = {}

    def text(self, ids: Sequence[int]) -> str:
        return "".join(f"[{i}]" for i in ids if i not in self.stop_ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self.text(ids)

    def prompt(self, prompt: Prompt) -> list[int]:
        return [int(i) for i in str(prompt)[1:-1].split("][")]

    def encode(self, text: str) -> list[int]:
        return self.prompt(text)

    def extend(self, before: Sequence[int], new: Sequence[Message]) -> list[int]:
        return [i for message in new for i in self.prompt(message.content)]

    def demonstration(self, prompt: Prompt, answer: Prompt) -> tuple[list[int], list[bool]]:
        a, b = self.prompt(prompt), self.prompt(answer)
        return a + b, [False] * len(a) + [True] * len(b)

    def parse(self, ids: Sequence[int]) -> Message:
        return Message(role="assistant", content=self.text(ids))


class EngineBase(Conformance):
    """What a subclass may override: `vocab_size`, `weights` and `source` of a model that the engine can serve."""

    kind = "rollout"
    places: ClassVar[tuple[Place, ...]] = (Place.CONTROLLER,)
    vocab_size = 15
    long = 200  # new tokens of an answer that is to be met in the middle; up to 25 times as many where that is too few
    close_to = 1e-4  # how far log-probabilities of equal distributions may lie apart

    def source(self) -> Any:
        """`BuildContext.model`."""
        from miles_core.contracts.model import ModelSource

        architecture = {"model_type": "toy", "vocab_size": self.vocab_size, "order": 2}
        return ModelSource(asked="conformance", architecture=architecture)

    def weights(self, seed: int) -> list[tuple[TensorSpec, Any]]:
        """A whole weight stream in the form that the port takes; another seed, another distribution."""
        config = {"vocab_size": self.vocab_size, "order": 2, "scale": 1.0}
        arrays = initial_weights(config, seed, "lm")
        return [(TensorSpec(name=n, shape=a.shape, dtype="F32"), a) for n, a in arrays.items()]

    def example(self, place: Place) -> Any:
        return self.new_engine()

    def probe(self) -> None:
        self.dispose(self.new_engine())

    def new_engine(self, *, endless: bool = False) -> Any:
        renderer = PlainRenderer(self.vocab_size, () if endless else (STOP_ID,))
        return self.build(Place.CONTROLLER, model=self.source(), renderer=renderer, name="engine-0")

    @asynccontextmanager
    async def engine(self, seed: int | None = 1, *, endless: bool = False) -> AsyncIterator[Any]:
        """A started engine that serves version 0 with the weights of `seed`."""
        engine = self.new_engine(endless=endless)
        await engine.start()
        try:
            if seed is not None:
                await self.load(engine, seed, version())
            yield engine
        finally:
            await engine.close()

    async def load(self, engine: Any, seed: int, to: Version) -> None:
        port = engine.port("tensors")
        await port.begin(to)
        await port.load(self.weights(seed))
        await port.end(to)

    def request(self, prompt: Sequence[int], seed: int = 0, **given: Any) -> Request:
        sampling = {"max_new_tokens": 8, **given.pop("sampling", {})}
        return Request(
            id=given.pop("id", f"r-{seed}-{'-'.join(map(str, prompt))}"),
            policy=given.pop("policy", POLICY),
            prompt={"tokens": np.array(prompt, np.int32)},
            sampling=Sampling(**sampling),
            seed=seed,
            deadline_s=given.pop("deadline_s", 60.0),
            **given,
        )

    def prompts(self) -> list[list[int]]:
        """Ragged prompts, one of a single token among them."""
        v = self.vocab_size
        return [[2], [3, 4, 5], [5, 4], [2, 3] * 6, [v - 1, 2, 3, 4, 5, 6, 7], [6, 6, 6]]

    async def many(self, engine: Any, n: int, prompt: Sequence[int] = (3, 4), **sampling: Any) -> dict[int, float]:
        """Token -> log-probability from `n` one-token answers under different seeds; how often, in `self.counts`."""
        given = {"max_new_tokens": 1, **sampling}
        done = await asyncio.gather(
            *(engine.generate(self.request(prompt, seed, sampling=given, id=f"m-{seed}")) for seed in range(n))
        )
        found: dict[int, float] = {}
        self.counts: dict[int, int] = {}
        for completion in done:
            token = int(completion.columns["tokens"][0])
            logprob = float(completion.columns["logprobs"][0])
            near = abs(found.get(token, logprob) - logprob) < self.close_to
            check("one token has one log-probability", near, (token, found.get(token), logprob))
            found[token] = logprob
            self.counts[token] = self.counts.get(token, 0) + 1
        return found


def version(number: int = 0, policy: str = POLICY) -> Version:
    return Version(policy=policy, lineage=0, number=number)


class EngineConformance(EngineInterruptions, EngineWeights, EngineBase):
    """See the base; capabilities that are offered must work, those that are not must be refused."""

    # --- life --------------------------------------------------------------------------------------------------------

    def test_life(self) -> None:
        async def life() -> None:
            engine = self.new_engine()
            await engine.start()
            health = await engine.health()
            check("health is ok after start", health.ok, health)
            unknown = engine.generate(self.request([2], policy="nobody", deadline_s=1.0))
            await refuses_async("a policy without weights is refused", MilesError, unknown)
            await self.load(engine, 1, version())
            await engine.generate(self.request([2]))
            health = await engine.health()
            check("health counts no request when all are done", health.running == health.waiting == 0, health)
            await engine.close()
            health = await engine.health()
            check("health is not ok after close", not health.ok, health)
            late = engine.generate(self.request([2], deadline_s=1.0))
            await refuses_async("a request after close is refused", MilesError, late)
            try:
                await engine.close()
            except Exception as error:
                check("closing twice is harmless", False, repr(error))

        self.run(life())

    # --- answers -----------------------------------------------------------------------------------------------------

    def test_answers(self) -> None:
        async def answers() -> None:
            async with self.engine() as engine:
                requests = [
                    self.request(p, 7 * i, sampling={"max_new_tokens": 6}) for i, p in enumerate(self.prompts())
                ]
                requests += [self.request([2, 3], seed, sampling={"max_new_tokens": 6}) for seed in range(40)]
                done = await asyncio.gather(*(engine.generate(r) for r in requests))
                for request, completion in zip(requests, done, strict=True):
                    self._answer(engine, request, completion)
                kinds = {c.finish for c in done}
                check("answers end by stop and by length", kinds == {Finish.STOP, Finish.LENGTH}, kinds)

        self.run(answers())

    def _answer(self, engine: Any, request: Request, completion: Completion) -> None:
        tokens, logprobs = completion.columns["tokens"], completion.columns["logprobs"]
        assert isinstance(tokens, np.ndarray) and isinstance(logprobs, np.ndarray)
        n = len(tokens)
        inside = tokens.dtype == np.int32 and bool(((tokens >= 0) & (tokens < self.vocab_size)).all())
        check("tokens are int32 ids of the vocabulary", inside, (tokens.dtype, tokens))
        flat = logprobs.dtype == np.float32 and logprobs.shape == (n,)
        check("log-probabilities are float32, one per token", flat, (logprobs.dtype, logprobs.shape))
        sane = bool(np.isfinite(logprobs).all() and (logprobs <= 1e-6).all())
        check("log-probabilities are finite and at most 0", sane, logprobs)
        ends = [(s.start, s.end) for s in completion.spans]
        covers = [e for _, e in ends] == [s for s, _ in ends[1:]] + [n] and (not ends or ends[0][0] == 0)
        check("spans cover the tokens in order", covers or (n == 0 and not ends), (ends, n))
        served = {s.version for s in completion.spans}
        check("tokens carry the version that sampled them", served <= {version()}, served)
        limit = request.sampling.max_new_tokens
        check("answers hold at most max_new_tokens", 0 < n <= limit, (n, limit))
        early = STOP_ID in tokens_of(completion)[:-1]
        check("nothing is sampled after a stop token", not early, tokens)
        stopped = int(tokens[-1]) == STOP_ID
        honest = completion.finish == (Finish.STOP if stopped else Finish.LENGTH) and (stopped or n == limit)
        check("finish says why the answer ended", honest, (completion.finish, tokens, limit))
        named = completion.request == request.id and completion.engine == engine.name
        check("the completion names request and engine", named, (completion.request, completion.engine))

    def test_stop_strings(self) -> None:
        async def stops() -> None:
            async with self.engine(endless=True) as engine:
                whole = tokens_of(await engine.generate(self.request([2, 3], 5)))
                text = f"[{whole[3]}]"
                cut = await engine.generate(self.request([2, 3], 5, sampling={"stop": (text,)}))
                expected = whole[: whole.index(whole[3]) + 1]
                ended = tokens_of(cut) == expected and cut.finish == Finish.STOP
                check("a stop string ends the answer behind it", ended, (tokens_of(cut), expected, cut.finish))

        self.run(stops())

    def test_unknown_wishes(self) -> None:
        async def wishes() -> None:
            async with self.engine() as engine:
                odd = engine.generate(self.request([2], want=frozenset({"conformance.nonsense"})))
                await refuses_async("an unknown wish is refused with CapabilityError", CapabilityError, odd)
                if "keep_ids" not in self.offered():
                    asked = engine.generate(self.request([2], want=frozenset({"keep_ids"})))
                    await refuses_async("keep_ids without the capability is refused", CapabilityError, asked)

        self.run(wishes())

    # --- seeds and neighbours ----------------------------------------------------------------------------------------

    def test_seeds(self) -> None:
        async def seeds() -> None:
            async with self.engine(endless=True) as engine:
                one = await engine.generate(self.request([2, 3], 11))
                two = await engine.generate(self.request([2, 3], 11, id="again"))
                same = tokens_of(one) == tokens_of(two)
                check("the same seed gives the same tokens", same, (tokens_of(one), tokens_of(two)))
                others = [tokens_of(await engine.generate(self.request([2, 3], s))) for s in range(12, 20)]
                check("another seed gives other tokens", any(o != tokens_of(one) for o in others), others[0])
                firsts = {o[0] for o in others} | {o[1] for o in others}
                check("draws of one request differ", any(len(set(o)) > 1 for o in others), firsts)

        self.run(seeds())

    def test_neighbours(self) -> None:
        async def neighbours() -> None:
            async with self.engine(endless=True) as engine:
                alone = await engine.generate(self.request([2, 3], 11))
                crowd = [self.request(p, 90 + i, id=f"n{i}") for i, p in enumerate(self.prompts() * 3)]
                crowd.insert(4, self.request([2, 3], 11, id="mine"))
                done = await asyncio.gather(*(engine.generate(r) for r in crowd))
                mine = done[4]
                a, b = alone.columns["logprobs"], mine.columns["logprobs"]
                if "batch_invariant" in self.offered():
                    same = tokens_of(alone) == tokens_of(mine)
                    check("batch_invariant: tokens do not depend on neighbours", same, (alone, mine))
                    check("batch_invariant: the bits of log-probabilities neither", np.array_equal(a, b), (a, b))
                elif tokens_of(alone)[0] == tokens_of(mine)[0]:
                    near = abs(float(a[0]) - float(b[0])) < self.close_to
                    check("log-probabilities do not depend on neighbours", near, (a, b))

        self.run(neighbours())

    def test_together(self) -> None:
        async def together() -> None:
            async with self.engine() as engine:
                if not hasattr(engine, "generate_many"):
                    return
                wanted = [self.request(p, 70 + i, id=f"t{i}") for i, p in enumerate(self.prompts())]
                alone = [await engine.generate(replace(r, id=f"alone-{r.id}")) for r in wanted]
                odd = self.request([2], id="odd", want=frozenset({"conformance.nonsense"}))
                done = await engine.generate_many([odd, *wanted])
                firsts = [(c.request, tokens_of(c)[:1]) for c in done[1:]]
                same = firsts == [(r.id, tokens_of(a)[:1]) for r, a in zip(wanted, alone, strict=True)]
                check("answers that come together are those that come alone, in order", same, firsts)
                refused = isinstance(done[0], CapabilityError)
                check("an error stands in the place of its answer", refused, done[0])

        self.run(together())

    # --- the distribution --------------------------------------------------------------------------------------------

    def test_distribution(self) -> None:
        async def distribution() -> None:
            async with self.engine(endless=True) as engine:
                n = 600
                plain = await self.many(engine, n)
                total = sum(np.exp(p) for p in plain.values())
                check("probabilities sum to at most 1", total < 1 + self.close_to, total)
                seen = {t: c for t, c in self.counts.items() if n * np.exp(plain[t]) >= 5}
                expected = {t: n * float(np.exp(plain[t])) for t in seen}
                chi2 = sum((seen[t] - expected[t]) ** 2 / expected[t] for t in seen)
                bound = len(seen) + 6.0 * np.sqrt(2.0 * len(seen))
                check("frequencies agree with log-probabilities", chi2 < bound, (chi2, bound, seen, expected))
                cold = await self.many(engine, 100, temperature=0.5)
                a, b = sorted(set(cold) & set(plain), key=lambda t: -plain[t])[:2]
                gap, double = cold[a] - cold[b], 2.0 * (plain[a] - plain[b])
                near = abs(gap - double) < 10 * self.close_to
                check("temperature divides the logits", near, (gap, double))
                greedy = await self.many(engine, 8, temperature=0.0)
                best = max(plain, key=lambda t: plain[t])
                check("temperature 0 takes the most likely token", set(greedy) == {best}, (greedy, best))

        self.run(distribution())

    def test_cuts(self) -> None:
        async def cuts() -> None:
            async with self.engine(endless=True) as engine:
                plain = await self.many(engine, 600)
                order = sorted(plain, key=lambda t: -plain[t])
                one = await self.many(engine, 8, top_k=1)
                certain = set(one) == {order[0]} and abs(one[order[0]]) < self.close_to
                check("top_k 1 makes the most likely token certain", certain, one)
                three = await self.many(engine, 300, top_k=3)
                check("top_k keeps the k most likely tokens", set(three) <= set(order[:3]), (three, order[:3]))
                total = sum(np.exp(p) for p in three.values())
                check("log-probabilities are renormalised after a cut", abs(total - 1) < 10 * self.close_to, total)
                mass = np.cumsum([np.exp(plain[t]) for t in order])
                target = float((mass[1] + mass[2]) / 2)  # reached by the third token
                nucleus = await self.many(engine, 300, top_p=target)
                kept = set(order[:3])
                check("top_p keeps the smallest set with that mass", set(nucleus) == kept, (nucleus, kept, target))

        self.run(cuts())

    def test_keep_ids(self) -> None:
        if "keep_ids" not in self.offered():
            return

        async def keeps() -> None:
            async with self.engine(endless=True) as engine:
                want = frozenset({"keep_ids"})
                cut = await engine.generate(self.request([2, 3], 4, sampling={"top_k": 3}, want=want))
                both = {"keep_counts", "keep_ids"} <= set(cut.columns)
                check("keep_ids and keep_counts come where they are wanted", both, sorted(cut.columns))
                counts, ids = cut.columns["keep_counts"], cut.columns["keep_ids"]
                assert isinstance(counts, np.ndarray) and isinstance(ids, np.ndarray)
                tokens = tokens_of(cut)
                shaped = counts.dtype == ids.dtype == np.int32 and counts.shape == (len(tokens),)
                fits = shaped and int(counts.sum()) == len(ids)
                check("keep_ids are flat int32 by keep_counts", fits, (counts, ids))
                check("top_k keeps k ids of each token", set(counts.tolist()) == {3}, counts)
                rows = ids.reshape(-1, 3)
                inside = all(t in row for t, row in zip(tokens, rows, strict=True))
                check("the sampled token is among the kept ids", inside, (tokens, rows))
                seen = await self.many(engine, 200, prompt=(2, 3), top_k=3)
                check("the kept ids are those that can be sampled", set(seen) == set(rows[0].tolist()), (seen, rows[0]))
                free = await engine.generate(self.request([2, 3], 4, id="free", want=want))
                none = not np.asarray(free.columns["keep_counts"]).any() and not len(free.columns["keep_ids"])
                check("nothing is listed where nothing was cut", none, free.columns)

        self.run(keeps())

    # --- what is not offered -----------------------------------------------------------------------------------------

    def test_undeclared_modes(self) -> None:
        async def refused() -> None:
            async with self.engine() as engine:
                for mode in {"in_place", "recompute", "abort", "finish"} - set(self.modes()):
                    asked = engine.pause(mode)
                    await refuses_async("a pause mode that is not offered is refused", CapabilityError, asked)
                odd = engine.pause("conformance-nonsense")
                await refuses_async("an unknown pause mode is refused", MilesError, odd)

        self.run(refused())

    def test_unknown_port(self) -> None:
        async def ports() -> None:
            async with self.engine() as engine:
                label = "a port that is not offered is refused with CapabilityError"
                for name in ("tensors", "group", "checkpoint", "regions", "conformance-nonsense"):
                    if f"weights.{name}" not in self.offered():
                        refuses(label, CapabilityError, partial(engine.port, name))

        self.run(ports())
