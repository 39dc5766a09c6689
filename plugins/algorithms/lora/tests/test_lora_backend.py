"""Adapters inside the backend `fsdp`: what moves, what is shared, what leaves, what is saved."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lora_support import (
    ADAPTER_OFF,
    LOGPROBS,
    REFERENCE,
    SOURCE,
    Reinforce,
    backend,
    batch_of,
    extension,
    parameters,
    stream,
    terms,
)
from safetensors.torch import load_file

from miles_algo_lora.config import Export, LoraConfig
from miles_algo_lora.draft import LoraDraft
from miles_algo_lora.merge import PEFT_PREFIX
from miles_algo_lora.trainer import LoraTrainer
from miles_core.columns import ColumnSpec, Level
from miles_core.contracts.learning import BoundTerm, Output, TermOutput
from miles_core.contracts.model import ModelSource
from miles_core.errors import BackendError, CapabilityError, CheckpointError, CombinationError, WeightError
from miles_core.provider import BuildContext, Place

BASE = ("weight", "bias")


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_only_adapters_move_and_only_they_have_optimizer_state() -> None:
    made = backend(extension(rank=2))
    plain = backend(None)
    before = parameters(made)
    assert {n: t for n, t in before.items() if ".lora_" not in n}.keys() == parameters(plain).keys()
    batch = batch_of()
    scores = made.score(batch, [LOGPROBS])["proximal_logprobs"]
    np.testing.assert_array_equal(scores, plain.score(batch, [LOGPROBS])["proximal_logprobs"])
    for step in range(3):
        made.update(batch_of(step), terms())
    changed = moved(before, parameters(made))
    assert changed and all(".lora_" in name for name in changed)
    assert changed == {name for name in before if ".lora_" in name}
    state = {key.partition("/")[2] for key in made._role("main", "actor").optimizer.tensors()}
    assert state == changed
    for other in (made, plain):
        other.close()


def test_the_reference_is_the_same_module_without_adapters() -> None:
    """Inside the micro-batch too, with recomputed activations, and in the middle of a backward pass."""
    results = []
    for options in ({}, {"checkpointing": True, "unit_mib": 0, "micro_tokens": 30}):
        made = backend(extension(ADAPTER_OFF), ADAPTER_OFF, **options)
        plain = backend(None)
        assert made._role("main", "reference").module is made._role("main", "actor").module
        for step in range(2):
            result = made.update(batch_of(step), terms(beta=0.5))
        batch = batch_of(5)
        scores = made.score(batch, [LOGPROBS, REFERENCE])
        base = plain.score(batch, [LOGPROBS])["proximal_logprobs"]
        np.testing.assert_allclose(scores["reference.logprobs"], base, atol=1e-5 if options else 0.0)
        assert np.abs(scores["proximal_logprobs"] - base).max() > 1e-2
        results.append((result.grad_norm, scores["proximal_logprobs"]))
        for other in (made, plain):
            other.close()
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4)
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-4)


def test_a_copy_of_the_reference_gives_the_same_updates() -> None:
    """A frozen copy and the module without adapters are one reference."""
    frozen = {"reference": {"init": "actor", "update": "frozen"}}
    found = []
    for roles in (frozen, ADAPTER_OFF):
        made = backend(extension(roles), roles)
        for step in range(2):
            result = made.update(batch_of(step), terms(beta=0.5))
        found.append((result, {n: t for n, t in parameters(made).items() if ".lora_" in n}))
        made.close()
    assert found[0][0] == found[1][0] and not moved(found[0][1], found[1][1])


def test_a_role_that_follows_has_adapters_and_its_base_never_moves() -> None:
    roles = {"reference": {"init": "actor", "update": "copy"}}
    made = backend(extension(roles), roles)
    for step in range(2):
        before = parameters(made, role="reference")
        made.update(batch_of(step), terms())
        made.blend("main", "reference", "actor", 0.0)
        after, actor = parameters(made, role="reference"), parameters(made)
        changed = moved(before, after)
        assert changed and all(".lora_" in name for name in changed) and not moved(after, actor)
    scores = made.score(batch_of(3), [LOGPROBS, REFERENCE])
    np.testing.assert_array_equal(scores["proximal_logprobs"], scores["reference.logprobs"])
    made.close()


def test_the_stream_is_the_merged_model() -> None:
    made, plain = backend(extension(alpha=24.0)), backend(None)
    made.update(batch_of(), terms())
    own = parameters(made)
    whole = stream(made)
    assert not moved(own, parameters(made))  # nothing is merged in place
    specs = [(spec.name, spec.shape, spec.dtype) for spec, _ in made.export("main", "full", True)]
    assert specs == [(spec.name, spec.shape, spec.dtype) for spec, _ in plain.export("main", "full")]
    with torch.no_grad():
        for name, parameter in plain._role("main", "actor").module.named_parameters():
            parameter.to_local().copy_(whole[name.removeprefix("lm.")])  # type: ignore[union-attr]
    batch = batch_of(3)
    merged, apart = (b.score(batch, [LOGPROBS])["proximal_logprobs"] for b in (plain, made))
    np.testing.assert_allclose(merged, apart, atol=2e-5)
    with pytest.raises(CapabilityError, match="layout 'full', not 'shards'"):
        made._extensions[0].export(iter(()), "shards", "main")
    for other in (made, plain):
        other.close()


def test_the_adapter_alone_has_its_scale_inside() -> None:
    made = backend(extension(export=Export.adapter, rank=2, alpha=6.0, targets=["q_proj", "*.mlp.up_proj"]))
    made.update(batch_of(), terms())
    found, own = stream(made), parameters(made)
    assert {spec.name: spec.shape for spec, _ in made.export("main", "full", True)} == {
        name: tuple(tensor.shape) for name, tensor in found.items()
    }
    for layer in ("self_attn.q_proj", "mlp.up_proj"):
        a, b = (f"model.layers.1.{layer}.lora_{part}.weight" for part in "AB")
        assert torch.equal(found[PEFT_PREFIX + a], own["lm." + a])
        assert torch.equal(found[PEFT_PREFIX + b], own["lm." + b] * 3.0)
    assert len(found) == 2 * 2 * 2
    made.close()


def test_a_checkpoint_holds_adapters_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight, resumed = (backend(extension(rank=2)) for _ in range(2))
    for step in range(2):
        straight.update(batch_of(step), terms())
    straight.save(tmp_path / "trainer")
    held = load_file(tmp_path / "trainer" / "rank_00000_of_00001.safetensors")
    assert held and all(".lora_" in name for name in held)
    resumed.load(tmp_path / "trainer")
    one, two = (b.update(batch_of(7), terms()) for b in (straight, resumed))
    assert one == two and not moved(parameters(straight), parameters(resumed))
    other = backend(
        extension(rank=2), source=ModelSource(asked="x", architecture={**SOURCE.architecture, "initializer_range": 0.1})
    )
    with pytest.raises(CheckpointError, match="was trained over"):
        other.load(tmp_path / "trainer")
    for made in (straight, resumed, other):
        made.close()


def test_a_base_that_changes_is_found() -> None:
    made = backend(extension(rank=2))
    list(made.export("main", "full"))
    parameter = dict(made._role("main", "actor").module.named_parameters())["lm.model.layers.1.mlp.up_proj.weight"]
    with torch.no_grad():
        parameter.to_local()[0, 0] += 1e-6  # type: ignore[attr-defined]
    with pytest.raises(WeightError, match=r"base of policy 'main' changed: tensor 'model.layers.1.mlp.up_proj.weight'"):
        for _ in range(8):  # within a round of the guard
            list(made.export("main", "full"))
    with pytest.raises(BackendError, match="frozen weights of role 'actor' of policy 'main' changed"):
        made.save(Path("nowhere"))
    made.close()


def test_policies_have_adapters_of_their_own() -> None:
    both = backend(extension(names=("main", "second")), policies=("main", "second"))
    one, two = (parameters(both, policy) for policy in ("main", "second"))
    a = "lm.model.layers.0.mlp.up_proj.lora_A.weight"
    assert not torch.equal(one[a], two[a])
    assert not moved({n: t for n, t in one.items() if ".lora_" not in n}, two)  # one seed in this test: one base
    both.update(batch_of(policy="second"), terms())
    assert not moved(one, parameters(both, "main")) and moved(two, parameters(both, "second"))
    assert both._extensions[0].adapted == {("main", "actor"), ("second", "actor")}
    both.close()


def test_one_policy_of_two() -> None:
    added = extension(names=("main", "second"), policies=["second"])
    made = backend(added, policies=("main", "second"))
    assert added.adapted == {("second", "actor")}
    assert not any(".lora_" in name for name in parameters(made, "main"))
    assert stream(made, "main").keys() == stream(made, "second").keys()
    made.close()


def test_dropout_is_repeated_by_step_and_trajectories_only() -> None:
    found = {}
    for name, step in (("first", 0), ("again", 0), ("later", 1)):
        made = backend(extension(ADAPTER_OFF, dropout=0.3), ADAPTER_OFF, checkpointing=name == "again")
        for _ in range(2):
            made.update(batch_of(step=step), terms(beta=0.5))
        found[name] = {n: t for n, t in parameters(made).items() if ".lora_" in n}
        batch = batch_of(3)
        scores = made.score(batch, [LOGPROBS])
        np.testing.assert_array_equal(scores["proximal_logprobs"], made.score(batch, [LOGPROBS])["proximal_logprobs"])
        made.close()
    for name, tensor in found["first"].items():
        torch.testing.assert_close(tensor, found["again"][name], atol=1e-6, rtol=1e-5)
    assert moved(found["first"], found["later"])
    blind: Any = SimpleNamespace()
    added = extension(dropout=0.3)
    made = backend(added)
    with pytest.raises(CapabilityError, match="this backend's views do not say"), ExitStack() as stack:
        stack.enter_context(added.micro(blind, "actor", "update"))
    made.close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"targets": ["*_proj", "w1"]}, CombinationError, "'w1', which no linear layer of role 'actor' matches"),
        ({"targets": ["lm_head"]}, CapabilityError, "'lm.lm_head' shares its weight with another"),
        ({"train_also": ["*norm.weight"], "export": Export.adapter}, CombinationError, "sends adapters only"),
        ({"roles": ["actor", "reference"]}, CombinationError, "names 'reference', whose update is 'frozen'"),
    ],
)
def test_what_cannot_be_adapted(options: dict[str, Any], error: type[Exception], message: str) -> None:
    roles = {"reference": {"init": "actor", "update": "frozen"}}
    with pytest.raises(error, match=message):
        backend(extension(roles, **options), roles)


def test_what_is_trained_is_chosen_once() -> None:
    linear = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(2, 2), "down_proj": torch.nn.Linear(2, 2)})
    first, second = extension(targets=["up_proj"]), extension(targets=["down_proj"])
    first.model(linear, "actor", "main")
    with pytest.raises(CombinationError, match="chosen twice"):
        second.model(linear, "actor", "main")
    with pytest.raises(CombinationError, match="two extensions adapt the layer 'up_proj'"):
        extension().model(linear, "actor", "main")
    with pytest.raises(CapabilityError, match="adapts torch modules; role 'actor' is a dict"):
        first.model({}, "actor", "main")


def test_a_critic_may_share_the_adapted_module() -> None:
    roles = {"critic": {"init": "actor", "update": "shares", "head": "value"}, **ADAPTER_OFF}
    made = backend(extension(roles), roles)
    before = parameters(made)

    class Regress(Reinforce):
        needs, weighted = frozenset(), False

        def __init__(self) -> None:
            self.outputs = (Output(name="values", role="critic", grad=True),)

        def __call__(self, view: Any) -> TermOutput:
            return TermOutput(value=(view.out(self.outputs[0]) - 1.0) ** 2)

    batch = batch_of()
    batch = batch.with_columns(
        {"weight.value": batch.columns["weight.policy"]},
        [ColumnSpec(name="weight.value", level=Level.UNIT, dtype="float32")],
    )
    for _ in range(2):
        made.update(batch, [*terms(beta=0.1), BoundTerm(name="value", term=Regress(), coef=1.0, role="critic")])
    changed = moved(before, parameters(made))
    assert "value.weight" in changed and all(".lora_" in name or name.startswith("value.") for name in changed)
    assert not any(name.startswith("value") for name in stream(made))
    made.close()


def test_parameters_may_be_trained_whole_beside_the_adapters() -> None:
    made = backend(extension(rank=2, train_also=["*norm.weight"]))
    before = parameters(made)
    made.update(batch_of(), terms())
    changed = moved(before, parameters(made))
    norms = {name for name in before if name.endswith("norm.weight")}
    assert norms <= changed and all(".lora_" in name for name in changed - norms)
    assert stream(made)["model.norm.weight"].equal(parameters(made)["lm.model.norm.weight"])
    for _ in range(9):
        list(made.export("main", "full"))  # the guard knows that they may change
    made.close()


def test_policies_that_are_not_there_and_bases_that_differ() -> None:
    with pytest.raises(CombinationError, match="names 'other'; the run has main"):
        LoraTrainer(LoraConfig(policies=["other"]), context_of({"main": "base"}))
    for sources in ({"a": "x", "b": "y"}, {"a": None}):
        with pytest.raises(CombinationError, match="engines read one base from one folder"):
            LoraTrainer(LoraConfig(export=Export.adapter), context_of(sources))
    assert LoraTrainer(LoraConfig(export=Export.adapter), context_of({"a": "x", "b": "x"})).adapted == set()


def context_of(sources: dict[str, str | None]) -> Any:
    policies = {
        n: SimpleNamespace(roles={}, model=SimpleNamespace(core=SimpleNamespace(source=s))) for n, s in sources.items()
    }
    return SimpleNamespace(run=SimpleNamespace(policies=policies), seed=0, rank=0)


def draft_of(config: LoraConfig) -> LoraDraft:
    """The extension while there is no run file yet."""
    unready: Any = None
    return LoraDraft(config, BuildContext(place=Place.CONTROLLER, name="lora", run=unready))


def test_a_reference_without_a_word_becomes_the_base() -> None:
    draft = {
        "roles": {"reference": {"init": "actor"}, "teacher": {"source": "x"}, "old": {"init": "actor", "update": "ema"}}
    }
    found = draft_of(LoraConfig()).on_config(draft)
    assert found["roles"] == {**draft["roles"], "reference": {"init": "actor", "update": "adapter_off"}}
    plural = {"policies": {"a": draft, "b": draft}}
    found = draft_of(LoraConfig(policies=["b"])).on_config(plural)
    assert found["policies"]["a"] == draft
    assert found["policies"]["b"]["roles"]["reference"]["update"] == "adapter_off"
    assert draft_of(LoraConfig(policies=["x"])).on_config(draft) == draft


@pytest.mark.parametrize("options", [{"train_also": ["*norm.weight"]}, {"rslora": True, "rank": 4}, {"dora": True}])
def test_a_saved_folder_is_the_merged_model_and_an_adapter_that_peft_loads(
    options: dict[str, Any], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    plain, made = backend(None), backend(extension(export=Export.merged, **options))
    for step in range(2):
        made.update(batch_of(step), terms())
    plain.save_model("main", tmp_path / "base")
    made.save_model("main", tmp_path / "tuned")
    told = json.loads((tmp_path / "tuned" / "adapter" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == "base" and told["use_dora"] == bool(options.get("dora"))
    tokens = torch.arange(24).reshape(2, 12) + 3
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        before = base(tokens).logits
        expected = whole(tokens).logits
        wrapped = peft.PeftModel.from_pretrained(base, str(tmp_path / "tuned" / "adapter"))
        found = wrapped(tokens).logits
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
        assert (before - expected).abs().max() > 0.05
        unmerged = wrapped.merge_and_unload()
        torch.testing.assert_close(unmerged(tokens).logits, expected, atol=2e-4, rtol=1e-4)
    for other in (made, plain):
        other.close()


def test_a_run_that_sends_adapters_still_saves_whole_weights(tmp_path: Path) -> None:
    made = backend(extension(export=Export.adapter))
    made.update(batch_of(), terms())
    made.save_model("main", tmp_path / "tuned")
    merged = backend(extension(export=Export.merged))
    merged.update(batch_of(), terms())
    whole = load_file(tmp_path / "tuned" / "model.safetensors")
    assert not moved(stream(merged), whole) and whole.keys() == stream(merged).keys()
    for other in (made, merged):
        other.close()
