"""Filter `dynamic_sampling`: only groups that have something to say are trained on (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

from miles_core.numerics.host import all_equal
from miles_core.records import Group


def dynamic_sampling(group: Group) -> str | None:
    """Rejects a group whose rewards are all equal, on `Episode.reward`: penalties are not seen. Its slot is sampled
    again. Episodes without a reward do not count; a group of one reward, or of none, is all equal."""
    rewards = [e.reward for e in group.episodes if e.reward is not None]
    return "all rewards are equal" if all_equal(rewards) else None
