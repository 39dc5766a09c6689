"""The built-in renderers, tokenizer and trackers against the kit, like any outsider's."""

from miles_core.builtin.conformance import BarsConformance, ChatConformance, LinesConformance
from miles_core.testing import RendererConformance, TokenizerConformance, TrackerConformance


class TestChars(TokenizerConformance):
    name = "chars"


class TestText(RendererConformance):
    name = "text"


class TestChat(ChatConformance):
    pass


class TestConsoleLines(LinesConformance):
    pass


class TestConsoleBars(BarsConformance):
    pass


class TestJsonl(TrackerConformance):
    name = "jsonl"
