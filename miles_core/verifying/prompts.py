"""How a question becomes a prompt: messages for a chat template, or one string."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from miles_core.config.schema import opt
from miles_core.records import Message, Prompt


class Form(StrEnum):
    auto = "auto"
    messages = "messages"
    text = "text"


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    system: str = opt("", "system message; none where empty")
    template: str = opt("{question}", "the user's message, with {question} where the question stands")
    suffix: str | None = opt(None, "appended to the question; what `extract` needs said where null")
    form: Form = opt(Form.auto, "messages, one string, or `auto`: a string for the renderer `text`, else messages")

    def __post_init__(self) -> None:
        if "{question}" not in self.template:
            raise ValueError(f"template is {self.template!r}, without {{question}}")


def make(config: PromptConfig, question: str, said: str, *, plain: bool) -> Prompt:
    """The prompt of `question`. `said` is what to append where the config leaves the suffix open; `plain` makes it one
    string where it leaves the form open."""
    suffix = ("\n" + said if said else "") if config.suffix is None else config.suffix
    text = config.template.replace("{question}", question + suffix)
    if config.form is Form.text or (plain and config.form is Form.auto):
        return f"{config.system}\n\n{text}" if config.system else text
    system = (Message(role="system", content=config.system),) if config.system else ()
    return (*system, Message(role="user", content=text))
