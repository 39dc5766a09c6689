"""Schedules by hand, AdamW and clipping against plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fsdp_support import batch_of, bound, make_backend, random_groups, weights

from miles_backend_fsdp.optimizer import RoleOptimizer, learning_rate, local
from miles_core.config.schema import Decay, OptimizerConfig
from miles_core.errors import BackendError


@pytest.mark.parametrize(
    ("decay", "update", "want"),
    [
        ("constant", 0, 0.25),
        ("constant", 3, 1.0),
        ("constant", 13, 1.0),
        ("linear", 3, 1.0),
        ("linear", 4, 1.0),
        ("linear", 9, 1 - 0.9 * 0.5),
        ("linear", 14, 0.1),
        ("linear", 99, 0.1),
        ("cosine", 4, 1.0),
        ("cosine", 9, 0.1 + 0.9 * 0.5),
        ("cosine", 14, 0.1),
    ],
)
def test_schedule_by_hand(decay: str, update: int, want: float) -> None:
    config = OptimizerConfig(lr=2.0, decay=Decay[decay], warmup_updates=4, min_lr_ratio=0.1)
    assert learning_rate(config, update, 14) == pytest.approx(2.0 * want)


def test_a_warm_up_longer_than_the_run_is_a_ramp() -> None:
    config = OptimizerConfig(lr=1.0, decay=Decay.linear, warmup_updates=10)
    assert [learning_rate(config, u, 3) for u in range(3)] == pytest.approx([0.1, 0.2, 0.3])


def gradients(backend: Any, batch: Any, terms: Any = None) -> dict[str, torch.Tensor]:
    """Of the whole minibatch, without a step."""
    backend._backward(batch, {"actor": terms or [bound()]})
    optimizer = backend._role("main", "actor").optimizer
    found = {name: local(p.grad).clone() for name, p in optimizer._named}
    optimizer.drop_gradients()
    return found


def test_updates_equal_plain_adamw_with_clipping() -> None:
    config = OptimizerConfig(lr=3e-3, weight_decay=0.1, max_grad_norm=0.5, decay=Decay.linear, warmup_updates=1)
    backend = make_backend(optimizer=config, total=5)
    plain = {name: torch.nn.Parameter(tensor) for name, tensor in weights(backend).items()}
    adamw = torch.optim.AdamW(plain.values(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for seed in range(3):
        batch = batch_of(random_groups(seed), seed)
        for name, gradient in gradients(backend, batch).items():
            plain[name].grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(plain.values(), 0.5)
        adamw.param_groups[0]["lr"] = learning_rate(config, seed, 5)
        adamw.step()
        result = backend.update(batch, [bound()])
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert result.metrics["lr"] == (pytest.approx(learning_rate(config, seed, 5)), 1.0)
    for name, tensor in weights(backend).items():
        assert torch.allclose(tensor, plain[name], rtol=1e-5, atol=1e-7), name
    backend.close()


def test_huge_weights_are_finite_weights() -> None:
    module = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(module.weight, 1e25)  # whose squares are not finite in float32
    optimizer = RoleOptimizer(module, OptimizerConfig(lr=1e-3), 2, 1)
    module(torch.zeros(1, 2)).sum().backward()
    assert optimizer.step("it") > 0 and optimizer.updates == 1


def test_weights_that_are_not_finite_behind_an_update_stop_the_run() -> None:
    backend = make_backend(optimizer=OptimizerConfig(lr=1e38))
    said = r"update 0 \(lr 1e\+38, .* left weights of role 'actor' of policy 'main' that are not finite"
    with pytest.raises(BackendError, match=said):
        backend.update(batch_of(random_groups(0)), [bound()])
    backend.close()


def test_a_norm_that_is_not_finite_changes_nothing() -> None:
    backend = make_backend()
    before = weights(backend)
    batch = batch_of(random_groups(0))
    with pytest.raises(BackendError, match=r"gradient norm of role 'actor' of policy 'main' is (inf|nan)"):
        backend.update(batch, [bound(coef=math.inf)])
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(backend).items())
    assert backend._role("main", "actor").optimizer.updates == 0
    assert backend.update(batch, [bound()]).skipped == ""
    backend.close()
