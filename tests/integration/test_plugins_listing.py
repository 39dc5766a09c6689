"""The script that measures what `miles plugins` costs lists what it says, whatever is installed beside it."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_script_lists_as_many_plugins_as_it_claims_to():
    script = str(ROOT / "benchmarks/plugins_listing.py")
    done = subprocess.run([sys.executable, script, "--repeats", "1"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    few, every = map(int, re.fullmatch(r"plugins listed +(\d+) +(\d+)", done.stdout.splitlines()[1]).groups())
    assert few == 20 and every > 20
