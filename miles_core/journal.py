"""The append-only record of a run: who leased what, what was sampled, where it ended. Format 1.

A journal is a folder of segments `000000.frames`, `000001.frames`, …; every process that opens it starts a new segment.
A frame is

    length   uint64, little-endian: bytes of the payload
    check    uint64, little-endian: xxh3-64 of the payload, seeded with `length`, so that both are covered
    payload  uint32 header length, a JSON header (UTF-8) whose first key is `kind`, raw blocks

A process that dies while writing leaves a torn frame at the very end; opening cuts it off. A bad frame with a good one
behind it is corruption and refused: nothing is guessed. Written bytes survive the death of the process at once, and
the machine's from the next `sync` on (the loop syncs at every checkpoint).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from miles_core.errors import JournalError, RecordError
from miles_core.files import Files
from miles_core.jsontext import exact

FORMAT = 1
_PREFIX = struct.Struct("<QQ")
_HEADER_LENGTH = struct.Struct("<I")
_MARK = b'{"kind":'  # how every header begins: finds frames behind a bad one
_SMALLEST = _HEADER_LENGTH.size + len(_MARK)

#: (segment, offset) of a frame, or of the end.
Position = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One frame as read back: where it stands, its header, its raw blocks, and the bytes that it takes."""

    position: Position
    header: Mapping[str, Any]
    body: memoryview
    size: int = 0

    @property
    def kind(self) -> str:
        return str(self.header["kind"])


class Journal:
    """The writing end. One process writes; `read` may be used beside it.

    Any failed write raises `JournalError` and leaves the journal closed to further ones: what was written before it
    stays valid, the part of a frame that may have been written is cut off.
    """

    def __init__(self, folder: Path, *, files: Files | None = None, segment_bytes: int = 1 << 28) -> None:
        """Open `folder` (created where missing), cut a torn tail off, and start a new segment."""
        self.folder = folder
        self._files = files or Files()
        self._segment_bytes = segment_bytes
        self._fd: int | None = None
        self._offset = 0
        self.broken: str = ""
        with self._guarded("opened"):
            folder.mkdir(parents=True, exist_ok=True)
            segments = segments_of(folder)
            if segments:
                data = segments[-1].read_bytes()
                good = _good_prefix(segments[-1], data)
                if good < len(data):
                    self._files.truncate(segments[-1], good)
        self._segment = len(segments) - 1
        self._next_segment()

    def position(self) -> Position:
        """Where the next frame will stand."""
        return self._segment, self._offset

    def append(self, kind: str, fields: Mapping[str, Any], blocks: Sequence[bytes] = ()) -> Position:
        """Write one frame and return where it stands. `fields` is JSON and becomes the header, behind `kind`."""
        if self._fd is None:
            raise JournalError(
                f"the journal {self.folder} takes no more records: {self.broken or 'it is closed'}",
                fix="solve that, then go on with `miles run --resume`",
            )
        try:
            text = exact({"kind": kind, **fields})
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(
                f"a {kind!r} record holds what JSON cannot: {error}",
                fix="return plain JSON from environments: numbers, strings, lists and dicts in a score's info",
            ) from error
        payload = b"".join((_HEADER_LENGTH.pack(len(text)), text, *blocks))
        prefix = _PREFIX.pack(len(payload), xxhash.xxh3_64_intdigest(payload, seed=len(payload)))
        at = self._segment, self._offset
        try:
            self._files.write(self._fd, (prefix, payload))
        except OSError as error:
            with suppress(OSError):  # a torn frame that stays is cut off by whoever opens the journal next
                self._files.truncate(self._path(), self._offset)
            raise self._ended("written", error) from error
        self._offset += len(prefix) + len(payload)
        if self._offset >= self._segment_bytes:
            self._next_segment()
        return at

    def sync(self) -> None:
        """Make all that was written survive the machine."""
        if self._fd is not None:
            with self._guarded("synced"):
                self._files.sync(self._fd)

    def close(self) -> None:
        """Sync and close; does nothing the second time."""
        self.sync()
        if self._fd is not None:
            self._files.close(self._fd)
            self._fd = None

    def _next_segment(self) -> None:
        self.close()
        self._segment += 1
        self._offset = 0
        with self._guarded("extended"):
            self._fd = self._files.create(self._path())
            self._files.sync_folder(self.folder)
        self.append("segment", {"format": FORMAT, "segment": self._segment})

    def _path(self) -> Path:
        return self.folder / f"{self._segment:06d}.frames"

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._ended(what, error) from error

    def _ended(self, what: str, error: OSError) -> JournalError:
        """A disk that failed ends the writing: the file is closed, and later records are refused."""
        self.broken = f"it could not be {what}: {error}"
        if self._fd is not None:
            with suppress(OSError):
                self._files.close(self._fd)
            self._fd = None
        return JournalError(
            f"the journal {self.folder} could not be {what}: {error}",
            fix="free space or repair the file system there, then go on with `miles run --resume`",
        )


def segments_of(folder: Path) -> list[Path]:
    """The segments of a journal, in order. Raises `JournalError` where one is missing."""
    found = sorted(folder.glob("*.frames"))
    for number, path in enumerate(found):
        if path.name != f"{number:06d}.frames":
            raise JournalError(
                f"the journal {folder} has {path.name} where {number:06d}.frames should follow",
                fix="restore the missing segment, or resume from a copy of the run directory",
            )
    return found


def read(folder: Path, start: Position = (0, 0)) -> Iterator[Frame]:
    """All frames from `start` on, each verified. A torn tail ends the reading; corruption raises `JournalError`."""
    segments = segments_of(folder)
    if start[0] > len(segments) or (start[0] == len(segments) and start[1] > 0):
        raise _missing(f"the journal {folder} ends before segment {start[0]}, which a checkpoint names")
    for number in range(start[0], len(segments)):
        path = segments[number]
        data = path.read_bytes()
        offset = start[1] if number == start[0] else 0
        if offset > len(data):
            raise _missing(f"{path} ends at byte {len(data)}, a checkpoint names byte {offset} of it")
        view = memoryview(data)
        while (size := _frame_at(view, offset)) is not None:
            frame = _parsed(view[offset : offset + size], (number, offset))
            if frame.kind == "segment" and frame.header.get("format") != FORMAT:
                raise JournalError(
                    f"{path} has journal format {frame.header.get('format')}, this miles reads {FORMAT}",
                    fix="resume with the version of miles-core that wrote it (plugins.lock names it)",
                )
            yield frame
            offset += size
        if offset < len(data) and number < len(segments) - 1:
            raise _corrupt(path, offset)
        _good_prefix(path, data, offset)


def read_one(folder: Path, position: Position) -> Frame:
    """The frame that stands at `position`."""
    path = folder / f"{position[0]:06d}.frames"
    try:
        with path.open("rb") as file:
            file.seek(position[1])
            prefix = file.read(_PREFIX.size)
            length = _PREFIX.unpack(prefix)[0] if len(prefix) == _PREFIX.size else 0
            data = prefix + file.read(min(length, path.stat().st_size))
    except OSError as error:
        raise JournalError(f"{path} could not be read: {error}", fix="restore the journal") from error
    view = memoryview(data)
    if _frame_at(view, 0) != len(data):
        raise _corrupt(path, position[1])
    return _parsed(view, position)


def _parsed(frame: memoryview, position: Position) -> Frame:
    (length,) = _HEADER_LENGTH.unpack_from(frame, _PREFIX.size)
    body = frame[_PREFIX.size + _HEADER_LENGTH.size :]
    header = json.loads(bytes(body[:length]))
    return Frame(position=position, header=header, body=body[length:], size=len(frame))


def _frame_at(view: memoryview, offset: int) -> int | None:
    """Size of the whole frame at `offset`, or `None` where there is no good one."""
    end = len(view)
    if end - offset < _PREFIX.size + _SMALLEST:
        return None
    length, check = _PREFIX.unpack_from(view, offset)
    at = offset + _PREFIX.size
    if not _SMALLEST <= length <= end - at:
        return None
    (header,) = _HEADER_LENGTH.unpack_from(view, at)
    if header > length - _HEADER_LENGTH.size or bytes(view[at + 4 : at + 4 + len(_MARK)]) != _MARK:
        return None
    if xxhash.xxh3_64_intdigest(view[at : at + length], seed=length) != check:
        return None
    return _PREFIX.size + int(length)


def _good_prefix(path: Path, data: bytes, start: int = 0) -> int:
    """Bytes up to the last good frame. Raises where a good frame follows a bad one: that is no torn tail."""
    view = memoryview(data)
    offset = start
    while (size := _frame_at(view, offset)) is not None:
        offset += size
    lead = _PREFIX.size + _HEADER_LENGTH.size
    mark = data.find(_MARK, offset + lead + 1)
    while mark >= 0:
        if _frame_at(view, mark - lead) is not None:
            raise _corrupt(path, offset)
        mark = data.find(_MARK, mark + 1)
    return offset


def _corrupt(path: Path, offset: int) -> JournalError:
    return JournalError(
        f"{path} is corrupt at byte {offset}: the frame there fails its checksum, and more follow",
        fix="restore the file from a copy, or start a new run from the last checkpoint's model",
    )


def _missing(what: str) -> JournalError:
    return JournalError(what, fix="restore the journal, or rm -r the checkpoint to go on from the one before")
