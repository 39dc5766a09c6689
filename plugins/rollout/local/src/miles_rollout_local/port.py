"""Weight port `tensors`: whole tensors copied into the live model between two decode steps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_core.contracts.weights import TensorSpec
from miles_core.errors import WeightError
from miles_core.records import Version

if TYPE_CHECKING:
    from miles_rollout_local.engine import LocalEngine


class TensorsPort:
    """See `miles_core.contracts.weights.TensorsPort`.

    `begin` again before `end` starts over (a transfer that failed half-way is repeated in full). `end` takes either
    every tensor, or none at all: the same weights under a new version. Until an `end` succeeds the engine stands still.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    async def begin(self, version: Version) -> None:
        self._engine.check_policy(version)

        def hold() -> None:
            self._engine.loading = version
            self._engine.weights.restart()

        await self._engine.control(hold)

    async def load(self, bucket: Sequence[tuple[TensorSpec, Any]]) -> None:
        def copy() -> None:
            if self._engine.loading is None:
                raise WeightError("tensors came outside begin and end", fix="call begin(version) first")
            self._engine.torn = True
            self._engine.weights.load(bucket)

        await self._engine.control(copy)

    async def end(self, version: Version) -> None:
        def activate() -> None:
            engine = self._engine
            if engine.loading != version:
                raise WeightError(
                    f"end({version}) without its begin; {engine.loading or 'nothing'} is being loaded",
                    fix="call begin and end with the same version",
                )
            if engine.torn or engine.slots.version is None:
                engine.weights.check_complete()
            if engine.slots.version is None:
                engine.check_invariance()
            engine.torn = False
            engine.loading = None
            engine.slots.activate(version)

        await self._engine.control(activate)

    async def evidence(self, version: Version, tensors: Sequence[TensorSpec]) -> Mapping[str, tuple[str, ...]]:
        held = self._engine.loading or self._engine.slots.version
        if held != version:
            raise WeightError(
                f"engine {self._engine.name!r} holds {held or 'no weights'}, not {version}",
                fix="ask for evidence of the version that was loaded last",
            )
        # Reading beside decode steps is safe: only `load` writes, and the caller has finished loading.
        return await asyncio.to_thread(self._engine.weights.digests, tensors)
