"""The adapter against transformers' own forward, its heads, its folders and its refusals."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_support import ARCHITECTURES, VOCABULARY, adapter, batch_of, random_groups, source, trajectory
from transformers import AutoModelForCausalLM

from miles_backend_fsdp import hf_folder
from miles_core.columns import CORE_COLUMNS, Batch, collate
from miles_core.contracts.learning import ENTROPY, LOGPROBS, Output
from miles_core.contracts.model import ModelSource
from miles_core.errors import CapabilityError, LearnerError, ModelSourceError
from miles_core.records import Episode, Group, Sampling, Task

LAYOUTS: list[dict[str, Any]] = [
    {"layout": "padded"},
    {"layout": "packed", "share_prefixes": False},
    {"layout": "packed", "pack_tokens": 16},
]


def write(module: Any, made: Any, folder: Path) -> Path:
    """A Hugging Face folder of a plain module."""
    folder.mkdir(exist_ok=True)
    tensors = ((name, p.detach()) for name, p in module.named_parameters())
    hf_folder.write(folder, ((spec.name, tensor) for spec, tensor in made.export(module, tensors)))
    made.save_config(module, folder)
    return folder


def plain_logits(folder: Path, batch: Batch) -> torch.Tensor:
    """[units, vocabulary]: transformers' logits that predict each unit, one trajectory at a time (0 for the first)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = torch.zeros(batch.units, VOCABULARY)
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        tokens = torch.from_numpy(batch.columns["tokens"][start:end].astype(np.int64))[None]
        with torch.no_grad():
            logits[start + 1 : end] = model(input_ids=tokens).logits[0, :-1]
    return logits


@pytest.mark.parametrize("options", LAYOUTS, ids=["padded", "packed", "shared"])
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_outputs_equal_a_plain_forward(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    made = adapter(**options)
    module = made.build(source(name), 3)
    batch = batch_of(random_groups(1, longest=20))
    logits = torch.log_softmax(plain_logits(write(module, made, tmp_path), batch), -1)
    with torch.no_grad():
        found = made.outputs(module, batch, [LOGPROBS, ENTROPY])
    mask = batch.columns["trainable"]
    targets = torch.from_numpy(batch.columns["tokens"].astype(np.int64))
    expected = logits.gather(1, targets[:, None])[:, 0]
    entropy = -(logits.exp() * logits).sum(-1)
    for got, want in ((found["logprobs"], expected), (found["entropy"], entropy)):
        assert got.shape == (batch.units,) and got.dtype == torch.float32
        assert torch.allclose(got[mask], want[mask], rtol=0, atol=1e-5)
        assert (got[~torch.from_numpy(mask)] == 0).all()


def kept_batch(temperature: float, keep: int) -> Batch:
    """Trajectories sampled with top_k: kept sets of `keep` ids hold the sampled token; one unit kept everything."""
    sampling = Sampling(max_new_tokens=20, temperature=temperature, top_k=keep)
    rng = np.random.default_rng(5)
    rows = []
    for i in range(3):
        answer = rng.integers(2, VOCABULARY, 4)
        counts = np.array([0, 0, keep, keep, 0, keep], np.int32)
        ids = [
            [*rng.permutation(np.setdiff1d(np.arange(VOCABULARY), [a]))[: keep - 1].tolist(), int(a)] for a in answer
        ]
        flat = np.array([k for j, one in enumerate(ids) if counts[j + 2] for k in one], np.int32)
        rows.append(trajectory(f"k{i}", [4, 5], answer, sampling, keep_counts=counts, keep_ids=flat))
    episodes = tuple(Episode(id=r.id, member=i, trajectories=(r,)) for i, r in enumerate(rows))
    task = Task(id="g", prompt="")
    group = Group(id="g", policy="main", slot=0, attempt=0, task=task, episodes=episodes)
    return collate("main", 0, [group], CORE_COLUMNS)


@pytest.mark.parametrize("limit", [10**9, 200])
def test_temperature_and_kept_sets_are_applied_as_sampled(tmp_path: Path, limit: int) -> None:
    made = adapter()
    module = made.build(source(), 3)
    module.logits_limit = limit  # 200 elements: chunks of four units
    batch = kept_batch(0.7, 5)
    logits = plain_logits(write(module, made, tmp_path), batch).double() / np.float32(0.7)
    found = {k: v.detach() for k, v in made.outputs(module, batch, [LOGPROBS, ENTROPY]).items()}
    flat, _ = batch.items["keep_ids"]
    ends = np.cumsum(batch.columns["keep_counts"])
    for unit in np.flatnonzero(batch.columns["trainable"]):
        count = int(batch.columns["keep_counts"][unit])
        ids = flat[ends[unit] - count : ends[unit]] if count else np.arange(VOCABULARY)
        own = logits[unit]
        want = own[int(batch.columns["tokens"][unit])] - torch.logsumexp(own[ids.astype(np.int64)], 0)
        assert float(found["logprobs"][unit]) == pytest.approx(float(want), abs=1e-5)
        p = torch.log_softmax(own, 0)
        assert float(found["entropy"][unit]) == pytest.approx(float(-(p.exp() * p).sum()), abs=1e-5)


def test_hand_computed_temperature() -> None:
    """Logits [2, 0] at T = 0.5 give [-0.0181499, -4.0181499]."""
    from miles_backend_fsdp.module import Asked, CausalModule

    module = adapter().build(source(), 0)
    two = torch.zeros(1, VOCABULARY).fill_(-torch.inf)
    two[0, :2] = torch.tensor([2.0, 0.0])
    module.lm.lm_head = torch.nn.Identity()
    for token, want in ((0, -0.0181499), (1, -4.0181499)):
        asked = Asked(("logprobs",), torch.tensor([0]), torch.tensor([token]), torch.tensor([0.5]))
        assert float(CausalModule._read(module, two, asked)["logprobs"]) == pytest.approx(want, abs=1e-6)


def test_chunked_heads_have_the_same_gradient() -> None:
    made = adapter()
    batch = kept_batch(0.7, 5)
    grads = []
    for limit in (10**9, 100):
        module = made.build(source(), 3)
        module.logits_limit = limit
        made.outputs(module, batch, [LOGPROBS])["logprobs"].sum().backward()
        grads.append([p.grad.clone() for p in module.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*grads, strict=True))


def test_token_logprobs_are_read_at_given_ids() -> None:
    made = adapter()
    module = made.build(source(), 3)
    batch = batch_of(random_groups(2))
    ids = np.stack([batch.columns["tokens"], np.full(batch.units, 7)], 1)
    batch.columns["teacher.topk_ids"] = ids  # type: ignore[index]
    asked = Output(name="token_logprobs", inputs=("teacher.topk_ids",), grad=True)
    found = made.outputs(module, batch, [asked, LOGPROBS])
    assert found["token_logprobs"].shape == (batch.units, 2)
    assert torch.allclose(found["token_logprobs"][:, 0], found["logprobs"], atol=1e-6)


def test_a_value_head_reads_the_position_before() -> None:
    made = adapter()
    module = made.build(source(), 3, head="value")
    batch = batch_of(random_groups(2))
    found = made.outputs(module, batch, [Output(name="values", role="critic", grad=True)])["values"]
    unit = int(np.flatnonzero(batch.columns["trainable"])[0])
    start = int(batch.offsets[batch.trajectory_of_unit[unit]])
    tokens = torch.from_numpy(batch.columns["tokens"][start:unit].astype(np.int64))[None]
    want = module.value(module.lm.model(input_ids=tokens, use_cache=False)[0][0, -1])
    assert found[unit].item() == pytest.approx(want.item(), abs=1e-5)
    with pytest.raises(CapabilityError, match="gives \\['bootstrap_value', 'values'\\]"):
        made.outputs(module, batch, [LOGPROBS])


# --- seeds and folders ----------------------------------------------------------------------------------------------


def test_one_seed_gives_the_same_bits_whatever_other_threads_draw() -> None:
    made = adapter()
    first = made.build(source("qwen3_moe"), 5).state_dict()
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            torch.rand(1000)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        second = made.build(source("qwen3_moe"), 5).state_dict()
    finally:
        stop.set()
        thread.join()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = made.build(source("qwen3_moe"), 6).state_dict()
    assert not torch.equal(first["lm.lm_head.weight"], other["lm.lm_head.weight"])


def test_building_leaves_the_global_generators_alone() -> None:
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    adapter().build(source(), 5)
    adapter(unverified=True).build(source(), 5)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


def test_drawn_weights_are_what_the_architecture_draws() -> None:
    module = adapter().build(source("qwen2", hidden_size=128, intermediate_size=256, initializer_range=0.02), 5)
    for name, parameter in module.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all()
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_folder_holds_the_same_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_folder, "SHARD_BYTES", 40_000)  # several files and an index
    made = adapter()
    module = made.build(source(name), 3)
    folder = write(module, made, tmp_path / "m")
    assert (folder / hf_folder.INDEX).is_file()
    again = adapter().build(ModelSource(asked="m", folder=folder), 99)
    for key, value in module.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert type(theirs).__name__ == json.loads((folder / "config.json").read_text())["architectures"][0]
    for key, value in theirs.state_dict().items():
        assert torch.equal(value, module.lm.state_dict()[key]), key


def test_padding_of_the_vocabulary_is_invisible(tmp_path: Path) -> None:
    plain, padded = adapter(), adapter(pad_vocab_to=64)
    one, other = plain.build(source(), 3), padded.build(source(), 3)
    assert other.lm.lm_head.weight.shape[0] == 64
    batch = batch_of(random_groups(4))
    a = plain.outputs(one, batch, [LOGPROBS, ENTROPY])
    b = padded.outputs(other, batch, [LOGPROBS, ENTROPY])
    assert all(torch.allclose(a[k], b[k], atol=1e-6) for k in a)
    folder = write(other, padded, tmp_path / "m")
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == VOCABULARY
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.lm_head.weight.shape[0] == VOCABULARY
    assert torch.equal(theirs.lm_head.weight, one.lm.lm_head.weight)
    again = padded.build(ModelSource(asked="m", folder=folder), 0)
    assert torch.equal(again.lm.lm_head.weight[:VOCABULARY], one.lm.lm_head.weight)
    assert (again.lm.lm_head.weight[VOCABULARY:] == 0).all()


def test_tied_weights_are_exported_once_and_metadata_without_data() -> None:
    made = adapter()
    module = made.build(source(), 3)
    real = [s for s, _ in made.export(module, ((n, p.detach()) for n, p in module.named_parameters()))]
    meta = [s for s, _ in made.export(module, ((n, p.detach().to("meta")) for n, p in module.named_parameters()))]
    assert real == meta
    names = [s.name for s in real]
    assert "lm_head.weight" not in names and names.count("model.embed_tokens.weight") == 1


# --- refusals -------------------------------------------------------------------------------------------------------


def test_an_unverified_architecture_is_refused_by_name() -> None:
    other = ModelSource(asked="x", architecture={"model_type": "olmo", "vocab_size": 40, "hidden_size": 32})
    with pytest.raises(ModelSourceError, match=r"'olmo' .* is not verified .* LlamaForCausalLM") as caught:
        adapter().build(other, 0)
    assert "model.unverified: true" in caught.value.fix


def test_an_unverified_architecture_runs_where_asked_and_plain() -> None:
    keys = {k: v for k, v in ARCHITECTURES["llama"].items() if k not in ("model_type", "head_dim")}
    made = adapter(unverified=True)
    module = made.build(ModelSource(asked="x", architecture={**keys, "model_type": "olmo", "pad_token_id": 1}), 0)
    batch = batch_of(random_groups(4))
    found = made.outputs(module, batch, [LOGPROBS])["logprobs"]
    assert torch.isfinite(found).all() and bool((found[batch.columns["trainable"]] < 0).all())


def test_an_unverified_architecture_with_more_than_a_head_is_refused() -> None:
    keys = {k: v for k, v in ARCHITECTURES["llama"].items() if k not in ("model_type", "head_dim")}
    scaled = {**keys, "model_type": "granite", "logits_scaling": 8.0}
    with pytest.raises(ModelSourceError, match="GraniteForCausalLM: its forward is not"):
        adapter(unverified=True).build(ModelSource(asked="x", architecture=scaled), 0)


def test_wrong_architecture_keys_are_refused() -> None:
    with pytest.raises(ModelSourceError, match="'hiden_size'") as caught:
        adapter().build(source(hiden_size=8), 0)
    assert "hidden_size" in caught.value.fix
    with pytest.raises(ModelSourceError, match="no model_type"):
        adapter().build(ModelSource(asked="x", architecture={"vocab_size": 8}), 0)


def test_folders_that_cannot_be_loaded_are_refused(tmp_path: Path) -> None:
    made = adapter()
    with pytest.raises(ModelSourceError, match=r"no config.json"):
        made.build(ModelSource(asked="m", folder=tmp_path), 0)
    folder = write(made.build(source(), 3), made, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(ModelSourceError, match=r"missing \['model.layers.2"):
        made.build(ModelSource(asked="m", folder=folder), 0)
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
    with pytest.raises(ModelSourceError, match="of shape"):
        made.build(ModelSource(asked="m", folder=folder), 0)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelSourceError, match="quantised"):
        made.build(ModelSource(asked="m", folder=folder), 0)
    (folder / hf_folder.SINGLE).unlink()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelSourceError, match=r"neither model.safetensors"):
        made.build(ModelSource(asked="m", folder=folder), 0)


def test_sampling_that_cannot_be_applied_is_refused() -> None:
    made = adapter()
    module = made.build(source(), 3)
    groups = random_groups(0, sampling=Sampling(max_new_tokens=9, top_p=0.9))
    with pytest.raises(LearnerError, match="'t0/0/0' was sampled with top_p"):
        made.outputs(module, batch_of(groups), [LOGPROBS])
    greedy = random_groups(0, sampling=Sampling(max_new_tokens=9, temperature=0.0))
    with pytest.raises(LearnerError, match="temperature that is not above 0"):
        made.outputs(module, batch_of(greedy), [LOGPROBS])
    batch = kept_batch(1.0, 5)
    unit = int(np.flatnonzero(batch.columns["trainable"])[0])
    batch.items["keep_ids"][0][batch.items["keep_ids"][0] == batch.columns["tokens"][unit]] = 0
    found = made.outputs(module, batch, [LOGPROBS])["logprobs"]
    assert found[unit] == -torch.inf and torch.isfinite(found).sum() == batch.units - 1  # refused further up
