"""Frames bit for bit, torn tails, corruption, and a disk that fails at any operation."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from miles_core.errors import JournalError, RecordError
from miles_core.frames import decode_group, encode_group, restorable
from miles_core.journal import Journal, read, read_one, segments_of
from miles_core.records import (
    Episode,
    Finish,
    Group,
    Message,
    Ref,
    Sampling,
    Span,
    Status,
    Task,
    Trajectory,
    Version,
)
from miles_core.testing.simulation import Disk, Killed


def same(a, b):
    """Equal, arrays bit for bit with dtype and shape."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.dtype.str == b.dtype.str and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic) or isinstance(b, np.generic):
        return type(a) is type(b) and a.tobytes() == b.tobytes()
    return type(a) is type(b) and a == b


def equal(a: Group, b: Group) -> None:
    assert (a.id, a.policy, a.slot, a.attempt, a.task) == (b.id, b.policy, b.slot, b.attempt, b.task)
    assert len(a.episodes) == len(b.episodes)
    for x, y in zip(a.episodes, b.episodes, strict=True):
        assert repr(replace(x, trajectories=())) == repr(replace(y, trajectories=()))  # tells 0.0, -0.0, 0 and False
        assert len(x.trajectories) == len(y.trajectories)
        for s, t in zip(x.trajectories, y.trajectories, strict=True):
            assert repr(replace(s, columns={})) == repr(replace(t, columns={}))
            assert list(s.columns) == list(t.columns) or set(s.columns) == set(t.columns)
            for name in s.columns:
                assert same(s.columns[name], t.columns[name]), name


def through(group, **options):
    header, blocks = encode_group(group, **options)
    return decode_group(json.loads(json.dumps(header, allow_nan=False)), b"".join(blocks))


def trajectory(name="t", **columns):
    n = 3
    return Trajectory(
        id=name,
        length=n,
        columns={"tokens": np.array([1, 2, 3], np.int32), **columns},
        spans=(Span(start=1, end=3, version=Version(policy="main", lineage=1, number=4)),),
        finish=Finish.LENGTH,
        sampling=Sampling(max_new_tokens=4, temperature=0.7, stop=("x", "y")),
        engine="local-0",
    )


def group(*trajectories, reward=0.25, **episode):
    return Group(
        id="arithmetic:train:7#1",
        policy="main",
        slot=5,
        attempt=1,
        task=Task(id="arithmetic:train:7", prompt="1+1=", answer="2", metadata={"digits": 1}),
        episodes=(
            Episode(id="arithmetic:train:7#1/0", member=0, trajectories=tuple(trajectories), reward=reward, **episode),
            Episode(id="arithmetic:train:7#1/1", member=1, trajectories=(), status=Status.FAILED, error="late é\ud800"),
        ),
    )


names = st.sampled_from(["tokens", "values", "keep_ids", "r3.experts", "odd"])
arrays = hnp.arrays(
    dtype=st.one_of(hnp.integer_dtypes(endianness="?"), hnp.floating_dtypes(endianness="?"), hnp.boolean_dtypes()),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
columns = st.dictionaries(names, st.one_of(arrays, arrays.map(lambda a: a.ravel()[0] if a.size else a)))


@given(st.lists(columns, max_size=5))
@settings(max_examples=100, deadline=None)
def test_groups_come_back_bit_for_bit(found):
    """Any mix of columns, dtypes, byte orders, shapes (also empty ones), 0-d arrays and NumPy scalars."""
    before = group(*(trajectory(f"t{i}", **c) for i, c in enumerate(found)))
    equal(before, through(before))


numbers = st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf"), float("-inf")]) | st.floats()
texts = st.sampled_from(["", "arithmetic:train:7#1/0", "arithmetic:train:7#1/0/0", "é\ud800"])
same_version = Version(policy="main", lineage=0, number=1)
versions = st.just(same_version) | st.builds(
    Version, policy=st.just("main"), lineage=st.just(0), number=st.integers(0, 2)
)
samplings = st.none() | st.builds(Sampling, max_new_tokens=st.integers(1, 2), stop=st.sampled_from([(), ("x",)]))
trajectories = st.builds(
    Trajectory,
    id=texts,
    length=st.integers(0, 2),
    columns=st.just({"tokens": np.array([1], np.int32)}),
    spans=st.lists(st.builds(Span, start=st.integers(0, 2), end=st.integers(0, 2), version=versions), max_size=3).map(
        tuple
    ),
    finish=st.sampled_from(Finish),
    sampling=samplings,
    engine=texts,
    axis=st.sampled_from(["token", "step"]),
)
episodes = st.builds(
    Episode,
    id=texts,
    member=st.integers(0, 3),
    trajectories=st.lists(trajectories, max_size=3).map(tuple),
    reward=st.none() | numbers,
    components=st.dictionaries(texts, numbers, max_size=2),
    info=st.dictionaries(texts, texts, max_size=2),
    status=st.sampled_from(Status),
    error=texts,
    preference=st.sampled_from([-1, 0, 1]),
)


@given(st.lists(episodes, max_size=4))
@settings(deadline=None)
def test_every_field_comes_back(found):
    """Also of no episodes or trajectories; equal versions and samplings may be one object or several."""
    before = replace(group(), episodes=tuple(found))
    equal(before, through(before))


def test_groups_of_the_first_release_are_read_and_would_be_written_so_again():
    """The frames are what their format says, for as long as the format has that number."""
    run = Path(__file__).parents[1] / "third_party/first_run/first/journal"
    frames = [frame for frame in read(run) if frame.kind == "group"]
    assert len(frames) == 6
    for frame in frames:
        header, blocks = encode_group(decode_group(frame.header, frame.body))
        written = {"kind": "group", "lease": frame.header["lease"], **header}
        before = dict(frame.header)
        before["blocks"] = [[*row[:3], row[3] or [], *row[4:]] for row in before["blocks"]]  # everyone was null once
        assert json.dumps(written) == json.dumps(before)
        assert b"".join(blocks) == frame.body


def test_payloads_of_nan_and_negative_zero_survive():
    payload = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x7F800000], np.uint32).view(np.float32)
    back = through(group(trajectory(values=payload)))
    values = back.episodes[0].trajectories[0].columns["values"]
    assert values.view(np.uint32).tolist() == [0x7FC00001, 0xFFC12345, 0x80000000, 0x7F800000]


def test_not_contiguous_arrays_and_scalars():
    before = group(trajectory(strided=np.arange(12).reshape(3, 4)[:, ::2], plain=0.5, flag=True))
    back = through(before).episodes[0].trajectories[0].columns
    assert back["strided"].tolist() == [[0, 2], [4, 6], [8, 10]]
    assert back["plain"] == 0.5 and back["flag"] == np.True_


def test_arrays_that_come_back_can_be_written():
    back = through(group(trajectory())).episodes[0].trajectories[0].columns["tokens"]
    back[0] = 9


def test_rewards_components_and_messages():
    before = group(
        trajectory(),
        reward=1.0 / 3.0,
        components={"a": float("inf"), "b": float("nan"), "c": -0.0},
        info={"why": "wrong"},
        preference=-1,
    )
    task = Task(
        id="chat:train:0",
        prompt=(Message(role="user", content="hi"),),
        demonstrations=("hello", (Message(role="assistant", content="hey"),)),
    )
    before = Group(id="g", policy="p", slot=0, attempt=0, task=task, episodes=before.episodes)
    equal(before, through(before))
    assert through(before).episodes[0].reward == 1.0 / 3.0
    for empty in ("", ()):
        bare = replace(before, task=Task(id="x", prompt=empty))
        equal(bare, through(bare))


def test_references_are_kept_and_only_durable_ones_can_be_restored():
    for durable in (True, False):
        ref = Ref(key="k", nbytes=7, digest="d", durable=durable)
        before = group(trajectory(experts=ref))
        header, _ = encode_group(before)
        assert restorable(header) is durable
        equal(before, through(before))


def test_omitted_columns_are_named():
    header, blocks = encode_group(group(trajectory(big=np.zeros(9))), omit=frozenset({"big"}))
    assert header["omitted"] == [[0, "big"]] and not restorable(header)
    assert "big" not in decode_group(header, b"".join(blocks)).episodes[0].trajectories[0].columns


@pytest.mark.parametrize("array", [np.array([object()]), np.zeros(2, [("a", "i4")])])
def test_arrays_that_are_not_plain_data_are_refused(array):
    with pytest.raises(RecordError, match="column 'odd' of 't' has dtype"):
        encode_group(group(trajectory(odd=array)))


# --- the journal -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "journal"


def written(folder, count=5):
    journal = Journal(folder)
    at = [journal.append("note", {"n": n}, [bytes([n]) * n]) for n in range(count)]
    journal.close()
    return at


def notes(folder, start=(0, 0)):
    return [(f.header["n"], bytes(f.body)) for f in read(folder, start) if f.kind == "note"]


def test_frames_are_as_documented(folder):
    """Length, xxh3-64 seeded with it, header length, JSON, blocks: read here with nothing but struct."""
    written(folder, 2)
    data = (folder / "000000.frames").read_bytes()
    offset, seen = 0, []
    while offset < len(data):
        length, check = struct.unpack_from("<QQ", data, offset)
        payload = data[offset + 16 : offset + 16 + length]
        assert xxhash.xxh3_64_intdigest(payload, seed=length) == check
        (header,) = struct.unpack_from("<I", payload)
        seen.append((payload[4 : 4 + header].decode(), payload[4 + header :]))
        offset += 16 + length
    assert seen == [
        ('{"kind":"segment","format":1,"segment":0}', b""),
        ('{"kind":"note","n":0}', b""),
        ('{"kind":"note","n":1}', b"\x01"),
    ]


def test_reading_from_a_position_and_a_single_frame(folder):
    at = written(folder)
    assert notes(folder, at[3]) == [(3, b"\x03\x03\x03"), (4, b"\x04" * 4)]
    assert bytes(read_one(folder, at[4]).body) == b"\x04" * 4


def test_every_process_starts_a_segment(folder):
    written(folder, 1)
    written(folder, 2)
    assert [p.name for p in segments_of(folder)] == ["000000.frames", "000001.frames"]
    assert [n for n, _ in notes(folder)] == [0, 0, 1]


def test_segments_are_cut_by_size(folder):
    journal = Journal(folder, segment_bytes=200)
    for n in range(9):
        journal.append("note", {"n": n}, [b"x" * 50])
    journal.close()
    assert len(segments_of(folder)) > 3
    assert [n for n, _ in notes(folder)] == list(range(9))


def test_a_tail_torn_at_any_byte_is_cut_off(folder):
    at = written(folder)
    path = folder / "000000.frames"
    data = path.read_bytes()
    for size in range(at[3][1], len(data)):
        path.write_bytes(data[:size])
        whole = [n for n in range(5) if n < 4 and size >= [*at, (0, len(data))][n + 1][1]]
        assert [n for n, _ in notes(folder)] == whole  # an auditor may read without repairing
        journal = Journal(folder)
        journal.close()
        assert [n for n, _ in notes(folder)] == whole
        assert path.stat().st_size == at[len(whole)][1]
        (folder / "000001.frames").unlink()


def test_a_tail_of_garbage_or_zeros_is_cut_off(folder):
    written(folder)
    path = folder / "000000.frames"
    data = path.read_bytes()
    for tail in (b"\0" * 100, b"\xff" * 100, data[:30], b'{"kind":' * 20):
        path.write_bytes(data + tail)
        assert [n for n, _ in notes(folder)] == [0, 1, 2, 3, 4]


@given(st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_a_flipped_byte_in_the_middle_is_refused(tmp_path_factory, where, flip):
    folder = tmp_path_factory.mktemp("journal")
    at = written(folder)
    path = folder / "000000.frames"
    data = bytearray(path.read_bytes())
    data[where % at[4][1]] ^= flip  # anywhere before the last frame
    path.write_bytes(data)
    with pytest.raises(JournalError, match="corrupt at byte"):
        list(read(folder))
    with pytest.raises(JournalError, match="corrupt at byte"):
        Journal(folder)


def test_a_torn_segment_that_others_follow_is_refused(folder):
    written(folder)
    written(folder)
    path = folder / "000000.frames"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(JournalError, match=r"000000\.frames is corrupt"):
        list(read(folder))


def test_a_missing_segment_is_refused(folder):
    for _ in range(3):
        written(folder, 1)
    (folder / "000001.frames").unlink()
    with pytest.raises(JournalError, match=r"has 000002.frames where 000001.frames should follow"):
        list(read(folder))


def test_a_position_beyond_the_end_is_refused(folder):
    written(folder)
    with pytest.raises(JournalError, match="ends at byte"):
        list(read(folder, (0, 10**6)))
    with pytest.raises(JournalError, match="ends before segment 3"):
        list(read(folder, (3, 1)))
    with pytest.raises(JournalError, match="corrupt at byte 7"):
        read_one(folder, (0, 7))


def test_another_format_is_refused(folder):
    written(folder, 1)
    path = folder / "000000.frames"
    payload = b'{"kind":"segment","format":2,"segment":0}'
    payload = struct.pack("<I", len(payload)) + payload
    head = struct.pack("<QQ", len(payload), xxhash.xxh3_64_intdigest(payload, seed=len(payload)))
    path.write_bytes(head + payload)
    with pytest.raises(JournalError, match="has journal format 2, this miles reads 1"):
        list(read(folder))


@pytest.mark.parametrize("what", ["error", "torn"])
def test_a_failure_of_any_operation_is_one_clear_error(tmp_path, what):
    def work(disk):
        folder = tmp_path / f"{what}-{disk.fail_at}"
        done = []
        try:
            journal = Journal(folder, files=disk, segment_bytes=150)
            for n in range(4):
                journal.append("note", {"n": n}, [b"x" * 40])
                done.append(n)
            journal.sync()
            journal.close()
        finally:
            work.done, work.folder = done, folder

    clean = Disk()
    work(clean)
    for operation in range(clean.operations):
        with pytest.raises(JournalError) as failed:
            work(Disk({operation: what}))
        assert "No space left on device" in str(failed.value)
        assert "Fix: free space" in str(failed.value)
        assert [n for n, _ in notes(work.folder)][: len(work.done)] == work.done  # nothing that was written is lost
        journal = Journal(work.folder)  # and it opens again
        journal.append("note", {"n": 99})
        journal.close()
        assert notes(work.folder)[-1] == (99, b"")


def test_after_a_failure_nothing_more_is_taken(folder):
    disk = Disk()
    journal = Journal(folder, files=disk)
    disk.fail_at[disk.operations] = "torn"
    size = journal.position()[1]
    with pytest.raises(JournalError, match="could not be written"):
        journal.append("note", {"n": 0})
    assert (folder / "000000.frames").stat().st_size == size  # the half that was written is cut off
    with pytest.raises(JournalError, match=r"takes no more records: it could not be written: .*No space"):
        journal.append("note", {"n": 1})
    journal.close()
    with pytest.raises(JournalError, match="it is closed"):
        Journal.append(closed(folder), "note", {})


def closed(folder):
    journal = Journal(folder)
    journal.close()
    return journal


def test_a_process_killed_inside_a_write_leaves_a_tail_that_is_cut(folder):
    disk = Disk()
    journal = Journal(folder, files=disk)
    journal.append("note", {"n": 0})
    disk.fail_at[disk.operations] = "kill"
    with pytest.raises(Killed):
        journal.append("note", {"n": 1}, [b"x" * 100])
    reopened = Journal(folder)
    reopened.append("note", {"n": 2})
    reopened.close()
    assert [n for n, _ in notes(folder)] == [0, 2]


def test_an_info_that_json_cannot_hold_is_refused(folder):
    journal = Journal(folder)
    header, blocks = encode_group(group(trajectory(), info={"why": {"a set"}}))
    with pytest.raises(RecordError, match="a 'group' record holds what JSON cannot"):
        journal.append("group", header, blocks)
    journal.close()


def test_a_record_that_holds_itself_is_refused(tmp_path):
    journal = Journal(tmp_path / "j")
    info: dict[str, object] = {}
    info["again"] = info
    with pytest.raises(RecordError, match="holds what JSON cannot"):
        journal.append("lease", info)
    journal.append("lease", {"id": "a"})  # and the journal goes on
    assert [frame.kind for frame in read(tmp_path / "j")] == ["segment", "lease"]
