"""The built-in renderers, tokenizer and trackers against the kit, like any outsider's."""

from typing import ClassVar

from miles_core.builtin.conformance import ChatConformance
from miles_core.testing import RendererConformance, TokenizerConformance, TrackerConformance


class TestChars(TokenizerConformance):
    name = "chars"


class TestText(RendererConformance):
    name = "text"


class TestChat(ChatConformance):
    pass


class TestConsoleLines(TrackerConformance):
    name = "console"
    options: ClassVar = {"style": "plain"}


class TestConsoleBars(TrackerConformance):
    name = "console"
    options: ClassVar = {"style": "live"}


class TestJsonl(TrackerConformance):
    name = "jsonl"
