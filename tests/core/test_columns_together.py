"""`validate_all` says of many trajectories what `validate` says of each."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.columns import CORE_COLUMNS, ColumnSpec, Level, validate, validate_all
from miles_core.errors import RecordError
from miles_core.records import Origin, Span, Trajectory, Version

VERSION = Version(policy="main", lineage=0, number=0)


def trajectory(name: str, prompt: int, sampled: int) -> Trajectory:
    origin = np.repeat(np.array([Origin.PROMPT, Origin.SAMPLED], np.uint8), [prompt, sampled])
    n = prompt + sampled
    columns = {
        "tokens": np.arange(n, dtype=np.int32),
        "origin": origin,
        "trainable": origin == Origin.SAMPLED,
        "behaviour_logprobs": np.where(origin == Origin.SAMPLED, -1.0, 0.0).astype(np.float32),
    }
    spans = (Span(start=prompt, end=n, version=VERSION),) if sampled else ()
    return Trajectory(id=name, length=n, columns=columns, spans=spans)


def with_column(t: Trajectory, name: str, value: object) -> Trajectory:
    return replace(t, columns={**t.columns, name: value})


def changed(t: Trajectory, name: str, at: int, value: float) -> Trajectory:
    column = np.array(t.columns[name])
    column[at] = value
    return with_column(t, name, column)


BREAKS = {
    "nothing": lambda t: t,
    "positive": lambda t: changed(t, "behaviour_logprobs", -1, 0.5),
    "nan": lambda t: changed(t, "behaviour_logprobs", -1, np.nan),
    "infinite": lambda t: changed(t, "behaviour_logprobs", -1, -np.inf),
    "nan where nothing was sampled": lambda t: changed(t, "behaviour_logprobs", 0, np.nan),
    "trainable prompt": lambda t: changed(t, "trainable", 0, True),
    "demonstration": lambda t: changed(changed(t, "origin", 0, Origin.DEMONSTRATION), "trainable", 0, True),
    "sampled outside its spans": lambda t: changed(t, "origin", 0, Origin.SAMPLED),
    "span too early": lambda t: replace(t, spans=(Span(start=0, end=t.length - 1, version=VERSION),)),
    "span beyond the end": lambda t: replace(t, spans=(Span(start=1, end=t.length + 1, version=VERSION),)),
    "no spans": lambda t: replace(t, spans=()),
    "span twice": lambda t: replace(t, spans=t.spans * 2),
    "spans backwards": lambda t: replace(
        t, spans=tuple(Span(start=i, end=i + 1, version=VERSION) for i in reversed(range(2, t.length)))
    ),
    "short column": lambda t: with_column(t, "tokens", t.columns["tokens"][1:]),
    "no log-probabilities": lambda t: replace(
        t, columns={k: v for k, v in t.columns.items() if k != "behaviour_logprobs"}
    ),
    "undeclared": lambda t: with_column(t, "strange", np.zeros(t.length)),
    "another axis": lambda t: replace(t, axis="step"),
}


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(list(BREAKS))), max_size=5))
def test_together_they_pass_where_each_passes(drawn):
    found = [BREAKS[how](trajectory(f"t{i}", 2, sampled)) for i, (sampled, how) in enumerate(drawn)]
    first = None
    for one in found:
        try:
            validate(one, CORE_COLUMNS)
        except RecordError as error:
            first = str(error)
            break
    if first is None:
        validate_all(found, CORE_COLUMNS)
    else:
        with pytest.raises(RecordError) as raised:
            validate_all(found, CORE_COLUMNS)
        assert str(raised.value) == first


def test_every_break_among_good_ones():
    bad = {how for how, make in BREAKS.items() if _fails([trajectory("a", 2, 3), make(trajectory("b", 2, 3))])}
    good = {"nothing", "nan where nothing was sampled", "demonstration", "spans backwards", "another axis"}
    assert bad == set(BREAKS) - good


def _fails(found: list[Trajectory]) -> bool:
    try:
        validate_all(found, CORE_COLUMNS)
    except RecordError:
        return True
    return False


def test_columns_of_another_level_are_looked_at_one_by_one():
    specs = {**CORE_COLUMNS, "tokens": ColumnSpec(name="tokens", level=Level.ITEM, dtype="int32")}
    short = with_column(trajectory("a", 2, 3), "tokens", np.zeros(1, np.int32))
    validate_all([short, short], specs)
