"""Files that exist twice on purpose, because plugins never import each other."""

from pathlib import Path

import pytest

ENVS = Path(__file__).parents[2] / "plugins" / "envs"


@pytest.mark.parametrize("name", ["workers.py", "sandbox.py"])
def test_both_environments_with_verifiers_hold_the_same(name):
    one = ENVS / "reasoning-gym" / "src" / "miles_env_reasoning_gym" / name
    other = ENVS / "math" / "src" / "miles_env_math" / name
    assert one.read_bytes() == other.read_bytes()
