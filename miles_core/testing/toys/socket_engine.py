"""Toy engine behind a TCP port on 127.0.0.1: a server, and a client that keeps the whole `Engine` contract.

The controller's client owns the server (in this process, or with `own_process` in one of its own that may be killed);
clients of sampler processes are given its `address`. Frames as in `wire.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from miles_core import errors
from miles_core.contracts.engine import Completion, Health, PauseMode, Request
from miles_core.contracts.weights import Piece, Tensor, TensorSpec
from miles_core.errors import CapabilityError, EngineError, MilesError
from miles_core.records import Finish, Ref, Sampling, Span, Version
from miles_core.testing.toys import wire
from miles_core.testing.toys.engine import ToyEngine
from miles_core.testing.toys.table import Array

PORTS = ("checkpoint", "tensors")


# --- records as JSON -------------------------------------------------------------------------------------------------


def version_json(version: Version) -> list[Any]:
    return [version.policy, version.lineage, version.number]


def version_from(data: Sequence[Any]) -> Version:
    return Version(policy=data[0], lineage=data[1], number=data[2])


def spec_json(spec: TensorSpec) -> dict[str, Any]:
    return asdict(spec)


def spec_from(data: Mapping[str, Any]) -> TensorSpec:
    pieces = tuple(Piece(offsets=tuple(p["offsets"]), shape=tuple(p["shape"])) for p in data["pieces"])
    return TensorSpec(name=data["name"], shape=tuple(data["shape"]), dtype=data["dtype"], pieces=pieces)


def _arrays(columns: Mapping[str, Array | Ref]) -> dict[str, Array]:
    references = sorted(name for name, value in columns.items() if isinstance(value, Ref))
    if references:
        raise CapabilityError(f"{references[0]!r} is a reference; the toy socket sends arrays", fix="resolve it first")
    return {name: np.asarray(value) for name, value in columns.items()}


def request_frame(request: Request) -> tuple[dict[str, Any], dict[str, Array]]:
    """A request as header and arrays."""
    header = {
        "id": request.id,
        "policy": request.policy,
        "sampling": asdict(request.sampling),
        "seed": request.seed,
        "want": sorted(request.want),
        "deadline_s": request.deadline_s,
        "session": request.session,
    }
    arrays = {f"prompt.{name}": value for name, value in _arrays(request.prompt).items()}
    if request.resume is not None:
        arrays["resume"] = np.asarray(request.resume)
    return header, arrays


def request_from(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> Request:
    sampling = header["sampling"] | {"stop": tuple(header["sampling"]["stop"])}
    return Request(
        id=header["id"],
        policy=header["policy"],
        prompt={name.removeprefix("prompt."): a for name, a in arrays.items() if name.startswith("prompt.")},
        sampling=Sampling(**sampling),
        seed=header["seed"],
        resume=arrays.get("resume"),
        want=frozenset(header["want"]),
        deadline_s=header["deadline_s"],
        session=header["session"],
    )


def completion_frame(done: Completion) -> tuple[dict[str, Any], dict[str, Array]]:
    header = {
        "request": done.request,
        "spans": [[s.start, s.end, version_json(s.version)] for s in done.spans],
        "finish": done.finish.value,
        "info": dict(done.info),
    }
    return header, _arrays(done.columns)


def completion_from(header: Mapping[str, Any], arrays: Mapping[str, Array], engine: str) -> Completion:
    return Completion(
        request=header["request"],
        columns=dict(arrays),
        spans=tuple(Span(start=a, end=b, version=version_from(v)) for a, b, v in header["spans"]),
        finish=Finish(header["finish"]),
        engine=engine,
        info=header["info"],
    )


def error_json(error: BaseException) -> dict[str, str]:
    if isinstance(error, MilesError):
        return {"class": type(error).__name__, "message": error.message, "fix": error.fix}
    return {"class": "EngineError", "message": f"the engine failed: {error!r}", "fix": "see the engine's log"}


def error_from(data: Mapping[str, str]) -> MilesError:
    cls = getattr(errors, data["class"], EngineError)
    known = isinstance(cls, type) and issubclass(cls, MilesError)
    return (cls if known else EngineError)(data["message"], fix=data["fix"])


# --- server ----------------------------------------------------------------------------------------------------------


class EngineServer:
    """Serves one engine; every call of every connection runs concurrently."""

    def __init__(self, engine: ToyEngine) -> None:
        self.engine = engine
        self._server: asyncio.Server | None = None
        self._ports: dict[tuple[int, str], Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int) -> int:
        """Listen; returns the port."""
        await self.engine.start()
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        await self.engine.close()
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine: set[asyncio.Task[None]] = set()
        me = asyncio.current_task()
        assert me is not None
        self._tasks.add(me)
        try:
            while True:
                header, arrays = await wire.receive(reader)
                task = asyncio.create_task(self._answer(header, arrays, writer))
                mine.add(task)
                task.add_done_callback(mine.discard)
        except (EOFError, errors.WeightError, asyncio.CancelledError):
            pass  # a client that goes away takes its requests with it
        finally:
            for task in mine:
                task.cancel()
            writer.close()
            self._tasks.discard(me)

    async def _answer(self, header: dict[str, Any], arrays: dict[str, Array], writer: asyncio.StreamWriter) -> None:
        try:
            answer, out = await self._do(header["op"], header, arrays)
        except Exception as error:
            answer, out = {"error": error_json(error)}, {}
        with contextlib.suppress(ConnectionError):
            writer.write(wire.encode({"call": header["call"], **answer}, out))
            await writer.drain()

    async def _do(
        self, op: str, header: dict[str, Any], arrays: dict[str, Array]
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        engine = self.engine
        if op == "generate":
            return completion_frame(await engine.generate(request_from(header["request"], arrays)))
        if op == "abort":
            await engine.abort(header["ids"])
        elif op == "pause":
            await engine.pause(header["mode"])
        elif op == "resume":
            await engine.resume()
        elif op == "health":
            return asdict(await engine.health()), {}
        elif op == "port":
            return await self._port(header, arrays)
        else:
            raise EngineError(f"unknown operation {op!r}", fix="use the same version on both sides")
        return {}, {}

    async def _port(self, header: dict[str, Any], arrays: dict[str, Array]) -> tuple[dict[str, Any], dict[str, Array]]:
        key = (header["handle"], header["port"])
        if key not in self._ports:
            self._ports[key] = self.engine.port(header["port"])
        port, method = self._ports[key], header["method"]
        specs = [spec_from(s) for s in header.get("specs", ())]
        if method == "begin":
            await port.begin(version_from(header["version"]))
        elif method == "end":
            await port.end(version_from(header["version"]))
        elif method == "evidence":
            return {"digests": await port.evidence(version_from(header["version"]), specs)}, {}
        elif header["port"] == "tensors":
            await port.load([(spec, arrays[f"{i}"]) for i, spec in enumerate(specs)])
        else:
            await port.load(header["path"], specs)
        return {}, {}


# --- client ----------------------------------------------------------------------------------------------------------


class SocketEngine:
    """`server` is the server that this client owns in its process, `command` starts one in a process of its own."""

    _handles = itertools.count()

    def __init__(
        self,
        name: str,
        *,
        address: str = "",
        port: int = 0,
        server: EngineServer | None = None,
        command: Sequence[str] = (),
        connect_s: float = 10.0,
    ) -> None:
        self.name = name
        self.address = address  # host:port; known once a server that this client owns has started
        self._port = port
        self._server = server
        self._command = tuple(command)
        self._connect_s = connect_s
        self.process: subprocess.Popen[str] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._lost = "not started"

    async def start(self) -> None:
        if self._writer is not None:
            return
        if self._server is not None:
            self._port = await self._server.start(self._port)
        elif self._command:
            self._port = await asyncio.to_thread(self._spawn)
        if self._port:
            self.address = f"127.0.0.1:{self._port}"
        reader, self._writer = await self._connect()
        self._lost = ""
        self._reading = asyncio.create_task(self._read(reader))

    def _spawn(self) -> int:
        self.process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EngineError(f"engine {self.name!r}: its server ended at once", fix="see its messages above")
        return int(json.loads(line)["port"])

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        deadline = asyncio.get_running_loop().time() + self._connect_s
        while True:
            try:
                host, _, port = self.address.rpartition(":")
                return await asyncio.open_connection(host, int(port))
            except (OSError, ValueError) as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise EngineError(
                        f"engine {self.name!r} was not reached within {self._connect_s:g} s: {error!r}",
                        fix="start the engine in the controller first, or raise connect_s",
                    ) from error
                await asyncio.sleep(0.02)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                header, arrays = await wire.receive(reader)
                future = self._calls.pop(header["call"], None)
                if future is None or future.done():
                    continue
                if "error" in header:
                    future.set_exception(error_from(header["error"]))
                else:
                    future.set_result((header, arrays))
        except (EOFError, errors.WeightError, asyncio.CancelledError) as error:
            self._lost = self._lost or f"connection lost: {error!r}"
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(self._dead())
            self._calls.clear()

    def _dead(self) -> EngineError:
        return EngineError(f"engine {self.name!r}: {self._lost}", fix="start it again; it serves after a new transfer")

    async def call(self, op: str, arrays: Mapping[str, Array] | None = None, **fields: Any) -> Any:
        """One operation on the server: (header, arrays) of its answer."""
        if self._writer is None or self._lost:
            raise self._dead()
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            self._writer.write(wire.encode({"call": number, "op": op, **fields}, arrays))
            await self._writer.drain()
            return await future
        except ConnectionError as error:
            self._lost = self._lost or f"connection lost: {error!r}"
            raise self._dead() from error
        finally:
            self._calls.pop(number, None)

    async def generate(self, request: Request) -> Completion:
        header, arrays = request_frame(request)
        answer, columns = await self.call("generate", arrays, request=header)
        return completion_from(answer, columns, self.name)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await self.call("abort", ids=None if request_ids is None else list(request_ids))

    async def pause(self, mode: PauseMode) -> None:
        await self.call("pause", mode=mode)

    async def resume(self) -> None:
        await self.call("resume")

    async def health(self) -> Health:
        if self._lost:
            return Health(ok=False, detail=self._lost)
        try:
            answer, _ = await self.call("health")
        except EngineError as error:
            return Health(ok=False, detail=error.message)
        return Health(**{k: v for k, v in answer.items() if k != "call"})

    def port(self, name: str) -> SocketPort:
        if name not in PORTS:
            raise CapabilityError(
                f"engine {self.name!r} has no weight port {name!r}; it has {list(PORTS)}",
                fix="choose a transport that speaks one of them",
            )
        return SocketPort(self, name, next(self._handles))

    async def close(self) -> None:
        self._lost = self._lost or "closed"
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        if self._server is not None:
            await self._server.close()
        if self.process is not None:
            self.process.terminate()
            await asyncio.to_thread(self.process.wait)
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()


class SocketPort:
    """Ports `tensors` and `checkpoint` of the engine on the other side."""

    def __init__(self, client: SocketEngine, name: str, handle: int) -> None:
        self._client = client
        self._name = name
        self._handle = handle + (os.getpid() << 24)

    async def _call(self, method: str, arrays: Mapping[str, Array] | None = None, **fields: Any) -> Any:
        return await self._client.call("port", arrays, port=self._name, handle=self._handle, method=method, **fields)

    async def begin(self, version: Version) -> None:
        await self._call("begin", version=version_json(version))

    async def end(self, version: Version) -> None:
        await self._call("end", version=version_json(version))

    async def load(self, what: Any, specs: Sequence[TensorSpec] = ()) -> None:
        if self._name == "checkpoint":
            await self._call("load", path=str(what), specs=[spec_json(s) for s in specs])
            return
        bucket: Sequence[tuple[TensorSpec, Tensor]] = what
        arrays = {str(i): np.asarray(tensor) for i, (_, tensor) in enumerate(bucket)}
        await self._call("load", arrays, specs=[spec_json(s) for s, _ in bucket])

    async def evidence(self, version: Version, tensors: Sequence[TensorSpec]) -> Mapping[str, tuple[str, ...]]:
        answer, _ = await self._call("evidence", version=version_json(version), specs=[spec_json(s) for s in tensors])
        return {name: tuple(digests) for name, digests in answer["digests"].items()}


def serve_command(name: str, step_s: float, slots: int, stop_ids: Sequence[int]) -> list[str]:
    """The command line of a server in a process of its own."""
    options = json.dumps({"name": name, "step_s": step_s, "slots": slots, "stop_ids": list(stop_ids)})
    return [sys.executable, "-m", "miles_core.testing.toys.serve", options]
