"""The stage, the term and their formula: worked numbers, exact gradients, what is masked, and extremes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_algo_opd import plugin
from miles_algo_opd.config import OpdConfig, Support, TopkKlConfig
from miles_algo_opd.stage import Opd
from miles_algo_opd.term import TopkKl

from miles_core.columns import ColumnSpec, Level
from miles_core.contracts.learning import Output, Stage, Term
from miles_core.numerics.distill import ABSENT, rest_of, set_kl
from miles_core.numerics.views import MicroView
from miles_core.testing.suites import batches

F64 = torch.float64
P, T = torch.tensor([[0.5, 0.3, 0.2]], dtype=F64).log(), torch.tensor([[0.2, 0.3, 0.5]], dtype=F64).log()


def over(ids: list[int], p: torch.Tensor = P, t: torch.Tensor = T, **options: str) -> torch.Tensor:
    """set_kl over a set, from whole distributions [units, vocabulary]."""
    outside = [i for i in range(p.shape[1]) if i not in ids]
    rests = {}
    if options["tail"] == "bucket":
        rests = {f"{n}_rest": torch.logsumexp(x[:, outside], 1) for n, x in (("student", p), ("teacher", t))}
    return set_kl(p[:, ids], t[:, ids], **options, **rests)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("direction", "tail", "value"),
    [
        ("reverse", "none", 0.45814537),
        ("reverse", "renormalise", 0.10267808),
        ("reverse", "bucket", 0.27488722),
        ("forward", "none", 0.2 * math.log(0.4)),
        ("forward", "renormalise", 0.4 * math.log(0.64) + 0.6 * math.log(1.6)),
        ("forward", "bucket", 0.2 * math.log(0.4) + 0.5 * math.log(2.5)),
    ],
)
def test_worked_values(direction: str, tail: str, value: float) -> None:
    assert over([0, 1], direction=direction, tail=tail).item() == pytest.approx(value, abs=5e-9)
    assert over([0, 1], direction=direction, tail=tail, t=P).item() == pytest.approx(0, abs=1e-12)


MODES = [(d, t) for d in ("reverse", "forward") for t in ("none", "renormalise", "bucket")]


@pytest.mark.parametrize(("direction", "tail"), MODES)
@pytest.mark.parametrize("repeats", [False, True])
def test_gradients_through_the_log_softmax_are_those_of_finite_differences(
    direction: str, tail: str, repeats: bool
) -> None:
    rng = np.random.default_rng(3)
    ids = torch.tensor([[0, 1, 4, 1] if repeats else [0, 1, 4, 6], [5, 2, 3, 2] if repeats else [5, 2, 3, 0]])
    repeated = torch.tensor([[False, False, False, repeats]] * 2)
    teacher = torch.log_softmax(torch.from_numpy(rng.normal(size=(2, 7))), -1)

    def rest(full: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(full.scatter(1, ids, ABSENT), -1)

    def value(logits: torch.Tensor) -> torch.Tensor:
        full = torch.log_softmax(logits, -1)
        return set_kl(
            full.gather(1, ids),
            teacher.gather(1, ids),
            direction=direction,  # type: ignore[arg-type]
            tail=tail,  # type: ignore[arg-type]
            student_rest=rest(full),
            teacher_rest=rest(teacher),
            repeated=repeated,
        )

    logits = torch.from_numpy(rng.normal(size=(2, 7))).requires_grad_()
    assert torch.autograd.gradcheck(value, [logits], eps=1e-6, atol=1e-8)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_whole_vocabulary_is_the_kl_with_its_textbook_gradient(direction: str) -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.1]], dtype=F64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([[1.0, 0.2, -0.5, 0.0]], dtype=F64), -1)
    full = torch.log_softmax(logits, -1)
    found = set_kl(full, teacher, direction=direction, tail="none")  # type: ignore[arg-type]
    p, t = full.exp().detach(), teacher.exp()
    kl = (p * (full.detach() - teacher)).sum() if direction == "reverse" else (t * (teacher - full.detach())).sum()
    assert found.item() == pytest.approx(kl.item(), abs=1e-12)
    found.sum().backward()
    want = p * (full.detach() - teacher - kl) if direction == "reverse" else p - t
    torch.testing.assert_close(logits.grad, want, rtol=0, atol=1e-12)


def test_sampled_tokens_push_as_the_distributions_do_in_expectation() -> None:
    """Σ_a p(a) · (log p(a) − log t(a)) ∇log p(a), the policy gradient of stage `opd`, is the gradient of reverse KL."""
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.1]], dtype=F64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([[1.0, 0.2, -0.5, 0.0]], dtype=F64), -1)
    full = torch.log_softmax(logits, -1)
    (full.exp().detach() * (full.detach() - teacher) * full).sum().backward()
    policy = logits.grad.clone()  # type: ignore[union-attr]
    logits.grad = None
    set_kl(torch.log_softmax(logits, -1), teacher, direction="reverse", tail="none").sum().backward()
    torch.testing.assert_close(logits.grad, policy, rtol=0, atol=1e-12)


def test_the_sampled_form_is_an_unbiased_estimate_of_reverse_kl() -> None:
    rng = np.random.default_rng(11)
    p, t = P.exp().numpy()[0], T.exp().numpy()[0]
    draws = rng.choice(3, size=20_000, p=p)
    gaps = np.log(p[draws]) - np.log(t[draws])
    error = gaps.std(ddof=1) / math.sqrt(len(gaps))
    assert abs(gaps.mean() - float((p * np.log(p / t)).sum())) < 4 * error


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_a_bucket_bounds_the_kl_from_below_and_a_larger_set_is_nearer(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    p, t = (torch.log_softmax(torch.from_numpy(rng.normal(size=(1, 7)) * 3), -1) for _ in range(2))
    order = rng.permutation(7).tolist()
    for direction in ("reverse", "forward"):
        few, more = (over(order[:n], p, t, direction=direction, tail="bucket").item() for n in (k, k + 1 - k // 6))
        whole = over(list(range(7)), p, t, direction=direction, tail="none").item()
        assert -1e-12 <= few <= more + 1e-12 <= whole + 2e-12


def test_extremes_stay_finite() -> None:
    sure = torch.log_softmax(torch.tensor([[100.0, 0.0, 0.0]], dtype=F64), -1)
    other = sure.flip(1)
    for direction, tail in MODES:
        logits = torch.tensor([[100.0, 0.0, 0.0]], dtype=F64, requires_grad=True)
        p = torch.log_softmax(logits, -1)
        value = over([0, 1], p, other, direction=direction, tail=tail)
        value.sum().backward()
        assert value.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()
    assert over([0, 1], sure, other, direction="reverse", tail="bucket").item() == pytest.approx(100, rel=1e-9)
    gone = torch.tensor([[0.0, ABSENT]], dtype=F64)
    rest = torch.tensor([ABSENT], dtype=F64)
    for direction in ("reverse", "forward"):  # an id that neither may sample, and no rest at all
        whole = set_kl(gone, gone, direction=direction, tail="bucket", student_rest=rest, teacher_rest=rest - 1)  # type: ignore[arg-type]
        assert whole.tolist() == [0.0]
    noise = torch.tensor([math.log(1e-7)], dtype=F64)  # all that a service's top k leaves is rounding
    told = set_kl(gone, gone, direction="forward", tail="bucket", student_rest=rest, teacher_rest=noise)
    assert told.tolist() == [0.0]


def test_the_rest_of_what_a_service_tells() -> None:
    assert rest_of(torch.tensor([[0.5, 0.3]], dtype=F64).log()).item() == pytest.approx(math.log(0.2), abs=1e-12)
    assert rest_of(torch.tensor([[0.0, -40.0]])).item() == pytest.approx(math.log(1e-7))  # rounding noise, not −∞


# --- the stage ------------------------------------------------------------------------------------------------------


def sampled(**columns: list[float]) -> batches.Batch:
    batch = batches.batch_of([batches.group(0, [[3, 4], [5]], [1.0, 0.0], [2])])
    for name, values in columns.items():
        key = name.replace("teacher_", "teacher.")
        spec = ColumnSpec(name=key, level=Level.UNIT, dtype="float64")
        batch = batch.with_columns({key: np.array(values)}, [spec])
    return batch


def test_the_stage_by_hand() -> None:
    batch = sampled(
        proximal_logprobs=[9.0, -1.0, -0.5, 9.0, -2.0],
        teacher_logprobs=[0.0, -1.5, -0.25, 0.0, -2.0],
        advantages=[9.0, 1.0, 1.0, 9.0, -1.0],
    )
    rng = np.random.default_rng(0)
    alone = Opd(OpdConfig(), mixes=False)
    assert isinstance(alone, Stage) and alone.needs == {"proximal_logprobs", "teacher.logprobs"}
    result = alone(batch, rng)
    np.testing.assert_array_equal(result.columns["advantages"], np.float32([0, -0.5, 0.25, 0, 0]))
    assert result.metrics == {"reverse_kl": (0.25, 3.0), "agree": (2.0, 3.0)}
    mixed = Opd(OpdConfig(coef=2.0), mixes=True)
    assert mixed.needs == alone.needs | {"advantages"}
    np.testing.assert_array_equal(mixed(batch, rng).columns["advantages"], np.float32([0, 0, 1.5, 0, -1]))


def test_far_apart_is_not_clamped_and_masked_garbage_is_not_seen() -> None:
    batch = sampled(
        proximal_logprobs=[np.nan, -100.0, 0.0, np.inf, 0.0], teacher_logprobs=[np.nan, 0.0, -100.0, 1.0, 0.0]
    )
    found = Opd(OpdConfig(), mixes=False)(batch, np.random.default_rng(0)).columns["advantages"]
    np.testing.assert_array_equal(found, np.float32([0, 100, -100, 0, 0]))


# --- the term -------------------------------------------------------------------------------------------------------


def term_of(**options: object) -> TopkKl:
    built = plugin.miles_term().build(TopkKlConfig(**options), None)
    assert isinstance(built, Term) and isinstance(built, TopkKl)
    return built


def test_what_is_scored_follows_the_support() -> None:
    k = 4
    own, theirs = Output(name="topk_ids", k=k), Output(name="topk_ids", role="teacher", k=k)
    by_student = term_of(k=k).scores
    at = ("actor.topk_ids",)
    assert by_student == {
        "actor.topk_ids": own,
        "teacher.token_logprobs": Output(name="token_logprobs", role="teacher", inputs=at),
        "teacher.rest_logprobs": Output(name="rest_logprobs", role="teacher", inputs=at),
    }
    both = term_of(k=k, support=Support.union, tail="renormalise")
    assert both.scores.keys() == {"actor.topk_ids", "teacher.topk_ids", "teacher.token_logprobs"}
    assert both.scores["teacher.token_logprobs"].inputs == ("actor.topk_ids", "teacher.topk_ids")
    by_teacher = term_of(k=k, support=Support.teacher).scores
    assert by_teacher == {
        "teacher.topk_ids": theirs,
        "teacher.topk_logprobs": Output(name="topk_logprobs", role="teacher", k=k),
        "teacher.rest_logprobs": Output(name="rest_logprobs", role="teacher", k=k),
    }
    told = TopkKl(TopkKlConfig(k=k, support=Support.teacher), chosen_by_scorer=True)
    assert told.scores.keys() == {"teacher.topk_ids", "teacher.topk_logprobs"}
    for term in (both, told, term_of(k=k)):
        assert term.needs == term.scores.keys() and not term.weighted and term.mask == "kept"
        assert all(output.role == "actor" for output in term.outputs)


def test_ids_that_both_name_count_once() -> None:
    """The union of {0, 1} and {2, 0} is all three tokens: the exact KL, and no rest."""
    batch = batches.batch_of([batches.group(0, [[3]], [1.0], [])])
    for name, value in {
        "actor.topk_ids": np.array([[0, 1]], np.int32),
        "teacher.topk_ids": np.array([[2, 0]], np.int32),
        "teacher.token_logprobs": T[:, [0, 1, 2, 0]].float().numpy(),
        "teacher.rest_logprobs": np.array([ABSENT], np.float32),
    }.items():
        batch = batch.with_columns({name: value}, [ColumnSpec(name=name, level=Level.UNIT, dtype=str(value.dtype))])
    made = {"token_logprobs": P[:, [0, 1, 2, 0]], "rest_logprobs": torch.tensor([ABSENT], dtype=F64)}
    made["logprobs"] = torch.zeros(1, dtype=F64)
    found = term_of(k=2, support=Support.union)(MicroView(batch, lambda output: made[output.name]))
    assert found.value.item() == pytest.approx(float((P.exp() * (P - T)).sum()), abs=1e-7)
    assert found.metrics["student_mass"].item() == pytest.approx(1) and found.metrics[
        "teacher_mass"
    ].item() == pytest.approx(1)


def test_a_teacher_that_tells_its_top_only_gives_the_same_value() -> None:
    batch = batches.batch_of([batches.group(0, [[3]], [1.0], [])])
    for name, value in {
        "teacher.topk_ids": np.array([[2, 1]], np.int32),
        "teacher.topk_logprobs": T[:, [2, 1]].float().numpy(),
        "teacher.rest_logprobs": T[:, 0].float().numpy(),
    }.items():
        batch = batch.with_columns({name: value}, [ColumnSpec(name=name, level=Level.UNIT, dtype=str(value.dtype))])
    made = {"token_logprobs": P[:, [2, 1]], "rest_logprobs": P[:, 0], "logprobs": torch.zeros(1, dtype=F64)}
    view = MicroView(batch, lambda output: made[output.name])
    values = [
        TopkKl(TopkKlConfig(k=2, support=Support.teacher), chosen_by_scorer=told)(view).value.item()
        for told in (False, True)
    ]
    assert values[0] == pytest.approx(values[1], abs=1e-6)
    assert values[0] == pytest.approx(0.5 * math.log(2.5) + 0.2 * math.log(0.4), abs=1e-6)


@pytest.mark.parametrize(
    "options", [{"k": 2}, {"k": 2, "support": Support.union}, {"k": 2, "support": Support.teacher}]
)
def test_masked_garbage_reaches_neither_value_nor_gradient(options: dict[str, object]) -> None:
    rng = np.random.default_rng(1)
    batch = batches.batch_of([batches.group(0, [[3, 4], [5]], [1.0, 0.0], [2])])
    m = batch.columns["trainable"]
    term = term_of(**options)
    width = 4 if options.get("support") is Support.union else 2
    results = []
    for bad in (0.0, np.nan, np.inf):
        rng = np.random.default_rng(1)
        dirty = batch
        for name, output in term.scores.items():
            shape = {"topk_ids": (2,), "topk_logprobs": (2,), "rest_logprobs": ()}.get(output.name, (width,))
            value = -np.abs(rng.normal(size=(batch.units, *shape))) - 1
            if output.name == "topk_ids":
                value = np.argsort(rng.random((batch.units, 5)))[:, :2]
            else:
                value[~m] = bad
            spec = ColumnSpec(name=name, level=Level.UNIT, dtype="int32" if output.name == "topk_ids" else "float32")
            dirty = dirty.with_columns({name: value}, [spec])
        made = {}
        for name, shape in (("token_logprobs", (width,)), ("rest_logprobs", ()), ("logprobs", ())):
            value = -np.abs(rng.normal(size=(batch.units, *shape))) - 1
            value[~m] = bad
            made[name] = torch.from_numpy(value).requires_grad_()
        found = term(MicroView(dirty, lambda output, made=made: made[output.name])).value  # type: ignore[misc]
        found.sum().backward()
        gradient = made["token_logprobs"].grad
        assert gradient is not None and not gradient[~m].any() and not found[~m].any()
        results.append((found.tolist(), gradient.tolist()))
    assert results[0] == results[1] == results[2]
