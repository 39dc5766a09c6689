"""Weight ports `tensors` and `checkpoint`: whole tensors copied into the live model between two decode steps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from miles_core.contracts.weights import TensorSpec
from miles_core.errors import WeightError
from miles_core.records import Version
from miles_rollout_local.adapters import is_adapter
from miles_rollout_local.weights import SPELLED

if TYPE_CHECKING:
    from miles_rollout_local.engine import LocalEngine


class TensorsPort:
    """See `miles_core.contracts.weights.TensorsPort`. What comes is whole weights, or an adapter under PEFT's names.

    `begin` again before `end` starts over (a transfer that failed half-way is repeated in full). `end` takes either
    every tensor, or none at all: the same weights under a new version. Until an `end` succeeds the engine stands still.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    async def begin(self, version: Version) -> None:
        def hold() -> None:
            self._engine.loading = version
            lane = self._engine.lanes.by_policy.get(version.policy, self._engine.lanes.first)
            lane.weights.restart()
            if lane.adapters is not None:
                lane.adapters.incoming = {}

        await self._engine.control(hold)

    async def load(self, bucket: Sequence[tuple[TensorSpec, Any]]) -> None:
        def copy() -> None:
            version = self._engine.loading
            if version is None:
                raise WeightError("tensors came outside begin and end", fix="call begin(version) first")
            for adapter in sorted({is_adapter(spec.name) for spec, _ in bucket}):
                part = [(spec, tensor) for spec, tensor in bucket if is_adapter(spec.name) == adapter]
                self._engine.lanes.load(version.policy, part, adapter=adapter)

        await self._engine.control(copy)

    async def end(self, version: Version) -> None:
        def activate() -> None:
            engine = self._engine
            if engine.loading != version:
                raise WeightError(
                    f"end({version}) without its begin; {engine.loading or 'nothing'} is being loaded",
                    fix="call begin and end with the same version",
                )
            if engine.lanes.finish(version):
                engine.check_invariance(engine.lanes.by_policy[version.policy])
            engine.loading = None
            engine.lanes.activate(version)

        await self._engine.control(activate)

    async def evidence(self, version: Version, tensors: Sequence[TensorSpec]) -> Mapping[str, tuple[str, ...]]:
        engine = self._engine
        held = engine.lanes.versions.get(version.policy)
        if engine.loading is not None and engine.loading.policy == version.policy:
            held = engine.loading
        if held != version:
            raise WeightError(
                f"engine {self._engine.name!r} holds {held or 'no weights'}, not {version}",
                fix="ask for evidence of the version that was loaded last",
            )
        # Reading beside decode steps is safe: only `load` writes, and the caller has finished loading.
        return await asyncio.to_thread(engine.lanes.digests, version.policy, tensors)


class CheckpointPort(TensorsPort):
    """See `miles_core.contracts.weights.CheckpointPort`: tensors of a folder's safetensors files, all of them where
    `specs` is empty, in the engine's own number format."""

    async def load(self, path: str, specs: Sequence[TensorSpec]) -> None:  # type: ignore[override]
        weights = self._engine.lanes.first.weights
        wanted = {spec.name for spec in specs}
        try:
            for file in sorted(Path(path).glob("*.safetensors")):
                with safe_open(file, framework="pt") as handle:
                    for name in handle.keys():
                        if wanted and name not in wanted:
                            continue
                        tensor = await asyncio.to_thread(handle.get_tensor, name)
                        view = weights.views.get(name)
                        tensor = tensor if view is None else tensor.to(view.dtype)  # another name is refused below
                        spec = TensorSpec(name=name, shape=tuple(tensor.shape), dtype=SPELLED[tensor.dtype])
                        await super().load([(spec, tensor)])
        except (OSError, SafetensorError) as error:
            raise WeightError(
                f"engine {self._engine.name!r} cannot read the weights in {path}: {error}",
                fix="repair the folder, or name another",
            ) from error
