"""The port `tensors`: what it takes, what it refuses, and that evidence is read from what computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from local_engine_kit import (
    ARCHITECTURES,
    build,
    model_of,
    plain_logprobs,
    publish,
    request,
    run,
    started,
    stream,
    version,
)

from miles_core.contracts.weights import Piece, TensorSpec
from miles_core.contracts.weights import TensorsPort as Contract
from miles_core.errors import CapabilityError, EngineError, WeightError

QWEN = ARCHITECTURES["qwen3"]
MOE = ARCHITECTURES["qwen3-moe"]


def digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().numpy().tobytes())


def test_evidence_of_every_tensor_and_of_pieces(architecture: dict[str, Any]) -> None:
    model = model_of(architecture)

    async def go() -> None:
        engine = await started(model, architecture)
        port = engine.port("tensors")
        assert isinstance(port, Contract)
        sent = stream(model)
        found = await port.evidence(version(0), [spec for spec, _ in sent])
        assert found == {spec.name: (digest(tensor),) for spec, tensor in sent}
        spec, tensor = next((s, t) for s, t in sent if s.name.endswith("k_proj.weight"))
        halves = (
            Piece(offsets=(0, 0), shape=(spec.shape[0], 10)),
            Piece(offsets=(0, 10), shape=(spec.shape[0], spec.shape[1] - 10)),
        )
        cut = TensorSpec(name=spec.name, shape=spec.shape, dtype=spec.dtype, pieces=halves)
        assert (await port.evidence(version(0), [cut]))[spec.name] == (digest(tensor[:, :10]), digest(tensor[:, 10:]))
        # Flip one bit in the block that the matrix product reads: evidence must see it.
        engine.weights.views[spec.name]  # the parameter itself
        layer = engine.slots.forward.layers[0]
        layer.qkv_weight.view(torch.int32)[engine.slots.forward.heads * engine.slots.forward.head_dim, 0] ^= 1
        assert (await port.evidence(version(0), [spec]))[spec.name] != (digest(tensor),)
        with pytest.raises(WeightError, match=r"holds main@0\.0, not main@0.1"):
            await port.evidence(version(1), [spec])
        await engine.close()

    run(go())


def test_memory_may_be_reused_after_load_and_numpy_arrays_are_taken() -> None:
    model = model_of(QWEN)
    prompt = [3, 4, 5]

    async def go() -> None:
        engine = build(QWEN)
        await engine.start()
        port = engine.port("tensors")
        await port.begin(version(0))
        for spec, tensor in stream(model):
            array = tensor.numpy().copy()
            await port.load([(spec, array)])
            array[:] = np.nan
        await port.end(version(0))
        done = await engine.generate(request("a", prompt))
        np.testing.assert_allclose(
            done.columns["logprobs"], plain_logprobs(model, prompt, done.columns["tokens"]), atol=1e-5
        )
        await engine.close()

    run(go())


def test_experts_under_checkpoint_names() -> None:
    model = model_of(MOE)

    async def go() -> None:
        engine = await started(model_of(MOE, 1), MOE)
        bucket = []
        for spec, tensor in stream(model):
            if ".experts." not in spec.name:
                bucket.append((spec, tensor))
                continue
            stem = spec.name.rsplit(".", 1)[0]
            for expert, block in enumerate(tensor):
                parts = zip(("gate", "up"), block.chunk(2), strict=True)
                if "down" in spec.name:
                    parts = iter([("down", block)])
                for kind, part in parts:
                    name = f"{stem}.{expert}.{kind}_proj.weight"
                    bucket.append((TensorSpec(name=name, shape=tuple(part.shape), dtype="F32"), part))
        port = engine.port("tensors")
        await port.begin(version(1))
        await port.load(bucket)
        await port.end(version(1))
        stacked = [spec for spec, _ in stream(model) if ".experts." in spec.name]
        found = await port.evidence(version(1), stacked)
        assert found == {s.name: (digest(t),) for s, t in stream(model) if ".experts." in s.name}
        await port.begin(version(2))
        await port.load([pair for pair in bucket if ".3.up_proj" not in pair[0].name])
        with pytest.raises(WeightError, match=r"mlp\.experts\.gate_up_proj"):
            await port.end(version(2))
        await engine.close()

    run(go())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(name="model.norm.bias"), "the model has no tensor 'model.norm.bias'"),
        (dict(shape=(63,)), r"has shape \[63\]; the engine holds \[64\]"),
        (dict(dtype="BF16"), "is BF16; the engine computes in F32"),
    ],
)
def test_refused_tensors(change: dict[str, Any], message: str) -> None:
    async def go() -> None:
        engine = build(QWEN)
        await engine.start()
        port = engine.port("tensors")
        await port.begin(version(0))
        keys = dict(name="model.norm.weight", shape=(64,), dtype="F32") | change
        with pytest.raises(WeightError, match=message) as caught:
            await port.load([(TensorSpec(**keys), torch.zeros(64))])
        assert "Fix:" in str(caught.value)
        good = TensorSpec(name="model.norm.weight", shape=(64,), dtype="F32")
        with pytest.raises(WeightError, match=r"what came is F32 \[3\]"):
            await port.load([(good, torch.zeros(3))])
        with pytest.raises(WeightError, match=r"what came is F64 \[64\]"):
            await port.load([(good, torch.zeros(64, dtype=torch.float64))])
        await port.load([(good, torch.zeros(64))])
        with pytest.raises(WeightError, match="came twice"):
            await port.load([(good, torch.zeros(64))])
        await engine.close()

    run(go())


def test_order_of_calls_and_missing_tensors() -> None:
    model, tied = model_of(QWEN), "lm_head.weight"

    async def go() -> None:
        engine = build(QWEN)
        await engine.start()
        port = engine.port("tensors")
        with pytest.raises(EngineError, match="has no weights yet"):
            await engine.generate(request("early", [2]))
        with pytest.raises(WeightError, match="outside begin and end"):
            await port.load(stream(model))
        with pytest.raises(WeightError, match="without its begin"):
            await port.end(version(0))
        await port.begin(version(0))
        with pytest.raises(WeightError, match="of 24 parameters did not come"):
            await port.end(version(0))  # the first version cannot be empty
        await port.load(stream(model)[1:])
        with pytest.raises(WeightError, match=r"1 of 24 parameters did not come .*: model.embed_tokens.weight"):
            await port.end(version(0))
        # The tied tensor under its other name is the same parameter: it completes the set, and twice is refused.
        spec, tensor = stream(model)[0]
        again = TensorSpec(name=tied, shape=spec.shape, dtype="F32")
        await port.load([(again, tensor)])
        await port.end(version(0))
        await port.begin(version(1))
        await port.load([*stream(model), (again, tensor)])
        with pytest.raises(WeightError, match="or twice"):
            await port.end(version(1))
        # A half-carried version leaves the engine standing still; a full one heals it.
        await publish(engine, model, 2)
        done = await engine.generate(request("a", [2, 3]))
        assert done.spans[0].version == version(2)
        with pytest.raises(CapabilityError, match="no weight port 'group'"):
            engine.port("group")
        await engine.close()

    run(go())


def test_an_alias_moves_the_version_only() -> None:
    model = model_of(QWEN)

    async def go() -> None:
        engine = await started(model, QWEN)
        first = await engine.generate(request("a", [2, 3], seed=4))
        await engine.port("tensors").begin(version(1))
        await engine.port("tensors").end(version(1))
        second = await engine.generate(request("a", [2, 3], seed=4))
        np.testing.assert_array_equal(first.columns["logprobs"], second.columns["logprobs"])
        assert [s.version.number for c in (first, second) for s in c.spans] == [0, 1]
        await engine.close()

    run(go())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_formats(dtype: str) -> None:
    model = model_of(QWEN).to(getattr(torch, dtype))

    async def go() -> None:
        engine = await started(model, QWEN, dtype=dtype)
        done = await engine.generate(request("a", [2, 3, 4], seed=4))
        plain = plain_logprobs(model, [2, 3, 4], done.columns["tokens"])
        np.testing.assert_allclose(done.columns["logprobs"], plain, atol=0.15)
        assert done.columns["logprobs"].dtype == np.float32
        await engine.close()

    run(go())
