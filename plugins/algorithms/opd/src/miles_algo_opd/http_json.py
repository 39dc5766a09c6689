"""POST JSON, get JSON: a small HTTP/1.1 client on asyncio, so that a deadline really ends a request.

One connection a request, standard library only. No redirects, no proxies, no cookies.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

#: Longest answer that is read.
LIMIT_BYTES = 1 << 30
#: Answers of a service that may do better later.
BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})


class Failed(Exception):
    """One attempt. `again` says whether another one could fare better."""

    def __init__(self, reason: str, *, again: bool) -> None:
        super().__init__(reason)
        self.again = again


async def post(url: str, body: Mapping[str, Any], deadline_s: float) -> Any:
    """The parsed JSON of a 200 answer. Raises `Failed`."""
    try:
        async with asyncio.timeout(deadline_s):
            status, data = await _exchange(url, json.dumps(body).encode())
    except TimeoutError:
        raise Failed(f"no answer within {deadline_s:g} s", again=True) from None
    except (OSError, EOFError, asyncio.LimitOverrunError, ValueError) as error:
        raise Failed(f"{type(error).__name__}: {error}", again=True) from error
    if status != 200:
        text = " ".join(data[:400].decode("utf-8", "replace").split())
        raise Failed(f"HTTP {status}: {text or 'nothing more'}", again=status in BUSY)
    try:
        return json.loads(data)
    except ValueError as error:
        raise Failed(f"the answer is no JSON: {error}", again=False) from error


async def _exchange(url: str, body: bytes) -> tuple[int, bytes]:
    parts = urlsplit(url)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    host, port = parts.hostname or "", parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(host, port, ssl=secure)
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nAccept: application/json\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode("ascii") + body)
        await writer.drain()
        words = (await reader.readline()).split()
        if len(words) < 2:
            raise EOFError("the service closed the connection without an answer")
        return int(words[1]), await _body(reader, await _headers(reader))
    finally:
        writer.close()


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    found: dict[str, str] = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        found[name.strip().lower()] = value.strip()
    return found


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        parts = []
        size = total = int((await reader.readline()).split(b";")[0], 16)
        while size:
            parts.append(await reader.readexactly(_bounded(size, total)))
            await reader.readline()
            size = int((await reader.readline()).split(b";")[0], 16)
            total += size
        return b"".join(parts)
    if "content-length" in headers:
        length = int(headers["content-length"])
        return await reader.readexactly(_bounded(length, length))
    return await reader.read(LIMIT_BYTES)


def _bounded(size: int, total: int) -> int:
    if total > LIMIT_BYTES or size < 0:
        raise ValueError(f"an answer of {total} bytes; at most {LIMIT_BYTES} are read")
    return size
