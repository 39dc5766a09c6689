"""What `miles conformance env:reasoning-gym` tests: one data set, a mixture with a curriculum, plain prompts."""

from typing import Any, ClassVar

from miles_core.testing import EnvironmentConformance


class SingleConformance(EnvironmentConformance):
    name = "reasoning-gym"
    options: ClassVar[dict[str, Any]] = {"dataset": "letter_counting", "extract": ["tag", "whole"]}


class MixtureConformance(SingleConformance):
    options: ClassVar[dict[str, Any]] = {
        "datasets": {
            "chain_sum": {"weight": 2, "level": 1},
            "spell_backward": {"curriculum": {"every": 20, "levels": [0, 1, 2], "review": 0.2}},
            "number_sorting": {},
        },
        **{"extract": ["tag", "whole"], "format_reward": 0.1, "threshold": 0.9},
        "prompt": {"form": "text", "system": "Be brief.", "template": "Question: {question}"},
    }
