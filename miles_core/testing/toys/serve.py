"""`python -m miles_core.testing.toys.serve OPTIONS`: a toy engine server that ends when its standard input closes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

from miles_core.testing.toys.engine import ToyEngine
from miles_core.testing.toys.socket_engine import EngineServer


async def main(options: dict[str, object]) -> None:
    engine = ToyEngine(str(options["name"]), step_s=float(str(options["step_s"])), slots=int(str(options["slots"])))
    stop_ids = options["stop_ids"]
    assert isinstance(stop_ids, list)
    engine.stop_on(stop_ids)
    server = EngineServer(engine)
    port = await server.start(0)
    print(json.dumps({"port": port}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent decides
    asyncio.run(main(json.loads(sys.argv[1])))
