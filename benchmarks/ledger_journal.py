"""What the accounting costs: ledger and journal, in microseconds a trajectory, and against the bytes alone.

    python benchmarks/ledger_journal.py [--folder DIR]

Three shapes: recipe A's step (16 groups of 16, 6 new tokens), the ragged one (8 of 8, up to 128), and a long one
(8 of 8, 8192 tokens). For each: lease, finish (journalled whole), claim, trained; then the same arrays written to a
file as raw bytes, which is the least that any journal could do. Processor time (user and system) of one thread, so
that other processes do not disturb it. Target: at most 100 µs a trajectory for the first two.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from miles_core.config.schema import ScheduleConfig
from miles_core.files import Files
from miles_core.journal import Journal, read
from miles_core.ledger import Ledger
from miles_core.records import Episode, Group, Sampling, Span, Task, Trajectory, Version

VERSION = Version(policy="main", lineage=0, number=0)
SAMPLING = Sampling(max_new_tokens=128)


def make_group(rng: np.random.Generator, slot: int, size: int, prompt: int, new: tuple[int, int]) -> Group:
    task = Task(id=f"arithmetic:train:{slot}", prompt="31415>", answer="11345", metadata={"digits": 5})
    name = f"{task.id}#0"
    episodes = []
    for member in range(size):
        sampled = int(rng.integers(new[0], new[1] + 1))
        n = prompt + sampled
        columns = {
            "tokens": rng.integers(0, 45, n).astype(np.int32),
            "origin": np.repeat(np.array([0, 1], np.uint8), [prompt, sampled]),
            "trainable": np.repeat([False, True], [prompt, sampled]),
            "behaviour_logprobs": rng.normal(size=n).astype(np.float32),
        }
        spans = (Span(start=prompt, end=n, version=VERSION),)
        leaf = Trajectory(
            id=f"{name}/{member}/0", length=n, columns=columns, spans=spans, sampling=SAMPLING, engine="local"
        )
        info = {"answer": "11345"}
        episodes.append(
            Episode(id=f"{name}/{member}", member=member, trajectories=(leaf,), reward=float(member % 2), info=info)
        )
    return Group(id=name, policy="main", slot=slot, attempt=0, task=task, episodes=tuple(episodes))


def measure(folder: Path, title: str, groups: int, size: int, prompt: int, new: tuple[int, int], steps: int) -> None:
    rng = np.random.default_rng(0)
    schedule = ScheduleConfig(groups_per_step=groups, group_size=size)
    batches = [[make_group(rng, s * groups + g, size, prompt, new) for g in range(groups)] for s in range(steps)]
    count = groups * size * steps
    arrays = [a for b in batches for g in b for e in g.episodes for t in e.trajectories for a in t.columns.values()]
    nbytes = sum(a.nbytes for a in arrays)
    whole, raw, restored = [], [], []
    for repeat in range(5):
        place = folder / f"{title.replace(' ', '-')}-{repeat}"
        began = time.process_time()
        journal = Journal(place)
        ledger = Ledger(journal, {"main": schedule})
        for step, batch in enumerate(batches):
            ledger.publish(Version(policy="main", lineage=0, number=step), {}, True)
            leases = []
            for group in batch:
                slot = ledger.next_slot("main")
                position = ledger.next_position("main", slot)
                leases.append(
                    ledger.lease("main", slot=slot, position=position, env="arithmetic", task=group.task, attempt=0)
                )
            for lease, group in zip(leases, batch, strict=True):
                ledger.finish(lease, group)
            ledger.claim("main", leases)
            ledger.trained("main", step, leases, step)
        whole.append(time.process_time() - began)
        journal.close()
        began = time.process_time()
        kept = sum(frame.kind == "group" for frame in read(place))
        restored.append(time.process_time() - began)
        assert kept == groups * steps
        files = Files()
        began = time.process_time()
        fd = files.create(folder / f"{title.replace(' ', '-')}-{repeat}.raw")
        for a in arrays:
            files.write(fd, [a.tobytes()])
        raw.append(time.process_time() - began)
        files.close(fd)
    a, b, c = min(whole), min(raw), min(restored)
    print(
        f"{title:28s} {count:6d} trajectories {nbytes / 1e6:8.1f} MB   "
        f"{1e6 * a / count:7.1f} µs a trajectory   {a / b:5.2f} x raw writes   "
        f"read and verified {1e6 * c / count:6.1f} µs a trajectory"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder by default")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory(dir=folder) as place:
        print("one thread; the best of five; raw writes: one write a column, no headers, no checksums")
        measure(Path(place), "recipe A (16 x 16, 6 new)", 16, 16, 6, (6, 6), 20)
        measure(Path(place), "ragged (8 x 8, to 128)", 8, 8, 16, (1, 128), 40)
        measure(Path(place), "long (8 x 8, 8192)", 8, 8, 512, (8192, 8192), 4)


if __name__ == "__main__":
    main()
