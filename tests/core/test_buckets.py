"""Buckets by bytes, zero-copy bytes of tensors, digests that do not depend on the library."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_core.contracts.weights import Piece, TensorSpec
from miles_core.errors import WeightError
from miles_core.numerics import buckets
from miles_core.weights import piece_digests

TORCH = {name: getattr(torch, spelled) for name, (_, _, spelled) in buckets.DTYPES.items()}


def specs(sizes):
    return [TensorSpec(name=f"t{i}", shape=(n,), dtype="F32") for i, n in enumerate(sizes)]


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 30).map(lambda n: 4 * n))
def test_pack_keeps_order_and_limit(sizes, limit):
    stream = specs(sizes)
    packed = buckets.pack(stream, limit)
    assert [s for bucket in packed for s in bucket] == stream
    for i, bucket in enumerate(packed):
        total = sum(buckets.nbytes(s) for s in bucket)
        assert bucket
        assert total <= limit or len([s for s in bucket if buckets.nbytes(s)]) == 1
        if i:  # greedy: the first tensor of a bucket had no room in the one before
            assert sum(buckets.nbytes(s) for s in packed[i - 1]) + buckets.nbytes(bucket[0]) > limit


@given(st.lists(st.integers(0, 50), max_size=10))
def test_offsets_are_aligned_and_do_not_overlap(sizes):
    stream = specs(sizes)
    starts, total = buckets.offsets(stream)
    ends = [start + buckets.nbytes(s) for start, s in zip(starts, stream, strict=True)]
    assert all(start % buckets.ALIGN == 0 for start in starts)
    assert all(end <= start for end, start in zip(ends, [*starts[1:], total], strict=False))
    assert not stream or ends[-1] <= total


@pytest.mark.parametrize("dtype", sorted(buckets.DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_write_and_view_are_exact_for_every_dtype(dtype, shape):
    size = int(np.prod(shape)) * buckets.itemsize(dtype)
    raw = torch.from_numpy(np.arange(size, dtype=np.uint8) * 37 % (2 if dtype == "BOOL" else 251))
    tensor = raw.view(TORCH[dtype]).view(shape) if size else torch.empty(shape, dtype=TORCH[dtype])
    spec = TensorSpec(name="x", shape=shape, dtype=dtype)
    assert buckets.dtype_name(tensor) == dtype
    memory = np.zeros(256, np.uint8)
    buckets.write(memory, 64, tensor)
    back = buckets.view(memory, 64, spec, "torch")
    assert back.dtype == tensor.dtype and back.shape == tensor.shape
    assert bytes(buckets.as_bytes(back)) == bytes(raw.numpy())
    assert buckets.piece_digests(spec, back) == buckets.piece_digests(spec, tensor)
    if buckets.DTYPES[dtype][1]:
        array = buckets.view(memory, 64, spec, "numpy")
        assert buckets.dtype_name(array) == dtype
        assert buckets.piece_digests(spec, array) == piece_digests(spec, array) == buckets.piece_digests(spec, tensor)
    else:
        with pytest.raises(WeightError, match="NumPy has no dtype"):
            buckets.view(memory, 64, spec, "numpy")


def test_bytes_share_memory_where_they_can():
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    shared = buckets.as_bytes(tensor)
    tensor[0] = 1.0
    assert shared[1] == 0x3F and shared[0] == 0x80  # bf16 1.0, little-endian


def test_strided_tensors_are_digested_and_written_in_their_own_order():
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3).t()
    spec = TensorSpec(name="x", shape=(3, 2), dtype="F32")
    assert not tensor.is_contiguous()
    memory = np.zeros(64, np.uint8)
    buckets.write(memory, 0, tensor)
    assert torch.equal(buckets.view(memory, 0, spec, "torch"), tensor)
    assert buckets.piece_digests(spec, tensor) == buckets.piece_digests(spec, tensor.contiguous())


def test_gradients_and_pieces():
    tensor = torch.nn.Parameter(torch.arange(6, dtype=torch.float32).reshape(3, 2))
    pieces = (Piece(offsets=(0, 0), shape=(3, 1)), Piece(offsets=(0, 1), shape=(3, 1)))
    spec = TensorSpec(name="x", shape=(3, 2), dtype="F32", pieces=pieces)
    assert buckets.piece_digests(spec, tensor) == piece_digests(spec, tensor.detach().numpy())


def test_take_refuses_another_order_dtype_or_end():
    a, b = specs([2, 3])
    x, y = np.zeros(2, np.float32), np.zeros(3, np.float32)
    assert [s for s, _ in buckets.take(iter([(a, x), (b, y)]), [a, b])] == [a, b]
    with pytest.raises(WeightError, match="gave 't1' where the plan expects 't0'"):
        buckets.take(iter([(b, y), (a, x)]), [a, b])
    with pytest.raises(WeightError, match="gave its end where the plan expects 't1'"):
        buckets.take(iter([(a, x)]), [a, b])
    with pytest.raises(WeightError, match="'t0' is F64"):
        buckets.take(iter([(a, x.astype(np.float64))]), [a])


def test_what_is_no_tensor():
    with pytest.raises(WeightError, match="holds list, neither"):
        buckets.dtype_name([1.0])
    with pytest.raises(WeightError, match="complex64, which no transport carries"):
        buckets.dtype_name(np.zeros(1, np.complex64))
    with pytest.raises(WeightError, match="unknown dtype 'F4'"):
        buckets.itemsize("F4")
