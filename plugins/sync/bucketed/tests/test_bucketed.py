"""Both paths end to end, with torch and NumPy, and everything that may go wrong on the way."""

import asyncio
import json
import multiprocessing as mp
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from miles_sync_bucketed import inprocess, shared
from miles_sync_bucketed.config import BucketedConfig, Path
from miles_sync_bucketed.link import BucketedLink
from miles_sync_bucketed.sender import BucketedSender
from miles_sync_bucketed.transport import BucketedTransport, here

from miles_core.config.schema import SyncKeys, Verify
from miles_core.contracts.weights import Evidence, Link, Sender, TensorSpec, Transport
from miles_core.errors import CapabilityError, DeadlineError, WeightError
from miles_core.numerics import buckets
from miles_core.records import Version
from miles_core.weights import check_receipt

V1 = Version(policy="main", lineage=0, number=1)
V2 = Version(policy="main", lineage=0, number=2)


class Port:
    """An engine that copies what it is given and digests what it holds."""

    def __init__(self, name="e0"):
        self.name, self.held, self.calls, self.fail_at, self.hang = name, {}, [], None, False
        self.spoil = None

    def port(self, name):
        assert name == "tensors"
        return self

    async def begin(self, version):
        self.calls.append(("begin", version))

    async def load(self, bucket):
        self.calls.append(("load", [s.name for s, _ in bucket]))
        await asyncio.sleep(0)
        if self.hang:
            await asyncio.sleep(60)
        for spec, tensor in bucket:
            if spec.name == self.fail_at:
                raise WeightError("engine is full", fix="x")
            self.held[spec.name] = tensor.clone() if isinstance(tensor, torch.Tensor) else tensor.copy()
            if spec.name == self.spoil:
                self.held[spec.name].reshape(-1)[0] += 1

    async def end(self, version):
        self.calls.append(("end", version))

    async def evidence(self, version, tensors):
        self.calls.append(("evidence", [s.name for s in tensors]))
        return {s.name: buckets.piece_digests(s, self.held[s.name]) for s in tensors}


def weights(library="torch"):
    generator = torch.Generator().manual_seed(0)
    made = {
        "embed": torch.randn(300, 1000, generator=generator),  # 1.2 MB: larger than a bucket of 1 MiB
        "w": torch.randn(200, 500, generator=generator),
        "t": torch.randn(100, 200, generator=generator).t(),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "last": torch.randn(200, 600, generator=generator),
    }
    if library == "torch":
        return made | {"half": torch.randn(70, 7, generator=generator).bfloat16(), "n": torch.arange(5)}
    return {k: v.numpy() for k, v in made.items()}


def specs_of(tensors):
    return [TensorSpec(name=k, shape=tuple(v.shape), dtype=buckets.dtype_name(v)) for k, v in tensors.items()]


@dataclass
class Rig:
    """A sender on its own thread and links on this loop."""

    tensors: dict
    path: Path = Path.in_process
    engines: tuple = ("e0",)
    keys: SyncKeys = field(default_factory=lambda: SyncKeys(deadline_s=5.0))
    rank: int = 0

    def __post_init__(self):
        self.specs = specs_of(self.tensors)
        self.ports = {name: Port(name) for name in self.engines}
        self.links = {name: BucketedLink(engine=port, keys=self.keys) for name, port in self.ports.items()}
        self.sender = BucketedSender(policy="main", rank=self.rank, export=self.export, deadline_s=5.0)
        self.transport = BucketedTransport(BucketedConfig(bucket_mib=1, path=self.path))
        self.cancelled = threading.Event()

    def export(self, policy, layout, meta):
        assert (policy, layout, meta) == ("main", "full", False)
        for spec in specs_of(self.tensors):
            yield spec, self.tensors[spec.name]

    async def connect(self):
        described = await asyncio.to_thread(self.sender.describe)
        links = {name: await link.describe() for name, link in self.links.items()}
        plan = self.transport.plan(self.specs, [described], links)
        await asyncio.to_thread(self.sender.connect, plan.senders[0])  # either side may come first
        await asyncio.gather(*(link.connect(plan.links[name]) for name, link in self.links.items()))
        return plan

    async def publish(self, version):
        manifest = await asyncio.to_thread(self.sender.stage, version)
        for link in self.links.values():
            await link.stage(manifest)
        _, *receipts = await asyncio.gather(
            asyncio.to_thread(self.sender.carry, version, self.cancelled.is_set),
            *(link.carry(manifest) for link in self.links.values()),
        )
        return manifest, dict(zip(self.links, receipts, strict=True))

    async def close(self):
        await asyncio.to_thread(self.sender.close)
        for link in self.links.values():
            await link.close()


def run(rig, body):
    async def main():
        try:
            await asyncio.wait_for(body(rig), 30)
        finally:
            await rig.close()

    asyncio.run(main())


def same(a, b):
    return bytes(buckets.as_bytes(a)) == bytes(buckets.as_bytes(b))


PATHS = [Path.in_process, Path.shared_memory]


def test_protocols():
    rig = Rig(weights())
    assert isinstance(rig.sender, Sender) and isinstance(rig.transport, Transport)
    assert all(isinstance(link, Link) for link in rig.links.values())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("engines", [("e0",), ("e0", "e1", "e2")])
def test_every_engine_holds_the_very_bytes(path, library, engines):
    async def body(rig):
        plan = await rig.connect()
        assert path.value in plan.summary["paths"]
        for version in (V1, V2):
            manifest, receipts = await rig.publish(version)
            for name, port in rig.ports.items():
                receipt = receipts[name]
                check_receipt(manifest, receipt, Evidence.LIVE)
                assert receipt.root == manifest.root and receipt.engine == name
                assert receipt.nbytes == sum(v.nbytes for v in rig.tensors.values())
                assert port.held.keys() == rig.tensors.keys()
                for key, value in rig.tensors.items():
                    assert type(port.held[key]) is type(value) and same(port.held[key], value)
                order = [call[0] for call in port.calls]
                assert order == ["begin", *["load"] * (len(order) - 3), "end", "evidence"]
                assert [n for c, names in port.calls if c == "load" for n in names] == list(rig.tensors)
                assert next(names for c, names in port.calls if c == "load") == ["embed"]  # larger than a bucket
                port.calls.clear()
            rig.tensors["w"] = rig.tensors["w"] + 1

    run(Rig(weights(library), path, engines), body)


@pytest.mark.parametrize("path", PATHS)
def test_a_bit_that_changes_inside_the_engine_is_seen(path):
    async def body(rig):
        await rig.connect()
        rig.ports["e0"].spoil = "half"
        manifest, receipts = await rig.publish(V1)
        with pytest.raises(WeightError, match="tensor 'half' differs"):
            check_receipt(manifest, receipts["e0"], Evidence.LIVE)
        assert receipts["e0"].root != manifest.root

    run(Rig(weights(), path), body)


@pytest.mark.parametrize("path", PATHS)
def test_weights_that_move_between_stage_and_carry_are_seen(path):
    async def body(rig):
        await rig.connect()
        stage = rig.sender.stage

        def and_train(version):
            manifest = stage(version)
            rig.tensors["w"] = rig.tensors["w"] + 1
            return manifest

        rig.sender.stage = and_train
        manifest, receipts = await rig.publish(V1)
        with pytest.raises(WeightError, match="tensor 'w' differs"):
            check_receipt(manifest, receipts["e0"], Evidence.LIVE)

    run(Rig(weights(), path), body)


@pytest.mark.parametrize("path", PATHS)
def test_received_evidence_is_of_the_bytes_handed_over(path):
    async def body(rig):
        await rig.connect()
        rig.ports["e0"].spoil = "w"  # what the engine does with them is not covered
        manifest, receipts = await rig.publish(V1)
        assert receipts["e0"].evidence == Evidence.RECEIVED
        check_receipt(manifest, receipts["e0"], Evidence.RECEIVED)
        assert not [c for c, _ in rig.ports["e0"].calls if c == "evidence"]

    run(Rig(weights(), path, keys=SyncKeys(verify=Verify.received, deadline_s=5.0)), body)


def test_rotation_checks_everything_first_and_after_a_reconnection():
    async def body(rig):
        await rig.connect()
        seen = []
        for number in range(3):
            _, receipts = await rig.publish(Version(policy="main", lineage=0, number=number))
            seen.append(set(receipts["e0"].digests))
            assert (receipts["e0"].root is None) == (number > 0)
        assert seen[0] == set(rig.tensors) and seen[1] | seen[2] == set(rig.tensors) and not seen[1] & seen[2]
        await rig.connect()
        _, receipts = await rig.publish(V2)
        assert set(receipts["e0"].digests) == set(rig.tensors)

    run(Rig(weights(), keys=SyncKeys(verify_within=2, deadline_s=5.0)), body)


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_that_fails_stops_the_sender_and_a_new_plan_works(path):
    async def body(rig):
        await rig.connect()
        rig.ports["e0"].fail_at = "w"
        manifest = await asyncio.to_thread(rig.sender.stage, V1)
        carrying = asyncio.create_task(asyncio.to_thread(rig.sender.carry, V1, rig.cancelled.is_set))
        with pytest.raises(WeightError, match="engine is full"):
            await rig.links["e0"].carry(manifest)
        with pytest.raises(WeightError, match="link of engine 'e0' gave up"):
            await carrying
        assert not [c for c, _ in rig.ports["e0"].calls if c == "end"]  # never activated
        rig.ports["e0"].fail_at = None
        await rig.connect()
        manifest, receipts = await rig.publish(V2)
        check_receipt(manifest, receipts["e0"], Evidence.LIVE)

    run(Rig(weights(), path), body)


@pytest.mark.parametrize("path", PATHS)
def test_cancelled_senders_return_and_cancelled_links_free_them(path):
    async def body(rig):
        await rig.connect()
        rig.ports["e0"].hang = True
        manifest = await asyncio.to_thread(rig.sender.stage, V1)
        carrying = asyncio.create_task(asyncio.to_thread(rig.sender.carry, V1, rig.cancelled.is_set))
        link = asyncio.create_task(rig.links["e0"].carry(manifest))
        await asyncio.sleep(0.1)
        assert not carrying.done()
        rig.cancelled.set()
        await asyncio.wait_for(carrying, 5)  # returns early, without an error
        link.cancel()
        with pytest.raises(asyncio.CancelledError):
            await link
        rig.cancelled.clear()
        await rig.connect()
        carrying = asyncio.create_task(asyncio.to_thread(rig.sender.carry, V1, rig.cancelled.is_set))
        link = asyncio.create_task(rig.links["e0"].carry(manifest))
        await asyncio.sleep(0.1)
        link.cancel()
        with pytest.raises(WeightError, match="gave up"):
            await asyncio.wait_for(carrying, 5)

    run(Rig(weights(), path), body)


def test_links_may_connect_before_the_sender():
    async def body(rig):
        described = rig.sender.describe()
        plan = rig.transport.plan(rig.specs, [described], {"e0": await rig.links["e0"].describe()})
        early = asyncio.create_task(rig.links["e0"].connect(plan.links["e0"]))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(rig.sender.connect, plan.senders[0])
        await early
        manifest, receipts = await rig.publish(V1)
        check_receipt(manifest, receipts["e0"], Evidence.LIVE)

    run(Rig(weights(), Path.shared_memory), body)


def test_streams_must_be_those_of_the_dry_pass():
    async def body(rig):
        await rig.connect()
        del rig.tensors["last"]
        with pytest.raises(WeightError, match="gave 'half' where the plan expects 'last'"):
            await asyncio.to_thread(rig.sender.stage, V1)
        rig.tensors = weights() | {"more": torch.zeros(1)}
        with pytest.raises(WeightError, match="goes on with 'more' after all planned tensors"):
            await asyncio.to_thread(rig.sender.stage, V1)

    run(Rig(weights()), body)


def test_other_ranks_walk_the_export_and_hand_nothing_over():
    walked = []

    def export(policy, layout, meta):
        for i in range(3):
            walked.append(i)
            yield TensorSpec(name=str(i), shape=(), dtype="F32"), torch.tensor(0.0)

    sender = BucketedSender(policy="main", rank=1, export=export, deadline_s=1.0)
    sender.describe()
    sender.connect(json.dumps({"limit": 1, "memory": 0, "token": "", "tensors": [], "paths": {}}).encode())
    assert sender.stage(V1) is None
    sender.carry(V1, lambda: False)
    assert walked == [0, 1, 2, 0, 1, 2]
    sender.close()


def test_plans_by_place():
    spec = [TensorSpec(name="a", shape=(3 << 18,), dtype="F32")]
    sender = json.dumps({**here(), "token": "t", "socket": "/s"}).encode()
    elsewhere = json.dumps({"host": "other b", "process": "p 1"}).encode()
    beside = json.dumps({**here(), "process": "p 1"}).encode()
    own = json.dumps(here()).encode()

    def paths(path, **links):
        plan = BucketedTransport(BucketedConfig(bucket_mib=1, path=path)).plan(spec, [sender, sender], links)
        assert json.loads(plan.senders[1])["paths"] == {}
        assert json.loads(plan.senders[0])["memory"] == 3 << 20  # a bucket is as large as its largest tensor
        return json.loads(plan.senders[0])["paths"]

    assert paths(Path.auto, a=own, b=beside) == {"a": "in_process", "b": "shared_memory"}
    assert paths(Path.shared_memory, a=own) == {"a": "shared_memory"}
    with pytest.raises(CapabilityError, match="engine 'b' is in another process"):
        paths(Path.in_process, b=beside)
    with pytest.raises(CapabilityError, match="engine 'c' is on host 'other'"):
        paths(Path.auto, c=elsewhere)


def test_links_that_do_not_come_meet_the_deadline(tmp_path):
    server = shared.Server(str(tmp_path / "f" / "s"), "token", ["e0"], 64, 0.1)
    with pytest.raises(DeadlineError, match=r"links of \['e0'\] did not connect within 0.1 s"):
        server.start(lambda: False)
    assert not server.start(lambda: True)
    server.close()
    assert not (tmp_path / "f").exists()


def test_strangers_are_turned_away(tmp_path):
    async def main():
        server = shared.Server(str(tmp_path / "f" / "s"), "token", ["e0"], 64, 5.0)
        assert (tmp_path / "f").stat().st_mode & 0o777 == 0o700
        for token, name in (("wrong", "e0"), ("token", "e1")):
            with pytest.raises(WeightError, match="cannot reach the trainer's weights"):
                await shared.Client(name, 1.0).connect(str(tmp_path / "f" / "s"), token, 64)
        client = shared.Client("e0", 1.0)
        await client.connect(str(tmp_path / "f" / "s"), "token", 64)
        assert await asyncio.to_thread(server.start, lambda: False)
        assert not (tmp_path / "f").exists()  # nothing is left to find once all are in
        client.close()
        server.close()

    asyncio.run(main())


def test_a_client_without_a_sender_meets_the_deadline(tmp_path):
    with pytest.raises(WeightError, match="cannot reach"):
        asyncio.run(shared.Client("e0", 0.1).connect(str(tmp_path / "none"), "t", 64))


@pytest.mark.parametrize("path", PATHS)
def test_a_bucket_of_another_version_is_refused(path):
    async def body(rig):
        await rig.connect()
        manifest = await asyncio.to_thread(rig.sender.stage, V1)
        with pytest.raises(WeightError, match=r"main@0.2 was to be carried, main@0.1 was staged"):
            rig.sender.carry(V2, lambda: False)
        await asyncio.to_thread(rig.sender.stage, V2)
        sending = asyncio.create_task(asyncio.to_thread(rig.sender.carry, V2, rig.cancelled.is_set))
        with pytest.raises(WeightError, match=r"bucket 0 of main@0.1 was due"):
            await rig.links["e0"].carry(manifest)
        with pytest.raises(WeightError):
            await sending

    run(Rig(weights(), path), body)


def test_at_most_two_buckets_exist():
    """The sender asks for the tensors of a bucket only when the bucket before the last one is gone."""
    alive, most = 0, 0

    class Held(np.ndarray):
        def __del__(self):
            nonlocal alive
            if getattr(self, "counted", False):
                alive -= 1

    tensors = {f"t{i}": np.zeros(1 << 18, np.float32) for i in range(8)}  # one tensor fills a bucket

    class Counting(Rig):
        def export(self, policy, layout, meta):
            nonlocal alive, most
            for spec in self.specs:
                made = self.tensors[spec.name].copy().view(Held)
                made.counted = True
                alive += 1
                most = max(most, alive)
                yield spec, made
                del made

    async def body(rig):
        await rig.connect()
        await rig.publish(V1)

    run(Counting(tensors), body)
    assert most == 2


def _serve(pipe, verify):
    """A link in another process, told what to do over a pipe."""
    link = BucketedLink(engine=Port("far"), keys=SyncKeys(verify=verify, deadline_s=10.0))

    async def main():
        while True:
            method, argument = await asyncio.to_thread(pipe.recv)
            if method == "stop":
                return
            try:
                pipe.send(await getattr(link, method)(*argument))
            except Exception as error:
                pipe.send(error)

    asyncio.run(main())


def test_shared_memory_reaches_another_process_and_its_death_is_noticed():
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, Verify.live), daemon=True)
    process.start()

    def tell(method, *argument):
        pipe.send((method, argument))

    tensors = weights()
    sender = BucketedSender(
        policy="main", rank=0, export=lambda *_: zip(specs_of(tensors), tensors.values(), strict=True), deadline_s=20.0
    )
    tell("describe")
    described = sender.describe()
    plan = BucketedTransport(BucketedConfig(bucket_mib=1)).plan(specs_of(tensors), [described], {"far": pipe.recv()})
    assert json.loads(plan.senders[0])["paths"] == {"far": "shared_memory"}
    tell("connect", plan.links["far"])
    sender.connect(plan.senders[0])
    assert pipe.recv() is None
    manifest = sender.stage(V1)
    tell("carry", manifest)
    sender.carry(V1, lambda: False)
    receipt = pipe.recv()
    check_receipt(manifest, receipt, Evidence.LIVE)
    assert receipt.root == manifest.root

    process.kill()
    process.join()
    sender.stage(V2)
    started = time.monotonic()
    with pytest.raises(WeightError, match="link of engine 'far' gave up"):
        sender.carry(V2, lambda: False)
    assert time.monotonic() - started < 10
    sender.close()


def test_channels_are_forgotten():
    rig = Rig(weights())

    async def body(rig):
        await rig.connect()
        await rig.connect()
        assert len([key for key in inprocess._CHANNELS if key[1] == "e0"]) == 1

    run(rig, body)
    assert not [key for key in inprocess._CHANNELS if key[1] == "e0"]
