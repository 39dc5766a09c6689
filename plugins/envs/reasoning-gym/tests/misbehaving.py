"""Data sets for the tests, registered as a user would (`modules: [misbehaving.py]`); their verifiers misbehave."""

import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import register_dataset


@dataclass
class Config:
    what: str = "good"
    when: str = ""  # misbehave at this answer only; always where empty
    items: int = 10**6
    width: int = 0
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        assert self.items > 0, "items must be positive"


def spin() -> None:
    while True:
        pass


def throw() -> None:
    raise RuntimeError("broken  verifier\nof two lines")


WAYS: dict[str, Callable[[], Any]] = {
    "spin": spin,
    "sleep": lambda: time.sleep(100),
    "raise": throw,
    "die": lambda: os._exit(3),
    "above": lambda: 7.0,
    "below": lambda: -0.5,
    "nan": lambda: float("nan"),
    "none": lambda: None,
    "memory": lambda: bytearray(1 << 33),
    "socket": socket.socket,
    "fork": os.fork,
    "exec": lambda: subprocess.run(["true"]),
    "write": lambda: open("written", "w"),
    "low_level_write": lambda: os.open("written", os.O_CREAT | os.O_WRONLY),
    "remove": lambda: os.remove("run.yaml"),
}


class Misbehaving(ProceduralDataset):
    def __init__(self, config: Config) -> None:
        super().__init__(config, config.seed, config.size)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        number = Random(self.seed + idx).randrange(self.config.items)
        if self.config.what == "unlucky" and number % 2:
            raise ValueError("no such item")
        if self.config.what == "clock":
            number = time.monotonic_ns()
        if self.config.what == "slow":
            spin()
        return {"question": str(number).zfill(self.config.width) + "=", "answer": str(number), "metadata": {}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        way = WAYS.get(self.config.what)
        if way is not None and self.config.when in ("", answer, entry["answer"]):
            return way()
        return float(answer == entry["answer"])


register_dataset("misbehaving", Misbehaving, Config)
