"""Where the answer stands, and why there is none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.verifying.extract import Extract, find

TAG = [Extract.tag]


@pytest.mark.parametrize(
    ("places", "text", "answer", "why"),
    [
        ("tag", "so <answer> 7 </answer>.", "7", "inside <answer>"),
        ("tag", "<answer>1</answer> no, <answer>2</answer>", "2", "inside <answer>"),
        ("tag", "<answer>a <b>c</b>\nd</answer>", "a <b>c</b>\nd", "inside <answer>"),
        ("tag", "<answer>first <answer>second</answer>", "second", "inside <answer>"),
        ("tag", "seven", None, "no <answer> in the text"),
        ("tag", "<answer>7", None, "<answer> is never closed"),
        ("tag", "7</answer>", None, "</answer> without <answer> before it"),
        ("tag", "<answer> </answer>", None, "<answer> is empty"),
        ("boxed", r"\boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}", r"inside \boxed{}"),
        ("boxed", r"\boxed{1", None, r"\boxed{ is never closed"),
        ("boxed", r"\boxed{}", None, r"\boxed{} is empty"),
        ("boxed", "1", None, r"no \boxed{} in the text"),
        ("last_number", "from 3 to -1,234.5, I think.", "-1,234.5", "the last number"),
        ("last_number", "it is 12.", "12", "the last number"),
        ("last_number", "none", None, "no number in the text"),
        ("last_line", "think\n a, b \n\n", "a, b", "the last line"),
        ("first_line", "\na\nb", "a", "the first line"),
        ("first_line", " \n", None, "nothing was written"),
        ("whole", " a\nb ", "a\nb", "the whole text"),
        ("whole", "", None, "nothing was written"),
    ],
)
def test_places(places, text, answer, why):
    found = find(text, [Extract(places)], "answer")
    assert (found.answer, found.why) == (answer, why)
    assert found.place == (0 if answer else -1)


def test_places_are_tried_in_order():
    both = [Extract.tag, Extract.last_number]
    assert find("2 <answer>1</answer> 3", both, "answer").answer == "1"
    second = find("2, then 3", both, "answer")
    assert (second.answer, second.place) == ("3", 1)
    neither = find("nothing", both, "answer")
    assert neither.answer is None and neither.why == "no <answer> in the text; no number in the text"
    assert find("<final>4</final>", TAG, "final").answer == "4"


@settings(deadline=None)
@given(st.text(), st.text(alphabet="xyz 12", min_size=1).filter(str.strip))
def test_what_stands_in_the_last_tag_is_found(before, inner):
    assert find(f"{before}<answer>{inner}</answer>", TAG, "answer").answer == inner.strip()


@pytest.mark.parametrize("place", Extract)
@pytest.mark.parametrize("text", ["<answer>" * 200_000, "\\boxed{" * 200_000, "1" * 10**6, "-" * 10**6, "{" * 10**6])
def test_a_megabyte_costs_no_more_than_reading_it(place, text):
    find(text, [place], "answer")  # a quadratic search would not end
