"""The tokenizer and renderer suites: pass on toys and built-ins, and every assertion sees what is broken for it."""

from dataclasses import replace

import pytest

from miles_core.records import Message
from miles_core.testing import RendererConformance, TokenizerConformance
from miles_core.testing.toys.rendering import ToyRenderer, ToyTokenizer

from .mutants import broken_suite, must_fail, own_labels, plugin


def tokenizer(**methods):
    kind = type("Broken", (ToyTokenizer,), methods)
    return broken_suite(TokenizerConformance, plugin(lambda config, context: kind(context.core.alphabet)))


def initialised(edit):
    def init(self, alphabet):
        ToyTokenizer.__init__(self, alphabet)
        edit(self)

    return tokenizer(__init__=init)


def encode(edit):
    return tokenizer(encode=lambda self, text: edit(text, ToyTokenizer.encode(self, text)))


def decode(edit):
    def changed(self, ids, *, skip_special=True):
        return edit(ToyTokenizer.decode(self, ids, skip_special=skip_special), skip_special)

    return tokenizer(decode=changed)


def set_eos(self):
    self.eos_ids = (99,)


def saves_one_file(self, folder):
    ToyTokenizer.save(self, folder)
    (folder / "tokenizer_config.json").unlink()


def saves_other_ids(self, folder):
    other = ToyTokenizer(self.alphabet[::-1])
    other.save(folder)


TOKENIZERS = {
    "ids are ints of the vocabulary": encode(lambda text, ids: [i + 100 for i in ids]),
    "decode gives back what was encoded": decode(lambda text, skip: text.replace("9", "8")),
    "no text has no ids": encode(lambda text, ids: ids or [0]),
    "encode adds no special ids": encode(lambda text, ids: [1, *ids] if text else ids),
    "pad and end ids are ids of the vocabulary": initialised(set_eos),
    "decode leaves special ids out": tokenizer(
        decode=lambda self, ids, *, skip_special=True: ToyTokenizer.decode(self, ids, skip_special=False)
    ),
    "decode shows special ids when asked": tokenizer(
        decode=lambda self, ids, *, skip_special=True: ToyTokenizer.decode(self, ids)
    ),
    "a special token that is spelled out becomes its id": encode(
        lambda text, ids: [2, 3, 4] if text == "<eos>" else ids
    ),
    "save writes tokenizer.json and tokenizer_config.json": tokenizer(save=saves_one_file),
    "a saved tokenizer encodes the same elsewhere": tokenizer(save=saves_other_ids),
}


def renderer(**methods):
    kind = type("Broken", (ToyRenderer,), methods)
    return broken_suite(RendererConformance, plugin(lambda config, context: kind(context.tokenizer)))


def no_stops(self, given):
    ToyRenderer.__init__(self, given)
    self.stop_ids = (99,)


def extends(edit):
    return renderer(extend=lambda self, before, new: edit(self, before, ToyRenderer.extend(self, before, new)))


def demonstrates(edit):
    return renderer(
        demonstration=lambda self, prompt, answer: edit(self, *ToyRenderer.demonstration(self, prompt, answer))
    )


def writes_into(self, before, new):
    if isinstance(before, list):
        before.append(3)
    return new


def shows_everything(self, before, new):
    return [*before, *new] if len(before) > 8 else new


def only_with_stop(self, before, new):
    return new if before[-1] in self.stop_ids else [*new, 5]


def numbered(self, prompt):
    type(self).calls = getattr(type(self), "calls", 0) + 1
    return [*ToyRenderer.prompt(self, prompt), 2 + type(self).calls % 5]


def strings_only(self, prompt):
    return ToyRenderer.prompt(self, prompt) if isinstance(prompt, str) else []


def without_end(self, ids, mask):
    return ids[:-1], mask[:-1]


def another_prompt(self, ids, mask):
    return [5, *ids], [False, *mask]


def prompt_too(self, ids, mask):
    return ids, [True] * len(mask)


def short_mask(self, ids, mask):
    return ids, mask[:-1]


def end_only(self, ids, mask):
    return ids, [m and i in self.stop_ids for i, m in zip(ids, mask, strict=True)]


def whole_rest(self, ids, mask):
    first = mask.index(True)
    return ids, [i >= first for i in range(len(ids))]


RENDERERS = {
    "there are stop ids, all of the vocabulary": renderer(__init__=no_stops),
    "a prompt is ids of the vocabulary": renderer(prompt=lambda self, prompt: [500]),
    "every process renders the same ids": renderer(prompt=numbered),
    "messages are rendered too": renderer(prompt=strings_only),
    "extend leaves what was there alone": extends(writes_into),
    "extend shows the new message": extends(lambda self, before, new: []),
    "extend shows the same after a turn that lacks its stop token": extends(only_with_stop),
    "extend gives new ids only": extends(shows_everything),
    "a demonstration marks each of its ids": demonstrates(short_mask),
    "a demonstration starts with the prompt": demonstrates(another_prompt),
    "the prompt is no demonstration": demonstrates(prompt_too),
    "demonstration tokens end with a stop token": demonstrates(without_end),
    "demonstration tokens are the answer": demonstrates(end_only),
    "only assistant turns are demonstrations": demonstrates(whole_rest),
    "text leaves stop tokens out": renderer(text=lambda self, ids: self.tokenizer.decode(ids, skip_special=False)),
    "parse gives an assistant message": renderer(parse=lambda self, ids: Message(role="user", content=self.text(ids))),
    "text of a truncated answer is what there is": renderer(
        text=lambda self, ids: self.tokenizer.decode(ids) if ids and ids[-1] in self.stop_ids else ""
    ),
}


def test_every_label_has_a_mutant():
    assert own_labels(TokenizerConformance) == set(TOKENIZERS)
    assert own_labels(RendererConformance) == set(RENDERERS)


@pytest.mark.parametrize("label", [*TOKENIZERS, *RENDERERS])
def test_a_broken_one_is_seen(label):
    must_fail(label, {**TOKENIZERS, **RENDERERS}[label])


class TestToyTokenizer(TokenizerConformance):
    name = "toy"


class TestChars(TokenizerConformance):
    name = "chars"


class TestToyRenderer(RendererConformance):
    name = "toy"


class TestText(RendererConformance):
    name = "text"


def test_messages_are_frozen():
    assert replace(Message(role="user", content="a"), content="b").content == "b"
