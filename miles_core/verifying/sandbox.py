"""Child side of `workers.py`: serve requests, give up nothing to what is judged, end on time.

Verifiers may run what a model wrote (some call `eval`). So a first process loads what they need and judges nothing; it
forks the children that do, which makes a new one cheap, and each of them first shuts itself in: no sockets, no new
processes, no writing to files (a seccomp filter on Linux, an audit hook everywhere), little memory, an alarm for each
request. Files may still be read.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

#: Events of `sys.addaudithook` that nothing which is judged needs.
_FORBIDDEN = frozenset(
    (
        *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen"),
        *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod"),
        *("os.kill", "pty.spawn", "socket.__new__", "socket.connect", "socket.bind", "shutil.rmtree", "ctypes.dlopen"),
    )
)
_WRITES = 0o3 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
_ALLOW = 0x7FFF0000  # SECCOMP_RET: allow
_DENY = 0x00050001  # EPERM
_NO_SUCH = 0x00050026  # ENOSYS
#: Machine -> (AUDIT_ARCH, number of open or -1, of openat, of clone, of clone3, calls that are refused).
_CALLS: dict[str, tuple[int, int, int, int, int, tuple[int, ...]]] = {
    # socket connect bind fork vfork execve kill truncate; rename mkdir rmdir creat link unlink symlink chmod chown;
    # ptrace tkill mkdirat unlinkat renameat linkat symlinkat fchmodat process_vm_writev renameat2 execveat
    # io_uring_setup openat2
    "x86_64": (
        *(0xC000003E, 2, 257, 56, 435),
        (
            *(41, 42, 49, 57, 58, 59, 62, 76, 82, 83, 84, 85, 86, 87, 88, 90, 92),
            *(101, 200, 258, 263, 264, 265, 266, 268, 311, 316, 322, 425, 437),
        ),
    ),
    # the same, as far as they exist there
    "aarch64": (
        *(0xC00000B7, -1, 56, 220, 435),
        (34, 35, 36, 37, 38, 45, 53, 117, 129, 130, 198, 200, 203, 221, 271, 276, 281, 425, 437),
    ),
}


class Refused(Exception):
    """What the run file asks for cannot be had: (message, fix)."""


def serve(start: Callable[[dict[str, Any]], Any], deadline_s: float, memory_mib: int, settings: dict[str, Any]) -> None:
    """Fork children until the socket at standard input closes. `start(settings)` builds the object whose methods are
    asked for, by `op`, with the rest of the request as keywords."""
    control = socket.socket(fileno=0)
    try:
        target = start(settings)
    except Refused as refused:
        return control.sendall(_line({"refused": refused.args}))
    control.sendall(_line({"ready": True}))
    alive: set[int] = set()
    while True:
        text, files, _, _ = socket.recv_fds(control, 1024, 1)
        order = json.loads(text or b"{}")
        if files:
            told = os.fork()
            if told == 0:
                control.close()
                _answer(socket.socket(fileno=files[0]), target, deadline_s, memory_mib)
            os.close(files[0])
            alive.add(told)
        elif order:
            told = _ended(order["end"])
            alive.discard(order["end"])
        else:  # the parent is gone, or wants no more
            for child in alive:
                _ended(child)
            return None
        control.sendall(_line({"told": told}))


def _ended(child: int) -> int:
    """End a child of this process; its exit code, negative for a signal that ended it before."""
    os.kill(child, signal.SIGKILL)  # no other process can have its number before it is waited for
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _answer(line: socket.socket, target: Any, deadline_s: float, memory_mib: int) -> NoReturn:
    """Answer requests until the socket closes."""
    stream = line.makefile("rwb")
    confine(memory_mib)
    for text in stream:
        request = json.loads(text)
        arm(deadline_s)
        try:
            told = getattr(target, request.pop("op"))(**request)
        except Refused as refused:
            told = {"refused": refused.args}
        except Exception as error:
            told = {"raised": said(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        stream.write(_line(told))
        stream.flush()
    os._exit(0)


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def said(error: BaseException) -> str:
    """An exception in one short line."""
    text = " ".join(str(error)[:1000].split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def arm(deadline_s: float) -> None:
    """End this process by itself once the parent has given it up; the alarm's default action stops any loop."""
    signal.setitimer(signal.ITIMER_REAL, deadline_s * 1.5 + 1)


def confine(memory_mib: int) -> bool:
    """Shut the process in, for good. Whether the kernel helps: elsewhere than on Linux the audit hook stands alone."""
    most = memory_mib << 20
    for what, limit in ((resource.RLIMIT_AS, most), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        with contextlib.suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(what, (limit, limit))
    filtered = _filter_calls()
    sys.addaudithook(_audit)
    return filtered


def _audit(event: str, args: tuple[Any, ...]) -> None:
    writes = event == "open" and len(args) > 2 and isinstance(args[2], int) and args[2] & _WRITES
    if event in _FORBIDDEN or writes:
        raise PermissionError(f"{event} is not allowed in a verifier")


def _filter_calls() -> bool:
    """Install the seccomp filter: refused calls fail with EPERM, and nothing else changes."""
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        return False
    arch, open_, openat, clone, clone3, refused = _CALLS[platform.machine()]
    load, equal, any_of, give = 0x20, 0x15, 0x45, 0x06  # BPF: ld word, jeq, jset, ret
    code = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, _DENY), (load, 0, 0, 0)]
    code += [(0x35, 0, 1, 0x40000000), (give, 0, 0, _DENY)]  # jge: the x32 calls
    for number in refused:
        code += [(equal, 0, 1, number), (give, 0, 0, _DENY)]
    code += [(equal, 0, 1, clone3), (give, 0, 0, _NO_SUCH)]  # the C library falls back to clone
    code += [(equal, 0, 4, clone), (load, 0, 0, 16), (any_of, 1, 0, 0x10000), (give, 0, 0, _DENY), (give, 0, 0, _ALLOW)]
    for number, flags in ((open_, 24), (openat, 32)):
        if number >= 0:
            code += [(equal, 0, 4, number), (load, 0, 0, flags), (any_of, 0, 1, _WRITES), (give, 0, 0, _DENY)]
            code += [(give, 0, 0, _ALLOW)]
    code.append((give, 0, 0, _ALLOW))
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    none = ctypes.c_ulong(0)
    if prctl(38, ctypes.c_ulong(1), none, none, none):  # PR_SET_NO_NEW_PRIVS
        return False
    # PR_SET_SECCOMP, mode filter
    return not prctl(22, ctypes.c_ulong(2), ctypes.c_void_p(ctypes.addressof(header)), none, none)
