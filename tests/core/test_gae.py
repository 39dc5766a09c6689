"""Generalised advantage estimation and explained variance, against values by hand and a plain loop."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.numerics import host


def loop(rewards, values, mask, row, gamma, lam, bootstrap):
    """The definition, one unit at a time from the right."""
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    after, value_after = {}, {}
    for t in reversed(range(len(mask))):
        if not mask[t]:
            continue
        following = value_after.get(row[t], bootstrap[row[t]])
        delta = rewards[t] + gamma * following - values[t]
        advantages[t] = delta + gamma * lam * after.get(row[t], 0.0)
        returns[t] = advantages[t] + values[t]
        after[row[t]], value_after[row[t]] = advantages[t], values[t]
    return advantages, returns


def test_by_hand():
    mask = np.array([False, True, True, True])
    rewards, values = np.array([0, 0, 0, 1.0]), np.array([9.0, 0.5, 0.2, 0.1])
    a, g = host.gae(rewards, values, mask, np.zeros(4, int), gamma=0.9, lam=0.8)
    np.testing.assert_allclose(a, [0, 0.06736, 0.538, 0.9], atol=1e-12)
    np.testing.assert_allclose(g, [0, 0.56736, 0.738, 1.0], atol=1e-12)
    a, _ = host.gae(rewards, values, mask, np.zeros(4, int), gamma=0.9, lam=0.8, bootstrap=np.array([2.0]))
    np.testing.assert_allclose(a[1:], [0.06736 + 0.72**2 * 1.8, 0.538 + 0.72 * 1.8, 0.9 + 1.8], atol=1e-12)


def test_the_defaults_give_the_return_minus_the_value():
    values = np.array([0.3, -0.2, 0.7, 0.1])
    a, g = host.gae(np.array([0, 0, 2.0, -1]), values, np.ones(4, bool), np.array([0, 0, 0, 1]))
    np.testing.assert_allclose(g, [2, 2, 2, -1], atol=1e-12)
    np.testing.assert_allclose(a, g - values, atol=1e-12)


def test_lam_zero_is_one_step():
    values = np.array([0.3, -0.2, 0.7])
    a, _ = host.gae(np.array([0, 0, 2.0]), values, np.ones(3, bool), np.zeros(3, int), gamma=0.5, lam=0.0)
    np.testing.assert_allclose(a, [0.5 * -0.2 - 0.3, 0.5 * 0.7 + 0.2, 2 - 0.7], atol=1e-12)


def test_masked_units_between_turns_are_skipped_without_decay():
    mask = np.array([True, False, False, True])
    rewards, values = np.array([0, 5.0, np.nan, 1.0]), np.array([0.5, np.nan, 7.0, 0.2])
    a, g = host.gae(rewards, values, mask, np.zeros(4, int), gamma=0.9, lam=0.8)
    together, _ = host.gae(
        np.array([0, 1.0]), np.array([0.5, 0.2]), np.ones(2, bool), np.zeros(2, int), gamma=0.9, lam=0.8
    )
    np.testing.assert_array_equal(a, [together[0], 0, 0, together[1]])
    assert g[1] == g[2] == 0


def test_nothing_trainable():
    a, g = host.gae(np.full(3, np.nan), np.full(3, np.nan), np.zeros(3, bool), np.zeros(3, int), bootstrap=np.ones(1))
    assert not a.any() and not g.any()
    a, g = host.gae(np.zeros(0), np.zeros(0), np.zeros(0, bool), np.zeros(0, int))
    assert not len(a) and not len(g)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 7), min_size=1, max_size=6), st.booleans())
def test_it_is_the_loop_whatever_the_shape(seed, lengths, bootstrapped):
    rng = np.random.default_rng(seed)
    row = np.repeat(np.arange(len(lengths)), lengths)
    mask = rng.random(len(row)) < 0.7
    rewards, values = rng.normal(size=len(row)), rng.normal(size=len(row))
    gamma, lam = rng.random(2)
    bootstrap = rng.normal(size=len(lengths)) if bootstrapped else np.zeros(len(lengths))
    found = host.gae(rewards, values, mask, row, gamma=gamma, lam=lam, bootstrap=bootstrap if bootstrapped else None)
    for ours, plain in zip(found, loop(rewards, values, mask, row, gamma, lam, bootstrap), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-12, atol=1e-12)


def test_explained_variance():
    g, mask = np.array([1.0, 2.0, 3.0, np.nan]), np.array([True, True, True, False])
    assert host.explained_variance(g, g, mask) == (2.0, 2.0)
    assert host.explained_variance(g, np.full(4, 7.0), mask) == (0.0, 2.0)
    assert host.explained_variance(g, g[::-1].copy(), np.array([False, True, False, False])) == (0.0, 0.0)
    num, den = host.explained_variance(g, -g, mask)
    assert num / den == pytest.approx(1 - 4.0)
    assert host.explained_variance(g, g, np.zeros(4, bool)) == (0.0, 0.0)
