"""What every transport promises: exact bits in every engine, honest receipts, and no hang when a side fails."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np

from miles_core.contracts.weights import Evidence, Layout, Manifest, Receipt, TensorSpec
from miles_core.errors import MilesError, WeightError
from miles_core.provider import Place
from miles_core.records import Version
from miles_core.testing.suite import CheckError, Conformance, check, refuses, refuses_async
from miles_core.testing.suites.recording import RecordingEngine, raw_digests, raw_of
from miles_core.weights import check_receipt, manifest_root

Stream = list[tuple[TensorSpec, Any]]


def version(number: int = 0, policy: str = "main") -> Version:
    return Version(policy=policy, lineage=0, number=number)


class Rig:
    """One sender and its links, driven as `publish.py` drives them."""

    def __init__(self, suite: TransportConformance, engines: list[RecordingEngine], policy: str = "main") -> None:
        self.suite = suite
        self.engines = {engine.name: engine for engine in engines}
        self.policy = policy
        self.stream = suite.stream(0)
        self.cancelled = threading.Event()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self.transport = suite.build(Place.CONTROLLER, policy=policy)
        self.sender: Any = None
        self.links: dict[str, Any] = {}
        self.plan: Any = None

    def export(self, policy: str, layout: Layout, meta: bool = False) -> Iterator[tuple[TensorSpec, Any]]:
        return iter(self.suite.meta(self.stream) if meta else self.stream)

    async def on_trainer(self, work: Any, *args: Any) -> Any:
        return await asyncio.wrap_future(self.thread.submit(work, *args))

    async def open(self) -> Rig:
        def make() -> Any:
            return self.suite.build(Place.TRAINER, policy=self.policy, export=self.export, rank=0, ranks=1)

        self.sender = await self.on_trainer(make)
        await self.connect(list(self.engines.values()))
        return self

    async def connect(self, engines: list[RecordingEngine]) -> None:
        for engine in engines:
            if engine.name not in self.links:
                self.links[engine.name] = self.suite.build(Place.ENGINE, policy=self.policy, engine=engine)
        self.links = {engine.name: self.links[engine.name] for engine in engines}
        specs = [spec for spec, _ in self.stream]
        described = await self.on_trainer(self.sender.describe)
        blobs = {name: await link.describe() for name, link in self.links.items()}
        check("describe gives bytes", all(isinstance(b, bytes) for b in [described, *blobs.values()]), blobs)
        self.plan = self.transport.plan(specs, [described], blobs)
        again = self.transport.plan(specs, [described], dict(reversed(blobs.items())))
        check("plan is pure", again == self.plan, (self.plan, again))
        fits = len(self.plan.senders) == 1 and set(self.plan.links) == set(blobs)
        check("plan has one blob per sender and per link", fits, self.plan)
        await self.on_trainer(self.sender.connect, self.plan.senders[0])
        for name, link in self.links.items():
            await link.connect(self.plan.links[name])

    async def publish(self, to: Version) -> tuple[Manifest, dict[str, Receipt]]:
        """One publication; the first error cancels the other side."""
        manifest = await self.on_trainer(self.sender.stage, to)
        staged_version = getattr(manifest, "version", None)
        check("the manifest is of the version that was staged", staged_version == to, staged_version)
        staged = self.transport.phase == "staged"

        def carry() -> Any:
            return self.on_trainer(self.sender.carry, to, self.cancelled.is_set)

        first: list[Any] = [link.stage(manifest) for link in self.links.values()]
        await self.together([*first, *([carry()] if staged else [])])
        second: list[Any] = [link.carry(manifest) for link in self.links.values()]
        found = await self.together([*second, *([] if staged else [carry()])])
        return manifest, dict(zip(self.links, found, strict=False))

    async def together(self, work: list[Any]) -> list[Any]:
        tasks = [asyncio.ensure_future(w) for w in work]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            self.cancelled.set()
            for task in tasks[: len(self.links)]:
                task.cancel()
            _, late = await asyncio.wait(tasks, timeout=self.suite.cancel_s)
            check("carry returns soon once cancelled", not late, late)
            raise
        finally:
            self.cancelled.clear()

    async def close(self) -> None:
        self.cancelled.set()  # a sender that still carries must come back now
        for link in self.links.values():
            await link.close()
        if self.sender is not None:
            with contextlib.suppress(TimeoutError):  # a thread that hangs was reported already
                await asyncio.wait_for(self.on_trainer(self.sender.close), self.suite.cancel_s)
        self.thread.shutdown(wait=False)


class TransportConformance(Conformance):
    """Override `stream` for tensors that are not NumPy's (each with the spec that announces it)."""

    kind = "sync"
    places: ClassVar[tuple[Place, ...]] = (Place.CONTROLLER, Place.TRAINER, Place.ENGINE)
    helpers: ClassVar[tuple[type, ...]] = (Rig,)
    cancel_s = 5.0  # how long a cancelled carry may take to come back

    def example(self, place: Place) -> Any:
        if place == Place.TRAINER:
            return self.build(place, export=lambda policy, layout, meta=False: iter(()))
        if place == Place.ENGINE:
            return self.build(place, engine=RecordingEngine("engine-0"))
        return self.build(place)

    def stream(self, seed: int) -> Stream:
        """Every dtype that NumPy has, odd shapes, nothing at all, and bits that careless copies change."""
        rng = np.random.default_rng(seed)
        bits = np.array([0x80000000, 0x7FC01234, 0xFFC00001, 1, 0x7F800000, 0x00800000], np.uint32)
        stream: Stream = [
            (TensorSpec(name="hostile", shape=(2, 3), dtype="F32"), bits.view(np.float32).reshape(2, 3)),
            (TensorSpec(name="scalar", shape=(), dtype="F32"), np.array(rng.standard_normal(), np.float32)),
            (TensorSpec(name="empty", shape=(0, 4), dtype="F32"), np.zeros((0, 4), np.float32)),
            (
                TensorSpec(name="large", shape=(257, 130), dtype="F32"),
                rng.standard_normal((257, 130)).astype(np.float32),
            ),
            (TensorSpec(name="doubles", shape=(3, 5, 7), dtype="F64"), rng.standard_normal((3, 5, 7))),
            (TensorSpec(name="halves", shape=(33,), dtype="F16"), rng.standard_normal(33).astype(np.float16)),
            (TensorSpec(name="longs", shape=(4, 1), dtype="I64"), rng.integers(-(2**60), 2**60, (4, 1))),
            (TensorSpec(name="ints", shape=(5,), dtype="I32"), rng.integers(-9, 9, 5).astype(np.int32)),
            (TensorSpec(name="bytes", shape=(7,), dtype="U8"), rng.integers(0, 256, 7).astype(np.uint8)),
            (TensorSpec(name="flags", shape=(9,), dtype="BOOL"), rng.integers(0, 2, 9).astype(bool)),
        ]
        transposed = rng.standard_normal((6, 4)).astype(np.float32).T
        return [*stream, (TensorSpec(name="transposed", shape=(4, 6), dtype="F32"), transposed)]

    def meta(self, stream: Stream) -> Stream:
        """The dry pass: the same specs, tensors without data."""
        return [(spec, np.broadcast_to(np.zeros((), np.asarray(t).dtype), spec.shape)) for spec, t in stream]

    def expected(self, stream: Stream) -> dict[str, Any]:
        return {spec.name: raw_of(spec, tensor) for spec, tensor in stream}

    def exact(self, engine: RecordingEngine, stream: Stream, policy: str = "main") -> list[str]:
        """Names of tensors that are not bit for bit in the engine."""
        held, expected = engine.held.get(policy, {}), self.expected(stream)
        wrong = [n for n, raw in expected.items() if n not in held or not np.array_equal(held[n], raw)]
        return wrong + sorted(set(held) - set(expected))

    # --- tests -------------------------------------------------------------------------------------------------------

    def test_exact_bits(self) -> None:
        async def exact() -> None:
            engines = [RecordingEngine(f"engine-{i}") for i in range(3)]
            rig = Rig(self, engines)
            try:
                await rig.open()
                phase = rig.transport.phase
                check("phase is staged or live", phase in ("staged", "live"), phase)
                for number in range(3):
                    rig.stream = self.stream(number)
                    manifest, receipts = await rig.publish(version(number))
                    self._manifest(manifest, rig.stream)
                    for engine in engines:
                        self._engine(engine, rig.stream, manifest, receipts[engine.name], number)
            finally:
                await rig.close()

        self.run(exact())

    def _manifest(self, manifest: Manifest, stream: Stream) -> None:
        specs = {spec.name: spec for spec, _ in stream}
        listed = {spec.name: (spec.shape, spec.dtype) for spec in manifest.tensors}
        same = listed == {n: (s.shape, s.dtype) for n, s in specs.items()} and len(manifest.tensors) == len(specs)
        check("the manifest lists every tensor once", same, sorted(listed))
        raws = self.expected(stream)
        wanted = {spec.name: raw_digests(spec, raws[spec.name]) for spec in manifest.tensors}
        digests = {name: tuple(d) for name, d in manifest.digests.items()}
        wrong = sorted(n for n in wanted if digests.get(n) != wanted[n])
        check("manifest digests are those of the exported bytes", not wrong, wrong)
        root = manifest_root(manifest.tensors, manifest.digests)
        check("the manifest's root covers its digests", manifest.root == root, (manifest.root, root))

    def _engine(self, engine: RecordingEngine, stream: Stream, manifest: Manifest, receipt: Any, number: int) -> None:
        wrong = self.exact(engine, stream)
        check("every engine holds exactly the exported bits", not wrong, (engine.name, wrong))
        active = engine.version.get("main")
        check("every engine serves the version", active == version(number), active)
        calls = [name for name, _ in engine.log if name != "evidence"]
        inner = set(calls[calls.index("begin") + 1 : -1]) if "begin" in calls else set()
        once = calls.count("begin") == calls.count("end") == 1 and calls[0] == "begin" and calls[-1] == "end"
        check("loads happen between one begin and one end", once and inner == {"load"}, calls)
        named = isinstance(receipt, Receipt) and receipt.engine == engine.name and receipt.version == manifest.version
        check("the receipt names engine and version", named, receipt)
        try:
            check_receipt(manifest, receipt, Evidence.PROBE)
        except WeightError as error:
            check("the receipt agrees with the manifest", False, error.message)
        nbytes = sum(raw.size for raw in self.expected(stream).values())
        check("the receipt counts the bytes", receipt.nbytes == nbytes, (receipt.nbytes, nbytes))
        engine.log.clear()

    def test_receipts_are_honest(self) -> None:
        async def honest() -> None:
            engines = [RecordingEngine("engine-0"), RecordingEngine("engine-1")]
            engines[1].flip = "large"
            rig = Rig(self, engines)
            try:
                await rig.open()
                manifest, receipts = await rig.publish(version())
                check_receipt(manifest, receipts["engine-0"], Evidence.PROBE)
                if receipts["engine-1"].evidence == Evidence.LIVE:
                    differs = lambda: check_receipt(manifest, receipts["engine-1"], Evidence.PROBE)  # noqa: E731
                    refuses("a bit that changed in the engine shows in its receipt", WeightError, differs)
            finally:
                await rig.close()

        self.run(honest())

    def test_a_failing_engine(self) -> None:
        async def failing() -> None:
            engines = [RecordingEngine("engine-0"), RecordingEngine("engine-1")]
            rig = Rig(self, engines)
            try:
                await rig.open()
                engines[1].fail_on_load = "no room for this tensor"
                try:
                    await rig.publish(version())
                except CheckError:
                    raise
                except Exception as error:
                    check("an engine's error surfaces with its own text", "no room for" in str(error), repr(error))
                else:
                    check("an engine's error is not swallowed", False)
                served = engines[1].version.get("main")
                check("an engine that failed serves nothing", served is None, served)
                engines[1].fail_on_load = ""
                await rig.connect(engines)
                rig.stream = self.stream(5)
                await rig.publish(version(1))
                wrong = [name for engine in engines for name in self.exact(engine, rig.stream)]
                check("a failed transfer can be followed by a whole one", not wrong, wrong)
            finally:
                await rig.close()

        self.run(failing())

    def test_membership(self) -> None:
        async def membership() -> None:
            engines = [RecordingEngine("engine-0"), RecordingEngine("engine-1")]
            rig = Rig(self, engines)
            try:
                await rig.open()
                await rig.publish(version())
                await rig.connect(engines[:1])
                rig.stream = self.stream(1)
                await rig.publish(version(1))
                left = engines[1].version["main"]
                check("an engine that left is sent nothing", left == version(), left)
                newcomer = RecordingEngine("engine-2")
                await rig.connect([engines[0], engines[1], newcomer])
                rig.stream = self.stream(2)
                await rig.publish(version(2))
                wrong = [n for engine in [*engines, newcomer] for n in self.exact(engine, rig.stream)]
                check("engines that join or come back are sent everything", not wrong, wrong)
            finally:
                await rig.close()

        self.run(membership())

    def test_order_of_calls(self) -> None:
        async def order() -> None:
            rig = Rig(self, [RecordingEngine("engine-0")])
            try:
                await rig.open()
                await rig.on_trainer(rig.sender.stage, version(0))
                carrying = rig.on_trainer(rig.sender.carry, version(7), rig.cancelled.is_set)
                label = "a version that was not staged is not carried"
                await refuses_async(label, MilesError, asyncio.wait_for(carrying, 3.0))
            finally:
                await rig.close()

        self.run(order())

    def test_policies(self) -> None:
        async def policies() -> None:
            engine = RecordingEngine("engine-0")
            rigs = [Rig(self, [engine], policy) for policy in ("main", "other")]
            try:
                for seed, rig in enumerate(rigs):
                    await rig.open()
                    rig.stream = self.stream(10 + seed)
                for rig in rigs:
                    await rig.publish(version(3, rig.policy))
                wrong = [(r.policy, n) for r in rigs for n in self.exact(engine, r.stream, r.policy)]
                check("senders of two policies do not mix", not wrong, wrong)
            finally:
                for rig in rigs:
                    await rig.close()

        self.run(policies())
