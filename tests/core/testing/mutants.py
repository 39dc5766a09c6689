"""Deliberately broken plugins against the suites: each breaks one thing and names the assertion that must see it."""

import inspect
from dataclasses import dataclass

from miles_core.provider import Provider
from miles_core.testing.suite import Conformance, labels, run_class, tests

BASE_LABELS = labels(Conformance)  # seen failing in test_suite.py


@dataclass(frozen=True)
class Options:
    """No options."""


def plugin(build, *, config=Options, offers=(), requires=(), field="", name="broken"):
    return Provider(
        name=name,
        config=config,
        build=build,
        offers=offers,
        requires=requires,
        summary="broken on purpose",
        field=field,
    )


def broken_suite(suite, provider, **changes):
    return type(f"Broken{suite.__name__}", (suite,), {"provider": provider, "deadline_s": 3.0, **changes})


def own_labels(suite):
    return labels(suite) - BASE_LABELS


def must_fail(label, suite):
    """Some test of the suite fails with exactly this label."""
    seen = []
    likely = sorted(tests(suite), key=lambda name: label not in inspect.getsource(getattr(suite, name)))
    for name in likely:
        for result in run_class(suite, only=name):
            if result.label == label:
                return
            if not result.passed:
                seen.append((result.label or name, result.detail))
    raise AssertionError(f"{label!r} did not fail; failing: {seen}")
