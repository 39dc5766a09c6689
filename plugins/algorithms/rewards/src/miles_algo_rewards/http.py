"""Rewards from a remote service: POST JSON, get numbers, with deadlines, bounded retries and a bounded concurrency.

The request's body is `{"items": [{"id", "group", "task", "prompt", "text", "answer", "finish", "metadata"}, …]}`, the
answer's `{"rewards": [number, …]}` in the same order. Retried are what may pass: no connection, a deadline, a broken
answer, status 408, 429 and 5xx; anything else is wrong for good. Redirects are not followed. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import math
import socket
import ssl
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from miles_algo_rewards.config import HttpRewardConfig
from miles_algo_rewards.items import Item, groups_of
from miles_algo_rewards.waits import all_of, in_thread
from miles_core.errors import ConfigError, RewardError
from miles_core.seeds import generator

#: An answer that is longer is refused before it fills the memory.
MAX_BYTES = 64 << 20
#: Statuses that may pass.
PASSING = {408, 425, 429}


class AttemptError(Exception):
    """One attempt failed. `again` says whether another may help; `after_s` how long the service asks to wait."""

    def __init__(self, what: str, *, again: bool = True, after_s: float = 0.0) -> None:
        super().__init__(what)
        self.again = again
        self.after_s = after_s


class HttpRater:
    """Rates items through the service, `batch_size` a request. Waits between attempts are drawn from a named stream,
    so that many clients that failed together do not come back together."""

    def __init__(self, name: str, config: HttpRewardConfig, seed: int) -> None:
        self._name = name
        self._config = config
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"} | _bearer(config)
        self._limit = asyncio.Semaphore(config.concurrency)
        self._rng = generator(seed, "", "scorer", name, "backoff")

    async def __call__(self, items: Sequence[Item]) -> Sequence[float]:
        batches = self._batches(items)
        found = await all_of([self._batch([items[i] for i in batch]) for batch in batches])
        rewards = [0.0] * len(items)
        for batch, given in zip(batches, found, strict=True):
            for place, reward in zip(batch, given, strict=True):
                rewards[place] = reward
        return rewards

    def _batches(self, items: Sequence[Item]) -> list[list[int]]:
        size = self._config.batch_size
        if not self._config.whole_groups:
            places = range(len(items))
            return [list(places[i : i + size]) for i in range(0, len(items), size)]
        batches: list[list[int]] = []
        for members in groups_of(items).values():
            if batches and len(batches[-1]) + len(members) <= size:
                batches[-1] += members
            else:
                batches.append(list(members))
        return batches

    async def _batch(self, items: Sequence[Item]) -> list[float]:
        body = json.dumps({"items": [item.plain() for item in items]}, allow_nan=False).encode()
        async with self._limit:
            for attempt in range(self._config.retries + 1):
                try:
                    return self._rewards(await self._post(body), len(items))
                except AttemptError as error:
                    if not error.again or attempt == self._config.retries:
                        raise self._gave_up(items, attempt + 1, error) from error
                    await asyncio.sleep(self._wait(attempt, error.after_s))
        raise AssertionError("a range of at least one attempt ends in a return or a raise")

    def _wait(self, attempt: int, asked_s: float) -> float:
        """backoff_s doubled each time, times a draw from [.5, 1); at least what the service asks for, within bounds."""
        most = self._config.backoff_max_s
        doubled = min(self._config.backoff_s * 2.0**attempt, most) * (0.5 + 0.5 * float(self._rng.random()))
        return max(doubled, min(asked_s, most))

    def _gave_up(self, items: Sequence[Item], attempts: int, error: AttemptError) -> RewardError:
        times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        return RewardError(
            f"the reward service {self._config.url} did not rate {len(items)} answers, the first of them "
            f"{items[0].id!r}, in {times}: {error}",
            fix="look at the service's log; then go on with --resume",
        )

    def _rewards(self, body: bytes, count: int) -> list[float]:
        try:
            found = json.loads(body)
        except ValueError as error:
            raise AttemptError(f"its answer is no JSON ({error}); it begins {_start(body)}") from error
        rewards = found.get("rewards") if isinstance(found, dict) else None
        if not isinstance(rewards, list):
            raise AttemptError(f'its answer has no list "rewards"; it begins {_start(body)}', again=False)
        if len(rewards) != count:
            raise AttemptError(f"it gave {len(rewards)} rewards for {count} answers", again=False)
        for place, reward in enumerate(rewards):
            if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
                raise AttemptError(f"reward {place} is {reward!r}, not a finite number", again=False)
        return rewards

    async def _post(self, body: bytes) -> bytes:
        call = _Call(self._config.url, self._config.deadline_s)
        try:
            async with asyncio.timeout(self._config.deadline_s):
                status, after, answer = await in_thread(lambda: call.post(self._headers, body))
        except TimeoutError as error:
            raise AttemptError(f"nothing came back within {self._config.deadline_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise AttemptError(f"{type(error).__name__}: {error}") from error
        finally:
            call.abort()
        if status != 200:
            again = status in PASSING or status >= 500
            raise AttemptError(f"status {status}; its answer begins {_start(answer)}", again=again, after_s=after)
        return answer


class _Call:
    """One POST in a thread; `abort` ends it from outside, wherever it waits."""

    def __init__(self, url: str, deadline_s: float) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None  # config checked it
        if parts.scheme == "https":
            context = ssl.create_default_context()
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=deadline_s, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=deadline_s)
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._lock = threading.Lock()
        self._aborted = False

    def post(self, headers: dict[str, str], body: bytes) -> tuple[int, float, bytes]:
        """(status, seconds that the service asks to wait, body)."""
        try:
            self._connection.connect()
            with self._lock:
                if self._aborted:
                    raise TimeoutError("aborted")
            self._connection.request("POST", self._path, body, headers)
            answer = self._connection.getresponse()
            content = answer.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise http.client.HTTPException(f"an answer of more than {MAX_BYTES} bytes")
            return answer.status, _seconds(answer.getheader("Retry-After")), content
        finally:
            self._connection.close()

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
        found: Any = self._connection.sock
        if found is not None:
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)


def _seconds(header: str | None) -> float:
    try:
        return max(float(header), 0.0) if header else 0.0
    except ValueError:  # a date: the own backoff does
        return 0.0


def _start(body: bytes) -> str:
    """How an answer begins, on one line."""
    return repr(" ".join(body[:200].decode("utf-8", "replace").split()))


def _bearer(config: HttpRewardConfig) -> dict[str, str]:
    if not config.token_file:
        return {}
    try:
        token = Path(config.token_file).read_text().splitlines()[0].strip()
    except (OSError, IndexError) as error:
        raise ConfigError(
            f"token_file is {config.token_file!r}, and no token can be read from it: {error}",
            fix="write the token into its first line, or leave token_file empty",
        ) from error
    return {"Authorization": f"Bearer {token}"}
