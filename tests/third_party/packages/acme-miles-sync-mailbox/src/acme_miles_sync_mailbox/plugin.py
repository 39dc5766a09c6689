"""Transport `mailbox`: one process. Staging copies the stream into a mailbox; engines swap it in inside their pause."""

import json
import os
import time
import uuid
from dataclasses import dataclass

from miles_core import hookimpl
from miles_core.contracts.weights import Evidence, Receipt, TransferPlan
from miles_core.errors import CapabilityError, WeightError
from miles_core.numerics.buckets import as_bytes, library_of, nbytes, piece_digests, view
from miles_core.provider import Place, Provider
from miles_core.weights import make_manifest, manifest_root

BOXES = {}  # sender's token -> (version, [(spec, tensor)])


@dataclass(frozen=True, kw_only=True)
class MailboxConfig:
    """No options."""


class Transport:
    phase = "staged"

    def plan(self, specs, senders, links):
        told = json.loads(senders[0])
        for name, blob in links.items():
            if json.loads(blob)["pid"] != told["pid"]:
                raise CapabilityError(
                    f"transport 'mailbox' stays in one process; engine {name!r} is in another",
                    fix="set sync.use to a transport that leaves the process, e.g. bucketed",
                )
        return TransferPlan(
            senders=tuple(senders), links=dict.fromkeys(links, senders[0]), summary={"mailbox": told["token"]}
        )


class Sender:
    def __init__(self, policy, rank, export):
        self.policy, self.rank, self.export = policy, rank, export
        self.token = uuid.uuid4().hex

    def describe(self):
        return json.dumps({"pid": os.getpid(), "token": self.token}).encode()

    def connect(self, plan):
        pass

    def stage(self, version):
        copies, digests = [], {}
        for spec, tensor in self.export(self.policy, "full", False):  # every rank walks it: the export is collective
            if self.rank == 0:
                copies.append((spec, view(as_bytes(tensor).copy(), 0, spec, library_of(tensor))))
                digests[spec.name] = piece_digests(*copies[-1])
        if self.rank != 0:
            return None
        BOXES[self.token] = (version, copies)
        return make_manifest(version, [spec for spec, _ in copies], digests)

    def carry(self, version, cancelled):
        found, _ = BOXES.get(self.token, (None, None))
        if self.rank == 0 and found != version:
            raise WeightError(f"asked to carry {version}; the mailbox holds {found}", fix="stage it first")

    def close(self):
        BOXES.pop(self.token, None)


class Link:
    def __init__(self, engine):
        self.engine, self.port = engine, engine.port("tensors")
        self.token, self.mail = "", (None, [])

    async def describe(self):
        return json.dumps({"pid": os.getpid()}).encode()

    async def connect(self, plan):
        self.token = json.loads(plan)["token"]

    async def stage(self, manifest):
        self.mail = BOXES.get(self.token, (None, []))

    async def carry(self, manifest):
        started = time.perf_counter()
        version, tensors = self.mail
        if version != manifest.version:
            raise WeightError(f"{manifest.version} is not in the mailbox, but {version}", fix="publish it again")
        await self.port.begin(version)
        await self.port.load(tensors)
        await self.port.end(version)
        digests = dict(await self.port.evidence(version, manifest.tensors))
        self.mail = (None, [])
        return Receipt(
            engine=self.engine.name,
            version=version,
            evidence=Evidence.LIVE,
            digests=digests,
            root=manifest_root(manifest.tensors, digests),
            nbytes=sum(nbytes(spec) for spec in manifest.tensors),
            seconds=time.perf_counter() - started,
        )

    async def close(self):
        self.mail = (None, [])


def build(config, context):
    if context.place == Place.CONTROLLER:
        return Transport()
    if context.place == Place.TRAINER:
        return Sender(context.policy, context.rank, context.need("export"))
    return Link(context.need("engine"))


@hookimpl
def miles_sync():
    return Provider(
        name="mailbox",
        config=MailboxConfig,
        build=build,
        requires=("weights.tensors", "in_process"),
        summary="copies wait in the process until engines swap them in",
    )
