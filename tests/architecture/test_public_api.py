"""The public API is the one that was written down; a change says what to do about it."""

import ast
import runpy
from pathlib import Path

API = runpy.run_path(str(Path(__file__).with_name("public_api.py")))


def test_the_public_api_is_the_one_that_was_written_down():
    changed = API["difference"](API["text"]())
    assert not changed, "\n".join(changed) + API["HOW"]


CODE = '''
@dataclass(frozen=True, kw_only=True)
class Keys:
    """Docs."""
    count: int = opt(1, "how many", low=1)
    _hidden: int = 0
    def total(self, more: int = 0) -> int:
        return 1
    def _own(self): ...
def _private(): ...
async def shared(*, name: str) -> None: ...
'''


def test_what_is_shown_is_what_others_rely_on():
    lines = [line for node in ast.parse(CODE).body for line in API["shown"](node)]
    assert lines == [
        "frozen class Keys()",
        "    count: int = 1, low=1",
        "    def total(self, more: int=0) -> int",
        "async def shared(*, name: str) -> None",
    ]


def test_every_kind_of_change_is_seen():
    written = API["SNAPSHOT"].read_text()
    for old, new in (
        ("def miles_on_step(policy: str, step: int,", "def miles_on_step(step: int,"),
        ("    async def health(self) -> Health\n", ""),
        ("max_staleness: int = 0, low=0", "max_staleness: int = 1, low=0"),
        ("code = 'MILES-E006'", "code = 'MILES-E016'"),
        ("format 1: ", "format 2: "),
        ("unit behaviour_logprobs float32", "unit behaviour_logprobs float64"),
    ):
        assert old in written
        assert API["difference"](written.replace(old, new))
    assert not API["difference"](written)
