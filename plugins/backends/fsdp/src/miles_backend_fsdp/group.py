"""The process group of a run's trainer ranks: joined once a process, left when the last backend closes.

One rank needs no port and no address (a `HashStore`). Several ranks use the group that a launcher made, or meet at
`backend.rendezvous`.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from miles_core.errors import BackendError

_lock = threading.Lock()
_users = 0
_ours = False


def join(rank: int, ranks: int, rendezvous: str | None, device: str, deadline_s: float) -> DeviceMesh:
    """A mesh over all ranks. Raises `BackendError` where they cannot meet."""
    global _users, _ours
    with _lock:
        if not dist.is_initialized():
            _init(rank, ranks, rendezvous, device, timedelta(seconds=deadline_s))
            _ours = True
        if dist.get_world_size() != ranks or dist.get_rank() != rank:
            raise BackendError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} in an existing process group; "
                f"the backend is rank {rank} of {ranks}",
                fix="let the launcher make a group of exactly the trainer ranks",
            )
        _users += 1
    return init_device_mesh(device, (ranks,))


def leave() -> None:
    """The opposite of `join`."""
    global _users, _ours
    with _lock:
        _users -= 1
        if _users == 0 and _ours:
            dist.destroy_process_group()
            _ours = False


def _init(rank: int, ranks: int, rendezvous: str | None, device: str, timeout: timedelta) -> None:
    kind = "nccl" if device == "cuda" else "gloo"
    where: dict[str, Any]
    if ranks == 1:
        where = {"store": dist.HashStore()}  # type: ignore[attr-defined]
    elif rendezvous:
        where = {"init_method": rendezvous}
    else:
        raise BackendError(
            f"{ranks} trainer ranks have no place to meet: the launcher made no process group",
            fix="use a launcher that places trainer ranks, or set backend.rendezvous to a tcp:// or file:// address",
        )
    try:
        dist.init_process_group(kind, rank=rank, world_size=ranks, timeout=timeout, **where)
    except (RuntimeError, ValueError) as error:
        raise BackendError(
            f"rank {rank} of {ranks} could not join the {kind} group at {rendezvous or 'this process'}: {error}",
            fix="check that every rank runs and that the address is right and new to this launch",
        ) from error
