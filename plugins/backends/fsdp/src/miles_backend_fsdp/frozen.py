"""A digest of what is frozen in a trained module: no checkpoint holds it, so a resume must find the same again.

The sum, modulo 2^64, of a hash of every row (along dimension 0, which is what sharding cuts): ranks add up what they
hold, and any number of them finds the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

_WRAP = 1 << 64


def digest(shards: Iterable[tuple[str, Tensor, int]], ranks: int) -> str:
    """16 hex digits over (name, this rank's rows, number of the first one); collective where there are several ranks.

    Empty where there are no shards.
    """
    total, count = 0, 0
    device = torch.device("cpu")
    for name, rows, first in shards:
        count, device = count + 1, rows.device
        seed = xxhash.xxh3_64_intdigest(name.encode())
        flat = rows.detach().cpu().contiguous().reshape(rows.shape[0] if rows.dim() else 1, -1)
        for number, row in enumerate(flat.view(torch.uint8).numpy(), start=first):
            total = (total + xxhash.xxh3_64_intdigest(row, (seed + number) % _WRAP)) % _WRAP
    if not count:
        return ""
    if ranks > 1:
        signed = torch.tensor(total - _WRAP if total >= _WRAP // 2 else total, dtype=torch.int64, device=device)
        dist.all_reduce(signed)
        total = int(signed) % _WRAP
    return f"{total:016x}"
