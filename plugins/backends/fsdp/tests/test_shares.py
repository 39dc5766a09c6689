"""A critic that shares the actor's module: two heads, one forward, one optimizer; the value at the last token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_support import (
    BOOTSTRAP,
    SHARES,
    TERMS,
    VALUES,
    adapter,
    batch_of,
    make_backend,
    random_groups,
    source,
    weights,
)
from safetensors import safe_open

from miles_backend_fsdp.config import Dtype, FsdpConfig
from miles_backend_fsdp.optimizer import local
from miles_core.contracts.learning import LOGPROBS
from miles_core.errors import CapabilityError


def nudge(backend: Any) -> None:
    """Give the value head something other than its beginning of zeros."""
    with torch.no_grad():
        module = backend._role("main", "critic").module
        generator = torch.Generator().manual_seed(3)
        shard = local(module.value.weight)
        shard.copy_(torch.randn(shard.shape, generator=generator))


def grads(backend: Any) -> dict[str, torch.Tensor]:
    named = backend._role("main", "actor").optimizer._named
    return {name: local(p.grad).clone() for name, p in named if p.grad is not None}


def test_both_losses_meet_in_the_trunk_as_in_plain_pytorch() -> None:
    backend = make_backend(roles=SHARES)
    nudge(backend)
    batch = batch_of(random_groups(7))
    backend._backward(batch, {"actor": TERMS[:1], "critic": TERMS[1:]})
    found = grads(backend)
    module = adapter().build(source(), 11, head="lm+value")
    with torch.no_grad():
        module.value.weight.copy_(local(backend._role("main", "critic").module.value.weight))
    total: Any = 0.0
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        tokens = torch.from_numpy(batch.columns["tokens"][start:end].astype(np.int64))
        hidden = module.lm.model(input_ids=tokens[None])[0][0, :-1]
        logprobs = torch.log_softmax(module.lm.lm_head(hidden), -1).gather(1, tokens[1:, None])[:, 0]
        values = module.value(hidden)[:, 0]
        weight = torch.from_numpy(batch.columns["weight.other"][start + 1 : end])
        advantage = torch.from_numpy(batch.columns["advantages"][start + 1 : end])
        total = total + (weight * (-advantage * logprobs + 0.5 * (values - 1) ** 2)).sum()
    total.backward()
    for name, parameter in module.named_parameters():
        scale = float(parameter.grad.abs().max())
        assert torch.allclose(found[name], parameter.grad, rtol=1e-4, atol=1e-5 * scale), name
    backend.close()


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({"layout": "packed"}, {"micro_tokens": 40}),
        ({"layout": "padded"}, {"micro_tokens": 30, "unit_mib": 0, "checkpointing": True}),
        ({"head_mib": 1}, {"micro_tokens": 1}),
    ],
)
def test_no_split_changes_an_update(options: dict[str, Any], config: dict[str, Any]) -> None:
    batch = batch_of(random_groups(7))
    found = []
    for given, cut in (({}, {}), (options, config)):
        backend = make_backend(roles=SHARES, options=given, config=FsdpConfig(**cut))
        nudge(backend)
        backend._backward(batch, {"actor": TERMS[:1], "critic": TERMS[1:]})
        found.append(grads(backend))
        backend.close()
    for name, want in found[0].items():
        assert torch.allclose(found[1][name], want, rtol=1e-4, atol=1e-5 * float(want.abs().max())), name


def test_one_forward_and_one_step_serve_both() -> None:
    backend = make_backend(roles=SHARES)
    module = backend._role("main", "actor").module
    forwards = []
    module.register_forward_pre_hook(lambda *_: forwards.append(1))
    batch = batch_of(random_groups(7))
    first = backend.update(batch, TERMS)
    assert len(forwards) == 1 and backend._role("main", "critic").optimizer.updates == 1
    assert set(first.metrics) >= {"loss", "lr", "critic.loss", "other"} and "critic.lr" not in first.metrics
    assert first.metrics["other"][0] == pytest.approx(1.0, abs=1e-5)  # the head begins at 0
    scored = backend.score(batch, [VALUES, LOGPROBS])
    assert len(forwards) == 2 and set(scored) == {"critic.values", "proximal_logprobs"}
    for _ in range(5):
        last = backend.update(batch, TERMS)
    assert last.metrics["other"][0] < first.metrics["other"][0]
    backend.close()


def test_the_head_changes_nothing_that_the_actor_begins_with_or_exports(tmp_path: Path) -> None:
    alone, shared = make_backend(), make_backend(roles=SHARES)
    plain = weights(alone)
    both = weights(shared)
    assert both.keys() - plain.keys() == {"value.weight", "value.bias"} and not both["value.weight"].any()
    assert all(torch.equal(both[name], tensor) for name, tensor in plain.items())
    specs = [spec for spec, _ in alone.export("main", "full")]
    assert [spec for spec, _ in shared.export("main", "full")] == specs
    shared.save_model("main", tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(spec.name for spec in specs)
    alone.close()
    shared.close()


@pytest.mark.parametrize("dtype", list(Dtype))
def test_a_resumed_run_continues_to_the_bit_and_copies_follow(dtype: Dtype, tmp_path: Path) -> None:
    roles = {**SHARES, "old": {"init": "actor", "update": "ema", "decay": 0.5, "optimizer": None}}
    config = FsdpConfig(dtype=dtype)
    batch = batch_of(random_groups(7))
    straight, resumed = (make_backend(roles=roles, config=config) for _ in range(2))
    straight.update(batch, TERMS)
    straight.blend("main", "old", "actor", 0.5)
    straight.save(tmp_path)
    resumed.load(tmp_path)
    for backend in (straight, resumed):
        backend.update(batch, TERMS)
        backend.blend("main", "old", "actor", 0.5)
    for role in ("actor", "old"):
        ours, theirs = weights(straight, role), weights(resumed, role)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert "value.weight" not in weights(straight, "old") and weights(straight)["value.weight"].any()
    straight.close()
    resumed.close()


def test_what_cannot_share_is_refused() -> None:
    for wrong in (
        {"critic": {"init": "actor", "update": "shares", "head": "lm"}},
        {**SHARES, "second": {"init": "actor", "update": "shares", "head": "value"}},
        {"old": {"init": "actor", "update": "frozen"}, "critic": {"init": "old", "update": "shares", "head": "value"}},
    ):
        with pytest.raises(CapabilityError, match="one value head beside a trained lm head"):
            make_backend(roles=wrong)
    with pytest.raises(CapabilityError, match="no head 'both'"):
        adapter().build(source(), 1, head="both")


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("share", [True, False])
def test_the_value_at_the_last_token(layout: str, share: bool) -> None:
    made = adapter(layout=layout, share_prefixes=share)
    module = made.build(source(), 3, head="value")
    torch.nn.init.normal_(module.value.weight, generator=torch.Generator().manual_seed(1))
    batch = batch_of(random_groups(2))
    trainable = batch.columns["trainable"].copy()
    trainable[batch.offsets[1] : batch.offsets[2]] = False  # one trajectory that needs nothing
    trainable[batch.offsets[3] - 1] = False  # one that ends in text of the environment
    batch = batch.with_columns({"trainable": trainable}, ())
    found = made.outputs(module, batch, [VALUES, BOOTSTRAP])
    values = made.outputs(module, batch, [VALUES])["values"]
    torch.testing.assert_close(found["values"], values, rtol=1e-4, atol=1e-5)
    at = batch.offsets[1:] - 1
    for row, last in enumerate(at):
        tokens = torch.from_numpy(batch.columns["tokens"][batch.offsets[row] : last + 1].astype(np.int64))[None]
        want = 0.0 if row == 1 else module.value(module.lm.model(input_ids=tokens, use_cache=False)[0][0, -1]).item()
        assert found["bootstrap_value"][last].item() == pytest.approx(want, abs=1e-5)
    elsewhere = np.ones(batch.units, bool)
    elsewhere[at] = False
    assert not found["bootstrap_value"][torch.from_numpy(elsewhere)].any()
    none = batch.with_columns({"trainable": np.zeros(batch.units, bool)}, ())
    assert not made.outputs(module, none, [BOOTSTRAP])["bootstrap_value"].any()


def test_a_backend_scores_it_for_the_role() -> None:
    backend = make_backend(roles=SHARES)
    nudge(backend)
    batch = batch_of(random_groups(2))
    scored = backend.score(batch, [VALUES, BOOTSTRAP, LOGPROBS])
    assert set(scored) == {"critic.values", "critic.bootstrap_value", "proximal_logprobs"}
    assert scored["critic.bootstrap_value"][batch.offsets[1:] - 1].all()
    assert scored["critic.values"].dtype == np.float32
    backend.close()
