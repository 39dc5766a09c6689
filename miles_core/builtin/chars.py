"""Tokenizer `chars`: one token per character. Id 0 is the pad token, id 1 the end token, then the alphabet in order.

For small models trained from nothing. `save` writes a `tokenizer.json` that `tokenizers` and transformers load with the
same ids. A character outside the alphabet is an error, never dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core import hookimpl
from miles_core.errors import ConfigError, DataError
from miles_core.provider import BuildContext, Provider

PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1
_SPECIAL = re.compile(f"({re.escape(PAD)}|{re.escape(EOS)})")


class CharsTokenizer:
    """Keeps the contract `Tokenizer`. `alphabet` holds each character once."""

    def __init__(self, alphabet: str) -> None:
        doubles = sorted({c for c in alphabet if alphabet.count(c) > 1})
        if not alphabet or doubles:
            found = f"it repeats {''.join(doubles)!r}" if alphabet else "it is empty"
            raise ConfigError(
                f"model.alphabet must hold each character once; {found}",
                fix='write every character that prompts and answers use, once: alphabet: "0123456789>"',
            )
        self.alphabet = alphabet
        self._tokens = (PAD, EOS, *alphabet)
        self._ids = {token: i for i, token in enumerate(self._tokens)}
        self.vocab_size = len(self._tokens)
        self.pad_id = PAD_ID
        self.eos_ids: tuple[int, ...] = (EOS_ID,)
        self.chat_template: str | None = None
        self.special_tokens = {"pad_token": PAD, "eos_token": EOS}

    def encode(self, text: str) -> list[int]:
        """One id per character; `<pad>` and `<eos>` spelled in `text` become theirs. Raises `DataError` for a character
        outside the alphabet."""
        ids: list[int] = []
        for piece in _SPECIAL.split(text):
            tokens: Sequence[str] = (piece,) if piece in (PAD, EOS) else piece
            for token in tokens:
                found = self._ids.get(token)
                if found is None:
                    raise DataError(
                        f"character {token!r} (U+{ord(token):04X}) of {text[:60]!r} is not in model.alphabet"
                        f" {self.alphabet!r}",
                        fix="change the text, or, for a new run, add it to model.alphabet (and to model's vocab_size)",
                    )
                ids.append(found)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`. An id beyond the alphabet (a padded vocabulary can sample one) reads as U+FFFD."""
        tokens = self._tokens
        return "".join(
            tokens[i] if 0 <= i < len(tokens) else "\ufffd" for i in map(int, ids) if i > EOS_ID or not skip_special
        )

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` (BPE without merges, so characters) and `tokenizer_config.json`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1_000_000_000,
            **self.special_tokens,
        }
        for name, value in (("tokenizer.json", self._spec()), ("tokenizer_config.json", config)):
            text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
            (folder / name).write_text(text, encoding="utf-8")

    def _spec(self) -> dict[str, Any]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": i, "content": t, **flags} for i, t in ((PAD_ID, PAD), (EOS_ID, EOS))],
            "normalizer": None,
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {"type": "Fuse"},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": self._ids,
                "merges": [],
            },
        }


@dataclass(frozen=True, kw_only=True)
class CharsConfig:
    """No options of its own: the alphabet is `model.alphabet`, which core owns."""


def _build(config: CharsConfig, context: BuildContext) -> CharsTokenizer:
    alphabet = getattr(context.core, "alphabet", None)
    if alphabet is None:
        raise ConfigError(
            "model.tokenizer is `chars`, and model.alphabet is not given",
            fix='write every character that prompts and answers use: alphabet: "0123456789>"',
        )
    return CharsTokenizer(alphabet)


@hookimpl
def miles_tokenizer() -> Provider[CharsConfig, CharsTokenizer]:
    return Provider(name="chars", config=CharsConfig, build=_build, summary="one token per character of model.alphabet")
