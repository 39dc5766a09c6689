"""Throughput of the bucketed transport, as a share of memcpy in the same run; and its peak extra memory.

One thread on each side (the hand-over is a pipeline of a sender and a link). Every case moves the same tensors of one
dtype into an engine that copies them, after one pass that is not counted; the best of some rounds is shown, for memcpy
too. `carry alone` moves bytes; `with digests` digests every tensor at the trainer before and in the engine after.

memcpy is taken twice. Tensor by tensor is what any engine must do that holds these tensors, and what the goals are held
against. One copy of everything is shown beside it: for a copy that large (glibc: more than its share of the last cache)
the C library goes around the caches, which may double its speed and is open to no copy of a single tensor.

Memory is taken over all passes, in the first of which the export makes every tensor anew.

    python benchmarks/sync_bucketed.py [--mib 1024] [--bucket-mib 64] [--dtype bfloat16] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import multiprocessing as mp
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from miles_sync_bucketed.config import BucketedConfig
from miles_sync_bucketed.link import BucketedLink
from miles_sync_bucketed.sender import BucketedSender
from miles_sync_bucketed.transport import BucketedTransport

from miles_core.config.schema import SyncKeys
from miles_core.contracts.weights import Manifest, Receipt, TensorSpec
from miles_core.numerics import buckets
from miles_core.records import Version
from miles_core.weights import Evidence, check_receipt

TARGETS = {
    ("in-process", "carry alone"): 0.5,
    ("in-process", "with digests"): 0.25,
    ("shared memory", "carry alone"): 0.35,
    ("shared memory", "with digests"): 0.2,
}


class Port:
    """An engine's weights: `load` copies in, `evidence` digests what is there (or, told to, believes the manifest)."""

    def __init__(self, specs: Sequence[TensorSpec], dtype: torch.dtype) -> None:
        self.held = {spec.name: torch.zeros(spec.shape, dtype=dtype) for spec in specs}
        self.believe: Mapping[str, tuple[str, ...]] | None = None
        self.name = "engine"

    def port(self, name: str) -> Port:
        return self

    async def begin(self, version: Version) -> None: ...

    async def end(self, version: Version) -> None: ...

    async def load(self, bucket: Sequence[tuple[TensorSpec, Any]]) -> None:
        def copy() -> None:
            for spec, tensor in bucket:
                self.held[spec.name].copy_(tensor)

        await asyncio.to_thread(copy)

    async def evidence(self, version: Version, tensors: Sequence[TensorSpec]) -> Mapping[str, tuple[str, ...]]:
        if self.believe is not None:
            return self.believe
        return await asyncio.to_thread(
            lambda: {spec.name: buckets.piece_digests(spec, self.held[spec.name]) for spec in tensors}
        )


def make_specs(mib: int, dtype: str) -> list[TensorSpec]:
    """Square matrices of 8 MiB and a few vectors, as a model has."""
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    specs = []
    for i in range(mib // 8):
        specs.append(TensorSpec(name=f"layers.{i}.weight", shape=(1024, (8 << 20) // 1024 // size), dtype=""))
    specs.append(TensorSpec(name="norm.weight", shape=(1024,), dtype=""))
    name = buckets.dtype_name(torch.empty(0, dtype=getattr(torch, dtype)))
    return [TensorSpec(name=s.name, shape=s.shape, dtype=name) for s in specs]


class Watch:
    """Peak resident memory of this process above where it stood, sampled every 2 ms. MiB."""

    def __enter__(self) -> Watch:
        self.base = self.peak = _resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, _resident())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def extra(self) -> float:
        return (self.peak - self.base) / 2**20


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Inline:
    """The link in this process, the sender on a thread of its own."""

    def __init__(self, specs: Sequence[TensorSpec], dtype: torch.dtype) -> None:
        self.engine = Port(specs, dtype)
        self.link = BucketedLink(engine=self.engine, keys=SyncKeys())
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def call(self, method: str, *args: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(getattr(self.link, method)(*args), self.loop)

    def believe(self, digests: Mapping[str, tuple[str, ...]] | None) -> None:
        self.engine.believe = digests

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)


class Process:
    """The link in a process of its own."""

    def __init__(self, specs: Sequence[TensorSpec], dtype: torch.dtype) -> None:
        self.pipe, theirs = mp.get_context("spawn").Pipe()
        self.process = mp.get_context("spawn").Process(target=_serve, args=(theirs, list(specs), dtype), daemon=True)
        self.process.start()

    def call(self, method: str, *args: Any) -> Process:
        self.pipe.send((method, args))
        return self

    def result(self) -> Any:
        found = self.pipe.recv()
        if isinstance(found, BaseException):
            raise found
        return found

    def believe(self, digests: Mapping[str, tuple[str, ...]] | None) -> None:
        self.call("believe", digests).result()

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join()


def _serve(pipe: Any, specs: Sequence[TensorSpec], dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    inline = Inline(specs, dtype)
    while (message := pipe.recv()) is not None:
        method, args = message
        try:
            if method == "believe":
                pipe.send(inline.believe(*args))
            else:
                pipe.send(inline.call(method, *args).result())
        except BaseException as error:
            pipe.send(error)


def memcpy_s(sources: Sequence[np.ndarray[Any, Any]], rounds: int) -> float:
    """The fastest of some copies of uint8 arrays to warm ones, on one thread."""
    targets = [np.zeros(len(source), np.uint8) for source in sources]
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: freed tensors leave the process, and are not counted
    dtype = getattr(torch, args.dtype)
    specs = make_specs(args.mib, args.dtype)
    total = sum(buckets.nbytes(spec) for spec in specs)
    generator = torch.Generator().manual_seed(0)
    weights = {spec.name: torch.randn(spec.shape, generator=generator).to(dtype) for spec in specs}

    gathered = False  # whether the export makes every tensor anew, as one that gathers shards does

    def export(policy: str, layout: str, meta: bool) -> Iterator[tuple[TensorSpec, Any]]:
        for spec in specs:
            yield spec, weights[spec.name].clone() if gathered else weights[spec.name]

    whole = memcpy_s([np.ones(total, np.uint8)], args.rounds + 2)
    fastest = memcpy_s([buckets.as_bytes(tensor) for tensor in weights.values()], args.rounds + 2)
    print(f"{total / 2**20:.0f} MiB of {args.dtype}, buckets of {args.bucket_mib} MiB, {os.cpu_count()} cores")
    print("one thread a side")
    print(f"{'memcpy, tensor by tensor':<28}{total / fastest / 1e9:6.2f} GB/s")
    print(f"{'memcpy, all at once':<28}{total / whole / 1e9:6.2f} GB/s")
    failed = False
    for name, other, path in (("in-process", Inline, "in_process"), ("shared memory", Process, "shared_memory")):
        side: Any = other(specs, dtype)
        sender = BucketedSender(policy="main", rank=0, export=export, deadline_s=120.0)
        transport = BucketedTransport(BucketedConfig(bucket_mib=args.bucket_mib, path=path))
        described = sender.describe()
        plan = transport.plan(specs, [described], {"engine": side.call("describe").result()})
        pending = side.call("connect", plan.links["engine"])
        sender.connect(plan.senders[0])
        pending.result()
        times: dict[str, list[float]] = {"carry alone": [], "with digests": []}
        extra = 0.0
        for round_ in range(args.rounds + 1):
            gathered = round_ == 0
            for digests in (False, True):
                version = Version(policy="main", lineage=0, number=2 * round_ + digests)
                with Watch() as watch:
                    started = time.perf_counter()
                    manifest = sender.stage(version)
                    staged = time.perf_counter()
                    assert isinstance(manifest, Manifest)
                    side.believe(None if digests else manifest.digests)
                    waiting = side.call("carry", manifest)
                    carrying = time.perf_counter()
                    sender.carry(version, lambda: False)
                    receipt = waiting.result()
                    ended = time.perf_counter()
                assert isinstance(receipt, Receipt)
                check_receipt(manifest, receipt, Evidence.LIVE)
                if round_:
                    spent = ended - carrying + (staged - started if digests else 0.0)
                    times["with digests" if digests else "carry alone"].append(spent)
                extra = max(extra, watch.extra)
        for case, found in times.items():
            ratio = fastest / min(found)
            target = TARGETS[name, case]
            failed |= ratio < target
            speed = f"{total / min(found) / 1e9:6.2f} GB/s  {ratio:5.2f} x memcpy (at least {target})"
            print(f"{name + ', ' + case:<28}{speed}, {whole / min(found):.2f} x all at once")
        bound = 2 * args.bucket_mib
        print(f"{name + ', extra memory':<28}{extra:6.0f} MiB in the trainer's process (two buckets: {bound})")
        failed |= extra > bound + 2  # what Python itself took meanwhile
        sender.close()
        side.call("close").result()
        side.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
