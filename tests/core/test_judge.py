"""A role that an engine holds: its model is read once, its answers become columns, and what is missing is named."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from miles_core.contracts.engine import Completion
from miles_core.contracts.model import ModelSource
from miles_core.errors import EngineError, ModelSourceError
from miles_core.judge import Judge
from miles_core.records import Finish, Trajectory, Version

VERSION = Version(policy="main", lineage=0, number=0)
ROWS = [Trajectory(id=f"t{n}", length=n, columns={"tokens": np.arange(n, dtype=np.int32)}) for n in (3, 5)]


class Reader:
    """Says of token t that its log-probability is -t; remembers what it was told."""

    name = "judge"

    def __init__(self, *, lacks=()):
        self.told, self.asked, self.lacks = [], [], lacks

    async def start(self):
        self.told.append("start")

    def port(self, name):
        assert name == "checkpoint"
        return self

    async def begin(self, version):
        self.told.append(("begin", version))

    async def load(self, path, specs):
        self.told.append(("load", path, specs))

    async def end(self, version):
        self.told.append(("end", version))

    async def generate(self, request):
        self.asked.append(request)
        tokens = request.prompt["tokens"]
        columns = {"tokens": tokens[:0], "logprobs": np.zeros(0), "prompt_logprobs": -tokens.astype(np.float32)}
        for want in request.want:
            if want.startswith("prompt_top_logprobs:"):
                k = int(want.partition(":")[2])
                columns["prompt_topk_ids"] = np.tile(np.arange(k, dtype=np.int32), (len(tokens), 1))
                columns["prompt_topk_logprobs"] = np.zeros((len(tokens), k), np.float32)
        columns = {name: value for name, value in columns.items() if name not in self.lacks}
        return Completion(request=request.id, columns=columns, spans=(), finish=Finish.LENGTH, engine=self.name)


def judge(engine, folder=Path("/models/teacher")):
    return Judge(engine, "teacher", ModelSource(asked="x", folder=folder), VERSION, 5.0)


def test_the_model_is_read_from_its_folder_before_anything_is_asked():
    engine = Reader()
    asyncio.run(judge(engine).start())
    assert engine.told == ["start", ("begin", VERSION), ("load", "/models/teacher", ()), ("end", VERSION)]


def test_answers_become_columns_of_each_trajectory():
    engine = Reader()
    made = judge(engine)
    found = asyncio.run(made.score(ROWS, ["teacher.logprobs"]))
    assert [value.tolist() for value in found["teacher.logprobs"]] == [[0, -1, -2], [0, -1, -2, -3, -4]]
    assert all(r.want == {"prompt_logprobs"} and r.sampling.max_new_tokens == 0 for r in engine.asked)
    made.k = 2
    found = asyncio.run(made.score(ROWS, ["teacher.topk_ids", "teacher.topk_logprobs"]))
    assert [value.shape for value in found["teacher.topk_ids"]] == [(3, 2), (5, 2)]
    assert "prompt_top_logprobs:2" in engine.asked[-1].want


def test_what_an_engine_does_not_give_is_named():
    with pytest.raises(EngineError, match="engine 'judge' gave no 'prompt_logprobs' for 'main:t3'"):
        asyncio.run(judge(Reader(lacks=("prompt_logprobs",))).score(ROWS, ["teacher.logprobs"]))
    with pytest.raises(EngineError, match=r"gave no 'teacher.values'"):
        asyncio.run(judge(Reader()).score(ROWS, ["teacher.values"]))


def test_a_model_without_a_folder_is_refused():
    with pytest.raises(ModelSourceError, match="role 'teacher' is held by engine 'judge', and its model has no folder"):
        judge(Reader(), folder=None)
