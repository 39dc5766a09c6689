"""Outputs about tokens other than the sampled one, against a plain log-softmax of the whole vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fsdp_support import VOCABULARY, adapter, batch_of, make_backend, random_groups, source, trajectory

from miles_core.columns import CORE_COLUMNS, Batch, ColumnSpec, collate
from miles_core.contracts.learning import LOGPROBS, Output
from miles_core.errors import CapabilityError, LearnerError
from miles_core.numerics.distill import ABSENT
from miles_core.records import Episode, Group, Sampling, Task


def reference(module: Any, batch: Batch) -> torch.Tensor:
    """[units, vocabulary] with gradient: the tempered log-softmax over each unit's kept set, one trajectory a time."""
    rows = []
    flat = batch.items["keep_ids"][0] if "keep_ids" in batch.items else None
    ends = np.cumsum(batch.columns.get("keep_counts", np.zeros(batch.units, np.int64)))
    for t, (start, end) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:], strict=True)):
        tokens = torch.from_numpy(batch.columns["tokens"][start:end].astype(np.int64))[None]
        hidden = module.lm.model(input_ids=tokens, position_ids=torch.arange(end - start)[None], use_cache=False)[0]
        logits = module.lm.lm_head(hidden)[0] / float(batch.columns["temperature"][t])
        rows += [torch.zeros(1, VOCABULARY), logits[:-1]]
    logits = torch.cat(rows)
    if flat is None:
        return torch.log_softmax(logits, -1)
    mask = torch.zeros(logits.shape, dtype=torch.bool)
    for unit, count in enumerate(batch.columns["keep_counts"]):
        if count:
            mask[unit] = True
            mask[unit, flat[ends[unit] - count : ends[unit]].astype(np.int64)] = False
    return torch.log_softmax(logits.masked_fill(mask, -torch.inf), -1)


def cut_batch() -> Batch:
    """Trajectories sampled with top_k 5 at T = 0.7; one unit of each kept everything."""
    rng = np.random.default_rng(5)
    rows = []
    for i in range(3):
        answer = rng.integers(2, VOCABULARY, 4)
        counts = np.array([0, 0, 5, 5, 0, 5], np.int32)
        ids = [[*rng.permutation(np.setdiff1d(np.arange(VOCABULARY), [a]))[:4].tolist(), int(a)] for a in answer]
        flat = np.array([k for j, one in enumerate(ids) if counts[j + 2] for k in one], np.int32)
        sampling = Sampling(max_new_tokens=20, temperature=0.7, top_k=5)
        rows.append(trajectory(f"k{i}", [4, 5], answer, sampling, keep_counts=counts, keep_ids=flat))
    episodes = tuple(Episode(id=r.id, member=i, trajectories=(r,)) for i, r in enumerate(rows))
    group = Group(id="g", policy="main", slot=0, attempt=0, task=Task(id="g", prompt=""), episodes=episodes)
    return collate("main", 0, [group], CORE_COLUMNS)


def with_ids(batch: Batch, **columns: np.ndarray[Any, Any]) -> Batch:
    specs = [ColumnSpec(name=n.replace("_", ".", 1), level="unit", dtype="int32") for n in columns]
    return batch.with_columns({n.replace("_", ".", 1): v for n, v in columns.items()}, specs)


def ids_of(batch: Batch, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (batch.units, width)).astype(np.int32)


BATCHES = {"whole": lambda: batch_of(random_groups(2, sampling=Sampling(max_new_tokens=9, temperature=1.3)))}
BATCHES["cut"] = cut_batch


@pytest.mark.parametrize("limit", [10**9, 100])
@pytest.mark.parametrize("kind", BATCHES)
def test_outputs_equal_a_plain_log_softmax(kind: str, limit: int) -> None:
    made = adapter()
    module = made.build(source(), 3)
    batch = BATCHES[kind]()
    batch = with_ids(
        batch, student_topk=ids_of(batch, 3), teacher_topk=ids_of(batch, 2, 1), one_id=ids_of(batch, 1)[:, 0]
    )
    want = reference(module, batch).detach()
    module.logits_limit = limit
    columns = ("student.topk", "teacher.topk", "one.id")
    asked = [
        LOGPROBS,
        Output(name="token_logprobs", inputs=columns, grad=True),
        Output(name="rest_logprobs", inputs=columns, grad=True),
        Output(name="topk_ids", k=4),
        Output(name="topk_logprobs", k=4),
    ]
    found = {name: value.detach() for name, value in made.outputs(module, batch, asked).items()}
    mask = torch.from_numpy(batch.columns["trainable"])
    ids = torch.from_numpy(np.concatenate([batch.columns[c].reshape(batch.units, -1) for c in columns], 1)).long()
    inside = torch.zeros(batch.units, VOCABULARY, dtype=torch.bool).scatter(1, ids, True)
    token = want.gather(1, ids).clamp(min=ABSENT)
    assert torch.allclose(found["token_logprobs"][mask], token[mask], rtol=1e-6, atol=1e-5)
    rest = torch.logsumexp(want.masked_fill(inside, -torch.inf), -1)
    gone = rest.isinf()
    assert torch.allclose(found["rest_logprobs"][mask & ~gone], rest[mask & ~gone], atol=1e-5)
    assert (found["rest_logprobs"][mask & gone] <= ABSENT / 2).all()
    values, top = want.topk(4, -1)
    assert found["topk_ids"].dtype == torch.int32 and torch.equal(found["topk_ids"][mask].long(), top[mask])
    assert torch.allclose(found["topk_logprobs"][mask], values[mask], atol=1e-5)
    for value in found.values():
        assert not value[~mask].any() and value.isfinite().all()


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("limit", [10**9, 100])
def test_gradients_are_those_of_a_plain_log_softmax(kind: str, limit: int) -> None:
    made = adapter()
    batch = BATCHES[kind]()
    batch = with_ids(batch, student_topk=ids_of(batch, 3))
    asked = [Output(name=n, inputs=("student.topk",), grad=True) for n in ("token_logprobs", "rest_logprobs")]
    ids = torch.from_numpy(batch.columns["student.topk"]).long()
    inside = torch.zeros(batch.units, VOCABULARY, dtype=torch.bool).scatter(1, ids, True)
    mask = torch.from_numpy(batch.columns["trainable"])
    grads = []
    for plain in (False, True):
        module = made.build(source(), 3)
        module.logits_limit = limit
        if plain:
            full = reference(module, batch)
            token, rest = full.gather(1, ids), torch.logsumexp(full.masked_fill(inside, -torch.inf), -1)
        else:
            found = made.outputs(module, batch, asked)
            token, rest = found["token_logprobs"], found["rest_logprobs"]
        # probabilities, so that an absent one is a plain 0
        value = (token.exp() * torch.arange(1.0, 4.0)).sum(-1) + 3 * rest.exp()
        value[mask].sum().backward()
        grads.append([p.grad.clone() for p in module.parameters()])
    assert any(g.abs().max() > 1e-3 for g in grads[0])
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(*grads, strict=True))


def test_a_small_rest_is_no_rounding_noise() -> None:
    """The student is sure of itself: what is left is far below the rounding of 1 − Σ p."""
    from miles_backend_fsdp.module import Asked, CausalModule

    module = adapter().build(source(), 0)
    module.lm.lm_head = torch.nn.Identity()
    logits = torch.zeros(1, VOCABULARY)
    logits[0, :2] = torch.tensor([40.0, 39.0])
    asked = Asked(("rest_logprobs",), torch.tensor([0]), torch.tensor([0]), ids=torch.tensor([[0, 1]]))
    want = np.log(VOCABULARY - 2) - (40 + np.log1p(np.exp(-1.0)))
    assert float(CausalModule._read(module, logits, asked)["rest_logprobs"]) == pytest.approx(want, abs=1e-5)


def test_what_cannot_be_asked_together_or_at_all() -> None:
    made = adapter()
    module = made.build(source(), 3)
    batch = batch_of(random_groups(2))
    batch = with_ids(batch, a_ids=ids_of(batch, 2), b_ids=ids_of(batch, 2))
    one, two = (Output(name="token_logprobs", inputs=(n,)) for n in ("a.ids", "b.ids"))
    for wrong, words in (
        ([one, two], "in one forward"),
        ([Output(name="token_logprobs")], "name at least one column"),
        ([Output(name="topk_ids")], "at least 1"),
        ([Output(name="topk_ids", k=2), Output(name="topk_logprobs", k=3)], "same k"),
        ([Output(name="topk_ids", k=VOCABULARY + 1)], f"take a k of {VOCABULARY} or less"),
    ):
        with pytest.raises(CapabilityError, match=words):
            made.outputs(module, batch, wrong)
    far = batch.with_columns({"a.ids": np.full((batch.units, 2), VOCABULARY, np.int32)}, ())
    with pytest.raises(LearnerError, match="same vocabulary"):
        made.outputs(module, far, [one])


def test_the_backend_scores_ids_as_integers_and_any_width() -> None:
    backend = make_backend()
    batch = batch_of(random_groups(2))
    first = backend.score(
        batch, [Output(name="topk_ids", k=3), Output(name="topk_logprobs", k=3), Output(name="logprobs")]
    )
    assert first["actor.topk_ids"].dtype == np.int32 and first["actor.topk_ids"].shape == (batch.units, 3)
    assert first["actor.topk_logprobs"].dtype == np.float32
    spec = ColumnSpec(name="actor.topk_ids", level="unit", dtype="int32", inner=(3,))
    batch = batch.with_columns({"actor.topk_ids": first["actor.topk_ids"]}, [spec])
    second = backend.score(batch, [Output(name="token_logprobs", inputs=("actor.topk_ids",))])
    np.testing.assert_allclose(second["actor.token_logprobs"], first["actor.topk_logprobs"], atol=1e-5)
    backend.close()
