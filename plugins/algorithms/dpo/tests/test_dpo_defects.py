"""Defects that implementations of DPO have had: the shipped suites reject each."""

from dataclasses import replace

import pytest
from miles_algo_dpo import conformance, plugin
from miles_algo_dpo.term import REFERENCE, Dpo
from torch.nn.functional import logsigmoid

from miles_core.contracts.learning import LOGPROBS, TermOutput
from miles_core.testing.suite import run_class


def faulty(suite, **methods):
    kind = type("Faulty", (Dpo,), methods)
    provider = replace(plugin.miles_term(), build=lambda config, context: kind(config=config))
    return type(suite.__name__, (suite,), {"provider": provider, "name": ""})


def over(suite, h_of):
    """The term over another h."""

    def call(self, view):
        return TermOutput(value=self._value(h_of(view, self.config)))

    return faulty(suite, __call__=call)


def read(view):
    m = view["trainable"]
    return m, view.out(LOGPROBS).masked_fill(~m, 0.0), view[REFERENCE].masked_fill(~m, 0.0)


def plain(view, c):
    _, current, reference = read(view)
    return view.atom_sum(current - reference, view["preference"].to(current.dtype))


def means(view, c):
    m, current, reference = read(view)
    x = (current - reference) / view.seq_sum(m.to(current.dtype)).clamp(min=1)
    return view.atom_sum(x, view["preference"].to(current.dtype))


def over_all_tokens(view, c):
    """Divided by the whole length, prompt included."""
    m, current, reference = read(view)
    x = (current - reference) / view.seq_sum(m.to(current.dtype) * 0 + 1)
    return view.atom_sum(x, view["preference"].to(current.dtype))


def without_reference(view, c):
    _, current, _ = read(view)
    return view.atom_sum(current, view["preference"].to(current.dtype))


def chosen_only(view, c):
    _, current, reference = read(view)
    return view.atom_sum(current - reference, (view["preference"] > 0).to(current.dtype))


def value(suite, formula):
    """The term with another value of h."""
    return faulty(suite, _value=lambda self, h: formula(h, self.config))


S, N, IPO = conformance.SigmoidConformance, conformance.NormalisedConformance, conformance.IpoConformance
C, R = conformance.ConservativeConformance, conformance.RobustConformance
DEFECTS = {
    "the pair is turned round": over(S, lambda view, c: -plain(view, c)),
    "means where sums belong": over(S, means),
    "sums where means belong": over(N, plain),
    "means over the prompt too": over(N, over_all_tokens),
    "no reference": over(S, without_reference),
    "only the chosen answer": over(S, chosen_only),
    "β outside of σ": value(S, lambda h, c: -c.beta * logsigmoid(h)),
    "1/β as IPO's margin": value(IPO, lambda h, c: (h - 1 / c.beta) ** 2),
    "IPO of βh": value(IPO, lambda h, c: (c.beta * h - 0.5) ** 2),
    "smoothing on the wrong side": value(
        C, lambda h, c: -c.epsilon * logsigmoid(c.beta * h) - (1 - c.epsilon) * logsigmoid(-c.beta * h)
    ),
    "robust without its division": value(
        R, lambda h, c: -(1 - c.epsilon) * logsigmoid(c.beta * h) + c.epsilon * logsigmoid(-c.beta * h)
    ),
    "robust as conservative": value(
        R, lambda h, c: -(1 - c.epsilon) * logsigmoid(c.beta * h) - c.epsilon * logsigmoid(-c.beta * h)
    ),
    "a hinge": value(S, lambda h, c: (1 - c.beta * h).clamp(min=0)),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_broken_term_is_rejected(name):
    label = run_class(DEFECTS[name], only="test_examples")[0].label
    assert label in ("values are those worked by hand", "gradients are those worked by hand")


@pytest.mark.parametrize("suite", [over(S, plain), over(N, means), over(IPO, means)])
def test_the_wrapper_alone_changes_nothing(suite):
    assert all(result.passed for result in run_class(suite, only="test_examples"))
