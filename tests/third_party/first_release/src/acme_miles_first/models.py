"""A tokenizer and a resolver of model sources."""

import hashlib
import json
import os
import tempfile
from pathlib import Path

from acme_miles_first.config import Nothing
from miles_core import hookimpl
from miles_core.errors import DataError, ModelSourceError
from miles_core.provider import Provider


class Letters:
    """Id 0 pads, id 1 ends, then the alphabet."""

    pad_id = 0
    eos_ids = (1,)
    chat_template = None

    def __init__(self, alphabet):
        self.alphabet = alphabet
        self.vocab_size = 2 + len(alphabet)
        self.special_tokens = {}

    def encode(self, text):
        for letter in text:
            if letter not in self.alphabet:
                raise DataError(f"{letter!r} is not in the alphabet", fix="add it to model.alphabet")
        return [2 + self.alphabet.index(letter) for letter in text]

    def decode(self, ids, *, skip_special=True):
        special = ("", "") if skip_special else ("<pad>", "<eos>")
        return "".join(special[i] if i < 2 else self.alphabet[i - 2] for i in ids)

    def save(self, folder):
        model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(["<pad>", "<eos>", *self.alphabet])}, "merges": []}
        spec = {"version": "1.0", "added_tokens": [], "decoder": {"type": "Fuse"}, "model": model}
        (Path(folder) / "tokenizer.json").write_text(json.dumps(spec))
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", "eos_token": "<eos>"}))


class Json:
    """`x.first` is a config.json under another name."""

    def resolve(self, source, cache, deadline_s):
        path = Path(source)
        if not path.is_file():
            raise ModelSourceError(f"{source} is not there", fix="name a file")
        text = path.read_text()
        folder = cache / f"first-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        if not (folder / "config.json").is_file():
            cache.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(dir=cache))
            (draft / "config.json").write_text(text)
            if folder.exists():
                os.replace(draft / "config.json", folder / "config.json")
            else:
                os.replace(draft, folder)
        return folder


@hookimpl
def miles_tokenizer():
    def build(config, context):
        return Letters(getattr(context.core, "alphabet", None) or "0123456789>+?")

    return Provider(name="first", config=Nothing, build=build, summary="one id a letter")


@hookimpl
def miles_model():
    return Provider(name=".first", config=Nothing, build=lambda config, context: Json(), summary="resolves *.first")
