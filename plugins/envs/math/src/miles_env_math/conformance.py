"""What `miles conformance env:math` tests, on the sample file beside this module: a held-out share, plain prompts."""

from pathlib import Path
from typing import Any, ClassVar

from miles_core.testing import EnvironmentConformance

SAMPLE = str(Path(__file__).with_name("sample.jsonl"))


class FractionConformance(EnvironmentConformance):
    name = "math"
    options: ClassVar[dict[str, Any]] = {"path": SAMPLE, "eval_fraction": 0.25, "extract": ["boxed", "whole"]}


class PlainConformance(FractionConformance):
    options: ClassVar[dict[str, Any]] = {
        **{"path": SAMPLE, "shuffle": False, "extract": ["tag", "last_line"], "format_reward": 0.1},
        "prompt": {"form": "text", "template": "Problem: {question}"},
    }
