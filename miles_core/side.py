"""One policy while the loop runs."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence

from miles_core.collaborators import PolicySetup
from miles_core.errors import NEW_RUN, StarvedError
from miles_core.ledger import Ledger, Open
from miles_core.records import Version

#: What tells one failed episode from another; their reasons are counted without it.
IDS = re.compile(r"((task .*?), episode .*?): |, (?:trajectories|answer) .*|(?<=request|episode) '[^']*'")


class Side:
    """One policy while the loop runs."""

    def __init__(self, setup: PolicySetup, ledger: Ledger) -> None:
        self.setup = setup
        self.name = setup.name
        self.schedule = setup.schedule
        self.book = ledger.books[setup.name]
        self.demonstrations = setup.sampling is None
        self.tasks: dict[str, asyncio.Future[None]] = {}
        self.retries: Counter[int] = Counter()
        self.training = False
        self.changed = False
        self.published: set[Version] = set()  # also what is being published: engines sample with it before all have it
        self.served = -1  # version number that engines serve
        self.dropped = self.ended = self.failed = 0  # leases, leases, episodes since the last step

    def next_step(self) -> int:
        """The earliest step that a group which waits now can be part of."""
        return self.book.consumed + self.training

    def choose(self, waiting: Sequence[Open], step: int) -> list[Open] | None:
        """The batch of `step` in slot order, or `None` while it is not complete.

        `slot`: exactly its own slots. `ready`: first finished, those that can wait least first.
        """
        groups = self.schedule.groups_per_step
        if self.schedule.order == "slot":
            own = [entry for entry in waiting if entry.lease.slot // groups == step]
        else:
            own = sorted(waiting, key=lambda entry: entry.versions[0] if entry.versions else step)[:groups]
        return sorted(own, key=lambda entry: entry.lease.slot) if len(own) == groups else None

    def check_starved(self, slot: int, reasons: Counter[str]) -> None:
        reasons = Counter({why: n for why, n in reasons.items() if why != "stale" or self.retries[slot]})
        if reasons.total() < self.schedule.max_leases_per_slot:
            return
        plain, examples = Counter[str](), dict[str, str]()
        for why, n in reasons.items():
            short, example = IDS.sub("", why), ""
            if (episode := IDS.search(why)) and episode[2]:
                short, example = short.replace(episode[2], "its task"), f" (e.g. {episode[1]})"
            plain[short] += n
            examples.setdefault(short, example)
        told = "; ".join(f"{n} x {why}{examples[why]}" for why, n in plain.most_common(5))
        fix = f"raise schedule.max_leases_per_slot, or loosen what rejects them or give other tasks {NEW_RUN}"
        if all(examples.values()):
            fix = "mend the reward or environment, which failed every time (events.jsonl has each failed episode)"
            if re.search("passed its deadline|TimeoutError", told):
                fix += "; if it is only slow, raise the deadline that passed (schedule.episode_deadline_s, or its own)"
        raise StarvedError(
            f"slot {slot} of policy {self.name!r} used {reasons.total()} leases and none could be trained: {told}",
            fix=fix,
        )
