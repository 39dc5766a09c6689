"""Adapters of several policies over one base: against merged models, rows without one bit for bit, swaps, refusals."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from local_engine_kit import ARCHITECTURES, RENDERER, model_of, plain_logprobs, ragged, request, run, version
from safetensors.torch import save_file

from miles_core.contracts.model import ModelSource
from miles_core.contracts.weights import TensorSpec
from miles_core.errors import CapabilityError, ConfigError, EngineError, WeightError
from miles_core.provider import BuildContext, Place
from miles_core.weights import piece_digests
from miles_rollout_local.adapters import PREFIX
from miles_rollout_local.config import LocalConfig
from miles_rollout_local.plugin import miles_rollout

Stream = list[tuple[TensorSpec, torch.Tensor]]


def folder_of(model: Any, folder: Path) -> ModelSource:
    """The model as a Hugging Face folder."""
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, tensor in list(weights.items()):
        if tensor.dim() == 3:  # a checkpoint holds one matrix an expert
            del weights[name]
            stem, kind = name.rsplit(".", 1)
            for e, block in enumerate(tensor):
                gate, up = block.chunk(2) if kind == "gate_up_proj" else (None, None)
                parts = {"down_proj": block} if gate is None else {"gate_proj": gate, "up_proj": up}
                weights |= {f"{stem}.{e}.{part}.weight": t.clone() for part, t in parts.items()}
    save_file(weights, folder / "model.safetensors")
    return ModelSource(asked=str(folder), folder=folder)


def engine_of(source: ModelSource, **options: Any) -> Any:
    run: Any = None
    context = BuildContext(place=Place.CONTROLLER, name="local", run=run, model=source, renderer=RENDERER)
    return miles_rollout().build(LocalConfig(**options), context)


def adapter(model: Any, seed: int, rank: int = 3, targets: tuple[str, ...] = (), scale: float = 0.3) -> Stream:
    """Random A and B on every projection (whose last name is among `targets`, where given)."""
    generator = torch.Generator().manual_seed(seed)
    found: Stream = []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if not isinstance(module, torch.nn.Linear) or not last.endswith("_proj") or (targets and last not in targets):
            continue
        out, inside = module.weight.shape
        for part, shape in (("lora_A", (rank, inside)), ("lora_B", (out, rank))):
            tensor = torch.randn(shape, generator=generator) * scale
            found.append((TensorSpec(name=f"{PREFIX}{name}.{part}.weight", shape=shape, dtype="F32"), tensor))
    return found


def merged(model: Any, stream: Stream) -> Any:
    found = copy.deepcopy(model)
    tensors = {spec.name.removeprefix(PREFIX): tensor for spec, tensor in stream}
    with torch.no_grad():
        for name, a in tensors.items():
            if name.endswith("lora_A.weight"):
                layer = name.removesuffix(".lora_A.weight")
                found.get_submodule(layer).weight += tensors[f"{layer}.lora_B.weight"] @ a
    return found


def silent(stream: Stream) -> Stream:
    return [(spec, torch.zeros_like(t) if "lora_B" in spec.name else t) for spec, t in stream]


async def send(engine: Any, stream: Stream, number: int, policy: str) -> None:
    port = engine.port("tensors")
    await port.begin(version(number, policy))
    for start in range(0, len(stream), 5):
        await port.load(stream[start : start + 5])
    await port.end(version(number, policy))


@pytest.mark.parametrize("kind", ["llama-biased", "qwen3", "qwen3-moe"])
def test_a_mixed_batch_equals_the_merged_models(kind: str, tmp_path: Path) -> None:
    model = model_of(ARCHITECTURES[kind])
    a, b = adapter(model, 1), adapter(model, 2, rank=5, targets=("q_proj", "v_proj", "down_proj"))
    models = {"a": merged(model, a), "b": merged(model, b), "base": model}

    async def go() -> None:
        engine = engine_of(folder_of(model, tmp_path / "base"), slots=8)
        await engine.start()
        for policy, stream in {"a": a, "b": b, "base": silent(a)}.items():
            await send(engine, stream, 0, policy)
        prompts = [*ragged(4, 3), np.array([2, 3])]
        asked = [
            replace(request(f"{policy}{i}", prompt, seed=7), policy=policy)
            for i, prompt in enumerate(prompts)
            for policy in models
        ]
        done = await asyncio.gather(*(engine.generate(r) for r in asked))
        answers = set()
        for wanted, got in zip(asked, done, strict=True):
            tokens = got.columns["tokens"]
            plain = plain_logprobs(models[wanted.policy], wanted.prompt["tokens"], tokens)
            np.testing.assert_allclose(got.columns["logprobs"], plain, atol=3e-5)
            assert {span.version for span in got.spans} == {version(0, wanted.policy)}
            answers.add((wanted.policy, tuple(tokens.tolist())))
        assert len(answers) > len(prompts)  # one prompt and seed, three policies: different answers
        await engine.close()

    run(go())


def test_rows_without_adapter_equal_the_base_bit_for_bit(tmp_path: Path) -> None:
    model = model_of(ARCHITECTURES["qwen3"])
    a, b = adapter(model, 1), adapter(model, 2)

    async def go() -> None:
        engine = engine_of(folder_of(model, tmp_path / "base"))
        await engine.start()
        await send(engine, silent(a), 0, "base")
        forward = engine.slots.forward
        ids, lengths = torch.arange(30).reshape(6, 5) + 2, torch.full((6,), 5)
        which = np.array([0, 1, 2, 0, 1, 0])
        plain, entries = forward.prefill(ids, lengths, np.zeros(6, np.int64))
        arena = torch.zeros(*entries.shape[:3], 8, entries.shape[4])
        arena[:, :, :, :5] = entries
        step = (torch.arange(6) + 2, lengths, arena, 6, None)
        decoded = forward.decode(*step, np.zeros(6, np.int64))
        await send(engine, a, 0, "a")
        await send(engine, b, 0, "b")
        mixed, _ = forward.prefill(ids, lengths, which)
        same = [bool(torch.equal(x, y)) for x, y in zip(plain, mixed, strict=True)]
        assert same == [True, False, False, True, False, True]
        redecoded = forward.decode(*step, which)
        same = [bool(torch.equal(x, y)) for x, y in zip(decoded, redecoded, strict=True)]
        assert same == [True, False, False, True, False, True]
        # One adapter in the whole batch takes a shorter way to the same numbers.
        alone, _ = forward.prefill(ids, lengths, np.ones(6, np.int64))
        torch.testing.assert_close(alone[[1, 4]], mixed[[1, 4]], atol=2e-5, rtol=1e-5)
        await engine.close()

    run(go())


def test_an_adapter_is_swapped_between_two_steps(tmp_path: Path) -> None:
    model = model_of(ARCHITECTURES["qwen3"])
    first, second = adapter(model, 1), adapter(model, 2)

    async def go() -> None:
        engine = engine_of(folder_of(model, tmp_path / "base"))
        await engine.start()
        await send(engine, first, 0, "a")
        await send(engine, adapter(model, 3), 0, "b")
        engine.slots.is_stop[:] = False
        steps, original = 0, engine.slots.step

        def step() -> None:
            nonlocal steps
            steps += 1
            original()
            if steps == 6:
                engine._paused = True  # between two steps

        engine.slots.step = step
        asked = [replace(request(p, [2, 3, 4], seed=5, max_new_tokens=40), policy=p) for p in ("a", "b")]
        tasks = [asyncio.ensure_future(engine.generate(r)) for r in asked]
        while steps < 6:
            await asyncio.sleep(0.001)
        await send(engine, second, 1, "a")
        await engine.resume()
        one, other = await asyncio.gather(*tasks)
        cut = one.spans[0].end
        assert [s.version for s in one.spans] == [version(0, "a"), version(1, "a")] and 0 < cut < 40
        assert [s.version for s in other.spans] == [version(0, "b")]
        old = plain_logprobs(merged(model, first), [2, 3, 4], one.columns["tokens"])
        np.testing.assert_allclose(one.columns["logprobs"][:cut], old[:cut], atol=3e-5)
        assert np.abs(one.columns["logprobs"][cut:] - old[cut:]).max() > 1e-3
        # What starts now sees nothing of the old adapter.
        new = await engine.generate(replace(request("later", [2, 3, 4], seed=5), policy="a"))
        plain = plain_logprobs(merged(model, second), [2, 3, 4], new.columns["tokens"])
        np.testing.assert_allclose(new.columns["logprobs"], plain, atol=3e-5)
        await engine.close()

    run(go())


def test_evidence_is_of_what_is_computed_with(tmp_path: Path) -> None:
    model = model_of(ARCHITECTURES["qwen3"])
    a, b = adapter(model, 1), adapter(model, 2)

    async def go() -> None:
        engine = engine_of(folder_of(model, tmp_path / "base"))
        await engine.start()
        await send(engine, a, 0, "a")
        await send(engine, b, 3, "b")
        for policy, number, stream in (("a", 0, a), ("b", 3, b)):
            found = await engine.port("tensors").evidence(version(number, policy), [spec for spec, _ in stream])
            assert found == {spec.name: piece_digests(spec, tensor.numpy()) for spec, tensor in stream}
        stack = engine.lanes.base.adapters.stacks[0, "qkv"]
        with torch.inference_mode():
            stack.b[stack.runs[0], :64] += 1.0  # the q_proj of policy a
        found = await engine.port("tensors").evidence(version(0, "a"), [spec for spec, _ in a])
        moved = [s.name for s, t in a if found[s.name] != piece_digests(s, t.numpy())]
        assert moved == [f"{PREFIX}model.layers.0.self_attn.q_proj.lora_B.weight"]
        # No tensor at all: the same adapter under another version.
        await send(engine, [], 4, "b")
        assert engine.lanes.versions["b"] == version(4, "b")
        await engine.close()

    run(go())


def test_what_is_refused(tmp_path: Path) -> None:
    model = model_of(ARCHITECTURES["qwen3"])
    a = adapter(model, 1)
    whole = [(TensorSpec(name=n, shape=tuple(p.shape), dtype="F32"), p.detach()) for n, p in model.named_parameters()]

    async def go() -> None:
        engine = engine_of(folder_of(model, tmp_path / "base"))
        await engine.start()
        await send(engine, a, 0, "a")
        with pytest.raises(WeightError, match="was sent an adapter before, and now whole weights"):
            await send(engine, whole, 1, "a")
        with pytest.raises(WeightError, match=r"lora_A.* of rank 3, and no .*lora_B"):
            await send(engine, a[:-1], 1, "a")
        with pytest.raises(WeightError, match="came twice"):
            await send(engine, [*a, a[0]], 1, "a")
        broken = [(spec, t * float("nan") if i == 3 else t) for i, (spec, t) in enumerate(a)]
        with pytest.raises(WeightError, match="is not finite"):
            await send(engine, broken, 1, "a")
        spec, tensor = a[0]
        with pytest.raises(WeightError, match="axis 1 must be 64"):
            await send(engine, [(replace(spec, shape=(64, 3)), tensor.t())], 1, "a")
        with pytest.raises(WeightError, match=r"no place for the adapter tensor .*lora_magnitude_vector"):
            await send(
                engine,
                [(replace(spec, name=spec.name.replace("lora_A.weight", "lora_magnitude_vector")), tensor)],
                1,
                "a",
            )
        with pytest.raises(WeightError, match="is F64"):
            await send(engine, [(replace(spec, dtype="F64"), tensor.double())], 1, "a")
        await send(engine, whole, 0, "w")  # another policy may have whole weights: a model of its own
        done = await asyncio.gather(
            *(engine.generate(replace(request(p, [2, 3]), policy=p)) for p in ("w", "nobody")), return_exceptions=True
        )
        assert isinstance(done[1], EngineError) and "'nobody'" in str(done[1])
        await send(engine, a, 2, "a")  # a whole transfer heals what was refused
        await engine.generate(replace(request("again", [2, 3]), policy="a"))
        await engine.close()

        drawn = engine_of(ModelSource(asked="drawn", architecture=ARCHITECTURES["qwen3"]))
        await drawn.start()
        with pytest.raises(CapabilityError, match="no folder that it could read the base from"):
            await send(drawn, a, 0, "a")
        await drawn.close()
        constant = engine_of(ModelSource(asked="x", folder=tmp_path / "base"), batch_invariant=True, slots=2)
        await constant.start()
        with pytest.raises(CapabilityError, match="neither with batch_invariant"):
            await send(constant, a, 0, "a")
        await constant.close()
        (tmp_path / "base" / "model.safetensors").write_bytes(b"torn")
        torn = engine_of(ModelSource(asked="x", folder=tmp_path / "base"))
        await torn.start()
        with pytest.raises(EngineError, match=r"the base .* cannot be read"):
            await send(torn, a, 0, "a")
        await torn.close()

    run(go())


def test_policies_of_one_engine_are_alike(tmp_path: Path) -> None:
    source = folder_of(model_of(ARCHITECTURES["qwen3"]), tmp_path / "base")

    def policy(name: str, **changes: Any) -> Any:
        keys = {"tokenizer": None, "alphabet": None, "architecture": None, "source": "base"} | changes
        renderer = SimpleNamespace(use="text", options=None)
        return SimpleNamespace(name=name, model=SimpleNamespace(core=SimpleNamespace(**keys)), renderer=renderer)

    def build(second: Any) -> None:
        run: Any = SimpleNamespace(policies={"a": policy("a"), "b": second})
        context = BuildContext(place=Place.CONTROLLER, name="local", run=run, model=source, renderer=RENDERER)
        miles_rollout().build(LocalConfig(), context)

    build(policy("b"))
    for changes in ({"source": "other"}, {"tokenizer": "chars"}):
        with pytest.raises(ConfigError, match="serves policies 'a' and 'b', whose tokenizer, renderer or architecture"):
            build(policy("b", **changes))


def test_a_policy_without_any_tensor_is_refused_and_costs_nobody_an_answer(tmp_path: Path) -> None:
    model = model_of(ARCHITECTURES["qwen3"])

    async def go() -> None:
        engine = engine_of(folder_of(model, tmp_path / "base"))
        await engine.start()
        await send(engine, adapter(model, 1), 0, "a")
        with pytest.raises(WeightError, match="no tensor of policy 'b' has come, and it has none here yet"):
            await send(engine, [], 0, "b")
        await send(engine, [], 1, "a")  # what it has, under a new version
        with pytest.raises(EngineError, match="serves 'a'"):
            await engine.generate(replace(request("x", [3]), policy="b"))
        assert (await engine.generate(replace(request("y", [3], max_new_tokens=2), policy="a"))).spans
        await engine.close()

    run(go())
