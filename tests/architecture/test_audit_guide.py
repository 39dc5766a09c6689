"""The audit guide names every file of the core, and proofs that exist; every error can be told from the others."""

import re
from collections import Counter
from pathlib import Path

from miles_core import errors

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"cli/", "testing/", "numerics/", "builtin/", "verifying/"}  # told of below the tables
GUIDE = (ROOT / "docs/explanation/audit.md").read_text()


def test_it_names_every_file_once():
    rows = [line.split("|")[1] for line in GUIDE.splitlines() if line.startswith("| `")]
    named = Counter(re.findall(r"`([^`]+)`", " ".join(rows)))
    rooms = {p.name for p in (ROOT / "miles_core").glob("*.py")} - {"__init__.py"}
    rooms |= {f"{p.parent.name}/" for p in (ROOT / "miles_core").glob("*/__init__.py")} - ELSEWHERE
    assert named == Counter(rooms)


def test_its_proofs_exist():
    named = set(re.findall(r"tests/[\w/]+\.py", GUIDE))
    assert named and not [name for name in named if not (ROOT / name).is_file()]


def test_every_error_has_a_code_of_its_own():
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.MilesError)]
    codes = Counter(kind.code for kind in kinds if "code" in vars(kind))
    assert len(codes) > 20 and set(codes.values()) == {1}
    assert all(re.fullmatch(r"MILES-E\d{3}", code) for code in codes)
    assert {kind.exit_code for kind in kinds} <= {2, 3, 70}
