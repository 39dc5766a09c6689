"""How a question becomes messages or one string."""

import pytest

from miles_core.records import Message
from miles_core.verifying.prompts import Form, PromptConfig, make


def test_messages_and_text():
    user = Message(role="user", content="1+1?\nSay it.")
    assert make(PromptConfig(), "1+1?", "Say it.", plain=False) == (user,)
    assert make(PromptConfig(), "1+1?", "Say it.", plain=True) == "1+1?\nSay it."
    assert make(PromptConfig(), "1+1?", "", plain=True) == "1+1?"
    brief = PromptConfig(system="Be brief.")
    assert make(brief, "1+1?", "Say it.", plain=False) == (Message(role="system", content="Be brief."), user)
    assert make(brief, "1+1?", "Say it.", plain=True) == "Be brief.\n\n1+1?\nSay it."


@pytest.mark.parametrize("plain", [False, True])
def test_a_form_that_is_said_holds_for_every_renderer(plain):
    assert make(PromptConfig(form=Form.text), "q", "", plain=plain) == "q"
    assert make(PromptConfig(form=Form.messages), "q", "", plain=plain) == (Message(role="user", content="q"),)


def test_templates_and_suffixes():
    own = PromptConfig(template="Q: {question}\n{x} A:", suffix="!", form=Form.text)
    assert make(own, "{why}?", "unsaid", plain=False) == "Q: {why}?!\n{x} A:"  # other braces are text
    with pytest.raises(ValueError, match=r"template is 'x', without \{question\}"):
        PromptConfig(template="x")
