"""A teacher behind a real socket on 127.0.0.1, speaking both dialects: for the conformance suite and the tests.

Its model is a table: the distribution of a token depends on the one before it. What it does wrong is said in advance,
one fault a request.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import numpy as np

#: Changes an answer before it is sent, or sends something else itself and returns `None`.
Fault = Callable[[Any, BaseHTTPRequestHandler], Any]


class Loopback:
    """`faults` are used up from the front; `requests` are the bodies so far; `most` requests were open at once."""

    def __init__(self, vocab_size: int, *, seed: int = 0, echoes_temperature: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.logits = rng.standard_normal((vocab_size, vocab_size)) * 2
        self.texts: Callable[[int], str | None] = lambda token: None
        self.echoes_temperature = echoes_temperature
        self.faults: list[Fault] = []
        self.requests: list[dict[str, Any]] = []
        self.slow_s = 0.0
        self.open = self.most = 0
        self.url = ""
        self.lock = threading.Lock()

    def logprobs(self, before: int, temperature: float = 1.0) -> np.ndarray[Any, Any]:
        """float64 [vocabulary]."""
        x = self.logits[before] / temperature
        return np.asarray(x - np.log(np.exp(x - x.max()).sum()) - x.max())

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        temperature = float(body.get("logprob_temperature", 1.0)) if self.echoes_temperature else 1.0
        echo = {"logprob_temperature": temperature} if self.echoes_temperature else {}
        if path.endswith("/generate"):
            ids, k = body["input_ids"], body.get("top_logprobs_num", 0)
            shown = self.texts if body.get("return_text_in_logprobs") else lambda token: None
            rows: list[Any] = [[None, ids[0], shown(ids[0])]]
            tops: list[Any] = [None]
            for before, token in pairwise(ids):
                p = self.logprobs(before, temperature)
                rows.append([float(p[token]), token, shown(token)])
                tops.append([[float(p[i]), int(i), None] for i in np.argsort(-p)[:k]])
            info = {"input_token_logprobs": rows, "prompt_tokens": len(ids), **echo}
            return {"text": "", "meta_info": info | ({"input_top_logprobs": tops} if k else {})}
        ids, k = body["prompt"], body["prompt_logprobs"]
        entries: list[Any] = [None]
        for before, token in pairwise(ids):
            p = self.logprobs(before, temperature)
            order = np.argsort(-p)
            rank = {int(i): place + 1 for place, i in enumerate(order)}
            listed = dict.fromkeys([token, *map(int, order[:k])])
            entries.append(
                {str(i): {"logprob": float(p[i]), "rank": rank[i], "decoded_token": self.texts(i)} for i in listed}
            )
        return {"choices": [{"index": 0, "text": "x", "prompt_logprobs": entries}], **echo}

    @contextmanager
    def serving(self) -> Iterator[Loopback]:
        """`url` is set inside."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join(10)


def _handler(teacher: Loopback) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with teacher.lock:
                teacher.open += 1
                teacher.most = max(teacher.most, teacher.open)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with teacher.lock:
                teacher.requests.append(body)
                fault = teacher.faults.pop(0) if teacher.faults else None
            time.sleep(teacher.slow_s)
            answer = teacher.answer(self.path, body)
            with teacher.lock:
                teacher.open -= 1  # before the answer, which lets the client ask again
            if fault is not None:
                answer = fault(answer, self)
            if answer is not None:
                send(self, 200, json.dumps(answer).encode())

        def log_message(self, format: str, *args: Any) -> None: ...

    return Handler


def send(handler: BaseHTTPRequestHandler, status: int, data: bytes, **headers: str) -> None:
    """One whole answer."""
    handler.send_response(status)
    for name, value in ({"Content-Length": str(len(data))} | headers).items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(data)


def status(code: int, text: str = "") -> Fault:
    """A fault: this status instead."""

    def fault(answer: Any, handler: BaseHTTPRequestHandler) -> None:
        send(handler, code, text.encode())

    return fault
