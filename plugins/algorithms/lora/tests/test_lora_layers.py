"""The adapted layer in hand-computed numbers, its gradients, its merge, and its names in PEFT."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from miles_algo_lora.config import Export, LoraConfig
from miles_algo_lora.layers import AdaptedLinear, Switch, adapt, merged
from miles_algo_lora.merge import PEFT_PREFIX


def layer(dora: bool = False, bias: bool = False, dropout: float = 0.0, rank: int = 1, scale: float = 2.0) -> Any:
    """W = [[1, 2], [3, 4]], A = [[1, −1]], B = [[2], [0.5]]."""
    linear = nn.Linear(2, 2, bias=bias)
    switch = Switch()
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        if bias:
            linear.bias.copy_(torch.tensor([10.0, 20.0]))
    adapt(linear, rank=rank, scale=scale, dora=dora, dropout=dropout, seed=3, number=0, switch=switch)
    if rank == 1:
        with torch.no_grad():
            linear.lora_A.weight.copy_(torch.tensor([[1.0, -1.0]]))
            linear.lora_B.weight.copy_(torch.tensor([[2.0], [0.5]]))
    return linear


def test_scales() -> None:
    """alpha / r, and alpha / sqrt(r) where rank-stabilised."""
    assert LoraConfig(rank=4, alpha=16.0).scale == 4.0
    assert LoraConfig(rank=4, alpha=16.0, rslora=True).scale == 8.0
    assert LoraConfig(rank=8, alpha=16.0, rslora=True).scale == pytest.approx(16 / math.sqrt(8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, "alpha is 0; it must be above 0"),
        ({"dropout": 1.0}, "dropout is 1; it must be below 1"),
        ({"targets": []}, "neither may be empty"),
        ({"dora": True, "dropout": 0.1}, "dora with dropout"),
        ({"dora": True, "export": Export.adapter}, "engines know plain LoRA only"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraConfig(**options)


def test_forward_by_hand() -> None:
    """x = [3, 1]: W x = [5, 13]; A x = 2; s·B A x = 2·[4, 1] = [8, 2]."""
    x = torch.tensor([[3.0, 1.0]])
    assert layer()(x).tolist() == [[13.0, 15.0]]
    assert layer(bias=True)(x).tolist() == [[23.0, 35.0]]
    assert merged(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), *adapter_of(layer()), 2.0).tolist() == [
        [5.0, -2.0],
        [4.0, 3.0],
    ]
    off = layer(bias=True)
    off.switch.off = True
    assert off(x).tolist() == [[15.0, 33.0]]


def adapter_of(linear: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return linear.lora_A.weight.detach(), linear.lora_B.weight.detach()


def test_dora_by_hand() -> None:
    """W + s·B A = [[5, −2], [4, 3]], rows of length √29 and 5; magnitudes are those of W: √5 and 5."""
    x = torch.tensor([[3.0, 1.0]])
    one, two = math.sqrt(5 / 29) * 13.0, 15.0
    torch.testing.assert_close(layer(dora=True)(x), torch.tensor([[one, two]]))
    torch.testing.assert_close(layer(dora=True, bias=True)(x), torch.tensor([[one + 10, two + 20]]))
    linear = layer(dora=True)
    whole = merged(linear.weight.detach(), *adapter_of(linear), 2.0, linear.lora_magnitude_vector.detach())
    torch.testing.assert_close(x @ whole.t(), linear(x).detach())


@pytest.mark.parametrize("dora", [False, True])
def test_gradients_are_those_of_finite_differences_and_only_of_the_adapter(dora: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(5, 4).double()
    adapt(linear, rank=2, scale=1.5, dora=dora, dropout=0.0, seed=1, number=0, switch=Switch())
    nn.init.normal_(linear.lora_B.weight)  # type: ignore[union-attr]
    linear.requires_grad_(True)
    linear.weight.requires_grad_(False)
    linear.bias.requires_grad_(False)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    a, b = linear.lora_A.weight, linear.lora_B.weight  # type: ignore[union-attr]

    def run(x: Any, a: Any, b: Any) -> Any:
        values = {"lora_A.weight": a, "lora_B.weight": b}
        return torch.func.functional_call(linear, values, (x,))

    if not dora:  # under DoRA the length is a constant of the gradient, which differences would not see
        assert torch.autograd.gradcheck(run, (x, a.detach().requires_grad_(), b.detach().requires_grad_()))
    linear(x).square().sum().backward()
    assert linear.weight.grad is None and linear.bias.grad is None
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in (a, b))


def test_a_fresh_adapter_changes_no_bit_and_takes_no_random_number() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(6, 3)
    x = torch.randn(4, 6)
    plain, state = linear(x), torch.get_rng_state()
    adapt(linear, rank=2, scale=2.0, dora=False, dropout=0.0, seed=9, number=0, switch=Switch())
    assert torch.equal(linear(x), plain) and torch.equal(torch.get_rng_state(), state)
    assert isinstance(linear, AdaptedLinear)
    assert linear.lora_A.weight.abs().max() <= 1 / math.sqrt(6) and not linear.lora_B.weight.any()
    names = [name for name, _ in linear.named_parameters()]
    assert names == ["weight", "bias", "lora_A.weight", "lora_B.weight"]


def test_dropout_is_a_function_of_its_key() -> None:
    linear = layer(dropout=0.5, rank=2)
    nn.init.normal_(linear.lora_B.weight)
    x = torch.ones(400, 2)
    plain = linear(x)
    linear.switch.key = 5
    once, again = linear(x), linear(x)
    assert torch.equal(once, again) and not torch.equal(once, plain)
    linear.switch.key = 6
    assert not torch.equal(linear(x), once)
    kept = linear._mask(x, 5)
    assert set(kept.unique().tolist()) == {0.0, 2.0} and 0.4 < (kept > 0).float().mean() < 0.6
    torch.testing.assert_close(once.mean(0), plain.mean(0), atol=0.5, rtol=0.2)
    linear.switch.off = True
    assert torch.equal(linear(x), nn.functional.linear(x, linear.weight))


@pytest.mark.parametrize("options", [{}, {"rslora": True}, {"dora": True}])
def test_peft_computes_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    """The same tensors under the same names in the library: equal outputs and equal gradients."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    ours = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    theirs = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    theirs.load_state_dict(ours.state_dict())
    config = LoraConfig(rank=4, alpha=6.0, **options)
    ours.requires_grad_(False)
    for number, name in enumerate(("0", "2")):
        adapt(
            ours.get_submodule(name), rank=4, scale=config.scale, dora=config.dora, dropout=0.0, seed=number,
            number=number, switch=Switch(),
        )  # fmt: skip
        nn.init.normal_(ours.get_submodule(name).lora_B.weight)  # type: ignore[union-attr, arg-type]
    told = peft.LoraConfig(
        r=4, lora_alpha=6.0, target_modules=["0", "2"], use_rslora=config.rslora, use_dora=config.dora
    )
    wrapped = peft.get_peft_model(theirs, told)
    tensors = {f"{PEFT_PREFIX}{n}": p.detach() for n, p in ours.named_parameters() if ".lora_" in n}
    loaded = peft.set_peft_model_state_dict(wrapped, tensors)
    assert not loaded.unexpected_keys
    x = torch.randn(5, 6)
    torch.testing.assert_close(ours(x), wrapped(x), atol=1e-6, rtol=1e-5)
    ours(x).square().sum().backward()
    wrapped(x).square().sum().backward()
    for n, p in ours.named_parameters():
        if ".lora_" not in n:
            assert p.grad is None
            continue
        stem, _, last = n.rpartition(".lora_")
        part = last.partition(".")[0]
        other = next(q for m, q in wrapped.named_parameters() if f"{stem}.lora_{part}" in m)
        torch.testing.assert_close(p.grad, other.grad, atol=2e-5, rtol=1e-4)
