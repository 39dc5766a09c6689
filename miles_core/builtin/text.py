"""Renderer `text`: plain text, no chat template. A prompt is its characters, an answer ends with the end token.

Environment turns are appended as they are. A chat prompt (messages) is refused: it needs the renderer `chat`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miles_core import hookimpl
from miles_core.builtin.hf_tokenizer import choose
from miles_core.config.schema import opt
from miles_core.contracts.rendering import Tokenizer
from miles_core.errors import TemplateError
from miles_core.provider import BuildContext, Provider
from miles_core.records import Message, Prompt


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    bos: bool | None = opt(None, "begin prompts with the BOS token; as the tokenizer itself does where null")


class TextRenderer:
    """Keeps the contract `Renderer`. `bos` is put before every prompt (empty: none)."""

    def __init__(self, tokenizer: Tokenizer, bos: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = tuple(tokenizer.eos_ids)
        self._bos = list(bos)
        self._unread = {*self.stop_ids, tokenizer.pad_id}

    def prompt(self, prompt: Prompt) -> list[int]:
        """Ids of a string. Raises `TemplateError` for messages."""
        if not isinstance(prompt, str):
            raise TemplateError(
                "a prompt of messages, and the renderer is `text`, which has no chat template",
                fix="set `renderer: chat` with a model that has a chat template, or make the prompt a string",
            )
        return self._bos + self.tokenizer.encode(prompt)

    def extend(self, before: Sequence[int], new: Sequence[Message]) -> list[int]:
        """The contents of `new`, one after the other; roles leave no trace in plain text."""
        return [i for message in new for i in self.tokenizer.encode(message.content)]

    def demonstration(self, prompt: Prompt, answer: Prompt) -> tuple[list[int], list[bool]]:
        """Prompt, then the answer with its end token, encoded apart as in sampling. Of an answer in messages, the
        assistant's are demonstrations."""
        ids = self.prompt(prompt)
        mask = [False] * len(ids)
        turns = (Message(role="assistant", content=answer),) if isinstance(answer, str) else answer
        for turn in turns:
            shown = turn.role == "assistant"
            part = self.tokenizer.encode(turn.content) + (list(self.stop_ids[:1]) if shown else [])
            ids += part
            mask += [shown] * len(part)
        return ids, mask

    def text(self, ids: Sequence[int]) -> str:
        unread = self._unread
        return self.tokenizer.decode([i for i in ids if i not in unread])

    def parse(self, ids: Sequence[int]) -> Message:
        return Message(role="assistant", content=self.text(ids))


def _build(config: TextConfig, context: BuildContext) -> TextRenderer:
    tokenizer = choose(context)
    bos = tokenizer.special_tokens.get("bos_token")
    wanted = getattr(tokenizer, "adds_bos", False) if config.bos is None else config.bos
    if wanted and bos is None:
        raise TemplateError(
            "renderer.bos is true, and the tokenizer has no BOS token", fix="leave renderer.bos out, or set it to false"
        )
    return TextRenderer(tokenizer, tokenizer.encode(bos) if wanted and bos else ())


@hookimpl
def miles_renderer() -> Provider[TextConfig, TextRenderer]:
    return Provider(name="text", config=TextConfig, build=_build, summary="plain text, without a chat template")
