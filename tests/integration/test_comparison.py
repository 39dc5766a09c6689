"""The page that compares our formulas with others' says what our code computes now."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compare_formulas", ROOT / "benchmarks/compare_formulas.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stored(script):
    import json

    return json.loads(script.STORED.read_text())


def test_the_page_is_that_of_the_script(script, stored):
    assert stored["inputs"] == script.inputs()
    assert set(stored["versions"]) == set(script.NAMES) == set(stored["systems"])
    assert script.PAGE.read_text() == script.page(stored, script.ours(stored["inputs"]))


def test_a_difference_needs_a_cause(script, stored):
    mine = script.ours(stored["inputs"])
    off = {**mine, "tis": [value + 0.1 for value in mine["tis"]]}
    with pytest.raises(KeyError):
        script.page(stored, off)


def test_known_numbers(script, stored):
    """What the tables of numerics say, on the page's own input."""
    mine = script.ours(stored["inputs"])
    assert mine["group"][:4] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert mine["group_equal"] == [0.0] * 4 and mine["group_of_one"] == [0.0]
    assert max(mine["tis"]) == 2.0
