"""The weight half of the engine suite: ports, evidence, versions, swaps in the middle, several policies."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.contracts.weights import TensorSpec
from miles_core.errors import MilesError
from miles_core.records import Version
from miles_core.testing.suite import Conformance, check, refuses_async
from miles_core.testing.suites.engine_interruptions import a_while, tokens_of
from miles_core.weights import piece_digests


def _version(number: int, policy: str = "main") -> Version:
    return Version(policy=policy, lineage=0, number=number)


class EngineWeights(Conformance):
    """Mixed into `EngineConformance`, which has the helpers."""

    if TYPE_CHECKING:
        close_to: float
        engine: Any
        interrupted: Any
        load: Any
        request: Any
        weights: Any

    def hostile(self, weights: list[tuple[TensorSpec, Any]]) -> list[tuple[TensorSpec, Any]]:
        """The stream with -0.0, a NaN with a payload and the smallest subnormal written into float32 tensors."""
        out = []
        for spec, tensor in weights:
            array = np.array(np.asarray(tensor))
            if spec.dtype == "F32" and array.size >= 3:
                bits = array.reshape(-1).view(np.uint32)
                bits[:3] = (0x80000000, 0x7FC01234, 0x00000001)
            out.append((spec, self.like(tensor, array)))
        return out

    def like(self, tensor: Any, array: Any) -> Any:
        """`array` as the kind of tensor that `tensor` is. Override for tensors that are not NumPy's."""
        if isinstance(tensor, np.ndarray):
            return array
        copy = tensor.clone()
        copy[...] = copy.new_tensor(array) if hasattr(copy, "new_tensor") else array
        return copy

    async def evidence(self, engine: Any, version: Version, specs: list[TensorSpec]) -> dict[str, tuple[str, ...]]:
        return dict(await engine.port("tensors").evidence(version, specs))

    def test_evidence(self) -> None:
        async def evidence() -> None:
            async with self.engine() as engine:
                stream = self.weights(1)
                specs = [spec for spec, _ in stream]
                expected = {s.name: piece_digests(s, np.asarray(t)) for s, t in stream}
                found = await self.evidence(engine, _version(0), specs)
                check("evidence is the digest of what was loaded", found == expected, (found, expected))
                part = await self.evidence(engine, _version(0), specs[:1])
                check("evidence covers the tensors that were asked for", set(part) == {specs[0].name}, part)
                port = engine.port("tensors")
                odd = self.hostile(stream)
                await port.begin(_version(1))
                await port.load(odd)
                await port.end(_version(1))
                expected = {s.name: piece_digests(s, np.asarray(t)) for s, t in odd}
                found = await self.evidence(engine, _version(1), specs)
                check("-0.0, NaN payloads and subnormals arrive bit for bit", found == expected, found)

        self.run(evidence())

    def test_the_engine_copies(self) -> None:
        async def copies() -> None:
            async with self.engine(None) as engine:
                stream = [(spec, self.like(t, np.array(np.asarray(t)))) for spec, t in self.weights(1)]
                specs = [spec for spec, _ in stream]
                expected = {s.name: piece_digests(s, np.array(np.asarray(t))) for s, t in stream}
                port = engine.port("tensors")
                await port.begin(_version(0))
                await port.load(stream[:1])
                stream[0][1][...] = 0
                await port.load(stream[1:])
                for _, tensor in stream:
                    tensor[...] = 0
                await port.end(_version(0))
                found = await self.evidence(engine, _version(0), specs)
                check("the caller may reuse its memory after load", found == expected, found)

        self.run(copies())

    def test_versions(self) -> None:
        async def versions() -> None:
            async with self.engine(endless=True) as engine, self.engine(2, endless=True) as fresh:
                before = await engine.generate(self.request([2, 3], 3))
                await self.load(engine, 2, _version(5))
                after = await engine.generate(self.request([2, 3], 3, id="after"))
                named = {s.version for s in after.spans}
                check("tokens after end carry the new version", named == {_version(5)}, named)
                direct = await fresh.generate(self.request([2, 3], 3))
                a, b = np.asarray(after.columns["logprobs"]), np.asarray(direct.columns["logprobs"])
                same = tokens_of(after) == tokens_of(direct) and bool(np.allclose(a, b, atol=self.close_to))
                check("tokens after end come from the new weights", same, (after, direct))
                moved = tokens_of(before) != tokens_of(after)
                check("the two weight streams differ in what they sample", moved, tokens_of(before))

        self.run(versions())

    def test_swap_in_the_middle(self) -> None:
        async def swap() -> None:
            async with self.engine(endless=True) as engine, self.engine(2, endless=True) as fresh:
                mode = "recompute" if "pause.recompute" in self.offered() else self.mode_that_keeps()
                if mode is None:
                    return

                def asked(n: int, **given: Any) -> list[Any]:
                    return [self.request([2, 3], 8, sampling={"max_new_tokens": n}, **given)]

                async def pause() -> None:
                    await asyncio.sleep(0.005)  # for some tokens of the old weights
                    await engine.pause(mode)

                n, (task,) = await self.interrupted(engine, asked, pause)
                await self.load(engine, 2, _version(1))
                await engine.resume()
                done = await task
                named = [s.version.number for s in done.spans]
                check("a request keeps the versions of its tokens over a swap", named in ([0, 1], [1]), named)
                if mode == "recompute":
                    cut = done.spans[0].end if named == [0, 1] else 0
                    head = np.array(tokens_of(done)[:cut], np.int32)
                    rest = await fresh.generate(asked(n, id="rest", resume=head)[0])
                    same = tokens_of(rest) == tokens_of(done)[cut:]
                    check("recompute leaves nothing of the old weights", same, (cut, tokens_of(rest), tokens_of(done)))

        self.run(swap())

    def mode_that_keeps(self) -> Any:
        return "in_place" if "pause.in_place" in self.offered() else None

    def test_begin_holds(self) -> None:
        async def holds() -> None:
            async with self.engine(endless=True) as engine:
                port = engine.port("tensors")
                await port.begin(_version(1))
                late = asyncio.ensure_future(engine.generate(self.request([2, 3], 3, sampling={"max_new_tokens": 1})))
                await a_while()
                check("no request advances between begin and end", not late.done(), late)
                await port.load(self.weights(2))
                await port.end(_version(1))
                done = await asyncio.wait_for(late, 30.0)
                named = {s.version for s in done.spans}
                check("a request that waited gets the new weights", named == {_version(1)}, named)

        self.run(holds())

    def test_interrupted_transfer(self) -> None:
        async def interrupted() -> None:
            async with self.engine(endless=True) as engine, self.engine(2, endless=True) as fresh:
                port = engine.port("tensors")
                await port.begin(_version(1))
                await port.load(self.weights(3)[:1])
                again = engine.port("tensors")
                await again.begin(_version(2))
                await again.load(self.weights(2))
                await again.end(_version(2))
                a = tokens_of(await engine.generate(self.request([2, 3], 3)))
                b = tokens_of(await fresh.generate(self.request([2, 3], 3)))
                check("a whole transfer heals an interrupted one", a == b, (a, b))

        self.run(interrupted())

    def test_wrong_transfers(self) -> None:
        async def wrong() -> None:
            async with self.engine() as engine:
                stream = self.weights(2)
                port = engine.port("tensors")
                outside = port.load(stream)
                await refuses_async("a load outside begin and end is refused", MilesError, outside)
                await port.begin(_version(1))
                spec, tensor = next((s, t) for s, t in stream if len(s.shape) and s.shape[0] > 1)
                cut = TensorSpec(name=spec.name, shape=(spec.shape[0] - 1, *spec.shape[1:]), dtype=spec.dtype)
                short = port.load([(cut, tensor)])
                await refuses_async("a tensor that is not what its spec says is refused", MilesError, short)
                await port.load(stream)
                other = port.end(_version(9))
                await refuses_async("the end of another version is refused", MilesError, other)
                await port.end(_version(1))
                early = port.evidence(_version(7), [spec])
                await refuses_async("evidence of a version that is not held is refused", MilesError, early)

        self.run(wrong())

    def test_policies(self) -> None:
        if "policies" not in self.offered():
            return

        async def policies() -> None:
            async with self.engine(endless=True) as engine:
                before = await engine.generate(self.request([2, 3], 3))
                await self.load(engine, 2, _version(4, "other"))
                after = await engine.generate(self.request([2, 3], 3, id="after"))
                same = tokens_of(before) == tokens_of(after) and {s.version for s in after.spans} == {_version(0)}
                check("weights of one policy leave another alone", same, (before, after))
                other = await engine.generate(self.request([2, 3], 3, id="other", policy="other"))
                named = {s.version for s in other.spans}
                check("each policy has its own version", named == {_version(4, "other")}, named)

        self.run(policies())
