"""The environment against the kit: held-out share, and files in their order."""

from typing import ClassVar

from miles_env_jsonl.conformance import JsonlConformance


class TestFraction(JsonlConformance):
    pass


class TestSlices(JsonlConformance):
    options: ClassVar = {
        "path": JsonlConformance.options["path"] + "@[:8]",
        "eval_path": JsonlConformance.options["path"] + "@[8:]",
        "shuffle": False,
    }
