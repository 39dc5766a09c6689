"""The static corrections by hand and as properties: documented values, m before rejection, extremes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from miles_algo_correction import config as c
from miles_algo_correction.plugin import miles_stage, miles_term
from miles_algo_correction.stages import Bypass, icepop, mis, tis

from miles_core.columns import CORE_COLUMNS, Batch
from miles_core.errors import LearnerError

E20 = math.exp(20.0)


def batch_of(rows, masked=(), origin=None, **more):
    """One trajectory a row of log w, π_b = −1; `masked`: flat indices that are not trainable, filled with NaN."""
    log_w = np.array([x for row in rows for x in row], np.float64)
    n = len(log_w)
    trainable = ~np.isin(np.arange(n), masked)
    nan = np.where(trainable, 0.0, np.nan)
    columns = {
        "trainable": trainable,
        "origin": np.ones(n, np.uint8) if origin is None else np.array(origin, np.uint8),
        "proximal_logprobs": (log_w - 1.0 + nan).astype(np.float64),
        "behaviour_logprobs": -1.0 + nan,
    }
    count = len(rows)
    return Batch(
        policy="main",
        step=0,
        trajectory_ids=tuple(f"t{i}" for i in range(count)),
        episode_ids=tuple(f"e{i}" for i in range(count)),
        group_ids=("g",),
        lengths=np.array([len(row) for row in rows], np.int64),
        episode_of=np.arange(count),
        group_of=np.zeros(count, np.int64),
        columns=columns | more,
        specs=dict(CORE_COLUMNS),
        items={},
    )


def run(stage, batch):
    with np.errstate(all="raise", under="ignore"):
        found = stage(batch, np.random.default_rng(0))
    weight = found.columns["correction_weight"]
    assert weight.dtype == np.float32 and set(found.columns) == {spec.name for spec in stage.gives}
    return weight, found.columns.get("rejected"), found.metrics


def logs(*w):
    return [math.log(x) for x in w]


# --- tis and icepop --------------------------------------------------------------------------------------------------


def test_tis_truncates_from_above_only():
    weight, rejected, metrics = run(tis(c.TisConfig()), batch_of([logs(1.0, 3.0, 0.1)]))
    np.testing.assert_allclose(weight, [1.0, 2.0, 0.1], rtol=1e-6)
    assert rejected is None and metrics["truncated"] == (1.0, 3.0)
    assert metrics["weight"] == (pytest.approx(3.1), 3.0)


def test_one_nat_behind_is_two_and_not_one():
    """Behaviour −2, proximal −1: w = e, truncated at 2. A result of 1.0 is the classic bug."""
    weight, _, _ = run(tis(c.TisConfig()), batch_of([[1.0]]))
    assert weight.tolist() == [2.0]
    assert run(tis(c.TisConfig(high=5.0)), batch_of([[1.0]]))[0][0] == np.float32(math.e)


def test_levels():
    rows = [logs(1.5, 1.2), logs(0.5, 1.0, 1.0)]
    token = run(tis(c.TisConfig()), batch_of(rows))[0]
    sequence = run(tis(c.TisConfig(level=c.Level.sequence)), batch_of(rows))[0]
    geometric = run(tis(c.TisConfig(level=c.Level.geometric)), batch_of(rows))[0]
    np.testing.assert_allclose(token, [1.5, 1.2, 0.5, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(sequence, [1.8, 1.8, 0.5, 0.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(geometric, [1.8**0.5] * 2 + [0.5 ** (1 / 3)] * 3, rtol=1e-6)


def test_masked_tokens_are_in_no_sum_not_even_as_nan():
    batch = batch_of([logs(1.5, 7.0, 1.2)], masked=[1])
    weight, _, metrics = run(tis(c.TisConfig(level=c.Level.geometric)), batch)
    np.testing.assert_allclose(weight, [1.8**0.5, 1.0, 1.8**0.5], rtol=1e-6)
    assert metrics["truncated"] == (0.0, 2.0)


def test_icepop_bounds_are_inclusive_and_nothing_is_rejected():
    for dtype in (np.float64, np.float32):
        columns = {
            "proximal_logprobs": np.log([0.5, 5.0, 0.4999, 5.001, 1.0]).astype(dtype),
            "behaviour_logprobs": np.zeros(5, dtype),
        }
        weight, rejected, metrics = run(icepop(c.IcepopConfig()), batch_of([[0.0] * 5], **columns))
        np.testing.assert_allclose(weight, [0.5, 5.0, 0.0, 0.0, 1.0], rtol=1e-6)
        assert rejected is None and metrics["zeroed"] == (2.0, 5.0)


# --- mis -------------------------------------------------------------------------------------------------------------

ROWS = [logs(3.0, 1.0), logs(0.25, 1.0)]


@pytest.mark.parametrize(
    ("mode", "level", "weight", "rejected"),
    [
        ("truncate", "token", [2, 1, 0.25, 1], None),
        ("clip", "token", [2, 1, 0.5, 1], None),
        ("mask", "token", [3, 1, 0.25, 1], [1, 0, 1, 0]),
        ("truncate", "sequence", [2, 2, 0.25, 0.25], None),
        ("clip", "sequence", [2, 2, 0.5, 0.5], None),
        ("mask", "sequence", [3, 3, 0.25, 0.25], [1, 1, 1, 1]),
        ("truncate", "geometric", [3**0.5] * 2 + [0.5] * 2, None),
        ("clip", "geometric", [3**0.5] * 2 + [0.5] * 2, None),
        ("mask", "geometric", [3**0.5] * 2 + [0.5] * 2, [0, 0, 0, 0]),
    ],
)
def test_three_levels_by_three_modes(mode, level, weight, rejected):
    config = c.MisConfig(mode=c.Mode(mode), level=c.Level(level))
    found, gone, metrics = run(mis(config), batch_of(ROWS))
    np.testing.assert_allclose(found, weight, rtol=1e-6)
    assert (gone is None) is (rejected is None) and (gone is None or gone.tolist() == [bool(x) for x in rejected])
    assert ("truncated" in metrics) is (mode != "mask") and ("rejected" in metrics) is (mode == "mask")
    if mode == "clip" and level == "token":
        assert metrics["truncated"] == (2.0, 4.0)
    if mode == "truncate" and level == "token":
        assert metrics["truncated"] == (1.0, 4.0)


def test_low_is_one_over_high_unless_given():
    weight, _, _ = run(mis(c.MisConfig(mode=c.Mode.clip, high=4.0)), batch_of([logs(0.1, 9.0)]))
    np.testing.assert_allclose(weight, [0.25, 4.0])
    weight, _, _ = run(mis(c.MisConfig(mode=c.Mode.clip, high=4.0, low=0.0)), batch_of([logs(0.1, 9.0)]))
    np.testing.assert_allclose(weight, [0.1, 4.0], rtol=1e-6)


def test_the_rejection_rule_has_its_own_level_and_bounds():
    rule = c.RejectConfig(level=c.Level.sequence, high=2.5)
    weight, rejected, metrics = run(mis(c.MisConfig(reject=rule)), batch_of(ROWS))
    np.testing.assert_allclose(weight, [2, 1, 0.25, 1], rtol=1e-6)  # the weight is still the token's
    assert rejected.tolist() == [True, True, True, True]  # 3 > 2.5 and 1/4 < 1/2.5
    assert metrics["rejected"] == (4.0, 4.0) and metrics["weight"] == (0.0, 0.0)
    rule = c.RejectConfig(level=c.Level.token, high=2.5, low=0.25)
    assert run(mis(c.MisConfig(reject=rule)), batch_of(ROWS))[1].tolist() == [True, False, False, False]


def test_what_mask_rule_and_veto_reject_adds_up():
    rows = [logs(3.0, 1.0), logs(1.6, 1.6), logs(0.05, 1.0), logs(1.0)]
    rule = c.RejectConfig(level=c.Level.sequence, high=3.5, low=0.01)
    config = c.MisConfig(mode=c.Mode.mask, low=0.01, reject=rule, veto=0.1)
    _, rejected, metrics = run(mis(config), batch_of(rows))
    assert rejected.tolist() == [True, False, False, False, True, True, False]  # token above 2; none; veto
    rule = c.RejectConfig(level=c.Level.sequence, high=2.5, low=0.01)
    _, rejected, metrics = run(mis(c.MisConfig(mode=c.Mode.mask, low=0.01, reject=rule)), batch_of(rows))
    assert rejected.tolist() == [True, True, True, True, False, False, False]  # 3 and 2.56 as trajectories, and 3
    rule = c.RejectConfig(level=c.Level.sequence, high=3.5, low=0.1)
    _, rejected, metrics = run(mis(c.MisConfig(mode=c.Mode.mask, low=0.01, reject=rule)), batch_of(rows))
    assert rejected.tolist() == [
        True,
        False,
        False,
        False,
        True,
        True,
        False,
    ]  # the mask's token, the rule's trajectory
    assert metrics["rejected"] == (3.0, 7.0)


def test_a_token_that_is_rejected_still_counts_in_its_trajectory():
    """Token rule drops w = 3; the geometric weight is that of both tokens, √3, and not that of the rest, 1."""
    config = c.MisConfig(level=c.Level.geometric, reject=c.RejectConfig(level=c.Level.token))
    weight, rejected, _ = run(mis(config), batch_of([logs(3.0, 1.0)]))
    np.testing.assert_allclose(weight, [3**0.5] * 2, rtol=1e-6)
    assert rejected.tolist() == [True, False]


def test_a_veto_rejects_the_whole_trajectory():
    rows = [[math.log(9e-5), 0.0, 0.0], [math.log(2e-4), 0.0]]
    _, rejected, metrics = run(mis(c.MisConfig(veto=1e-4)), batch_of(rows))
    assert rejected.tolist() == [True, True, True, False, False]
    assert metrics["vetoed"] == (3.0, 5.0) == metrics["rejected"]
    _, rejected, _ = run(mis(c.MisConfig(veto=1e-4)), batch_of(rows, masked=[0]))
    assert not rejected.any()  # what is masked vetoes nothing


def test_normalised_over_the_step_after_bounds_and_rejection():
    rows = [logs(3.0, 1.0), logs(0.5, 0.5)]
    weight, _, metrics = run(mis(c.MisConfig(normalize=c.Normalize.batch)), batch_of(rows))
    np.testing.assert_allclose(weight, [2, 1, 0.5, 0.5], rtol=1e-6)  # the mean of 2, 1, .5, .5 is 1 already
    assert metrics["weight"] == (pytest.approx(4.0), 4.0)
    mask = c.MisConfig(normalize=c.Normalize.batch, mode=c.Mode.mask)
    weight, rejected, metrics = run(mis(mask), batch_of(rows))
    assert rejected.tolist() == [True, False, False, False]
    np.testing.assert_allclose(
        weight[1:], np.array([1, 0.5, 0.5]) * 1.5, rtol=1e-6
    )  # Σ m w / Σ m = 2/3 of what is left
    assert metrics["weight"] == (pytest.approx(3.0), 3.0)


def test_normalised_at_sequence_level_by_the_mean_over_trajectories():
    rows = [[math.log(1.5)] + [0.0] * 3, [math.log(0.5)]]
    weight, _, _ = run(mis(c.MisConfig(level=c.Level.sequence, normalize=c.Normalize.batch)), batch_of(rows))
    np.testing.assert_allclose(weight, [1.5] * 4 + [0.5], rtol=1e-6)  # the mean over tokens would be 1.3
    rows[0][0] = math.log(1.9)
    weight, _, _ = run(mis(c.MisConfig(level=c.Level.sequence, normalize=c.Normalize.batch)), batch_of(rows))
    np.testing.assert_allclose(weight, [1.9 / 1.2] * 4 + [0.5 / 1.2], rtol=1e-6)


def test_nothing_left_to_normalise_by():
    config = c.MisConfig(normalize=c.Normalize.batch, veto=0.5)
    weight, rejected, metrics = run(mis(config), batch_of([logs(0.1)]))
    assert rejected.all() and np.isfinite(weight).all() and metrics["weight"] == (0.0, 0.0)


# --- all of them -----------------------------------------------------------------------------------------------------

STAGES = {
    "tis": tis(c.TisConfig()),
    "tis sequence": tis(c.TisConfig(level=c.Level.sequence)),
    "icepop": icepop(c.IcepopConfig()),
    "mis": mis(c.MisConfig()),
    "mis mask": mis(c.MisConfig(mode=c.Mode.mask)),
    "mis all": mis(
        c.MisConfig(mode=c.Mode.mask, level=c.Level.sequence, reject=c.RejectConfig(), veto=1e-4, normalize="batch")
    ),
    "mis geometric": mis(c.MisConfig(level=c.Level.geometric, mode=c.Mode.clip)),
}


@pytest.mark.parametrize("name", STAGES)
def test_log_ratios_of_a_hundred(name):
    for far in (100.0, -100.0):
        weight, _, metrics = run(STAGES[name], batch_of([[far, 0.0, far], [0.0]]))
        assert np.isfinite(weight).all() and (weight >= 0).all() and (weight <= E20 * 1.001).all()
        assert all(np.isfinite(v) for pair in metrics.values() for v in pair)
        assert weight[3] == pytest.approx(1.0) or "all" in name


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("masked", [[0, 1, 2, 3], [1, 2, 3]])
def test_all_masked_and_one_token(name, masked):
    weight, rejected, metrics = run(STAGES[name], batch_of([[0.1, 0.2, 0.3], [0.4]], masked=masked))
    assert np.isfinite(weight).all() and (weight[1:] == 1).all() and (rejected is None or not rejected.any())
    assert metrics["weight"][1] == 4 - len(masked)


@pytest.mark.parametrize("name", STAGES)
def test_what_no_engine_sampled_is_on_policy(name):
    """A demonstration among sampled tokens: weight 1, and in no statistic."""
    origin = [1, 3, 1, 1]
    batch = batch_of([[0.05, 0.0, 0.05], [0.0]], origin=origin, trainable=np.ones(4, bool))
    batch.columns["behaviour_logprobs"][1] = 0.0  # the fill of a token without a behaviour
    weight, rejected, metrics = run(STAGES[name], batch)
    assert weight[1] == 1.0 and metrics["weight"][1] == 3.0 and (rejected is None or not rejected.any())


log_w = hnp.arrays(np.float64, st.integers(1, 12), elements=st.floats(-30, 30, width=32))


@settings(max_examples=60, deadline=None)
@given(log_w, st.data())
def test_masking_equals_filtering(values, data):
    """Tokens that are not trainable could as well not be there."""
    live = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    for name, stage in STAGES.items():
        cut = len(values) // 2
        whole = batch_of([values[:cut], values[cut:]], masked=np.flatnonzero(~live))
        less = batch_of([values[:cut][live[:cut]], values[cut:][live[cut:]]])
        a, ra, ma = run(stage, whole)
        b, rb, mb = run(stage, less)
        np.testing.assert_allclose(a[live], b, rtol=1e-6, err_msg=name)
        assert (ra is None or ra[live].tolist() == rb.tolist()) and ma.keys() == mb.keys()


@settings(max_examples=60, deadline=None)
@given(log_w)
def test_bounds_hold_whatever_is_given(values):
    half = len(values) // 2
    batch = batch_of([values[:half], values[half:]])
    w = np.exp(np.clip(values, -20, 20))
    weight, _, _ = run(STAGES["tis"], batch)
    np.testing.assert_allclose(weight, np.minimum(w, 2.0), rtol=1e-5)
    weight, _, _ = run(STAGES["icepop"], batch)
    assert (((weight >= 0.5) & (weight <= 5.0)) | (weight == 0)).all()
    weight, _, _ = run(mis(c.MisConfig(mode=c.Mode.clip)), batch)
    assert ((weight >= 0.5) & (weight <= 2.0)).all()
    weight, rejected, _ = run(STAGES["mis mask"], batch)
    np.testing.assert_array_equal(rejected, (w.astype("f4") < 0.5) | (w.astype("f4") > 2.0))
    np.testing.assert_allclose(weight, w, rtol=1e-5)


@pytest.mark.parametrize("level", c.Level)
def test_importance_weights_correct_an_expectation(level):
    """E_b[w f] = E_p[f] for one-token trajectories at every level, within four standard errors."""
    rng = np.random.default_rng(3)
    p, b, f = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5]), np.array([1.0, -2.0, 4.0])
    drawn = rng.choice(3, 20_000, p=b)
    stage = tis(c.TisConfig(level=level, high=10.0))
    weight, _, metrics = run(stage, batch_of([[x] for x in np.log(p / b)[drawn]]))
    estimate = weight * f[drawn]
    error = 4 * estimate.std() / math.sqrt(len(drawn))
    assert abs(estimate.mean() - (p * f).sum()) < error and abs((b * f).sum() - (p * f).sum()) > error
    assert abs(metrics["weight"][0] / metrics["weight"][1] - 1.0) < 0.03


# --- bypass ----------------------------------------------------------------------------------------------------------


def test_bypass_puts_the_engines_log_probabilities_in_place_of_the_trainers():
    batch = batch_of([[1.0, 2.0]], masked=[1])
    found = Bypass()(batch, np.random.default_rng(0))
    assert found.columns["proximal_logprobs"].tolist() == [-1.0, 0.0] and not found.metrics


def test_bypass_refuses_what_no_engine_sampled():
    with pytest.raises(LearnerError, match=r"1 trainable tokens were not sampled.*'t0'"):
        Bypass()(batch_of([[0.0, 0.0]], origin=[1, 3]), np.random.default_rng(0))


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (c.IcepopConfig, {"low": 1.5}, "on-policy tokens have w = 1"),
        (c.MisConfig, {"low": 1.5}, "on-policy tokens have w = 1"),
        (c.RejectConfig, {"low": 1.5}, "on-policy tokens have w = 1"),
        (
            c.MisConfig,
            {"normalize": c.Normalize.batch, "level": c.Level.geometric},
            "geometric mean has no mean weight",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(config, values, message):
    with pytest.raises(ValueError, match=message):
        config(**values)


def test_every_part_explains_itself_and_asks_for_the_engines_log_probabilities():
    for provider in [*miles_stage(), *miles_term()]:
        assert provider.field == "correction" and "Deviations:" in provider.explain
        assert "behaviour_logprobs" in provider.required(provider.config())
    [opsm] = miles_term()
    assert opsm.required(c.OpsmConfig(base=c.Base.proximal)) == {"several_updates"}
