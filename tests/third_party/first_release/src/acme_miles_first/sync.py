"""A transport inside one process, phase `live`: the link takes what the sender staged."""

import json
import time

import numpy as np

from acme_miles_first.config import Nothing
from miles_core import hookimpl
from miles_core.contracts.weights import Evidence, Receipt, TransferPlan
from miles_core.errors import WeightError
from miles_core.provider import Place, Provider
from miles_core.weights import make_manifest, manifest_root, piece_digests

STAGED = {}


class Transport:
    phase = "live"

    def plan(self, specs, senders, links):
        return TransferPlan(senders=tuple(senders), links=dict.fromkeys(links, senders[0]))


class Sender:
    def __init__(self, policy, rank, export):
        self.policy, self.rank, self.export = policy, rank, export

    def describe(self):
        return json.dumps({"key": f"{id(self)}"}).encode()

    def connect(self, plan):
        pass

    def stage(self, version):
        copies = [(spec, np.array(tensor)) for spec, tensor in self.export(self.policy, "full", False)]
        if self.rank != 0:
            return None
        STAGED[str(id(self))] = (version, copies)
        return make_manifest(version, [s for s, _ in copies], {s.name: piece_digests(s, t) for s, t in copies})

    def carry(self, version, cancelled):
        have, _ = STAGED.get(str(id(self)), (None, None))
        if self.rank == 0 and have != version:
            raise WeightError(f"{version} is not staged, but {have}", fix="stage it first")

    def close(self):
        STAGED.pop(str(id(self)), None)


class Link:
    def __init__(self, engine):
        self.engine, self.port = engine, engine.port("tensors")
        self.key = ""

    async def describe(self):
        return self.engine.name.encode()

    async def connect(self, plan):
        self.key = json.loads(plan)["key"]

    async def stage(self, manifest):
        pass

    async def carry(self, manifest):
        started = time.perf_counter()
        version, copies = STAGED[self.key]
        if version != manifest.version:
            raise WeightError(f"{manifest.version} is not staged, but {version}", fix="stage it first")
        await self.port.begin(version)
        for spec, tensor in copies:
            await self.port.load([(spec, tensor)])
        await self.port.end(version)
        digests = dict(await self.port.evidence(version, manifest.tensors))
        return Receipt(
            engine=self.engine.name,
            version=version,
            evidence=Evidence.LIVE,
            digests=digests,
            root=manifest_root(manifest.tensors, digests),
            nbytes=sum(tensor.nbytes for _, tensor in copies),
            seconds=time.perf_counter() - started,
        )

    async def close(self):
        pass


def build(config, context):
    if context.place == Place.CONTROLLER:
        return Transport()
    if context.place == Place.TRAINER:
        return Sender(context.policy, context.rank, context.need("export"))
    return Link(context.need("engine"))


@hookimpl
def miles_sync():
    return Provider(
        name="first", config=Nothing, build=build, requires=("weights.tensors", "in_process"), summary="in one process"
    )
