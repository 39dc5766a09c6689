"""Renderer `text`."""

from types import SimpleNamespace

import pytest

from miles_core.builtin import text
from miles_core.builtin.chars import CharsTokenizer
from miles_core.builtin.text import TextConfig, TextRenderer
from miles_core.contracts.rendering import Renderer
from miles_core.errors import TemplateError
from miles_core.records import Message


@pytest.fixture
def renderer():
    return TextRenderer(CharsTokenizer("ab>"))


def test_prompt_and_text(renderer):
    assert isinstance(renderer, Renderer)
    assert renderer.prompt("ab>") == [2, 3, 4]
    assert renderer.stop_ids == (1,)
    assert renderer.text([2, 3, 1, 0]) == "ab"
    assert renderer.parse([3, 1]) == Message(role="assistant", content="b")


def test_demonstration_trains_the_answer_and_its_end(renderer):
    assert renderer.demonstration("ab>", "ba") == ([2, 3, 4, 3, 2, 1], [False] * 3 + [True] * 3)
    turns = (Message(role="assistant", content="a"), Message(role="user", content=">"))
    last = Message(role="assistant", content="b")
    ids, mask = renderer.demonstration("b", (*turns, last))
    assert ids == [3, 2, 1, 4, 3, 1]
    assert mask == [False, True, True, False, True, True]


def test_extend_appends(renderer):
    new = [Message(role="user", content="a"), Message(role="tool", content=">")]
    assert renderer.extend([2, 1], new) == [2, 4]


def test_messages_are_refused(renderer):
    with pytest.raises(TemplateError, match=r"a prompt of messages.*\nFix: set `renderer: chat`"):
        renderer.prompt((Message(role="user", content="a"),))


def test_bos():
    tokenizer = CharsTokenizer("ab>")
    context = SimpleNamespace(tokenizer=tokenizer)
    build = text.miles_renderer().build
    assert build(TextConfig(), context).prompt("a") == [2]
    with pytest.raises(TemplateError, match="no BOS token"):
        build(TextConfig(bos=True), context)
    tokenizer.special_tokens["bos_token"] = "b"
    tokenizer.adds_bos = True
    assert build(TextConfig(), context).prompt("a") == [3, 2]
    assert build(TextConfig(bos=False), context).prompt("a") == [2]
