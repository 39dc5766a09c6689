"""What the kernel itself refuses once a process is confined, whatever Python's own hook says."""

import platform
import subprocess
import sys

import pytest

from miles_core.verifying import sandbox

PROBES = """
import os, socket, subprocess, threading
from miles_core.verifying import sandbox
assert sandbox._filter_calls()
probes = {
    "socket": socket.socket, "fork": os.fork, "exec": lambda: subprocess.run(["true"]), "kill": lambda: os.kill(1, 0),
    "write": lambda: open("new", "w"), "append": lambda: open(sandbox.__file__, "a"), "mkdir": lambda: os.mkdir("new"),
    "remove": lambda: os.remove("old"), "rename": lambda: os.rename("old", "new"), "link": lambda: os.symlink("a", "b"),
    "vfork": lambda: os.posix_spawn("/bin/true", ["true"], {}),
}
for name, probe in probes.items():
    try:
        probe()
    except PermissionError:
        continue
    print(name, "went through")
open(sandbox.__file__).read()
worker = threading.Thread(target=print, args=("a thread may start",))
worker.start()
worker.join()
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in sandbox._CALLS,
    reason="the filter is for Linux on these machines",
)
def test_the_kernel_refuses_what_a_verifier_has_no_need_of(tmp_path):
    (tmp_path / "old").touch()
    done = subprocess.run([sys.executable, "-c", PROBES], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "a thread may start\n"
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
