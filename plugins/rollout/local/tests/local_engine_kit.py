"""What the tests of this plugin share: tiny random models of every verified architecture, a character renderer, a
started engine, and a plain forward to compare with."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from miles_core.contracts.engine import Request
from miles_core.contracts.model import ModelSource
from miles_core.contracts.weights import TensorSpec
from miles_core.provider import BuildContext, Place
from miles_core.records import Sampling, Version
from miles_rollout_local.config import Dtype, LocalConfig
from miles_rollout_local.conformance import model_of as model_of
from miles_rollout_local.plugin import miles_rollout
from miles_rollout_local.weights import DTYPES

VOCABULARY = 45
EOS = 1
COMMON: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=96,
    initializer_range=0.15,  # large enough that rows, positions and neighbours matter
    pad_token_id=0,
    eos_token_id=EOS,
    bos_token_id=None,
)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": dict(model_type="llama", **COMMON),
    "llama-biased": dict(model_type="llama", attention_bias=True, mlp_bias=True, **COMMON),
    "llama3-rope": dict(
        model_type="llama",
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=10000.0,
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        **COMMON,
    ),
    "smollm2": dict(model_type="llama", tie_word_embeddings=True, **{**COMMON, "num_key_value_heads": 1}),
    "mistral": dict(model_type="mistral", sliding_window=None, head_dim=24, **COMMON),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True, **COMMON),
    "qwen3": dict(model_type="qwen3", head_dim=32, tie_word_embeddings=True, **COMMON),
    "qwen3-moe": dict(
        model_type="qwen3_moe",
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        decoder_sparse_step=2,  # the first layer is dense
        norm_topk_prob=True,
        **COMMON,
    ),
}
SPELLED = {dtype: name for name, dtype in DTYPES.items()}


class Chars:
    """A tokenizer whose id i >= 2 is one character."""

    def decode(self, ids: Any, *, skip_special: bool = True) -> str:
        return "".join(chr(95 + i) for i in ids if i >= 2)


RENDERER: Any = SimpleNamespace(tokenizer=Chars(), stop_ids=(EOS,))


def stream(model: Any) -> list[tuple[TensorSpec, torch.Tensor]]:
    """Specs and tensors under the module's names, tied tensors once."""
    return [
        (TensorSpec(name=name, shape=tuple(p.shape), dtype=SPELLED[p.dtype]), p.detach())
        for name, p in model.named_parameters()
    ]


def build(architecture: dict[str, Any], *, core: Any = None, run: Any = None, **options: Any) -> Any:
    source = ModelSource(asked="test", architecture=architecture)
    context = BuildContext(
        place=Place.CONTROLLER,
        name="local",
        run=run,
        model=source,
        renderer=RENDERER,
        core=core,  # type: ignore[arg-type]
    )
    options["dtype"] = Dtype(options.get("dtype", "float32"))
    return miles_rollout().build(LocalConfig(**options), context)


def version(number: int, policy: str = "main") -> Version:
    return Version(policy=policy, lineage=0, number=number)


async def publish(engine: Any, model: Any, number: int) -> None:
    port = engine.port("tensors")
    await port.begin(version(number))
    await port.load(stream(model))
    await port.end(version(number))


async def started(model: Any, architecture: dict[str, Any], **options: Any) -> Any:
    engine = build(architecture, **options)
    await engine.start()
    await publish(engine, model, 0)
    return engine


def request(name: str, prompt: Any, *, seed: int = 0, want: Any = (), resume: Any = None, **sampling: Any) -> Request:
    sampling.setdefault("max_new_tokens", 12)
    return Request(
        id=name,
        policy="main",
        prompt={"tokens": np.asarray(prompt, np.int32)},
        sampling=Sampling(**sampling),
        seed=seed,
        want=frozenset(want),
        resume=resume,
        deadline_s=60.0,
    )


def plain_logprobs(model: Any, prompt: Any, answer: Any, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of `answer` after `prompt`, from one plain forward."""
    ids = torch.tensor([[*map(int, prompt), *map(int, answer)]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def ragged(count: int, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(2, VOCABULARY, generator.integers(1, 20)) for _ in range(count)]


def run(coroutine: Any) -> Any:
    """Run with a deadline: a wait that never ends fails instead of hanging."""
    return asyncio.run(asyncio.wait_for(coroutine, 120))
