"""Which option an answer names."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_env_math.choices import asked, letter_of, named

FOUR = ("1/3", "Blue whale", "A cat", "0.5")


@pytest.mark.parametrize(
    ("answer", "letter", "why"),
    [
        ("B", "B", ""),
        ("(b)", "B", ""),
        ("**C**.", "C", ""),
        (r"\text{(D)}", "D", ""),
        ("B. Blue whale", "B", ""),
        ("(B) the blue one", "B", ""),
        ("blue whale", "B", "by its text"),
        ("$1/3$", "A", "by its text"),
        ("The answer is (C), not A.", "C", "after the word answer"),
        ("Answer: d", "D", "after the word answer"),
        ("I would pick B here", "B", "the only letter named"),
        ("either B or C", "", "it names B, C"),
        ("E", "", "E is none of A to D"),
        ("forty", "", "it names none of A to D"),
        ("I'd say X", "", "it names none of A to D"),
        ("x" * 10**6, "", "it names none of A to D"),
    ],
)
def test_named(answer, letter, why):
    assert named(answer, FOUR) == (letter, why)


@pytest.mark.parametrize(
    ("reference", "letter"),
    [("B", "B"), ("(c)", "C"), (0, "A"), (3, "D"), (4, ""), (-1, ""), ("A cat", "C"), ("E", ""), ("cat", ""), ("", "")],
)
def test_letter_of(reference, letter):
    assert letter_of(reference, FOUR) == letter


def test_equal_options_are_told_by_letter_only():
    assert letter_of("x", ("x", "x")) == "" and letter_of("B", ("x", "x")) == "B"


@settings(deadline=None)
@given(st.lists(st.text(alphabet="abc 123", min_size=1), min_size=2, max_size=26, unique=True), st.data())
def test_every_option_is_asked_and_understood(options, data):
    number = data.draw(st.integers(0, len(options) - 1))
    letter = letter_of(number, options)
    assert f"{letter}. {options[number]}" in asked("Which?", options)
    assert named(f"({letter})", options)[0] == letter
