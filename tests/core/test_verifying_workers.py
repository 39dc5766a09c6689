"""Killable children: what they answer, what becomes of those that hang, die or refuse, and what is left of them."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_core.errors import ConfigError, EngineError
from miles_core.verifying.workers import Pool, WorkerLostError

CHILD = """
import json, os, sys, time
from miles_core.verifying.sandbox import Refused, serve

class Judge:
    def echo(self, **given):
        return {**given, "pid": os.getpid(), "parent": os.getppid()}
    def sleep(self, s):
        time.sleep(s)
        return {}
    def spin(self):
        while True:
            pass
    def leave(self, code):
        os._exit(code)
    def fail(self):
        raise KeyError("of  two\\nlines")
    def refuse(self):
        raise Refused("not this", "ask for another")
    def hashed(self):
        return {"hash": hash("abc"), "threads": os.environ["OMP_NUM_THREADS"]}
    def eat(self):
        return {"bytes": len(bytearray(1 << 40))}
    def write(self):
        return {"wrote": open(os.devnull, "w").name}

def start(settings):
    if settings.get("refuse"):
        raise Refused("no such thing", "name another")
    if settings.get("broken"):
        raise RuntimeError
    return Judge()

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    serve(start, given["deadline_s"], given["memory_mib"], given)
"""
SETTINGS = {"deadline_s": 60.0, "memory_mib": 1024}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("child")
    (path / "judge_of_tests.py").write_text(CHILD)
    return path


@pytest.fixture(autouse=True)
def found_by_children(folder, monkeypatch):
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{before}" if before else str(folder))


@pytest.fixture(scope="module")
def pool():
    return Pool.shared("judge_of_tests", SETTINGS, 1)


def test_a_child_is_asked_again_and_again(pool):
    first, second = (pool.ask({"op": "echo", "text": "½\n", "n": n}, 30.0) for n in (1, 2))
    assert (first["text"], first["n"], second["n"]) == ("½\n", 1, 2)
    assert first["pid"] == second["pid"] and os.getpid() not in (first["pid"], first["parent"])
    assert asyncio.run(pool.ask_async({"op": "echo", "n": 3}, 30.0))["pid"] == first["pid"]


@pytest.mark.parametrize(
    ("request_", "deadline_s", "says"),
    [
        ({"op": "spin"}, 0.1, "took longer than 0.1 s"),
        ({"op": "sleep", "s": 100}, 0.1, "took longer than 0.1 s"),
        ({"op": "leave", "code": 3}, 30.0, "ended its process (exit code 3)"),
    ],
)
def test_a_child_that_hangs_or_dies_is_replaced(pool, request_, deadline_s, says):
    before = pool.ask({"op": "echo"}, 30.0)
    with pytest.raises(WorkerLostError) as lost:
        pool.ask(request_, deadline_s)
    assert str(lost.value) == says
    after = pool.ask({"op": "echo"}, 30.0)
    assert after["pid"] != before["pid"] and after["parent"] == before["parent"]  # forked, not started anew
    with pytest.raises(ProcessLookupError):
        os.kill(before["pid"], 0)


def test_an_exception_costs_nothing(pool):
    before = pool.ask({"op": "echo"}, 30.0)["pid"]
    assert pool.ask({"op": "fail"}, 30.0) == {"raised": "KeyError: 'of two\\nlines'"}
    assert pool.ask({"op": "nothing_of_the_kind"}, 30.0)["raised"].startswith("AttributeError")
    assert pool.ask({"op": "eat"}, 30.0) == {"raised": "MemoryError"}
    assert pool.ask({"op": "write"}, 30.0) == {"raised": "PermissionError: open is not allowed in a verifier"}
    with pytest.raises(ConfigError, match=r"not this\nFix: ask for another"):
        pool.ask({"op": "refuse"}, 30.0)
    assert pool.ask({"op": "echo"}, 30.0)["pid"] == before


def test_children_agree_on_hashes_and_use_one_core_each(pool, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    other = Pool.shared("judge_of_tests", {**SETTINGS, "other": 1}, 1)
    assert other.ask({"op": "hashed"}, 30.0) == pool.ask({"op": "hashed"}, 30.0)
    assert pool.ask({"op": "hashed"}, 30.0)["threads"] == "1"


def test_who_forks_may_die_too(pool):
    forker = pool.ask({"op": "echo"}, 30.0)["parent"]
    os.kill(forker, 9)
    with pytest.raises(WorkerLostError):
        pool.ask({"op": "leave", "code": 1}, 30.0)
    assert pool.ask({"op": "echo"}, 30.0)["parent"] != forker


def test_what_is_refused_or_broken_at_the_start():
    with pytest.raises(ConfigError, match=r"no such thing\nFix: name another"):
        Pool.shared("judge_of_tests", {**SETTINGS, "refuse": True}, 1).ask({"op": "echo"}, 30.0)
    with pytest.raises(EngineError, match="does not start") as failed:
        Pool.shared("judge_of_tests", {**SETTINGS, "broken": True}, 1).ask({"op": "echo"}, 30.0)
    assert "-m judge_of_tests" in failed.value.fix
    with pytest.raises(EngineError, match="cannot be started"):
        Pool(("/no/such/python",), 1).ask({"op": "echo"}, 30.0)


def test_equal_settings_share_their_children(pool):
    assert Pool.shared("judge_of_tests", dict(reversed(SETTINGS.items())), 1) is pool
    assert Pool.shared("judge_of_tests", SETTINGS, 2) is not pool


def test_at_most_count_are_asked_at_once(pool):
    two = Pool.shared("judge_of_tests", {**SETTINGS, "two": True}, 2)

    async def main():
        return await asyncio.gather(*(two.ask_async({"op": "echo", "n": n}, 30.0) for n in range(20)))

    told = asyncio.run(main())
    assert [t["n"] for t in told] == list(range(20)) and len({t["pid"] for t in told}) <= 2


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at /proc")
def test_nothing_is_left_of_a_parent_that_is_killed():
    """The process that forks, and a child that hangs, end with their parent."""
    script = f"""
from miles_core.verifying.workers import Pool
pool = Pool.shared("judge_of_tests", {SETTINGS!r}, 1)
told = pool.ask({{"op": "echo"}}, 30.0)
print(told["pid"], told["parent"], flush=True)
pool.ask({{"op": "spin"}}, 600.0)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [int(word) for word in parent.stdout.readline().split()]
    parent.stdout.close()
    assert len(children) == 2 and all(Path(f"/proc/{pid}").exists() for pid in children)
    time.sleep(0.2)  # it spins now
    parent.kill()
    parent.wait()
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < end, children
        time.sleep(0.05)


def test_settings_reach_the_child_as_json(folder):
    (folder / "shows_settings.py").write_text(
        CHILD.replace("return Judge()", "judge = Judge(); judge.settings = lambda: settings; return judge")
    )
    settings = {**SETTINGS, "names": ["ä", None]}
    told = Pool.shared("shows_settings", settings, 1).ask({"op": "settings"}, 30.0)
    assert told == json.loads(json.dumps(settings))
