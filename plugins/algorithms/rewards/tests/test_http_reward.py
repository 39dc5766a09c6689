"""`http-reward` against a service on 127.0.0.1 that misbehaves in every way a service can."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from miles_algo_rewards.config import HttpRewardConfig
from miles_algo_rewards.http import HttpRater
from miles_algo_rewards.items import Item

from miles_core.errors import ConfigError, RewardError


def items(n, group="g"):
    return [Item(id=f"{group}/{i}/0", group=group, text="x" * i, finish="stop", prompt="?") for i in range(n)]


def answer(texts):
    return json.dumps({"rewards": [float(len(t)) for t in texts]}).encode()


@contextmanager
def service(*replies):
    """`replies`: what each request gets, the last one from then on: bytes, (status, body[, headers]), or a function of
    the handler and the texts. Yields (url, asked): the bodies that came, with their headers."""
    asked = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                asked.append((body, dict(self.headers)))
                reply = replies[min(len(asked), len(replies)) - 1]
            texts = [item["text"] for item in body["items"]]
            if callable(reply):
                reply = reply(self, texts)
            if reply is None:
                return
            status, content, headers = (*reply, {})[:3] if isinstance(reply, tuple) else (200, reply, {})
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.handle_error = True, lambda *arguments: None
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/rate?v=1", asked
    finally:
        server.shutdown()
        server.server_close()


def right(handler, texts):
    return answer(texts)


def rater(url, **options):
    given = {"deadline_s": 20.0, "backoff_s": 0.001, "retries": 2} | options
    return HttpRater("judge", HttpRewardConfig(url=url, **given), seed=7)


def rate(made, asked_for):
    async def work():
        return list(await made(asked_for))

    return asyncio.run(work())


def test_answers_are_rated_in_batches_in_their_order():
    with service(right) as (url, asked):
        assert rate(rater(url, batch_size=4), items(10)) == [float(i) for i in range(10)]
    assert sorted(len(body["items"]) for body, _ in asked) == [2, 4, 4]
    assert asked[0][0]["items"][0].keys() == {"id", "group", "task", "prompt", "text", "answer", "finish", "metadata"}
    assert "Authorization" not in asked[0][1]


def test_whole_groups_stay_together():
    answers = [*items(3, "a"), *items(2, "b"), *items(6, "c"), *items(1, "d")]
    mixed = answers[::2] + answers[1::2]
    with service(right) as (url, asked):
        assert rate(rater(url, batch_size=5, whole_groups=True), mixed) == [float(len(i.text)) for i in mixed]
    groups = sorted(sorted({i["group"] for i in body["items"]}) for body, _ in asked)
    assert groups == [["a", "b"], ["c"], ["d"]]


def test_no_more_requests_at_once_than_allowed():
    now, most, lock = [0], [0], threading.Lock()

    def busy(handler, texts):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.1)
        with lock:
            now[0] -= 1
        return answer(texts)

    with service(busy) as (url, _):
        rate(rater(url, batch_size=1, concurrency=3), items(12))
    assert most[0] == 3


def hang(handler, texts):
    time.sleep(20.0)


def trickle(handler, texts):
    """Bytes that keep coming, so that no single read is late."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    for _ in range(1000):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.02)


def cut_off(handler, texts):
    handler.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"rewards": [1')


def drop(handler, texts):
    handler.connection.shutdown(socket.SHUT_RDWR)


PASSING = {
    "500": ((500, b"out of\nmemory"), r"status 500; its answer begins 'out of memory'"),
    "503": ((503, b""), r"status 503"),
    "429": ((429, b"slow", {"Retry-After": "0.01"}), r"status 429"),
    "a hang": (hang, r"nothing came back within 1 s"),
    "a trickle": (trickle, r"nothing came back within 1 s"),
    "bad JSON": (b"<html>oops", r"is no JSON .* it begins '<html>oops'"),
    "a cut answer": (cut_off, r"is no JSON"),
    "a dropped connection": (drop, r"RemoteDisconnected|ConnectionReset|BadStatusLine"),
}


@pytest.mark.parametrize("name", PASSING)
def test_what_may_pass_is_tried_again(name):
    reply, _ = PASSING[name]
    late = callable(reply) and reply in (hang, trickle)
    with service(reply, right) as (url, asked):
        assert rate(rater(url, deadline_s=2.0 if late else 20.0), items(2)) == [0.0, 1.0]
    assert len(asked) == 2


@pytest.mark.parametrize("name", PASSING)
def test_what_does_not_pass_is_told(name):
    reply, message = PASSING[name]
    late = callable(reply) and reply in (hang, trickle)
    with service(reply) as (url, asked):
        with pytest.raises(RewardError, match=message) as caught:
            rate(rater(url, deadline_s=1.0 if late else 20.0, retries=1), items(2))
        assert (
            url in caught.value.message
            and "2 answers, the first of them 'g/0/0', in 2 attempts" in caught.value.message
        )
        assert caught.value.fix
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((404, b"not here"), r"status 404; its answer begins 'not here'"),
        ((302, b"", {"Location": "http://127.0.0.1:1/"}), r"status 302"),
        (b"[1.0, 2.0]", r'no list "rewards"; it begins .\[1.0, 2.0\]'),
        (b'{"rewards": 3}', r'no list "rewards"'),
        (b'{"rewards": [1.0]}', r"it gave 1 rewards for 2 answers"),
        (b'{"rewards": [1.0, NaN]}', r"reward 1 is nan, not a finite number"),
        (b'{"rewards": [1.0, null]}', r"reward 1 is None"),
        (b'{"rewards": [true, 1]}', r"reward 0 is True"),
        (b'{"rewards": ["1", 1]}', r"reward 0 is '1'"),
        (b'{"rewards": [1, 1e999]}', r"reward 1 is inf"),
    ],
)
def test_what_is_wrong_for_good_is_not_tried_again(reply, message):
    with service(reply) as (url, asked):
        with pytest.raises(RewardError, match=message) as caught:
            rate(rater(url), items(2))
        assert url in caught.value.message and "in 1 attempt:" in caught.value.message
    assert len(asked) == 1


def test_nobody_listens():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(RewardError, match="ConnectionRefusedError"):
        rate(rater(f"http://127.0.0.1:{port}/", retries=1), items(1))


def test_the_first_failure_ends_the_other_requests():
    """One batch is refused while two others hang: these are hung up on, and not waited for."""
    ended, arrived = [], threading.Semaphore(0)

    def one(handler, texts):
        if "" in texts:
            for _ in range(2):
                arrived.acquire(timeout=10.0)
            return 400, b"no"
        arrived.release()
        handler.connection.settimeout(10.0)
        try:
            ended.append(handler.connection.recv(1) == b"")  # the client hung up
        except TimeoutError:
            ended.append(False)
        return None

    with service(one) as (url, _):
        with pytest.raises(RewardError, match="status 400"):
            rate(rater(url, batch_size=1, deadline_s=60.0), items(3))
        deadline = time.monotonic() + 15.0
        while len(ended) < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
    assert ended == [True, True]


def test_waits_double_with_jitter_from_a_named_stream():
    made, again = (rater("http://127.0.0.1/", backoff_s=1.0, backoff_max_s=6.0) for _ in range(2))
    waits = [made._wait(n, 0.0) for n in range(5)]
    assert waits == [again._wait(n, 0.0) for n in range(5)]  # the same run, the same waits
    for wait, doubled in zip(waits, [1, 2, 4, 6, 6], strict=True):
        assert doubled / 2 <= wait < doubled
    other = HttpRater("critic", HttpRewardConfig(url="http://127.0.0.1/", backoff_s=1.0), seed=7)
    assert other._wait(0, 0.0) != waits[0]
    assert made._wait(0, 4.0) == 4.0 and made._wait(0, 60.0) == 6.0  # Retry-After, within bounds


def test_a_token_is_sent_and_never_in_the_config(tmp_path):
    (tmp_path / "token").write_text("s3cret\n")
    with service(right) as (url, asked):
        rate(rater(url, token_file=str(tmp_path / "token")), items(1))
    assert asked[0][1]["Authorization"] == "Bearer s3cret"
    with pytest.raises(ConfigError, match="no token can be read"):
        rater("http://127.0.0.1/", token_file=str(tmp_path / "none"))
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="no token can be read"):
        rater("http://127.0.0.1/", token_file=str(tmp_path / "empty"))


def test_no_answers_no_request():
    with service(right) as (url, asked):
        assert rate(rater(url), []) == [] and asked == []
