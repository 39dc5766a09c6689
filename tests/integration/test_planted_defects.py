"""Numerical defects that frameworks have had, planted into our parts: the conformance suite of each part rejects them.

Each row is a defect by name, the suite that must reject it (with the options and worked numbers that the part's own
`conformance` module ships) and the faulty code. The same parts without a defect pass through the same wrapper.
Defects of corrections are planted in that distribution's own tests.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from miles_algo_grpo import conformance as grpo

from miles_core.contracts.learning import ENTROPY, LOGPROBS, StageOutput, TermOutput
from miles_core.discovery import scan
from miles_core.numerics import host
from miles_core.testing import BackendConformance
from miles_core.testing.suite import labels, run_class
from miles_core.testing.toys.adapter import ToyAdapter
from miles_core.testing.toys.backend import ToyBackend

# --- stages: call(batch, config, right) -> the column, `right` being the correct one --------------------------------


class FaultyStage:
    def __init__(self, inner, config, call):
        self.needs, self.gives = inner.needs, inner.gives
        self._inner, self._config, self._call = inner, config, call

    def __call__(self, batch, rng):
        found = self._inner(batch, rng)
        ((name, right),) = found.columns.items()
        (spec,) = self.gives
        return StageOutput(columns={name: np.asarray(self._call(batch, self._config, right)).astype(spec.dtype)})


def faulty(suite, wrap, call):
    """The suite over its own provider, whose product is wrapped."""
    original = scan().load(suite.kind, suite.name).provider

    def build(config, context):
        return wrap(original.build(config, context), config, call)

    return type(suite.__name__, (suite,), {"provider": replace(original, build=build)})


def per_group(formula):
    """Advantages from a function of one group's rewards, on every unit."""

    def call(batch, config, right):
        reward, found = batch.columns["reward"], np.full(batch.n_episodes, np.nan)
        for g in range(batch.n_groups):
            mine = (batch.group_of == g) & ~np.isnan(reward)
            if mine.any():
                found[mine] = formula(reward[mine], config)
        return units(batch, found)

    return call


def units(batch, per_episode):
    return np.where(batch.columns["trainable"], per_episode[batch.episode_of_unit], 0.0)


def lonely(formula):
    """0 where there is nothing to compare, the formula elsewhere."""
    return per_group(lambda r, config: np.zeros(len(r)) if len(r) == 1 or host.all_equal(r) else formula(r, config))


def position_groups(batch, config, right):
    """As if every group had as many episodes as the first."""
    size = int((batch.group_of == 0).sum())
    groups = np.arange(batch.n_episodes) // size
    return units(batch, host.group_advantages(batch.columns["reward"], groups, eps=1e-6))


def population(batch, config, right):
    return units(batch, host.group_advantages(batch.columns["reward"], batch.group_of, ddof=0))


def decays_over_masked(batch, config, right):
    rewards = host.token_rewards(batch, batch.columns.get("reward_kl"))
    every = np.ones(batch.units, bool)
    return np.where(
        batch.columns["trainable"], host.discounted_sums(rewards, every, batch.trajectory_of_unit, config.gamma), 0.0
    )


def reward_at_the_last_token(batch, config, right):
    """The last token of the sequence, trainable or not: where it is masked, the reward is lost."""
    rewards = np.zeros(batch.units)
    last = batch.offsets[1:] - 1
    rewards[last] = batch.columns["reward"][batch.episode_of]
    return host.discounted_sums(rewards, batch.columns["trainable"], batch.trajectory_of_unit, config.gamma)


def one_token_early(batch, config, right):
    """Returns aligned with the token before: off by one."""
    moved = np.zeros_like(right)
    moved[:-1] = right[1:]
    return np.where(batch.columns["trainable"], moved, 0.0)


def reward_at_one_sibling(batch, config, right):
    keep = np.append(batch.episode_of[1:] != batch.episode_of[:-1], True)
    rewards = host.token_rewards(batch, batch.columns.get("reward_kl"))
    live = np.flatnonzero(batch.columns["trainable"])
    row = batch.trajectory_of_unit[live]
    last = live[np.append(row[1:] != row[:-1], True)]
    rewards[last] = np.where(keep[batch.trajectory_of_unit[last]], rewards[last], 0.0)
    return host.discounted_sums(rewards, batch.columns["trainable"], batch.trajectory_of_unit, config.gamma)


def leaks_into_the_trajectory_before(batch, config, right):
    rewards = host.token_rewards(batch, batch.columns.get("reward_kl"))
    return host.discounted_sums(rewards, batch.columns["trainable"], np.zeros(batch.units, int), config.gamma)


def kl_added(batch, config, right):
    kl = batch.columns.get("reward_kl")
    return right if kl is None else np.where(batch.columns["trainable"], right + 2 * kl, 0.0)


def kl_unmasked(batch, config, right):
    """Multiplies by the mask where it should select: 0 · NaN."""
    d = batch.columns["proximal_logprobs"] - batch.columns["reference.logprobs"]
    return config.coef * d + 0.0 * np.nansum(right) + np.nan * np.isnan(d).any()


def whitened(mean_of, var_of, root=lambda var: np.sqrt(var + 1e-8)):
    def call(batch, config, right):
        live, x = batch.columns["trainable"], batch.columns["advantages"].astype(np.float64)
        if not live.any():
            return right
        mean = mean_of(x, live)
        return np.where(live, (x - mean) / root(var_of(x, live, mean)), 0.0)

    return call


def masked_mean(x, live):
    return x[live].mean()


def masked_var(x, live, mean, ddof=1):
    return ((x[live] - mean) ** 2).sum() / max(int(live.sum()) - ddof, 1)


def per_rank(batch, config, right):
    """Statistics of each half of the batch, as two ranks would have them."""
    half = batch.trajectory_of_unit < (batch.n_trajectories + 1) // 2
    found = np.zeros(batch.units)
    for part in (half, ~half):
        found += host.whiten(batch.columns["advantages"], batch.columns["trainable"] & part)
    return found


def one_pass_in_float32(batch, config, right):
    x = batch.columns["advantages"][batch.columns["trainable"]].astype(np.float32)
    if len(x) < 2:
        return right
    mean = x.mean(dtype=np.float32)
    var = max(float((x * x).mean(dtype=np.float32) - mean * mean), 0.0) * len(x) / (len(x) - 1)
    found = np.zeros(batch.units)
    found[batch.columns["trainable"]] = (x - mean) / np.sqrt(var + 1e-8)
    return found


def overlong(tokens_of):
    def call(batch, config, right):
        longest = np.zeros(batch.n_episodes)
        tokens = np.bincount(batch.trajectory_of_unit, weights=tokens_of(batch), minlength=batch.n_trajectories)
        np.maximum.at(longest, batch.episode_of, tokens)
        return -config.penalty * np.clip((longest - 16) / 4, 0, 1)

    return call


def stage(suite, call):
    return faulty(suite, FaultyStage, call)


STAGES = {
    "group: ddof 0 in place of 1": stage(grpo.PlainGroupConformance, population),
    "group: epsilon inside the root": stage(
        grpo.GroupConformance, lonely(lambda r, c: (r - r.mean()) / np.sqrt(r.var(ddof=1) + c.eps))
    ),
    "group: a group of one gets its reward": stage(
        grpo.GroupConformance,
        per_group(lambda r, c: r if len(r) == 1 else (r - r.mean()) / (r.std(ddof=1) + c.eps)),
    ),
    "group: rewards equal up to float noise are blown up": stage(
        grpo.PlainGroupConformance,
        per_group(lambda r, c: r * 0 if len(r) == 1 else (r - r.mean()) / max(r.std(ddof=1), 1e-300)),
    ),
    "group: groups by position in the batch": stage(grpo.GroupConformance, position_groups),
    "group: the population's mean over the batch as the baseline": stage(
        grpo.CentredGroupConformance,
        lambda b, c, right: units(b, b.columns["reward"] - np.nanmean(b.columns["reward"])),
    ),
    "leave_one_out: its own reward in the baseline": stage(
        grpo.LeaveOneOutConformance, lonely(lambda r, c: r - r.mean())
    ),
    "leave_one_out: n in place of n − 1": stage(
        grpo.LeaveOneOutConformance, lonely(lambda r, c: r - (r.sum() - r) / len(r))
    ),
    "batch: statistics of each group": stage(
        grpo.BatchConformance, lonely(lambda r, c: (r - r.mean()) / (r.std(ddof=1) + c.eps))
    ),
    "centred: KL added to the reward": stage(grpo.CentredWithKlConformance, kl_added),
    "returns: decay across masked tokens": stage(grpo.DiscountedConformance, decays_over_masked),
    "returns: the reward at the last token of the sequence": stage(grpo.ReturnsConformance, reward_at_the_last_token),
    "returns: the reward at one sibling only": stage(grpo.ReturnsWithKlConformance, reward_at_one_sibling),
    "returns: off by one": stage(grpo.ReturnsWithKlConformance, one_token_early),
    "returns: one trajectory's rewards leak into another": stage(
        grpo.ReturnsConformance, leaks_into_the_trajectory_before
    ),
    "returns: KL added to the reward": stage(grpo.ReturnsWithKlConformance, kl_added),
    "whiten: ddof 0": stage(
        grpo.WhiteConformance, whitened(masked_mean, lambda x, live, mean: masked_var(x, live, mean, 0))
    ),
    "whiten: epsilon beside the root": stage(
        grpo.WhiteConformance, whitened(masked_mean, masked_var, lambda var: np.sqrt(var) + 1e-8)
    ),
    "whiten: masked tokens counted": stage(
        grpo.WhiteConformance,
        whitened(lambda x, live: np.where(live, x, 0).mean(), masked_var),
    ),
    "whiten: inverted mask": stage(
        grpo.WhiteConformance, lambda b, c, right: host.whiten(b.columns["advantages"], ~b.columns["trainable"])
    ),
    "whiten: each rank by itself": stage(grpo.WhiteConformance, per_rank),
    "whiten: variance in one pass, float32": stage(grpo.WhiteConformance, one_pass_in_float32),
    "whiten: shift_mean ignored": stage(
        grpo.WhiteKeepsMeanConformance,
        lambda b, c, right: host.whiten(b.columns["advantages"], b.columns["trainable"]),
    ),
    "reward_kl: the other sign": stage(grpo.TakenKlConformance, lambda b, c, right: -right),
    "reward_kl: masked by multiplication": stage(grpo.TakenKlConformance, kl_unmasked),
    "reward_kl: k3 of the other direction": stage(
        grpo.TakenK3Conformance,
        lambda b, c, right: c.coef * host.kl(b.columns["reference.logprobs"] - b.columns["proximal_logprobs"], "k3"),
    ),
    "reward_kl: coefficient forgotten": stage(grpo.TakenKlConformance, lambda b, c, right: right / c.coef),
    "overlong: the prompt counts": stage(grpo.OverlongConformance, overlong(lambda b: np.ones(b.units))),
    "overlong: only what is trainable counts": stage(
        grpo.OverlongConformance, overlong(lambda b: b.columns["trainable"])
    ),
}

# --- terms: call(view, config, right) -> values, `right` being the correct ones -------------------------------------


class FaultyTerm:
    def __init__(self, inner, config, call):
        for name in ("level", "mask", "weighted", "aggregation", "outputs", "needs"):
            setattr(self, name, getattr(inner, name))
        self._inner, self._config, self._call = inner, config, call

    def __call__(self, view):
        return TermOutput(value=self._call(view, self._config, self._inner(view).value))


def read(view):
    """m, π, π_p and A, selected as the real terms select them."""
    m = view["trainable"]
    chosen = [view.out(LOGPROBS), view["proximal_logprobs"], view["advantages"] if "advantages" in view else None]
    return [m, *(None if x is None else x.masked_fill(~m, 0.0) for x in chosen)]


def with_ratio(formula):
    """A term from rho (clamped), A, π and the config."""

    def call(view, config, right):
        _, pi, proximal, a = read(view)
        return formula((pi - proximal).clamp(-20, 20).exp(), a, pi, config)

    return call


def sequence_ratio(exponent):
    def call(view, config, right):
        m, pi, proximal, a = read(view)
        rho = exponent(view, m, pi - proximal).clamp(-20, 20).exp()
        return torch.maximum(-rho * a, -rho.clamp(1 - config.lo, 1 + config.lo) * a)

    return call


def mean_over(view, m, d):
    return view.seq_sum(d) / view.seq_sum(m.to(d.dtype)).clamp(min=1)


def not_rejected(view, m, d):
    kept = m & ~view["rejected"] if "rejected" in view else m
    return view.seq_sum(d * kept) / view.seq_sum(kept.to(d.dtype)).clamp(min=1)


def per_micro_batch(view, config, right):
    """A mean where a value per token was asked for: the mean of micro-batches is not that of the batch."""
    return right / view["trainable"].sum().clamp(min=1) * 4


def after_filtering(view, config, right):
    kept = view["trainable"] & ~view["rejected"] if "rejected" in view else view["trainable"]
    return right * view["trainable"].sum() / kept.sum().clamp(min=1)


def estimated(formula):
    """A KL term from d = π − π_ref, and ρ with its gradient."""

    def call(view, config, right):
        m, pi, proximal, _ = read(view)
        d = pi - view["reference.logprobs"].masked_fill(~m, 0.0)
        return formula(d, (pi - proximal).clamp(-20, 20).exp())

    return call


def k3(d):
    return (-d).clamp(-20, 20).expm1() + d


def term(suite, call):
    return faulty(suite, FaultyTerm, call)


TERMS = {
    "clip: the minimum in place of the maximum": term(
        grpo.ClipConformance,
        with_ratio(lambda r, a, pi, c: torch.minimum(-r * a, -r.clamp(1 - c.lo, 1 + c.lo) * a)),
    ),
    "clip: only the clipped branch": term(
        grpo.ClipConformance, with_ratio(lambda r, a, pi, c: -r.clamp(1 - c.lo, 1 + c.lo) * a)
    ),
    "clip: bounds of the log-ratio in place of the ratio": term(
        grpo.ClipConformance,
        with_ratio(lambda r, a, pi, c: torch.maximum(-r * a, -r.log().clamp(-c.lo, c.lo).exp() * a)),
    ),
    "clip: lo and hi swapped": term(
        grpo.DualConformance,
        with_ratio(
            lambda r, a, pi, c: torch.where(
                a < 0,
                torch.minimum(torch.maximum(-r * a, -r.clamp(1 - c.hi, 1 + c.lo) * a), -c.dual * a),
                torch.maximum(-r * a, -r.clamp(1 - c.hi, 1 + c.lo) * a),
            )
        ),
    ),
    "clip: the dual bound for positive advantages too": term(
        grpo.DualConformance, lambda view, c, right: torch.minimum(right, -c.dual * view["advantages"].abs() * 0 + 0.5)
    ),
    "clip: exp of any argument": term(
        grpo.ClipConformance,
        lambda view, c, right: (
            right + 0 * ((read(view)[1] - read(view)[2]) * 10).exp() * (read(view)[1] - read(view)[2] > 50)
        ),
    ),
    "clip: the sum of log-ratios in place of their mean": term(
        grpo.SequenceConformance, sequence_ratio(lambda view, m, d: view.seq_sum(d))
    ),
    "clip: the mean over the padded length": term(
        grpo.SequenceConformance, sequence_ratio(lambda view, m, d: view.seq_sum(d) / view.seq_sum(torch.ones_like(d)))
    ),
    "clip: the mean over what is not rejected": term(grpo.SequenceConformance, sequence_ratio(not_rejected)),
    "clip: no gradient through the mean": term(
        grpo.SequenceConformance, sequence_ratio(lambda view, m, d: mean_over(view, m, d.detach()) + (d - d.detach()))
    ),
    "clip: a mean over the micro-batch": term(grpo.ClipConformance, per_micro_batch),
    "clip: denominators after filtering": term(grpo.ClipConformance, after_filtering),
    "cispo: missing stop-gradient": term(
        grpo.CispoConformance, with_ratio(lambda r, a, pi, c: -r.clamp(1 - c.lo, 1 + c.hi) * a * pi)
    ),
    "cispo: bounded tokens lose their gradient": term(
        grpo.CispoConformance,
        with_ratio(lambda r, a, pi, c: -(r.detach() * (r.detach() <= 1 + c.hi)) * a * pi),
    ),
    "reinforce: the ratio beside the log-probability": term(
        grpo.ReinforceConformance, with_ratio(lambda r, a, pi, c: -r * a * pi)
    ),
    "reinforce: advantages of the token before (off by one)": term(
        grpo.ReinforceConformance,
        lambda view, c, right: -torch.roll(view["advantages"], 1) * read(view)[1],
    ),
    "kl: the other direction of d": term(grpo.K3Conformance, estimated(lambda d, rho: k3(-d))),
    "kl: its value used for its gradient": term(
        grpo.K3Conformance, estimated(lambda d, rho: k3(d).detach() + (d - d.detach()) * k3(d).detach())
    ),
    "kl: k2 without the half": term(grpo.K2Conformance, estimated(lambda d, rho: d * d)),
    "kl: the ratio of `unbiased` detached": term(
        grpo.UnbiasedK3Conformance, estimated(lambda d, rho: rho.detach() * k3(d))
    ),
    "kl: low_var bounded below only": term(
        grpo.LowVarConformance, estimated(lambda d, rho: k3(d.clamp(-20, 20)).clamp(min=-10))
    ),
    "entropy: the other sign": term(grpo.NegativeEntropyConformance, lambda view, c, right: -right),
    "entropy: detached": term(
        grpo.NegativeEntropyConformance, lambda view, c, right: -view.out(ENTROPY).detach() + 0 * right
    ),
}

# --- backends and models --------------------------------------------------------------------------------------------


class Averages(ToyBackend):
    """Divides the gradient by the number of micro-batches."""

    def __init__(self):
        super().__init__(micro_groups=1)

    def update(self, batch, terms):
        parts = len(self._micros(batch))
        scaled = {k: v / np.float32(parts) for k, v in batch.columns.items() if k.startswith("weight.")}
        return super().update(batch.with_columns(scaled, ()), terms)


class OffByOne(ToyAdapter):
    """Log-probabilities at the token before the one that they describe."""

    def outputs(self, module, micro, want):
        found = super().outputs(module, micro, [replace(o, grad=False) for o in want])
        return {name: np.append(value[1:], np.float32(0)) for name, value in found.items()}


class OneSidedTemperature(ToyAdapter):
    """Trains at temperature 1 whatever the engine sampled at."""

    def outputs(self, module, micro, want):
        plain = micro.with_columns({"temperature": np.ones(micro.n_trajectories, np.float32)}, ())
        return super().outputs(module, plain, want)


class WholeVocabulary(ToyAdapter):
    """Normalises over all tokens where sampling kept some."""

    def outputs(self, module, micro, want):
        columns = {k: v for k, v in micro.columns.items() if k != "keep_counts"}
        return super().outputs(module, replace(micro, columns=columns), want)


def backend(made=ToyBackend, adapter=ToyAdapter):
    original = scan().load("backend", "toy").provider
    provider = replace(original, build=lambda config, context: made())
    return type(
        "Suite",
        (BackendConformance,),
        {"provider": provider, "adapter": lambda self, source: adapter(self.vocab_size)},
    )


MODELS = {
    "backend: micro-batches averaged": backend(Averages),
    "model: log-probabilities off by one": backend(adapter=OffByOne),
    "model: temperature on one side": backend(adapter=OneSidedTemperature),
    "model: not renormalised over what sampling kept": backend(adapter=WholeVocabulary),
}

DEFECTS = {**STAGES, **TERMS, **MODELS}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("defect", DEFECTS)
def test_the_suite_rejects(defect):
    suite = DEFECTS[defect]
    rejected = [r for r in run_class(suite) if not r.passed]
    assert any(r.label in labels(suite) for r in rejected), [(r.name, r.detail) for r in rejected] or "accepted"


@pytest.mark.parametrize(
    "suite", sorted({d.__mro__[1] for d in (*STAGES.values(), *TERMS.values())}, key=str), ids=lambda s: s.__name__
)
def test_the_wrapper_alone_changes_nothing(suite):
    wrap = FaultyStage if suite.kind == "stage" else FaultyTerm
    assert not [r for r in run_class(faulty(suite, wrap, lambda of, config, right: right)) if not r.passed]


def test_there_are_enough_of_them():
    assert len(DEFECTS) >= 50
