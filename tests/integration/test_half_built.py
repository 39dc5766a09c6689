"""What fails while it is built leaves nothing open: neither a trainer, nor a sampler process, nor a controller."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from miles_core.config.compose import load
from miles_core.controller import Controller, sampler_worker
from miles_core.discovery import scan
from miles_core.errors import EngineError
from miles_core.export import export_cached
from miles_core.prepare import prepare
from miles_core.wiring import TrainerWorker, Wiring


@pytest.fixture
def prepared(tmp_path, monkeypatch, toy_text):
    monkeypatch.chdir(tmp_path)
    Path("toy.yaml").write_text(toy_text)
    run_file = load(Path("toy.yaml"), ("rollout.count=2", "scorers={judge: {use: toy}}"), catalogue=scan())
    return prepare(run_file, scan(), Path("runs/toy"), export_cached)


@pytest.fixture
def closed(monkeypatch):
    """Kinds of what was closed, while the build of one part (kind, and which of that kind) fails."""
    build, closed, seen = Wiring.build, [], []

    def start(kind, nth=0):
        def failing(self, part, place, **context):
            seen.append(part.kind)
            if part.kind == kind and seen.count(kind) == nth + 1:
                raise EngineError("no room", fix="make some")
            product = build(self, part, place, **context)
            if hasattr(product, "close"):
                close = product.close
                product.close = lambda: (closed.append(part.kind), close())[1]
            return product

        monkeypatch.setattr(Wiring, "build", failing)
        return closed

    return start


def test_a_trainer(prepared, closed):
    found = closed("sync")
    with pytest.raises(EngineError, match="no room"):
        TrainerWorker(replace(prepared.wiring, built=[]), 0, 1, lambda: False)
    assert found == ["backend"]


@pytest.mark.parametrize(
    ("kind", "nth", "want"),
    [
        ("rollout", 1, ["launcher", "backend", "sync", "rollout"]),
        ("sync", 1, ["launcher", "backend", "sync", "rollout", "rollout"]),
    ],
)
def test_a_controller(prepared, closed, kind, nth, want):
    found = closed(kind, nth)
    with pytest.raises(EngineError, match="no room"):
        asyncio.run(Controller.open(prepared, lambda kind, fields: None))
    assert sorted(found) == sorted(want)


def test_a_sampler_process(prepared, closed):
    found = closed("rollout", 1)
    payload = prepared.wiring.payload(prepared.lock)
    with pytest.raises(EngineError, match="no room"):
        sampler_worker(rank=0, count=1, cancelled=lambda: False, engines={}, **payload)
    assert found == ["rollout", "scorer"]
