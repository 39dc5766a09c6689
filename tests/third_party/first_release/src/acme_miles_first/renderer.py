"""A renderer of plain text."""

from acme_miles_first.config import Nothing
from miles_core import hookimpl
from miles_core.errors import TemplateError
from miles_core.provider import Provider
from miles_core.records import Message


class Plain:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.stop_ids = tuple(tokenizer.eos_ids)

    def prompt(self, prompt):
        if not isinstance(prompt, str):
            raise TemplateError("this renderer has no chat template", fix="use a string")
        return self.tokenizer.encode(prompt)

    def extend(self, before, new):
        return [i for message in new for i in self.tokenizer.encode(message.content)]

    def demonstration(self, prompt, answer):
        ids = self.prompt(prompt)
        mask = [False] * len(ids)
        turns = [Message(role="assistant", content=answer)] if isinstance(answer, str) else answer
        for turn in turns:
            own = turn.role == "assistant"
            part = self.tokenizer.encode(turn.content) + (list(self.stop_ids[:1]) if own else [])
            ids, mask = ids + part, mask + [own] * len(part)
        return ids, mask

    def text(self, ids):
        return self.tokenizer.decode([i for i in ids if i not in (*self.stop_ids, self.tokenizer.pad_id)])

    def parse(self, ids):
        return Message(role="assistant", content=self.text(ids))


@hookimpl
def miles_renderer():
    return Provider(
        name="first",
        config=Nothing,
        build=lambda config, context: Plain(context.need("tokenizer")),
        summary="plain text",
    )
