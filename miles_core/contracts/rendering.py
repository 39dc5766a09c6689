"""Kinds `tokenizer` and `renderer`: text to token ids and back, chat rendering, stop ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from miles_core.records import Message, Prompt


@runtime_checkable
class Tokenizer(Protocol):
    """Kind `tokenizer`: built from the `model` section, or from a folder's `tokenizer.json`."""

    vocab_size: int
    pad_id: int
    eos_ids: tuple[int, ...]  # ids that end a generation
    chat_template: str | None
    special_tokens: dict[str, str]  # bos_token, eos_token, … for templates

    def encode(self, text: str) -> list[int]:
        """Ids without added special tokens; special tokens spelled in `text` become their ids."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` so that the folder loads elsewhere."""


@runtime_checkable
class Renderer(Protocol):
    """Kind `renderer`: owns encode, decode, render, parse and stop ids.

    Rendering is append-only: the ids of a conversation are a bit-exact prefix of the ids of any continuation, because
    sampled tokens are never re-tokenised and only new environment text is encoded.
    """

    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]  # ids that end an assistant turn

    def prompt(self, prompt: Prompt) -> list[int]:
        """Ids of a task's prompt, up to where the model starts to write."""

    def extend(self, before: Sequence[int], new: Sequence[Message]) -> list[int]:
        """Ids to append after `before` (which ends in a sampled turn, its stop token possibly missing) so that `new`
        environment messages are shown and the model may write again."""

    def demonstration(self, prompt: Prompt, answer: Prompt) -> tuple[list[int], list[bool]]:
        """Ids of prompt and reference answer, and which of them are demonstration tokens (assistant turns with their
        end token)."""

    def text(self, ids: Sequence[int]) -> str:
        """What the model wrote, as readable text without stop and pad tokens."""

    def parse(self, ids: Sequence[int]) -> Message:
        """The assistant message that these sampled ids mean."""
