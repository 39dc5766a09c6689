"""The digest of what is frozen: of values and places, and the same over any cut into rows."""

from __future__ import annotations

import torch

from miles_backend_fsdp.frozen import digest


def test_it_tells_values_names_and_places_apart() -> None:
    a = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    whole = digest([("a", a, 0)], 1)
    assert len(whole) == 16 and digest([], 1) == ""
    assert digest([("a", a[:3], 0)], 1) != whole
    assert digest([("b", a, 0)], 1) != whole
    assert digest([("a", a[[1, 0, 2, 3]], 0)], 1) != whole
    negative = a.clone()
    negative[0, 0] = -0.0
    assert digest([("a", negative, 0)], 1) != whole


def test_rows_add_up_over_any_cut() -> None:
    a, b = torch.randn(5, 2), torch.randn(7)
    whole = int(digest([("a", a, 0), ("b", b, 0)], 1), 16)
    parts = [[("a", a[:2], 0), ("b", b[:4], 0)], [("a", a[2:], 2), ("b", b[4:], 4)]]
    assert sum(int(digest(part, 1), 16) for part in parts) % 2**64 == whole
