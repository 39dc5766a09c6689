"""The collection hook: a suite's test is not replaced quietly."""

import subprocess
import sys

import pytest

FILE = """
import pytest
from miles_core.testing import FilterConformance

class TestMine(FilterConformance):
    name = "toy"

    {mark}
    def {name}(self):
        assert False
"""


@pytest.mark.parametrize(
    ("mark", "name", "code", "said"),
    [
        ("", "test_verdicts", 4, "overrides a test of the conformance suite"),
        ("@pytest.mark.xfail(reason='known')", "test_verdicts", 4, "strict=True"),
        ("@pytest.mark.xfail(reason='known', strict=True)", "test_verdicts", 0, "xfailed"),
        ("", "test_mine", 1, "failed"),
    ],
)
def test_overriding(tmp_path, mark, name, code, said):
    (tmp_path / "test_it.py").write_text(FILE.format(mark=mark or "# no mark", name=name))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "miles_core.testing.pytest_plugin",
        "--rootdir",
        str(tmp_path),
    ]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
