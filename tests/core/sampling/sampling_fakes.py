"""A fake engine and the receipts that open its gate, for tests of pool, publisher and sampler."""

import asyncio

import numpy as np

from miles_core.contracts.engine import Completion, Health, Request
from miles_core.contracts.weights import Evidence, Receipt, TensorSpec
from miles_core.records import Finish, Sampling, Span, Version
from miles_core.weights import make_manifest

SPEC = TensorSpec(name="w", shape=(1,), dtype="F32")


def version(number, policy="main"):
    return Version(policy=policy, lineage=0, number=number)


async def a_while():
    """Some turns of the loop as well as some time: a busy machine may sleep through the time in a single turn."""
    for _ in range(20):
        await asyncio.sleep(0.001)


class FakeEngine:
    """Counts up from the number of earlier tokens, one token a turn of the loop, until `max_new_tokens`."""

    def __init__(self, name, *, tokens_at_once=10**9):
        self.name = name
        self.version = version(0)
        self.ok = True
        self.seen = []
        self.resumed_from = []
        self.modes = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.raises = None
        self.aborting = set()
        self.limit = tokens_at_once
        self.closed = False

    async def start(self):
        pass

    async def generate(self, request):
        self.seen.append(request.id)
        self.aborting.discard(request.id)
        if self.raises:
            raise self.raises
        start = 0 if request.resume is None else len(request.resume)
        self.resumed_from.append(None if request.resume is None else list(request.resume))
        tokens, spans = [], []
        while start + len(tokens) < request.sampling.max_new_tokens:
            if request.id in self.aborting:
                break
            if not self.gate.is_set() or len(tokens) >= self.limit:
                await asyncio.sleep(0.001)
                continue
            tokens.append(start + len(tokens))
            spans.append(Span(start=len(tokens) - 1, end=len(tokens), version=self.version))
            await asyncio.sleep(0)
        done = start + len(tokens) >= request.sampling.max_new_tokens
        return Completion(
            request=request.id,
            columns={"tokens": np.array(tokens, np.int32), "logprobs": -np.array(tokens, np.float32)},
            spans=tuple(spans),
            finish=Finish.LENGTH if done else Finish.ABORT,
            engine=self.name,
        )

    async def abort(self, request_ids=None):
        self.aborting |= set(self.seen if request_ids is None else request_ids)

    async def pause(self, mode):
        self.modes.append(mode)
        self.gate.clear()
        if mode == "abort":
            await self.abort()

    async def resume(self):
        self.gate.set()

    def port(self, name):
        raise NotImplementedError

    async def health(self):
        return Health(ok=self.ok, detail="" if self.ok else "unplugged")

    async def close(self):
        self.closed = True


def admit(pool, name, number=0, policy="main"):
    made = make_manifest(version(number, policy), [SPEC], {"w": [f"{policy}{number}"]})
    pool.gate.admit(
        made,
        Receipt(
            engine=name,
            version=made.version,
            evidence=Evidence.LIVE,
            digests=made.digests,
            root=made.root,
            nbytes=4,
            seconds=0.0,
        ),
    )


def request(id="r", n=4, **changes):
    return Request(
        **(
            {
                "id": id,
                "policy": "main",
                "prompt": {"tokens": np.zeros(1, np.int32)},
                "sampling": Sampling(max_new_tokens=n),
                "seed": 1,
                "deadline_s": 5.0,
            }
            | changes
        )
    )


class FakeRenderer:
    """One id per character; turns end with 1, environment turns are framed by 2 and 3."""

    stop_ids = (1,)
    tokenizer = None

    def prompt(self, prompt):
        if isinstance(prompt, str):
            return [ord(c) for c in prompt]
        return self.extend([1], list(prompt))

    def extend(self, before, new):
        closing = [] if before and before[-1] == 1 else [1]
        return closing + [i for m in new for i in (2, *map(ord, m.content), 3)]

    def demonstration(self, prompt, answer):
        ids = self.prompt(prompt)
        shown = [ord(c) for c in answer] + [1]
        return ids + shown, [False] * len(ids) + [True] * len(shown)

    def text(self, ids):
        return "".join(chr(i) for i in ids if i > 3)

    def parse(self, ids):
        from miles_core.records import Message

        return Message(role="assistant", content=self.text(ids))


def answer(request, text="ok", *, finish=Finish.STOP, numbers=None, engine="e0", **columns):
    """A completion that spells `text`, with the end token where it stopped; token i is of version `numbers[i]`."""
    ids = [ord(c) for c in text] + ([1] if finish == Finish.STOP else [])
    numbers = numbers or [0] * len(ids)
    spans = tuple(Span(start=i, end=i + 1, version=version(n)) for i, n in enumerate(numbers))
    given = {"tokens": np.array(ids, np.int32), "logprobs": -0.5 * np.arange(1, len(ids) + 1, dtype=np.float32)}
    return Completion(request=request.id, columns=given | columns, spans=spans, finish=finish, engine=engine)
