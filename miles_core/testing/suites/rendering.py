"""What every tokenizer and every renderer promises: round trips, and prefixes that never change."""

from __future__ import annotations

import importlib.util
import json
from typing import Any, ClassVar

from miles_core.errors import TemplateError
from miles_core.provider import Place
from miles_core.records import Message
from miles_core.testing.suite import Conformance, check


class TokenizerConformance(Conformance):
    """Override `texts` where the alphabet does not hold them."""

    kind = "tokenizer"
    places: ClassVar[tuple[Place, ...]] = (Place.CONTROLLER, Place.SAMPLER)
    texts: ClassVar[tuple[str, ...]] = ("", "3", "73>", "0123456789", "9>9>9")
    alphabet: str | None = "0123456789>+?"

    def example(self, place: Place) -> Any:
        from miles_core.config.schema import ModelKeys

        return self.build(place, core=ModelKeys(tokenizer=self.name or None, alphabet=self.alphabet))

    def test_round_trips(self) -> None:
        tokenizer = self.example(Place.CONTROLLER)
        for text in self.texts:
            ids = tokenizer.encode(text)
            inside = isinstance(ids, list) and all(isinstance(i, int) and 0 <= i < tokenizer.vocab_size for i in ids)
            check("ids are ints of the vocabulary", inside, (text, ids))
            back = tokenizer.decode(ids)
            check("decode gives back what was encoded", back == text, (text, ids, back))
        check("no text has no ids", tokenizer.encode("") == [], tokenizer.encode(""))
        extra = [i for i in (tokenizer.pad_id, *tokenizer.eos_ids) if i in tokenizer.encode("".join(self.texts))]
        check("encode adds no special ids", not extra, extra)

    def test_special(self) -> None:
        tokenizer = self.example(Place.CONTROLLER)
        ids = (tokenizer.pad_id, *tokenizer.eos_ids)
        inside = bool(tokenizer.eos_ids) and all(0 <= i < tokenizer.vocab_size for i in ids)
        check("pad and end ids are ids of the vocabulary", inside, ids)
        text = self.texts[-1]
        mixed = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
        check("decode leaves special ids out", tokenizer.decode(mixed) == text, tokenizer.decode(mixed))
        shown = tokenizer.decode(mixed, skip_special=False)
        check("decode shows special ids when asked", shown != text and shown.startswith(text), shown)
        spelled = tokenizer.special_tokens.get("eos_token")
        if spelled is not None:
            ids = tokenizer.encode(spelled)
            check("a special token that is spelled out becomes its id", ids == [tokenizer.eos_ids[0]], ids)

    def test_save(self) -> None:
        tokenizer = self.example(Place.CONTROLLER)
        with self.folder() as folder:
            tokenizer.save(folder)
            names = {p.name for p in folder.iterdir()}
            both = {"tokenizer.json", "tokenizer_config.json"} <= names
            check("save writes tokenizer.json and tokenizer_config.json", both, names)
            json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            if importlib.util.find_spec("tokenizers") is None:
                return
            loaded = importlib.import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
            for text in (*self.texts, *tokenizer.special_tokens.values()):
                theirs = loaded.encode(text, add_special_tokens=False).ids
                check("a saved tokenizer encodes the same elsewhere", theirs == tokenizer.encode(text), (text, theirs))


class RendererConformance(Conformance):
    """Override `tokenizer` or `context` for a renderer that needs a chat template, and `words` for its alphabet."""

    kind = "renderer"
    places: ClassVar[tuple[Place, ...]] = (Place.CONTROLLER, Place.SAMPLER)
    words: ClassVar[tuple[str, ...]] = ("73>", "3", "+4>", "9?")
    chat = False  # a renderer that takes messages only

    def tokenizer(self) -> Any:
        from miles_core.testing.toys.rendering import ToyTokenizer

        return ToyTokenizer()

    def example(self, place: Place) -> Any:
        return self.build(place, tokenizer=self.tokenizer())

    def say(self, text: str, role: str = "user") -> Message:
        return Message(role=role, content=text)

    def start(self) -> Any:
        return (self.say(self.words[0]),) if self.chat else self.words[0]

    def test_ids(self) -> None:
        renderer = self.example(Place.CONTROLLER)
        size = renderer.tokenizer.vocab_size
        stops = bool(renderer.stop_ids) and all(0 <= i < size for i in renderer.stop_ids)
        check("there are stop ids, all of the vocabulary", stops, renderer.stop_ids)
        ids = renderer.prompt(self.start())
        inside = bool(ids) and all(isinstance(i, int) and 0 <= i < size for i in ids)
        check("a prompt is ids of the vocabulary", inside, ids)
        again = self.example(Place.SAMPLER).prompt(self.start())
        check("every process renders the same ids", again == ids, (ids, again))
        try:
            longer = renderer.prompt((self.say(self.words[0]),))
        except TemplateError:
            return  # a renderer without a template says so, and the run file is refused
        check("messages are rendered too", longer and all(0 <= i < size for i in longer), longer)

    def test_append_only(self) -> None:
        renderer = self.example(Place.CONTROLLER)
        end = renderer.stop_ids[0]
        before = [*renderer.prompt(self.start()), *renderer.tokenizer.encode(self.words[1]), end]
        kept = list(before)
        new = renderer.extend(before, [self.say(self.words[2])])
        check("extend leaves what was there alone", before == kept, before)
        shown = self.words[2] in renderer.tokenizer.decode(new)
        check("extend shows the new message", bool(new) and shown, (new, renderer.tokenizer.decode(new)))
        ended = renderer.extend(before[:-1], [self.say(self.words[2])])
        same = ended[len(ended) - len(new) :] == new
        check("extend shows the same after a turn that lacks its stop token", same, (ended, new))
        more = renderer.extend(
            [*before, *new, *renderer.tokenizer.encode(self.words[1]), end], [self.say(self.words[3])]
        )
        check("extend gives new ids only", self.words[2] not in renderer.tokenizer.decode(more), more)

    def test_demonstrations(self) -> None:
        renderer = self.example(Place.CONTROLLER)
        prompt = renderer.prompt(self.start())
        ids, mask = renderer.demonstration(self.start(), self.words[1])
        check("a demonstration marks each of its ids", len(ids) == len(mask) and any(mask), (ids, mask))
        check("a demonstration starts with the prompt", ids[: len(prompt)] == prompt, (ids, prompt))
        check("the prompt is no demonstration", not any(mask[: len(prompt)]), mask)
        shown = [i for i, m in zip(ids, mask, strict=True) if m]
        check("demonstration tokens end with a stop token", shown[-1] in renderer.stop_ids, shown)
        text = renderer.text(shown)
        check("demonstration tokens are the answer", text == self.words[1], (text, shown))
        turns = (self.say(self.words[1], "assistant"), self.say(self.words[2]), self.say(self.words[3], "assistant"))
        try:
            ids, mask = renderer.demonstration(self.start(), turns)
        except TemplateError:
            return
        shown = [i for i, m in zip(ids, mask, strict=True) if m]
        text = renderer.tokenizer.decode(shown)
        only = self.words[1] in text and self.words[3] in text and self.words[2] not in text
        check("only assistant turns are demonstrations", only, (ids, mask, text))

    def test_text_and_parse(self) -> None:
        renderer = self.example(Place.CONTROLLER)
        ids = [*renderer.tokenizer.encode(self.words[1]), renderer.stop_ids[0]]
        text = renderer.text(ids)
        check("text leaves stop tokens out", text == self.words[1], text)
        message = renderer.parse(ids)
        good = message.role == "assistant" and message.content.strip() == self.words[1]
        check("parse gives an assistant message", good, message)
        cut = renderer.text(ids[:-1])
        check("text of a truncated answer is what there is", cut == self.words[1], cut)
