"""The transport suite: passes on the toys, and every assertion sees the transport that is broken for it."""

import itertools
import json
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from miles_core.contracts.weights import Evidence
from miles_core.provider import Place
from miles_core.testing import TransportConformance
from miles_core.testing.toys import sync
from miles_core.weights import make_manifest, piece_digests

from .mutants import broken_suite, must_fail, own_labels, plugin

numbers = itertools.count()


def suite_for(transport=sync.ToyTransport, sender=sync.ToySender, link=sync.ToyLink, phase="live"):
    def build(config, context):
        if context.place == Place.CONTROLLER:
            return transport(phase, "here")
        if context.place == Place.TRAINER:
            return sender(context.export, rank=0, bucket_bytes=1000)
        return link(context.engine)

    return broken_suite(TransportConformance, plugin(build), cancel_s=1.0)


def sender(**methods):
    return {"sender": type("Sender", (sync.ToySender,), methods)}


def link(**methods):
    return {"link": type("Link", (sync.ToyLink,), methods)}


def transport(**methods):
    return {"transport": type("Transport", (sync.ToyTransport,), methods)}


def staged(edit):
    """A sender whose manifest and buckets go through `edit(manifest, buckets) -> (manifest, buckets)`."""

    def stage(self, version):
        manifest, (_, buckets) = sync.ToySender.stage(self, version), self.staged
        manifest, buckets = edit(manifest, buckets)
        self.staged = (version, buckets)
        return manifest

    return sender(stage=stage)


def fetched(edit):
    """A link that loads `edit(buckets)`."""

    async def fetch(self, manifest):
        return edit(await sync.ToyLink.fetch(self, manifest))

    return link(fetch=fetch)


def receipt(edit):
    async def carry(self, manifest):
        return edit(await sync.ToyLink.carry(self, manifest))

    return link(carry=carry)


def by_name(buckets, name, change):
    return [[(s, change(a) if s.name == name else a) for s, a in b] for b in buckets]


def through_python(array):
    return np.array([float(x) + 0.0 for x in array.reshape(-1)], np.float32).reshape(array.shape)


def moved(manifest, buckets):
    """Digests of other bytes than those that were exported."""
    wrong = {s.name: piece_digests(s, np.zeros_like(a)) for b in buckets for s, a in b}
    return make_manifest(manifest.version, manifest.tensors, wrong), buckets


async def never_ends(self, manifest):
    """Loads and proves, but does not activate."""
    await self.port.begin(manifest.version)
    for bucket in await self.fetch(manifest):
        await self.port.load(bucket)
    digests = dict(await self.port.evidence(manifest.version, manifest.tensors))
    nbytes = 0
    return sync.Receipt(
        engine=self.engine.name,
        version=manifest.version,
        evidence=Evidence.LIVE,
        digests=digests,
        root=None,
        nbytes=nbytes,
        seconds=0.0,
    )


async def begins_for_each_bucket(self, manifest):
    found = None
    for bucket in await self.fetch(manifest):
        await self.port.begin(manifest.version)
        await self.port.load(bucket)
        await self.port.end(manifest.version)
    digests = dict(await self.port.evidence(manifest.version, manifest.tensors))
    found = sync.Receipt(
        engine=self.engine.name,
        version=manifest.version,
        evidence=Evidence.LIVE,
        digests=digests,
        root=manifest.root,
        nbytes=0,
        seconds=0.0,
    )
    return found


async def swallows(self, manifest):
    try:
        return await sync.ToyLink.carry(self, manifest)
    except Exception:
        return None


async def hides_the_reason(self, manifest):
    try:
        return await sync.ToyLink.carry(self, manifest)
    except Exception:
        raise RuntimeError("something went wrong") from None


async def ends_anyway(self, manifest):
    try:
        return await sync.ToyLink.carry(self, manifest)
    except Exception:
        await self.port.end(manifest.version)
        raise


def deaf_carry(self, version, cancelled):
    import time

    self._channel.offer(version, self.buckets(version))
    stop = time.monotonic() + 8.0
    while time.monotonic() < stop and not set(self.links) <= self._channel._taken.get(version, set()):
        time.sleep(0.01)


async def fetches_after_the_load(self, manifest):
    """Fails before it says that it took the bytes, so that its sender waits for it."""
    channel = sync._channels[self.plan["source"]["channel"]]
    found = channel.take(manifest.version)
    while not isinstance(found, list):
        await found.wait()
        found = channel.take(manifest.version)
    await self.port.begin(manifest.version)
    for bucket in found:
        await self.port.load(bucket)
    await self.port.end(manifest.version)
    return await sync.ToyLink.carry(self, manifest)


class GivesUp(sync.ToyLink):
    """Once it failed it sends its old buckets again."""

    failed = False

    async def carry(self, manifest):
        try:
            return await super().carry(manifest)
        except Exception:
            type(self).failed = True
            raise

    async def fetch(self, manifest):
        buckets = await super().fetch(manifest)
        return buckets[:-1] if type(self).failed else buckets


def carries_anything(self, version, cancelled):
    self.staged = (version, self.staged[1])
    sync.ToySender.carry(self, version, lambda: True)


class SendsDeltas(sync.ToySender):
    """From the second version on only what it has not sent before, whoever the engine is."""

    def stage(self, version):
        manifest = super().stage(version)
        sent = self.__dict__.setdefault("sent", {})
        buckets = [[(s, a) for s, a in b if sent.get(s.name) != a.tobytes()] for b in self.staged[1]]
        sent.update({s.name: a.tobytes() for b in self.staged[1] for s, a in b})
        self.staged = (version, buckets)
        return manifest


class KeepsLinks(sync.ToySender):
    """Carries to engines that have left."""

    seen: ClassVar = {}

    def carry(self, version, cancelled):
        for channel_link in self.seen.values():
            channel_link.engine.version[version.policy] = version
        super().carry(version, cancelled)


class KnownLink(sync.ToyLink):
    def __init__(self, engine):
        super().__init__(engine)
        KeepsLinks.seen[engine.name] = self


class OneStage(sync.ToySender):
    """All senders of a process share what they staged."""

    last: ClassVar = []

    def stage(self, version):
        manifest = super().stage(version)
        self.last[:] = [self.staged[1]] if not self.last or version.policy == "main" else self.last
        self.staged = (version, self.last[0])
        return manifest


def text_blob(self):
    return json.dumps({"channel": self._key, "pid": 0})


def random_plan(self, specs, senders, links):
    plan = sync.ToyTransport.plan(self, specs, senders, links)
    return replace(plan, summary={"number": str(next(numbers))})


def short_plan(self, specs, senders, links):
    plan = sync.ToyTransport.plan(self, specs, senders, links)
    return replace(plan, links=dict(list(plan.links.items())[1:]))


def renamed(manifest, buckets):
    other = replace(manifest.version, number=manifest.version.number + 1)
    return replace(manifest, version=other), buckets


MUTANTS = {
    "describe gives bytes": sender(describe=text_blob),
    "plan is pure": transport(plan=random_plan),
    "plan has one blob per sender and per link": transport(plan=short_plan),
    "phase is staged or live": {"phase": "sometimes"},
    "the manifest is of the version that was staged": staged(renamed),
    "the manifest lists every tensor once": staged(
        lambda m, b: (make_manifest(m.version, m.tensors[1:], {s.name: m.digests[s.name] for s in m.tensors[1:]}), b)
    ),
    "manifest digests are those of the exported bytes": staged(moved),
    "the manifest's root covers its digests": staged(lambda m, b: (replace(m, root="0" * 32), b)),
    "every engine holds exactly the exported bits": fetched(lambda b: by_name(b, "hostile", through_python)),
    "every engine serves the version": link(carry=never_ends),
    "loads happen between one begin and one end": link(carry=begins_for_each_bucket),
    "the receipt names engine and version": receipt(lambda r: replace(r, engine="another")),
    "the receipt agrees with the manifest": receipt(lambda r: replace(r, digests=dict(list(r.digests.items())[1:]))),
    "the receipt counts the bytes": receipt(lambda r: replace(r, nbytes=r.nbytes // 2)),
    "a bit that changed in the engine shows in its receipt": link(
        carry=lambda self, manifest: copies_the_manifest(self, manifest)
    ),
    "an engine's error surfaces with its own text": link(carry=hides_the_reason),
    "an engine's error is not swallowed": link(carry=swallows),
    "carry returns soon once cancelled": {**sender(carry=deaf_carry), **link(carry=fetches_after_the_load)},
    "an engine that failed serves nothing": link(carry=ends_anyway),
    "a failed transfer can be followed by a whole one": {"link": GivesUp},
    "an engine that left is sent nothing": {"sender": KeepsLinks, "link": KnownLink},
    "engines that join or come back are sent everything": {"sender": SendsDeltas},
    "a version that was not staged is not carried": sender(carry=carries_anything),
    "senders of two policies do not mix": {"sender": OneStage},
}


async def copies_the_manifest(self, manifest):
    receipt = await sync.ToyLink.carry(self, manifest)
    return replace(receipt, digests=manifest.digests, root=manifest.root)


#: Transfers that lose, repeat, cut or reorder what they carry; all must be seen as wrong bits or wrong digests.
HOSTILE = {
    "dropped": lambda b: b[:-1],
    "truncated": lambda b: by_name(b, "large", lambda a: np.where(np.arange(len(a))[:, None] < 200, a, 0)),
    "one bucket twice in place of another": lambda b: [b[0], *b[:-1]],
    "rows in another order": lambda b: by_name(b, "large", lambda a: a[::-1]),
    "minus zero lost": lambda b: by_name(b, "hostile", lambda a: a + np.float32(0)),
    "transposed": lambda b: by_name(b, "transposed", lambda a: np.ascontiguousarray(a.T).reshape(a.shape)),
}


def test_every_label_has_a_mutant():
    assert own_labels(TransportConformance) == set(MUTANTS)


@pytest.mark.parametrize("label", MUTANTS)
def test_a_broken_transport_is_seen(label):
    must_fail(label, suite_for(**MUTANTS[label]))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_transfer_is_seen(name):
    must_fail("every engine holds exactly the exported bits", suite_for(**fetched(HOSTILE[name])))


class TestToy(TransportConformance):
    name = "toy"


class TestToyStaged(TransportConformance):
    name = "toy"
    options: ClassVar = {"phase": "staged", "bucket_bytes": 1000}


class TestToySocket(TransportConformance):
    name = "toy-socket"


class TestToySocketStaged(TransportConformance):
    name = "toy-socket"
    options: ClassVar = {"phase": "staged", "bucket_bytes": 1000}
