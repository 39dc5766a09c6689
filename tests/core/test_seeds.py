"""Public test vectors of the random streams."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.seeds import derive, family, generator

VECTORS = {
    (7, "main", "sample"): 15013350335687259949,
    (7, "main", "sample", "arithmetic:train:0", 0, 3, 0): 5808363589547091607,
    (0, "main", "init", "actor"): 14320297636358775913,
    (7, "größer", "order", 1): 10609876110746184369,
}


@pytest.mark.parametrize("path", VECTORS)
def test_a_seed_is_sha256_over_canonical_json(path):
    text = json.dumps(list(path), separators=(",", ":"), ensure_ascii=False).encode()
    assert derive(*path) == VECTORS[path] == int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


@given(st.lists(st.integers() | st.text(st.characters(exclude_categories=["Cs"]))))
def test_every_path_is_canonical_json(path):
    text = json.dumps([7, "main", "x", *path], separators=(",", ":"), ensure_ascii=False).encode()
    assert derive(7, "main", "x", *path) == int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def test_streams_differ_in_every_part_and_by_type():
    seen = {derive(1, "main", "a"), derive(2, "main", "a"), derive(1, "b", "a"), derive(1, "main", "b")}
    seen |= {derive(1, "main", "a", 1), derive(1, "main", "a", "1")}
    assert len(seen) == 6


def test_a_generator_repeats():
    first, second = generator(1, "main", "x").random(5), generator(1, "main", "x").random(5)
    assert (first == second).all() and (first != generator(1, "main", "y").random(5)).any()


def test_a_family_shares_the_beginning_of_its_path():
    seed = family(7, "main", "sample", "größer:0", 0)
    assert [seed(m, t) for m in (0, 15) for t in (0, 2**40)] == [
        derive(7, "main", "sample", "größer:0", 0, m, t) for m in (0, 15) for t in (0, 2**40)
    ]
    assert seed(3) == derive(7, "main", "sample", "größer:0", 0, 3)
