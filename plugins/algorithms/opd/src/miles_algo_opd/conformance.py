"""What `miles conformance` tests: the stage, the term in every mixture of its options, and the scorer's contract."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import replace
from math import log
from typing import Any, ClassVar

import numpy as np

from miles_algo_opd.config import HttpTeacherConfig
from miles_algo_opd.loopback import Loopback
from miles_core.columns import Batch, ColumnSpec, Level
from miles_core.contracts.learning import Output
from miles_core.provider import Place
from miles_core.testing import (
    DistillConformance,
    PresetConformance,
    ScorerConformance,
    StageExample,
    TermConformance,
    TermExample,
)

VOCABULARY = 9

#: p = (.5, .3, .2), t = (.2, .3, .5), the set {0, 1}, the rest one outcome: Σ p log(p/t), gradient p (log(p/t) + 1).
REVERSE_BUCKET = TermExample(
    outputs={"logprobs": [-1.0], "token_logprobs": [[log(0.5), log(0.3)]], "rest_logprobs": [log(0.2)]},
    columns={
        "actor.topk_ids": [[0, 1]],
        "teacher.token_logprobs": [[log(0.2), log(0.3)]],
        "teacher.rest_logprobs": [log(0.5)],
    },
    value=[0.27488722],
    gradient={
        "token_logprobs": [[0.5 * (log(2.5) + 1), 0.3]],
        "rest_logprobs": [0.2 * (log(0.4) + 1)],
    },
)


class OpdConformance(DistillConformance):
    name = "opd"
    examples: ClassVar[Sequence[StageExample]] = (
        StageExample(
            rewards=[[1.0, 0.0]],
            trainable=[[0, 1, 1], [1]],
            columns={
                "advantages": [0.0, 0.5, -2.0, 1.0],
                "proximal_logprobs": [0.0, -1.0, -3.0, -100.0],
                "teacher.logprobs": [0.0, -1.5, -1.0, 0.0],
            },
            expect={"advantages": [0.0, 0.0, 0.0, 101.0]},
        ),
    )


class TopkPresetConformance(PresetConformance):
    name = "opd_topk"


class TopkKlConformance(TermConformance):
    """Student and teacher are distributions over nine tokens; columns and outputs are read from those."""

    name = "topk_kl"
    field = "distill"
    options: ClassVar[dict[str, Any]] = {"k": 3}
    examples: ClassVar[Sequence[TermExample]] = (REVERSE_BUCKET,)

    def distribution(self, batch: Batch, role: str) -> np.ndarray[Any, Any]:
        """float64 [units, 9]: log-probabilities that belong to a trajectory's name, not to its place."""
        rows = []
        for name, length in zip(batch.trajectory_ids, batch.lengths, strict=True):
            rng = np.random.default_rng([len(role), *name.encode()])
            rows.append(rng.standard_normal((int(length), VOCABULARY)))
        logits = np.concatenate(rows)
        return np.asarray(logits - np.log(np.exp(logits).sum(1, keepdims=True)))

    def read(self, batch: Batch, output: Output) -> np.ndarray[Any, Any]:
        full = self.distribution(batch, output.role)
        top = np.argsort(-full, axis=1)[:, : output.k]
        if output.name == "topk_ids":
            return np.asarray(top, np.int32)
        ids = np.concatenate([batch.columns[n] for n in output.inputs], axis=1) if output.inputs else top
        if output.name != "rest_logprobs":
            return np.take_along_axis(full, ids, 1)
        outside = full.copy()
        np.put_along_axis(outside, ids, -np.inf, 1)
        return np.asarray(np.log(np.exp(outside).sum(1)))

    def fill(self, batch: Batch, name: str) -> Batch:
        output = self.term().scores[name]
        for needed in output.inputs:
            if needed not in batch.columns:
                batch = self.fill(batch, needed)
        if name in batch.columns:
            return batch
        value = self.read(batch, output)
        dtype = "int32" if output.name == "topk_ids" else "float32"
        spec = ColumnSpec(name=name, level=Level.UNIT, dtype=dtype, inner=value.shape[1:])
        return batch.with_columns({name: value}, [spec])

    def start(self, batch: Batch, output: Output) -> np.ndarray[Any, Any]:
        return super().start(batch, output) if output.name == "logprobs" else self.read(batch, output)


class ForwardConformance(TopkKlConformance):
    examples: ClassVar[Sequence[TermExample]] = ()
    options: ClassVar[dict[str, Any]] = {"k": 3, "direction": "forward", "support": "teacher"}


class UnionConformance(TopkKlConformance):
    examples: ClassVar[Sequence[TermExample]] = ()
    options: ClassVar[dict[str, Any]] = {"k": 3, "support": "union"}


class RenormalisedConformance(TopkKlConformance):
    examples: ClassVar[Sequence[TermExample]] = ()
    options: ClassVar[dict[str, Any]] = {"k": 3, "support": "union", "tail": "renormalise"}


class TaillessConformance(TopkKlConformance):
    examples: ClassVar[Sequence[TermExample]] = ()
    options: ClassVar[dict[str, Any]] = {"k": 3, "direction": "forward", "tail": "none"}


class HttpTeacherConformance(ScorerConformance):
    """Asks a loopback teacher."""

    name = "http-teacher"
    options: ClassVar[dict[str, Any]] = {"url": "http://127.0.0.1:9", "vocabulary": "same", "k": 3, "retries": 0}
    want: ClassVar[tuple[str, ...]] = ("teacher.logprobs", "teacher.topk_ids", "teacher.topk_logprobs")
    per_unit: ClassVar[tuple[str, ...]] = want

    def example(self, place: Place) -> Any:
        config: HttpTeacherConfig = replace(self.config(), url=self.served)
        return self.the_provider().build(config, self.context(place))

    served = "http://127.0.0.1:9"  # nobody listens until something runs

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        with Loopback(15).serving() as teacher:
            self.served = teacher.url
            return super().run(work)
