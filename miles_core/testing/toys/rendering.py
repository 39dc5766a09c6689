"""Toy tokenizer (one id a character) and toy renderer (messages are their contents, one after another)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.errors import DataError
from miles_core.records import Message, Prompt

if TYPE_CHECKING:
    from miles_core.contracts.rendering import Tokenizer

PAD_ID = 0
EOS_ID = 1
ALPHABET = "0123456789>+?"


class ToyTokenizer:
    """Pad 0, eos 1, then the alphabet in order. A character outside it is a `DataError` that names it."""

    pad_id = PAD_ID
    eos_ids: tuple[int, ...] = (EOS_ID,)
    chat_template: str | None = None

    def __init__(self, alphabet: str = ALPHABET) -> None:
        self.alphabet = alphabet
        self.special_tokens = {"pad_token": "<pad>", "eos_token": "<eos>"}
        self._pieces = ["<pad>", "<eos>", *alphabet]
        self._ids = {piece: i for i, piece in enumerate(self._pieces)}
        self.vocab_size = len(self._pieces)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            piece = next((s for s in ("<pad>", "<eos>") if text.startswith(s, at)), text[at])
            if piece not in self._ids:
                raise DataError(
                    f"character {piece!r} is not in the toy alphabet {self.alphabet!r}",
                    fix="use characters of the alphabet, or set tokenizer alphabet",
                )
            ids.append(self._ids[piece])
            at += len(piece)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join(self._pieces[i] for i in ids if not (skip_special and i in (PAD_ID, EOS_ID)))

    def save(self, folder: Path) -> None:
        """A word-level `tokenizer.json` over single characters, as the `tokenizers` library reads it."""
        added = [
            {"id": i, "content": piece, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False}
            for i, piece in enumerate(self._pieces[:2])
        ]
        data = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "[\\s\\S]"},
                "behavior": "Isolated",
                "invert": False,
            },
            "post_processor": None,
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": self._ids, "unk_token": "<pad>"},
        }
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        (folder / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False, indent=1), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


class ToyRenderer:
    """A prompt is its text; a message is its content; an assistant turn ends with eos."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = tokenizer.eos_ids

    def prompt(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return [i for message in prompt for i in self._message(message)]

    def extend(self, before: Sequence[int], new: Sequence[Message]) -> list[int]:
        end = [] if before and before[-1] in self.stop_ids else [self.stop_ids[0]]
        return [*end, *(i for message in new for i in self._message(message))]

    def demonstration(self, prompt: Prompt, answer: Prompt) -> tuple[list[int], list[bool]]:
        ids = self.prompt(prompt)
        mask = [False] * len(ids)
        turns = (Message(role="assistant", content=answer),) if isinstance(answer, str) else answer
        for turn in turns:
            new = self._message(turn)
            ids += new
            mask += [turn.role == "assistant"] * len(new)
        return ids, mask

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def parse(self, ids: Sequence[int]) -> Message:
        return Message(role="assistant", content=self.text(ids))

    def _message(self, message: Message) -> list[int]:
        end = [self.stop_ids[0]] if message.role == "assistant" else []
        return self.tokenizer.encode(message.content) + end
