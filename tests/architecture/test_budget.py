"""The budgets of the core, counted as code lines: no blanks, comments or docstrings."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "miles_core"
MAX_NUMERICS, MAX_FILE = 2500, 400
MAX_VERIFYING = 500  # decision 0008
#: Decision 0006: what happens once a run has begun, what happens before, and the shapes that plugins keep.
MAX_RUN, MAX_BEFORE, MAX_CONTRACTS = 5000, 2000, 500
BEFORE = {"config", "discovery.py", "compatibility.py", "treehash.py", "vocabulary.py", "prepare.py", "export.py"}
ELSEWHERE = {"cli", "testing", "numerics", "builtin", "verifying"}  # decisions 0005 and 0008


def code_lines(path: Path) -> int:
    source = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                docstrings |= set(range(first.lineno, first.end_lineno + 1))
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in ignored:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def _sources(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*.py") if "tests" not in p.parts and ".venv" not in p.parts]


def test_the_counter_ignores_blanks_comments_and_docstrings(tmp_path):
    file = tmp_path / "x.py"
    file.write_text('"""Doc\n\nmore."""\n\n# comment\nx = 1  # one\n\ndef f():\n    """Doc."""\n    return (\n2\n)\n')
    assert code_lines(file) == 5


def room(path: Path) -> str:
    """The folder of the core in which a file lies, or its own name."""
    return path.relative_to(CORE).parts[0]


def test_core_fits_its_budgets():
    counted = {p: code_lines(p) for p in _sources(CORE) if room(p) not in ELSEWHERE}
    assert {room(p) for p in counted} >= BEFORE | {"contracts"}
    before = sum(n for p, n in counted.items() if room(p) in BEFORE)
    contracts = sum(n for p, n in counted.items() if room(p) == "contracts")
    assert before < MAX_BEFORE, f"what happens before a run has {before} code lines"
    assert contracts < MAX_CONTRACTS, f"the contracts have {contracts} code lines"
    run = sum(counted.values()) - before - contracts
    assert run < MAX_RUN, f"what happens in a run has {run} code lines"


def test_numerics_fits_its_budget():
    assert sum(map(code_lines, _sources(CORE / "numerics"))) < MAX_NUMERICS


def test_verifying_fits_its_budget():
    assert sum(map(code_lines, _sources(CORE / "verifying"))) < MAX_VERIFYING


@pytest.mark.parametrize("folder", ["miles_core", "plugins"])
def test_no_file_is_too_long(folder):
    long = {str(p.relative_to(ROOT)): n for p in _sources(ROOT / folder) if (n := code_lines(p)) > MAX_FILE}
    assert not long
