"""Fixtures; the shared helpers are in `local_engine_kit.py`, which this file makes importable."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from local_engine_kit import ARCHITECTURES


@pytest.fixture(params=sorted(ARCHITECTURES))
def architecture(request: Any) -> dict[str, Any]:
    return ARCHITECTURES[request.param]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
