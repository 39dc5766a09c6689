"""Writes the preference pairs of recipes/dpo.yaml beside this file: `python recipes/dpo/make.py`.

A task is five digits to sort. The chosen answer is right; in the rejected one, one digit is another one, which is the
kind of mistake that the warm-up's model makes. `held-out.jsonl` has other questions, with answers only.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
PAIRS, HELD_OUT = 1536, 512


def questions(count: int) -> list[str]:
    """Different questions, the same on every machine."""
    rng = random.Random(7)
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choice("0123456789") for _ in range(5))] = None
    return list(found)


def spoiled(answer: str, rng: random.Random) -> str:
    """The answer with one digit replaced by another."""
    at = rng.randrange(len(answer))
    return answer[:at] + rng.choice([d for d in "0123456789" if d != answer[at]]) + answer[at + 1 :]


def files() -> dict[str, str]:
    """File name -> content."""
    rng = random.Random(8)
    rows: dict[str, list[dict[str, str]]] = {"pairs.jsonl": [], "held-out.jsonl": []}
    for index, question in enumerate(questions(PAIRS + HELD_OUT)):
        prompt, answer = f"{question}>", "".join(sorted(question))
        if index < PAIRS:
            rows["pairs.jsonl"].append({"prompt": prompt, "chosen": answer, "rejected": spoiled(answer, rng)})
        else:
            rows["held-out.jsonl"].append({"prompt": prompt, "answer": answer})
    return {name: "".join(json.dumps(row) + "\n" for row in found) for name, found in rows.items()}


if __name__ == "__main__":
    for name, content in files().items():
        (HERE / name).write_text(content)
