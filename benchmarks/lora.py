"""What adapters cost: a training step against a full one, and a decode batch of several policies against one model.

    OMP_NUM_THREADS=1 python benchmarks/lora.py [--rounds 20] [--sizes tiny small] [--rank 8]

Training: one update of backend `fsdp` on the same batches, sides taking turns; printed is CPU time divided by that of a
full update, and the optimizer's memory. `peft` is the same with layers that the library injects, where it is
installed. Decoding: 64 requests in one batch of the engine `local`; printed is CPU time divided by that of whole
weights for one policy, with one adapter, and with the requests spread over 2, 4 and 8 policies.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from miles_algo_lora.config import LoraConfig
from miles_algo_lora.trainer import LoraTrainer
from miles_backend_fsdp.backend import FsdpBackend
from miles_backend_fsdp.causal_lm import CausalLM
from miles_backend_fsdp.config import CausalLMConfig, FsdpConfig
from miles_rollout_local.adapters import PREFIX
from rollout_local import SIZES, engine_of, model_of
from train_step import Clip, groups, minibatch

from miles_core.config.schema import OptimizerConfig, RoleConfig, RoleUpdate
from miles_core.contracts.backend import RoleSpec
from miles_core.contracts.engine import Request
from miles_core.contracts.learning import BoundTerm, Output
from miles_core.contracts.model import ModelSource
from miles_core.contracts.weights import TensorSpec
from miles_core.provider import BuildContext, Place
from miles_core.records import Sampling, Version

SHAPES = {"tiny": (16, 16, 6, 6), "small": (4, 8, 8, 24)}
NEW_TOKENS = 32
ROWS = 64


class WithPeft:
    """The library's own layers, injected into the same module."""

    name, columns, adapted = "peft", (), frozenset[Any]()

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def model(self, module: Any, role: str, policy: str) -> Any:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model

        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        return inject_adapter_in_model(PeftConfig(r=self._rank, lora_alpha=16, target_modules=targets), module)


class WithReference(Clip):
    """The clipped objective and k2 of a reference, inside the micro-batch."""

    reference = Output(name="logprobs", role="reference")
    outputs = (*Clip.outputs, reference)

    def __call__(self, view: Any) -> Any:
        found = super().__call__(view)
        distance = view.out(Clip.outputs[0]) - view.out(self.reference)
        return type(found)(value=found.value + 0.01 * distance**2)


def trainer(size: str, extension: Any, reference: str = "") -> FsdpBackend:
    run: Any = SimpleNamespace()
    context = BuildContext(
        place=Place.TRAINER, name="fsdp", run=run, extensions=() if extension is None else (extension,)
    )
    backend = FsdpBackend(FsdpConfig(), context)

    def spec(name: str, **given: Any) -> RoleSpec:
        source = ModelSource(asked="benchmark", architecture=SIZES[size])
        adapter = CausalLM(CausalLMConfig(), share_prefixes=True)
        return RoleSpec(name=name, source=source, adapter=adapter, optimizer=OptimizerConfig(lr=1e-4), **given)

    roles = {"actor": spec("actor")}
    if reference:
        roles["reference"] = spec("reference", init="actor", update=reference)
    backend.build({"main": roles}, {"main": 100})
    return backend


def lora(rank: int) -> LoraTrainer:
    roles = {
        "actor": RoleConfig(update=RoleUpdate.trained),
        "reference": RoleConfig(init="actor", update=RoleUpdate.adapter_off),
    }
    policy = SimpleNamespace(roles=roles, model=SimpleNamespace(core=SimpleNamespace(source="base")))
    run: Any = SimpleNamespace(policies={"main": policy})
    return LoraTrainer(LoraConfig(rank=rank), BuildContext(place=Place.TRAINER, name="lora", run=run))


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    start = time.process_time()
    yield
    into.append(time.process_time() - start)


def training(size: str, rounds: int, rank: int) -> None:
    sides: dict[str, tuple[FsdpBackend, Any]] = {
        "full": (trainer(size, None), Clip()),
        "lora": (trainer(size, lora(rank)), Clip()),
        "full, with a frozen copy as reference": (trainer(size, None, "frozen"), WithReference()),
        "lora, with the base as reference": (trainer(size, lora(rank), "adapter_off"), WithReference()),
    }
    try:
        sides["peft"] = (trainer(size, WithPeft(rank)), Clip())
    except ImportError:
        print("  (peft is not installed)")
    rng = np.random.default_rng(0)
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 2):
        batch = minibatch(rng, groups(rng, *SHAPES[size]))
        for name, (backend, term) in sides.items():
            with timed(spent[name]):
                backend.update(batch, [BoundTerm(name="clip", term=term, coef=1.0)])
            if number < 2:
                spent[name].clear()
    full = statistics.median(spent["full"])
    print(f"training, {size}: a full update takes {1e3 * full:.0f} ms of CPU time")
    for name, (backend, _) in sides.items():
        state = backend._role("main", "actor").optimizer.tensors()
        count = sum(t.numel() for t in state.values())
        print(f"  {name}: {statistics.median(spent[name]) / full:.2f} x full, {8 * count / 2**21:.2f} MiB of moments")
        backend.close()


def adapter_of(model: Any, rank: int, seed: int) -> list[tuple[TensorSpec, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith("_proj"):
            out, inside = module.weight.shape
            for part, shape in (("lora_A", (rank, inside)), ("lora_B", (out, rank))):
                tensor = torch.randn(shape, generator=generator) * 0.02
                found.append((TensorSpec(name=f"{PREFIX}{name}.{part}.weight", shape=shape, dtype="F32"), tensor))
    return found


async def with_adapters(model: Any, architecture: dict[str, Any], folder: Path, rank: int, count: int) -> Any:
    engine = await engine_of(model, architecture, slots=ROWS)  # one lane with whole weights, unused
    engine.lanes._source = ModelSource(asked="benchmark", folder=folder)
    port = engine.port("tensors")
    for number in range(count):
        version = Version(policy=f"p{number}", lineage=0, number=0)
        await port.begin(version)
        await port.load(adapter_of(model, rank, number))
        await port.end(version)
    return engine


async def decode(engine: Any, policies: int) -> None:
    rng = np.random.default_rng(0)
    requests = [
        Request(
            id=str(i),
            policy=f"p{i % policies}" if policies else "main",
            prompt={"tokens": rng.integers(2, 45, 6).astype(np.int32)},
            sampling=Sampling(max_new_tokens=NEW_TOKENS),
            seed=i,
        )
        for i in range(ROWS)
    ]
    await asyncio.gather(*(engine.generate(request) for request in requests))


async def decoding(size: str, rounds: int, rank: int) -> None:
    architecture = SIZES[size]
    model = model_of(architecture)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        sides: dict[str, tuple[Any, int]] = {
            "whole weights, one policy": (await engine_of(model, architecture, slots=ROWS), 0)
        }
        for count in (1, 2, 4, 8):
            engine = await with_adapters(model, architecture, Path(folder), rank, count)
            sides[f"adapters of {count} {'policies' if count > 1 else 'policy'}"] = (engine, count)
        spent: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds + 1):
            for name, (engine, count) in sides.items():
                with timed(spent[name]):
                    await decode(engine, count)
                if not number:
                    spent[name].clear()
        whole = statistics.median(spent["whole weights, one policy"])
        print(f"decoding, {size}: {ROWS} requests x {NEW_TOKENS} tokens take {1e3 * whole:.0f} ms of CPU time")
        for name, (engine, _) in sides.items():
            print(f"  {name}: {statistics.median(spent[name]) / whole:.2f} x one model")
            await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts: list[Callable[[str], None]] = [
        lambda size: training(size, given.rounds, given.rank),
        lambda size: asyncio.run(decoding(size, max(3, given.rounds // 3), given.rank)),
    ]
    for size in given.sizes:
        for part in parts:
            part(size)


if __name__ == "__main__":
    main()
