"""Whose weights live where. A lane is one model with a batch of its own.

A policy that is sent whole weights has a lane to itself. Policies that are sent adapters share one, whose model is the
base, read from the model's folder: they are decoded together. The first lane is made with the engine, others when a
policy's first tensors come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from miles_core.errors import CapabilityError, EngineError, WeightError
from miles_rollout_local.adapters import Adapters

if TYPE_CHECKING:
    from miles_core.contracts.model import ModelSource
    from miles_core.contracts.weights import TensorSpec
    from miles_core.records import Version
    from miles_rollout_local.jobs import Job
    from miles_rollout_local.slots import Slots
    from miles_rollout_local.weights import LiveWeights


@dataclass(eq=False)
class Lane:
    """`adapters` is `None` where this engine's forward takes none. `torn`: whole weights came in part."""

    slots: Slots
    weights: LiveWeights
    adapters: Adapters | None
    torn: bool = False
    taken: bool = False


class Lanes:
    """The lanes of an engine. Runs in the worker's thread, but for the constructor."""

    def __init__(self, name: str, source: ModelSource | None, make: Callable[[], Lane]) -> None:
        self._name, self._source, self._make = name, source, make
        self.first = make()
        self.all = [self.first]
        self.base: Lane | None = None
        self.by_policy: dict[str, Lane] = {}
        self.versions: dict[str, Version] = {}

    def take(self, policy: str, adapter: bool) -> Lane:
        """The lane for whole weights, or for an adapter, of `policy`; made where there is none yet.

        Raises `WeightError` where a policy changes from one to the other, `CapabilityError` where the engine has no
        adapters, or no folder that the base could be read from.
        """
        lane = self.by_policy.get(policy)
        if lane is not None and (lane is self.base) != adapter:
            raise WeightError(
                f"policy {policy!r} was sent {'an adapter' if lane is self.base else 'whole weights'} before, and now "
                f"{'an adapter' if adapter else 'whole weights'}",
                fix="publish one kind in a run",
            )
        if lane is None:
            lane = self._base() if adapter else self._free()
            self.by_policy[policy] = lane
        return lane

    def _free(self) -> Lane:
        lane = self.first
        if lane.taken:
            lane = self._make()
            self.all.append(lane)
        lane.taken = True
        return lane

    def _base(self) -> Lane:
        if self.base is None:
            lane = self._free()
            if lane.adapters is None:
                lane.taken = lane is not self.first
                raise CapabilityError(
                    f"engine {self._name!r} runs no adapters here: neither with batch_invariant nor with an "
                    "architecture that it was never tested with",
                    fix="set extensions.lora.export: merged, or leave out rollout.batch_invariant and .unverified",
                )
            self._read_base(lane)
            lane.slots.forward.adapters = lane.adapters
            self.base = lane
        return self.base

    def _read_base(self, lane: Lane) -> None:
        folder = None if self._source is None else self._source.folder
        if folder is None:
            raise CapabilityError(
                f"engine {self._name!r} was sent an adapter alone, and has no folder that it could read the base from",
                fix="set extensions.lora.export: merged, or start from a folder (model.source)",
            )
        wanted = dict(lane.weights.sizes)
        try:
            for file in sorted(folder.glob("*.safetensors")):
                with safe_open(file, framework="pt") as handle, torch.no_grad():
                    for name in handle.keys():
                        lane.weights.fill(name, handle.get_tensor(name))
                        wanted.pop(lane.weights.owner[name], None)
        except (OSError, SafetensorError, KeyError) as error:
            raise EngineError(
                f"the base of engine {self._name!r} in {folder} cannot be read: {error!r}",
                fix="repair the folder, or set extensions.lora.export: merged",
            ) from error
        if wanted:
            raise EngineError(
                f"{folder} lacks {len(wanted)} parameters of the base, {next(iter(wanted))!r} first",
                fix="use a complete Hugging Face folder",
            )

    def load(self, policy: str, bucket: Sequence[tuple[TensorSpec, Any]], *, adapter: bool) -> None:
        """Take tensors of the version that is being loaded. Whole weights go into the live model, an adapter waits."""
        lane = self.take(policy, adapter)
        if adapter:
            assert lane.adapters is not None
            lane.adapters.load(bucket)
        else:
            lane.torn = True
            lane.weights.load(bucket)

    def finish(self, version: Version) -> bool:
        """All tensors of `version` have come: whether they are the first whole weights of their policy. Raises
        `WeightError` where something is missing. No tensor at all stands for the weights that are there."""
        policy = version.policy
        lane, new = self.by_policy.get(policy, self.first), policy not in self.versions
        if lane is self.base:
            assert lane.adapters is not None
            if policy not in self.by_policy:
                raise WeightError(
                    f"no tensor of policy {policy!r} has come, and it has none here yet",
                    fix="send a policy's whole stream once, before a version without tensors",
                )
            if lane.adapters.incoming or new:
                lane.adapters.activate(policy)
            return False
        if lane.torn or new:
            lane.weights.check_complete()
        lane.torn = False
        return new

    def digests(self, policy: str, specs: Sequence[TensorSpec]) -> Mapping[str, tuple[str, ...]]:
        """Digests of the policy's weights where they live."""
        lane = self.by_policy[policy]
        if lane is self.base:
            assert lane.adapters is not None
            return lane.adapters.digests(policy, specs)
        return lane.weights.digests(specs)

    def activate(self, version: Version) -> None:
        """Tokens of the policy that are sampled from now on carry `version`."""
        self.versions[version.policy] = version
        self.by_policy[version.policy].slots.activate(version)

    # --- all batches as one ------------------------------------------------------------------------------------------

    def enqueue(self, job: Job) -> None:
        self.by_policy[job.request.policy].slots.enqueue(job)

    @property
    def busy(self) -> bool:
        return any(lane.slots.busy and not lane.torn for lane in self.all)

    def step(self) -> None:
        """One token for every running request."""
        for lane in self.all:
            if lane.slots.busy and not lane.torn:
                lane.slots.step()

    def preempt(self) -> None:
        for lane in self.all:
            lane.slots.preempt()

    def abort(self, chosen: Callable[[Job], bool]) -> None:
        for lane in self.all:
            lane.slots.abort(chosen)

    def take_finished(self) -> list[Any]:
        return [done for lane in self.all for done in lane.slots.take_finished()]

    def counts(self) -> tuple[int, int]:
        """Requests that run, and that wait for a slot or to be scored."""
        slots = [lane.slots for lane in self.all]
        return sum(len(s.jobs) for s in slots), sum(len(s.waiting) + len(s.unscored) for s in slots)
