"""The draw: counter hash, inverse CDF, cuts and log-probabilities, against hand-computed and brute-force values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_rollout_local.sampling import Knobs, sample, uniform


def knobs(n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Knobs:
    return Knobs(np.full(n, temperature, np.float32), np.full(n, top_k, np.int64), np.full(n, top_p, np.float32))


def reference_uniform(seed: int, draw: int) -> float:
    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    return (mix((seed + mix((draw + 1) * 0x9E3779B97F4A7C15 % 2**64)) % 2**64) >> 11) * 2.0**-53


def test_vectors_of_the_counter() -> None:
    """Public: they change with a major version only."""
    seeds = np.array([0, 0, 1, 2**64 - 1], np.uint64)
    draws = np.array([0, 1, 0, 12345], np.int64)
    expected = [0.28176129772258496, 0.80255116473696, 0.9160981669305095, 0.3429872818619779]
    assert uniform(seeds, draws).tolist() == expected
    assert [reference_uniform(int(s), int(d)) for s, d in zip(seeds, draws, strict=True)] == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31)), min_size=1, max_size=9))
def test_counter_depends_on_its_pair_only(pairs: list[tuple[int, int]]) -> None:
    seeds, draws = np.array([p[0] for p in pairs], np.uint64), np.array([p[1] for p in pairs], np.int64)
    together = uniform(seeds, draws)
    assert together.tolist() == [reference_uniform(*p) for p in pairs]
    assert ((together >= 0) & (together < 1)).all()


def test_counter_is_uniform_along_draws_and_along_seeds() -> None:
    n = 20000
    for u in (
        uniform(np.full(n, 7, np.uint64), np.arange(n)),
        uniform(np.arange(n).astype(np.uint64), np.zeros(n, np.int64)),
    ):
        counts = np.histogram(u, 50, (0, 1))[0]
        assert ((counts - n / 50) ** 2 / (n / 50)).sum() < 100  # chi-square with 49 degrees of freedom
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03


def test_temperature_of_numerics() -> None:
    """Logits [2, 0], T = .5 -> [-.0181499, -4.0181499]."""
    logits = torch.tensor([[2.0, 0.0]] * 2)
    tokens, scores, kept = sample(logits, np.array([0.0, 0.999]), knobs(2, 0.5))
    assert tokens.tolist() == [0, 1] and kept is None
    np.testing.assert_allclose(scores, [-0.0181499, -4.0181499], atol=1e-6)


def test_inverse_cdf_at_its_borders_and_never_a_token_without_mass() -> None:
    p = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    u = np.array([0.0, 0.2499, 0.2501, 1 - 2**-53])
    tokens, scores, _ = sample(p.log().repeat(4, 1), u, knobs(4))
    assert tokens.tolist() == [1, 1, 3, 3]
    np.testing.assert_allclose(scores, np.log([0.25, 0.25, 0.75, 0.75]), atol=1e-6)


def test_cold_rows_take_the_argmax_beside_hot_ones() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    settings_ = knobs(2)
    settings_.temperature[0] = 0
    settings_.top_k[0] = 2  # means nothing at temperature 0
    tokens, scores, kept = sample(logits, np.array([0.999, 0.999]), settings_)
    assert tokens.tolist() == [1, 2] and kept is None
    np.testing.assert_allclose(scores, torch.log_softmax(logits, -1)[[0, 1], [1, 2]], atol=1e-6)


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (2, 1.0, [1, 3]),
        (0, 0.7, [1, 3]),  # .4 + .3 = .7 reaches p exactly
        (0, 0.71, [1, 2, 3]),
        (0, 0.39, [1]),
        (0, 0.1, [1]),
        (3, 0.5, [1, 3]),  # top-p on what top-k left: .4/.9 = .444 < .5
        (3, 0.44, [1]),
        (1, 1.0, [1]),
    ],
)
def test_cuts(top_k: int, top_p: float, expected: list[int]) -> None:
    p = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64)
    u = np.linspace(0, 0.999, 40)
    logits = p.log().float().repeat(40, 1)
    tokens, scores, kept = sample(logits, u, knobs(40, 1.0, top_k, top_p if top_p != 0.7 else 0.69999))
    assert kept is not None and set(tokens.tolist()) == set(expected)
    assert kept.counts.tolist() == [len(expected)] * 40 and kept.ids.tolist() == expected * 40
    mass = p[0, expected].sum()
    np.testing.assert_allclose(scores, (p[0] / mass).log().numpy()[tokens], atol=1e-6)


def test_a_mass_that_is_reached_exactly_takes_nothing_more() -> None:
    """Four equal tokens, p = .5: two of them have mass .5, which is enough."""
    _, _, kept = sample(torch.zeros(1, 4), np.zeros(1), knobs(1, top_p=0.5))
    assert kept is not None and kept.ids.tolist() == [0, 1]


def test_ties_at_the_border_go_to_the_lower_id_and_a_whole_cut_is_no_cut() -> None:
    logits = torch.zeros(1, 5)
    _, _, kept = sample(logits, np.zeros(1), knobs(1, top_k=3))
    assert kept is not None and kept.ids.tolist() == [0, 1, 2]
    assert sample(logits, np.zeros(1), knobs(1, top_k=5))[2] is None


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 40),
    st.integers(0, 45),
    st.floats(0.05, 1.0),
    st.floats(0.2, 3.0),
    st.integers(0, 2**32),
)
def test_rows_do_not_see_each_other(vocabulary: int, top_k: int, top_p: float, temperature: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    logits = torch.from_numpy(generator.normal(0, 3, (6, vocabulary)).astype(np.float32))
    u = generator.random(6)
    mixed = knobs(6, temperature, top_k, top_p)
    mixed.top_k[::2], mixed.top_p[::3] = 0, 1
    mixed.temperature[5] = 0
    tokens, scores, _ = sample(logits, u, mixed)
    for i in range(6):
        one = Knobs(mixed.temperature[i : i + 1], mixed.top_k[i : i + 1], mixed.top_p[i : i + 1])
        token, score, kept = sample(logits[i : i + 1], u[i : i + 1], one)
        assert token[0] == tokens[i] and score[0] == scores[i]
        if kept is not None:
            inside = torch.log_softmax((logits[i].double() / float(one.temperature[0]))[kept.ids.astype(np.int64)], -1)
            assert token[0] in kept.ids
            np.testing.assert_allclose(score[0], inside[list(kept.ids).index(token[0])], atol=2e-6)
            if top_k and one.top_k[0]:
                assert len(kept.ids) <= top_k


def test_frequencies_follow_the_distribution() -> None:
    p = np.array([0.5, 0.3, 0.15, 0.05])
    n = 40000
    u = uniform(np.arange(n).astype(np.uint64), np.full(n, 3))
    tokens, _, _ = sample(torch.from_numpy(np.log(p)).float().repeat(n, 1), u, knobs(n))
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / n, p, atol=0.01)
