"""Invariances of the loss and its gradient, roles, skips and extensions, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_support import (
    Reinforce,
    adapter,
    batch_of,
    bound,
    make_backend,
    random_groups,
    source,
    weights,
)

from miles_backend_fsdp.config import CausalLMConfig, Dtype, FsdpConfig
from miles_backend_fsdp.optimizer import local
from miles_core.columns import ColumnSpec, Level
from miles_core.config.schema import OptimizerConfig
from miles_core.contracts.learning import ENTROPY, LOGPROBS, Output, TermOutput
from miles_core.errors import BackendError, CapabilityError, LearnerError
from miles_core.records import Sampling

VALUES = Output(name="values", role="critic", grad=True)


def gradients(backend: Any, batch: Any, terms: Any = None) -> tuple[torch.Tensor, float]:
    """The flattened gradient of the whole minibatch and its loss, without a step."""
    sums = backend._backward(batch, {"actor": terms or [bound()]})
    optimizer = backend._role("main", "actor").optimizer
    flat = torch.cat([local(p.grad).flatten() for _, p in optimizer._named])
    optimizer.drop_gradients()
    return flat, float(sums["loss"][0])


class Ratio(Reinforce):
    """exp(π − π_p)·A, with the ratio as a metric."""

    def __call__(self, view: Any) -> TermOutput:
        rho = (view.out(LOGPROBS) - view["proximal_logprobs"]).exp()
        off = (rho.detach() - 1).abs()
        return TermOutput(value=-rho * view["advantages"], metrics={"max_off": off})


class Pairwise(Reinforce):
    """A group-level term: the square of the signed sum of log-probabilities."""

    level = "group"
    weighted = False

    def __call__(self, view: Any) -> TermOutput:
        return TermOutput(value=view.atom_sum(view.out(LOGPROBS), view["advantages"]) ** 2)


# --- the loss -------------------------------------------------------------------------------------------------------


def test_loss_and_gradient_equal_plain_pytorch() -> None:
    backend = make_backend()
    batch = batch_of(random_groups(7, sampling=Sampling(max_new_tokens=20, temperature=0.7)))
    found, loss = gradients(backend, batch)
    module = adapter().build(source(), 11)
    total: Any = 0.0
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        tokens = torch.from_numpy(batch.columns["tokens"][start:end].astype(np.int64))
        logits = module.lm(input_ids=tokens[None]).logits[0, :-1] / 0.7
        logprobs = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
        scale = batch.columns["advantages"] * batch.columns["weight.loss_term"]
        total = total - (logprobs * torch.from_numpy(scale[start + 1 : end])).sum()
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in module.parameters()])
    assert loss == pytest.approx(total.item(), rel=1e-5)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))
    backend.close()


@pytest.mark.parametrize("term", [Reinforce(), Pairwise()])
@pytest.mark.parametrize(
    ("options", "micro_tokens", "config"),
    [
        ({"layout": "padded"}, 10**6, {}),
        ({"layout": "packed"}, 10**6, {}),
        ({"layout": "packed", "share_prefixes": False, "pack_tokens": 13}, 40, {}),
        ({}, 30, {"unit_mib": 0}),
        ({}, 1, {}),
        ({"head_mib": 1}, 60, {"checkpointing": True}),
    ],
)
def test_the_gradient_does_not_depend_on_the_split(
    term: Any, options: dict[str, Any], micro_tokens: int, config: dict[str, Any]
) -> None:
    batch = batch_of(random_groups(7), proximal=True)
    reference = make_backend(options={"layout": "padded"})
    other = make_backend(options=options, config=FsdpConfig(micro_tokens=micro_tokens, **config))
    want, loss = gradients(reference, batch, [bound(term)])
    got, other_loss = gradients(other, batch, [bound(term)])
    assert other_loss == pytest.approx(loss, rel=1e-5)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
    reference.close()
    other.close()


def test_order_and_masked_garbage_do_not_matter() -> None:
    backend = make_backend()
    groups = random_groups(7)
    batch = batch_of(groups)
    want, loss = gradients(backend, batch)
    order = np.concatenate([np.flatnonzero(batch.group_of[batch.episode_of] == g) for g in (2, 0, 1)])
    got, other = gradients(backend, batch.select(order))
    assert other == pytest.approx(loss, rel=1e-5) and torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    dirty = {name: value.copy() for name, value in batch.columns.items()}
    for name in ("advantages", "behaviour_logprobs"):
        dirty[name][~batch.columns["trainable"]] = np.nan
    got, other = gradients(backend, replace(batch, columns=dirty))
    assert other == loss and torch.equal(got, want)
    backend.close()


def test_an_on_policy_ratio_is_exactly_one() -> None:
    """Scored and trained in the same layout, at temperature 0.7, with gradients on one side only."""
    for options in ({"layout": "padded"}, {"layout": "packed"}):
        backend = make_backend(options=options, config=FsdpConfig(micro_tokens=50))
        batch = batch_of(random_groups(3, groups=6, sampling=Sampling(max_new_tokens=20, temperature=0.7)))
        scored = backend.score(batch, [LOGPROBS])["proximal_logprobs"]
        spec = ColumnSpec(name="proximal_logprobs", level=Level.UNIT, dtype="float32")
        again = batch.with_columns({"proximal_logprobs": scored}, [spec])
        result = backend.update(again, [bound(Ratio())])
        assert result.metrics["loss_term/max_off"] == (0.0, 1.0)
        half = again.select(np.flatnonzero(again.group_of[again.episode_of] < 2))  # another packing
        scored_again = backend.score(half, [LOGPROBS])["proximal_logprobs"]
        assert np.abs(scored_again - half.columns["proximal_logprobs"]).max() > 1e-4  # the update moved it
        backend.close()


def test_scores_in_another_packing_agree_closely() -> None:
    one = make_backend(options={"layout": "padded"})
    two = make_backend(options={"layout": "packed"}, config=FsdpConfig(micro_tokens=25))
    batch = batch_of(random_groups(3, groups=6))
    asked = [LOGPROBS, ENTROPY]
    a, b = one.score(batch, asked), two.score(batch, asked)
    assert set(a) == {"proximal_logprobs", "entropy"}
    for name in a:
        assert a[name].dtype == np.float32 and a[name].shape == (batch.units,)
        assert np.abs(a[name] - b[name]).max() < 5e-6
    one.close()
    two.close()


def test_without_proximal_logprobs_the_ratio_is_one_and_its_gradient_flows() -> None:
    backend = make_backend()
    batch = batch_of(random_groups(7))
    want, _ = gradients(backend, batch)
    got, loss = gradients(backend, batch, [bound(Ratio())])
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-7)
    sums = (batch.columns["advantages"] * batch.columns["weight.loss_term"]).sum()
    assert loss == pytest.approx(-float(sums), rel=1e-5)
    result = backend.update(batch, [bound(Ratio())])
    assert result.metrics["mismatch/abs"][1] == batch.columns["trainable"].sum()
    backend.close()


def test_a_zero_denominator_is_no_step() -> None:
    backend = make_backend()
    before = weights(backend)
    batch = batch_of(random_groups(0))
    none = batch.with_columns({"weight.loss_term": np.zeros(batch.units)}, [])
    result = backend.update(none, [bound()])
    assert "zero denominator" in result.skipped and result.grad_norm == 0.0
    assert result.metrics["loss"] == (0.0, 1.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(backend).items())
    assert backend._role("main", "actor").optimizer.updates == 0  # the schedule did not move
    backend.close()


def test_a_value_that_is_not_finite_names_its_trajectory() -> None:
    backend = make_backend()
    batch = batch_of(random_groups(0))
    unit = int(np.flatnonzero(batch.columns["trainable"])[-1])
    batch.columns["advantages"][unit] = np.nan
    name = batch.trajectory_ids[int(batch.trajectory_of_unit[unit])]
    with pytest.raises(LearnerError, match=f"{name}"):
        backend.update(batch, [bound()])
    backend.close()


# --- precision ------------------------------------------------------------------------------------------------------


def test_bfloat16_keeps_float32_masters() -> None:
    tiny = OptimizerConfig(lr=1e-6, max_grad_norm=None)  # far below half an ulp of most weights
    backend = make_backend(config=FsdpConfig(dtype=Dtype.bfloat16), optimizer=tiny)
    full = make_backend()
    batch = batch_of(random_groups(7))
    want, loss = gradients(full, batch)
    got, other = gradients(backend, batch)
    assert got.dtype == torch.float32
    assert other == pytest.approx(loss, rel=0.05, abs=0.02)
    assert float(torch.nn.functional.cosine_similarity(got, want, dim=0)) > 0.99
    specs = [(spec.dtype, tensor.dtype) for spec, tensor in backend.export("main", "full")]
    assert set(specs) == {("BF16", torch.bfloat16)}
    masters = {n: local(p).clone() for n, p in backend._role("main", "actor").optimizer._named}
    backend.update(batch, [bound()])
    after = dict(backend._role("main", "actor").optimizer._named)
    moved = [n for n, old in masters.items() if not torch.equal(old, local(after[n]))]
    unmoved = [n for n in moved if torch.equal(masters[n].bfloat16(), local(after[n]).bfloat16())]
    assert len(moved) == len(masters) and unmoved  # masters moved where bfloat16 could not
    scores = backend.score(batch, [LOGPROBS])["proximal_logprobs"]
    assert scores.dtype == np.float32 and np.isfinite(scores).all()
    backend.close()
    full.close()


# --- checkpointing and extensions -----------------------------------------------------------------------------------


class Watching:
    """An extension whose context is watched from inside the blocks."""

    name = "watching"
    columns = ()

    def __init__(self) -> None:
        self.inside: list[Any] = []
        self.seen: list[tuple[str, Any, int]] = []

    def model(self, module: Any, role: str, policy: str) -> Any:
        for number, block in enumerate(module.lm.model.layers):
            block.mlp.register_forward_pre_hook(lambda *_, number=number: self._look(number))
        return module

    def _look(self, number: int) -> None:
        purpose, view = self.inside[-1]
        self.seen.append((purpose, view, number))  # itself: the id of a view that is gone may come again

    @contextmanager
    def micro(self, view: Any, role: str, purpose: str) -> Iterator[None]:
        self.inside.append((purpose, view))
        try:
            yield
        finally:
            self.inside.pop()


def test_extensions_are_entered_again_on_recomputation_with_the_same_view() -> None:
    watching = Watching()
    config = FsdpConfig(checkpointing=True, micro_tokens=40)
    backend = make_backend(config=config, extensions=(watching,))
    batch = batch_of(random_groups(7))
    backend.score(batch, [LOGPROBS])
    assert {purpose for purpose, _, _ in watching.seen} == {"score"}
    watching.seen.clear()
    backend.update(batch, [bound()])
    views = {id(view): view for _, view, _ in watching.seen}
    assert len(views) >= 2  # several micro-batches
    for view in views.values():
        numbers = [number for _, seen, number in watching.seen if seen is view]
        assert numbers == [0, 1, 1, 0]  # forward, then recomputed backwards, each under its own view
    assert not watching.inside
    backend.close()


def test_recomputation_changes_no_bit() -> None:
    batch = batch_of(random_groups(7))
    found = []
    for checkpointing in (False, True):
        backend = make_backend(config=FsdpConfig(checkpointing=checkpointing, unit_mib=0))
        found.append(gradients(backend, batch)[0])
        backend.close()
    assert torch.equal(*found)


class Doubling:
    """An extension that changes the weight stream."""

    name = "doubling"
    columns = ()

    def export(self, stream: Any, layout: str, policy: str) -> Any:
        for spec, tensor in stream:
            yield spec, tensor * 2


def test_export_applies_extensions_and_refuses_shards() -> None:
    backend = make_backend(extensions=(Doubling(),))
    plain = {name.removeprefix("lm."): tensor for name, tensor in weights(backend).items()}
    real = dict(backend.export("main", "full"))
    meta = dict(backend.export("main", "full", meta=True))
    assert list(real) == list(meta)
    assert all(tensor.device.type == "meta" for tensor in meta.values())
    for spec, tensor in real.items():
        assert torch.equal(tensor, plain[spec.name] * 2) and tuple(tensor.shape) == spec.shape and spec.dtype == "F32"
    with pytest.raises(CapabilityError, match="'shards'"):
        backend.export("main", "shards")
    backend.close()


# --- roles ----------------------------------------------------------------------------------------------------------


class ValueLoss:
    """(V − G)²."""

    level, mask, weighted, aggregation = "unit", "trainable", False, None
    outputs, needs = (VALUES,), frozenset({"advantages"})

    def __call__(self, view: Any) -> TermOutput:
        return TermOutput(value=(view.out(VALUES) - view["advantages"]) ** 2)


def test_roles_start_from_the_actor_and_follow_it() -> None:
    backend = make_backend(
        roles={
            "reference": {"init": "actor", "update": "frozen"},
            "old": {"init": "actor", "update": "ema", "decay": 0.75},
            "other": {"update": "frozen", "seed": 12},
        }
    )
    batch = batch_of(random_groups(7))
    asked = [LOGPROBS, Output(name="logprobs", role="reference"), Output(name="logprobs", role="other")]
    first = backend.score(batch, asked)
    assert np.array_equal(first["proximal_logprobs"], first["reference.logprobs"])
    assert not np.allclose(first["proximal_logprobs"], first["other.logprobs"])
    start = weights(backend)
    backend.update(batch, [bound()])
    now = weights(backend)
    backend.blend("main", "old", "actor", 0.75)
    for name, tensor in weights(backend, "old").items():
        assert torch.allclose(tensor, 0.75 * start[name] + 0.25 * now[name], atol=1e-7)
    assert np.array_equal(backend.score(batch, asked)["reference.logprobs"], first["reference.logprobs"])
    backend.blend("main", "reference", "actor", 0.0)
    second = backend.score(batch, asked)
    assert np.array_equal(second["proximal_logprobs"], second["reference.logprobs"])
    assert not np.array_equal(second["proximal_logprobs"], first["proximal_logprobs"])
    backend.close()


@pytest.mark.parametrize("dtype", list(Dtype))
def test_actor_and_critic_are_trained_in_one_pass_with_their_own_optimizers(dtype: Dtype) -> None:
    critic = {"head": "value", "init": "actor", "optimizer": OptimizerConfig(lr=1e-2)}
    backend = make_backend(roles={"critic": critic}, config=FsdpConfig(dtype=dtype))
    trunk = weights(backend, "critic")
    assert torch.equal(
        trunk["lm.model.layers.0.mlp.up_proj.weight"], weights(backend)["lm.model.layers.0.mlp.up_proj.weight"]
    )
    batch = batch_of(random_groups(7))
    assert set(backend.score(batch, [VALUES])) == {VALUES.column} == {"critic.values"}
    alone = make_backend(config=FsdpConfig(dtype=dtype))
    terms = [bound(), bound(ValueLoss(), "other", 0.5, "critic")]
    losses = []
    for _ in range(6):
        result = backend.update(batch, terms)
        alone.update(batch, [bound()])
        losses.append(result.metrics["other"][0])
        assert result.metrics["critic.loss"][0] == pytest.approx(0.5 * result.metrics["other"][0])
        assert result.metrics["critic.lr"] == (0.01, 1.0)
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(t, weights(alone)[n]) for n, t in weights(backend).items())  # the actor noticed nothing
    backend.close()
    alone.close()


def test_a_frozen_role_may_be_asked_inside_the_update() -> None:
    backend = make_backend(roles={"reference": {"init": "actor", "update": "frozen"}})
    asked = Output(name="logprobs", role="reference")

    class Difference(Reinforce):
        outputs = (LOGPROBS, asked)

        def __call__(self, view: Any) -> TermOutput:
            return TermOutput(value=(view.out(LOGPROBS) - view.out(asked) + 1) ** 2)

    batch = batch_of(random_groups(7))
    before = weights(backend, "reference")
    assert backend.update(batch, [bound(Difference())]).metrics["loss_term"][0] == pytest.approx(1.0, rel=1e-5)
    assert backend.update(batch, [bound(Difference())]).metrics["loss_term"][0] != pytest.approx(1.0, rel=1e-3)
    assert all(torch.equal(before[n], t) for n, t in weights(backend, "reference").items())
    backend.close()


def test_policies_have_their_own_weights_and_optimizers() -> None:
    backend = make_backend()
    actor = backend._role("main", "actor").spec
    both = make_backend(policies={"main": {"actor": actor}, "second": {"actor": replace(actor, seed=12)}})
    batch = batch_of(random_groups(7))
    second = replace(batch, policy="second")
    before = dict(both.export("second", "full"))
    before = {spec.name: tensor.clone() for spec, tensor in before.items()}
    assert both.update(batch, [bound()]) == backend.update(batch, [bound()])
    assert all(torch.equal(before[spec.name], tensor) for spec, tensor in both.export("second", "full"))
    both.update(second, [bound()])
    both.update(second, [bound()])
    assert not all(torch.equal(before[spec.name], tensor) for spec, tensor in both.export("second", "full"))
    assert both.update(batch, [bound()]) == backend.update(batch, [bound()])
    backend.close()
    both.close()


def test_a_model_that_is_no_torch_module_is_refused() -> None:
    class Table(type(adapter())):  # type: ignore[misc]
        def build(self, *args: Any, **kwargs: Any) -> Any:
            return {}

    with pytest.raises(CapabilityError, match=r"role 'other' of policy 'main' \(Table\) built a dict"):
        make_backend(roles={"other": {"update": "frozen", "adapter": Table(CausalLMConfig(), share_prefixes=True)}})


def test_wrong_roles_are_named() -> None:
    with pytest.raises(CapabilityError, match="'adapter_off'"):
        make_backend(roles={"reference": {"update": "adapter_off"}})
    with pytest.raises(CapabilityError, match="no extension gives role 'actor' adapters"):
        make_backend(roles={"reference": {"update": "adapter_off", "init": "actor"}})
    backend = make_backend(roles={"reference": {"update": "frozen"}})
    batch = batch_of(random_groups(0))
    with pytest.raises(BackendError, match="no role 'teacher'; it has actor, reference"):
        backend.score(batch, [Output(name="logprobs", role="teacher")])
    with pytest.raises(LearnerError, match="would train role 'reference'"):
        backend.update(batch, [bound(role="reference")])

    class Undeclared(Reinforce):
        def __call__(self, view: Any) -> TermOutput:
            return TermOutput(value=view.out(ENTROPY))

    with pytest.raises(LearnerError, match="'entropy' of role 'actor', which it does not declare"):
        backend.update(batch, [bound(Undeclared())])
    backend.close()
