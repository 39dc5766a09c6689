"""Digests, manifests, receipts and the serving gate: every way in which a member may not serve."""

import dataclasses

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from miles_core.contracts.weights import Evidence, Piece, Receipt, TensorSpec
from miles_core.errors import WeightError
from miles_core.records import Version
from miles_core.weights import (
    Rotation,
    ServingGate,
    check_receipt,
    make_manifest,
    manifest_root,
    piece_digests,
)

A = TensorSpec(name="a", shape=(2, 2), dtype="F32")
B = TensorSpec(name="b", shape=(3,), dtype="F32")


def version(number: int = 1, lineage: int = 0, policy: str = "main") -> Version:
    return Version(policy=policy, lineage=lineage, number=number)


def manifest(number: int = 1, policy: str = "main"):
    digests = {"a": (f"a{number}",), "b": (f"b{number}",)}
    return make_manifest(version(number, policy=policy), [A, B], digests)


def receipt(of, engine: str = "e", **changes) -> Receipt:
    fields = {
        "engine": engine,
        "version": of.version,
        "evidence": Evidence.LIVE,
        "digests": dict(of.digests),
        "root": of.root,
        "nbytes": 28,
        "seconds": 0.1,
    }
    return Receipt(**(fields | changes))


def test_digest_is_xxh3_128_of_little_endian_bytes():
    array = np.array([[1, 2], [3, 4]], "<f4")
    expected = xxhash.xxh3_128_hexdigest(array.tobytes())
    assert piece_digests(A, array) == (expected,)
    assert piece_digests(A, array.astype(">f4")) == (expected,)
    assert piece_digests(A, np.asfortranarray(array)) == (expected,)


def test_negative_zero_and_nan_payloads_are_told_apart():
    spec = TensorSpec(name="x", shape=(1,), dtype="F32")
    bits = [0x00000000, 0x80000000, 0x7FC00000, 0x7FC00001]
    found = {piece_digests(spec, np.array([b], "<u4").view("<f4")) for b in bits}
    assert len(found) == 4


def test_pieces_are_digested_one_by_one():
    pieces = (Piece(offsets=(0, 0), shape=(1, 2)), Piece(offsets=(1, 0), shape=(1, 2)))
    spec = dataclasses.replace(A, pieces=pieces)
    array = np.arange(4, dtype="<f4").reshape(2, 2)
    assert piece_digests(spec, array) == tuple(xxhash.xxh3_128_hexdigest(array[i].tobytes()) for i in (0, 1))


def test_shape_must_be_announced():
    with pytest.raises(WeightError, match=r"'a' has shape \[4\]; its spec says \[2, 2\]"):
        piece_digests(A, np.zeros(4, "<f4"))


def test_root_by_hand():
    lines = "a\0[[0,0],[2,2]]\0x\nb\0[[0],[3]]\0y"
    expected = xxhash.xxh3_128_hexdigest(lines.encode())
    assert manifest_root([A, B], {"a": ["x"], "b": ["y"]}) == expected
    assert manifest_root([B, A], {"b": ["y"], "a": ["x"]}) == expected


def test_root_depends_on_every_digest_name_and_box():
    base = manifest_root([A], {"a": ["x"]})
    assert base != manifest_root([A], {"a": ["z"]})
    assert base != manifest_root([dataclasses.replace(A, name="c")], {"c": ["x"]})
    assert base != manifest_root([dataclasses.replace(A, shape=(4, 1))], {"a": ["x"]})


def test_manifest_refuses_double_names_and_missing_pieces():
    with pytest.raises(WeightError, match="names \\['a'\\] twice"):
        make_manifest(version(), [A, A], {"a": ["x"]})
    with pytest.raises(WeightError, match=r"'b' of main@0.1 has 1 pieces and 0 digests"):
        make_manifest(version(), [A, B], {"a": ["x"]})


REFUSED = [
    ({"version": version(2)}, "its receipt is for main@0.2"),
    ({"version": version(1, lineage=1)}, "its receipt is for main@1.1"),
    ({"evidence": Evidence.RECEIVED}, "'received', sync.verify asks for 'live' or stronger"),
    ({"digests": {"a": ("a1",)}}, "1 digests are missing, 'b' first"),
    ({"digests": {}}, "2 digests are missing, 'a' first"),
    ({"digests": {"a": ("a1",), "b": ("??",)}}, "tensor 'b' differs in piece 0: \\?\\? in place of b1"),
    ({"digests": {"a": ("a1", "a1"), "b": ("b1",)}}, "tensor 'a' has 2 digests in place of 1"),
    ({"digests": {"a": (), "b": ("b1",)}}, "tensor 'a' has 0 digests in place of 1"),
    ({"digests": {"a": ("a1",), "b": ("b1",), "c": ("c1",)}}, "a tensor 'c' that the version does not hold"),
    ({"root": "other"}, "its root is other"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED)
def test_gate_refuses(changes, why):
    gate = ServingGate()
    made = manifest()
    with pytest.raises(WeightError, match=why):
        gate.admit(made, receipt(made, **changes))
    assert gate.version("e", "main") is None
    assert gate.serving(made.version) == ()


def test_gate_keeps_the_old_version_when_it_refuses_a_new_one():
    gate = ServingGate()
    first, second = manifest(1), manifest(2)
    gate.admit(first, receipt(first))
    with pytest.raises(WeightError):
        gate.admit(second, receipt(second, digests=dict(first.digests)))
    assert gate.version("e", "main") == first.version


def test_evidence_without_digests_needs_a_weaker_minimum():
    made = manifest()
    word = receipt(made, evidence=Evidence.NATIVE, digests={}, root=None)
    check_receipt(made, word, Evidence.NATIVE)
    check_receipt(made, word, Evidence.PROBE)
    with pytest.raises(WeightError):
        check_receipt(made, word, Evidence.RECEIVED)
    # Stronger evidence is welcome, but then it must be whole.
    check_receipt(made, receipt(made), Evidence.PROBE)
    with pytest.raises(WeightError, match="missing"):
        check_receipt(made, receipt(made, digests={"a": ("a1",)}), Evidence.PROBE)


@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 12))
def test_rotation_covers_everything_within_n(within, count, rounds):
    specs = [TensorSpec(name=f"t{i}", shape=(1,), dtype="F32") for i in range(count)]
    rotation, gate = Rotation(within), ServingGate(within=within)
    since = dict.fromkeys([s.name for s in specs], 0)
    for number in range(rounds):
        made = make_manifest(version(number), specs, {s.name: [f"{s.name}.{number}"] for s in specs})
        checked = {s.name for s in rotation.next(specs)}
        since = {name: 0 if name in checked else age + 1 for name, age in since.items()}
        assert max(since.values()) < within
        gate.admit(made, receipt(made, digests={n: made.digests[n] for n in checked}, root=None))
        assert gate.version("e", "main") == made.version


def test_gate_wants_a_tensor_that_was_skipped_too_often():
    gate = ServingGate(within=2)
    numbers = [manifest(n) for n in range(4)]
    gate.admit(numbers[0], receipt(numbers[0]))
    only_a = [receipt(m, digests={"a": m.digests["a"]}, root=None) for m in numbers]
    gate.admit(numbers[1], only_a[1])
    with pytest.raises(WeightError, match="'b' first"):
        gate.admit(numbers[2], only_a[2])
    gate.admit(numbers[2], receipt(numbers[2]))
    gate.revoke("e")  # after a loss everything is due
    with pytest.raises(WeightError, match="'b' first"):
        gate.admit(numbers[3], only_a[3])


def test_alias_serves_and_names():
    gate = ServingGate()
    made = manifest(1)
    gate.admit(made, receipt(made))
    gate.alias(version(1), version(2))
    gate.alias(version(2), version(3))
    assert gate.version("e", "main") == version(3)
    assert gate.named(version(1)) == version(3)
    assert gate.serving(version(3)) == ("e",)
    with pytest.raises(WeightError, match="which no engine serves"):
        gate.alias(version(7), version(8))
    with pytest.raises(WeightError, match="cannot stand for"):
        gate.alias(version(3), version(4, policy="other"))


def test_policies_do_not_mix_and_state_travels():
    gate = ServingGate()
    mine, other = manifest(1), manifest(5, policy="other")
    gate.admit(mine, receipt(mine))
    gate.admit(other, receipt(other, engine="f"))
    gate.alias(version(1), version(2))
    follower = ServingGate()
    follower.follow(gate.state())
    for g in (gate, follower):
        assert g.version("e", "main") == version(2)
        assert g.version("f", "other") == other.version
        assert g.version("e", "other") is None
    gate.revoke("e")
    follower.follow(gate.state())
    assert follower.version("e", "main") is None
