"""Option `trainable`: what is frozen keeps its bits and costs nothing; what is trained does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_support import adapter, batch_of, bound, make_backend, random_groups, source, weights
from safetensors import safe_open

from miles_backend_fsdp.config import Dtype, FsdpConfig
from miles_core.config.schema import OptimizerConfig
from miles_core.contracts.learning import LOGPROBS
from miles_core.contracts.model import ModelSource
from miles_core.errors import ConfigError

OPTIMIZER = OptimizerConfig(lr=3e-3, weight_decay=0.1, max_grad_norm=None)
LAST = {"trainable": ["model.layers.1.*", "model.norm.weight"]}


def is_last(name: str) -> bool:
    return ".layers.1." in name or name == "lm.model.norm.weight"


def backend(options: Any = LAST, **changes: Any) -> Any:
    return make_backend(**{"options": options, "optimizer": OPTIMIZER, **changes})


@pytest.mark.parametrize("dtype", list(Dtype))
def test_what_is_frozen_keeps_its_bits_and_the_rest_is_trained_as_ever(dtype: Dtype) -> None:
    config = FsdpConfig(dtype=dtype, micro_tokens=40, unit_mib=0)
    part, whole = backend(config=config), backend({}, config=config)
    before = weights(part)
    for made in (part, whole):
        made.update(batch_of(random_groups(0)), [bound()])
    after, everything = weights(part), weights(whole)
    assert any(is_last(name) for name in before) and not all(is_last(name) for name in before)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) != is_last(name), name
        # AdamW is element-wise and nothing was clipped: a trained parameter does not see that others are frozen.
        assert torch.equal(after[name], everything[name]) == is_last(name), name
    part.close()
    whole.close()


def test_frozen_parameters_have_no_gradient_no_optimizer_state_and_no_place_in_checkpoints(tmp_path: Path) -> None:
    made = backend()
    role = made._role("main", "actor")
    made._backward(batch_of(random_groups(0)), {"actor": [bound()]})
    assert {n for n, p in role.module.named_parameters() if p.grad is not None} == {
        n for n, _ in role.module.named_parameters() if is_last(n)
    }
    assert all(is_last(key.partition("/")[2]) for key in role.optimizer.tensors())
    made.save(tmp_path)
    with safe_open(tmp_path / "rank_00000_of_00001.safetensors", framework="pt") as handle:
        assert all(is_last(key.rpartition("/")[2]) for key in handle.keys())
    made.close()


def test_the_backward_pass_ends_at_the_lowest_trained_block() -> None:
    made = adapter(**LAST)
    module = made.build(source(), 1)
    seen = []
    for block in module.lm.model.layers:
        block.register_forward_hook(lambda _, __, out: seen.append(out))
    found = made.outputs(module, batch_of(random_groups(0)), [LOGPROBS])
    assert found["logprobs"].requires_grad
    assert [x.requires_grad for x in seen] == [False, True]


def test_a_resumed_run_continues_to_the_bit_and_exports_everything(tmp_path: Path) -> None:
    roles = {"old": {"init": "actor", "update": "ema"}}
    straight, resumed = backend(roles=roles), backend(roles=roles)

    def train(made: Any, steps: range) -> None:
        for step in steps:
            made.update(batch_of(random_groups(step), step), [bound()])
            made.blend("main", "old", "actor", 0.9)

    train(straight, range(2))
    straight.save(tmp_path / "trainer")
    resumed.load(tmp_path / "trainer")
    train(straight, range(2, 4))
    train(resumed, range(2, 4))
    for role in ("actor", "old"):
        ours = weights(resumed, role)
        assert all(torch.equal(tensor, ours[name]) for name, tensor in weights(straight, role).items())
    resumed.save_model("main", tmp_path / "model")
    again = adapter().build(ModelSource(asked="x", folder=tmp_path / "model"), 0)
    ours = weights(resumed)
    assert all(torch.equal(p, ours[name]) for name, p in again.named_parameters())
    straight.close()
    resumed.close()


def test_a_value_head_is_trained_even_so() -> None:
    module = adapter(**LAST).build(source(), 1, head="value")
    assert {n for n, p in module.named_parameters() if p.requires_grad and not is_last(n)} == {
        "value.weight",
        "value.bias",
    }


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("model.layers.7.*", r"matches no parameter of Qwen3ForCausalLM \(model.layers.0 to model.layers.1, "),
        ("lm_head.weight", r"(?s)Fix: the output layer is the embedding here: name model.embed_tokens.weight"),
        ("layers.1.mlp.*", r"(?s)Fix: name parameters as 'model.layers.1.mlp"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapter(trainable=["model.norm.weight", pattern]).build(source(), 1)
