"""Renderer `chat`: conversations through the model's own chat template (sandboxed Jinja, extra `render`).

What was sampled is never rendered again. A prompt is rendered once; whatever follows is the *difference* that the
template adds behind an assistant's turn, taken from a stand-in conversation (`extend`). So the ids of a conversation
are a bit-exact prefix of those of any continuation, also for templates that cut earlier thinking. A demonstration is
laid out just as sampling would have written it, hence what is trained is what will be sampled.

The clock of templates that print the date is read once, when the renderer is built; `renderer.date` fixes it. Special
tokens that are spelled in a message become those tokens, as everywhere: clean what you do not trust.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core import hookimpl
from miles_core.builtin.hf_tokenizer import choose
from miles_core.config.schema import opt
from miles_core.contracts.rendering import Tokenizer
from miles_core.errors import MissingExtraError, TemplateError
from miles_core.provider import BuildContext, Provider
from miles_core.records import Message, Prompt

#: Content of stand-in turns. Letters and digits only, so that no template trims, splits or escapes it.
STAND_IN = "MilesStandIn7f3a"
_ASKED = Message(role="user", content="x")


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    template: str | None = opt(None, "a Jinja file to use instead of the model's own chat template")
    system: str | None = opt(None, "system message of prompts that are plain strings")
    arguments: dict[str, Any] = opt({}, "further arguments of the template, e.g. enable_thinking: false")
    date: str | None = opt(None, "today, as YYYY-MM-DD, for templates that print it; the clock where null")

    def __post_init__(self) -> None:
        if self.date is not None:
            datetime.date.fromisoformat(self.date)  # a ValueError that names the text


class ChatRenderer:
    """Keeps the contract `Renderer`. Raises `TemplateError` where the template refuses a conversation."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        system: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        now: datetime.datetime | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._render = _compile(template, now or datetime.datetime.now())
        self._system = system
        self._arguments = {**tokenizer.special_tokens, **(arguments or {})}
        end = tokenizer.encode(self._behind_answer((), opens=False))[:1]
        # The first thing behind an answer ends the turn, where it is a special token; else the tokenizer's end does.
        special = bool(end) and not tokenizer.decode(end) and bool(tokenizer.decode(end, skip_special=False))
        self._end = end if special or set(end) & set(tokenizer.eos_ids) else list(tokenizer.eos_ids[:1])
        if not self._end:
            raise TemplateError(
                "neither the chat template nor the tokenizer says which token ends a turn",
                fix="set eos_token in tokenizer_config.json",
            )
        self.stop_ids = tuple(dict.fromkeys((*self._end, *tokenizer.eos_ids)))
        self._unread = {*self.stop_ids, tokenizer.pad_id}

        self._opening, self._begun = self._openings()

    def prompt(self, prompt: Prompt) -> list[int]:
        """Ids of the conversation and the opening of the assistant's turn. A string is the user's message."""
        if isinstance(prompt, str):
            head = () if self._system is None else (Message(role="system", content=self._system),)
            prompt = (*head, Message(role="user", content=prompt))
        if not prompt or prompt[-1].role == "assistant":
            found = "is empty" if not prompt else "ends with an assistant's turn"
            raise TemplateError(f"a chat prompt {found}", fix="end it with the message that is to be answered")
        return self.tokenizer.encode(self._text(prompt, opens=True))

    def extend(self, before: Sequence[int], new: Sequence[Message]) -> list[int]:
        """What the template puts behind an assistant's turn: its end (unless sampled), `new`, the next opening. Nothing
        where `new` is empty and the turn has not ended: the model then goes on writing."""
        ended = bool(len(before)) and int(before[-1]) in self.stop_ids
        if not new and not ended:
            return []
        text = self._behind_answer(tuple(new), opens=True)
        self._check_shown(tuple(new), text)
        ids = self.tokenizer.encode(text)
        return ids[1:] if ended and ids[:1] == [int(before[-1])] else ids

    def demonstration(self, prompt: Prompt, answer: Prompt) -> tuple[list[int], list[bool]]:
        """As sampling would have it: the prompt, then the assistant's turns with their end token (marked), and between
        them what the template puts there.

        Where the template begins the answer itself (an open `<think>`), a turn goes on from there as the template
        prints it. Raises `TemplateError` for a turn that cannot.
        """
        ids = self.prompt(prompt)
        mask = [False] * len(ids)
        turns = [Message(role="assistant", content=answer)] if isinstance(answer, str) else list(answer)
        while any(turn.role == "assistant" for turn in turns):
            said = next(i for i, turn in enumerate(turns) if turn.role == "assistant")
            if said or mask[-1]:
                between = self.extend(ids, turns[:said])
                ids += between
                mask += [False] * len(between)
            part = self.tokenizer.encode(self._written(turns[said].content)) + self._end
            ids += part
            mask += [True] * len(part)
            turns = turns[said + 1 :]
        return ids, mask

    def _written(self, content: str) -> str:
        """What is sampled behind the opening of a turn whose content this is: the content itself, unless the template
        has begun the answer."""
        if not self._begun:
            return content
        printed = self._text((_ASKED, Message(role="assistant", content=content)), opens=False)
        if printed.startswith(self._opening):
            return printed.removeprefix(self._opening).removesuffix(self._behind_answer((), opens=False))
        if content.startswith(self._begun):
            return content.removeprefix(self._begun)
        raise TemplateError(
            f"the chat template begins every answer with {self._begun!r}; a demonstration does not go on from there: "
            f"{content[:60]!r}",
            fix="begin it alike, or choose another beginning: renderer.arguments, e.g. {enable_thinking: false}",
        )

    def _openings(self) -> tuple[str, str]:
        """The text that opens an answer, and the part of it that belongs to the answer: what is not printed before an
        answer further back."""
        asked = self._text((_ASKED,), opens=False)
        opening = self._text((_ASKED,), opens=True)
        told = (_ASKED, Message(role="assistant", content=STAND_IN), _ASKED)
        try:
            head, found, _ = self._text(told, opens=False).partition(STAND_IN)
        except TemplateError:  # for one question only
            return opening, ""
        if not found or not head.startswith(asked) or not opening.startswith(head):
            return opening, ""
        return opening, opening.removeprefix(head)

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode([i for i in map(int, ids) if i not in self._unread])

    def parse(self, ids: Sequence[int]) -> Message:
        return Message(role="assistant", content=self.text(ids))

    def _text(self, messages: Sequence[Message], *, opens: bool) -> str:
        plain = [{"role": m.role, "content": m.content} for m in messages]
        return self._render(messages=plain, add_generation_prompt=opens, **self._arguments)

    def _behind_answer(self, new: tuple[Message, ...], *, opens: bool) -> str:
        """The text that follows a stand-in answer when `new` follows it. The first stand-in is ours, whatever `new`
        says."""
        told = (_ASKED, Message(role="assistant", content=STAND_IN), *new)
        _, found, behind = self._text(told, opens=opens).partition(STAND_IN)
        if not found:
            raise TemplateError(
                "the chat template does not print an assistant's message", fix="use another one: renderer.template"
            )
        return behind

    def _check_shown(self, new: tuple[Message, ...], text: str) -> None:
        """A template that passes over a role without a word would hide the environment's message from the model."""
        for index, message in enumerate(new):
            content = message.content.strip()
            if content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text:
                continue
            changed = (*new[:index], Message(role=message.role, content=STAND_IN), *new[index + 1 :])
            if self._behind_answer(changed, opens=True) == text:
                raise TemplateError(
                    f"the chat template leaves out a message of role {message.role!r}",
                    fix="let the environment speak as `user`, or use another template: renderer.template",
                )


def _compile(template: str, now: datetime.datetime) -> Callable[..., str]:
    """The template as a function of its arguments, in a sandbox with the globals that chat templates expect."""
    try:
        import jinja2
        import jinja2.sandbox
    except ImportError as error:
        raise MissingExtraError(
            "chat templates need the library `jinja2`, which is not installed", fix="pip install 'miles-core[render]'"
        ) from error
    from miles_core.builtin.chat_extension import GenerationBlock

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime
    fix = "change the conversation, or use another template: renderer.template"
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the chat template is no Jinja, line {error.lineno}: {error.message}", fix=fix) from error

    def render(**arguments: Any) -> str:
        try:
            return compiled.render({"tools": None, "documents": None, **arguments})
        except Exception as error:  # whatever a template does wrong is the template's
            roles = ", ".join(m["role"] for m in arguments["messages"])
            raise TemplateError(f"the chat template cannot render roles {roles}: {error}", fix=fix) from error

    return render


def _build(config: ChatConfig, context: BuildContext) -> ChatRenderer:
    tokenizer = choose(context)
    template = tokenizer.chat_template if config.template is None else _read(config.template, context)
    if template is None:
        asked = "" if context.model is None else f" of model {context.model.asked!r}"
        raise TemplateError(
            f"renderer is `chat`, and the tokenizer{asked} has no chat template",
            fix="use an instruction-tuned model, give renderer.template a Jinja file, or set `renderer: text`",
        )
    now = None if config.date is None else datetime.datetime.fromisoformat(config.date)
    return ChatRenderer(tokenizer, template, system=config.system, arguments=config.arguments, now=now)


def _read(path: str, context: BuildContext) -> str:
    """A template file, looked up in the run file's folder, then in the working directory."""
    places = [Path(folder) / path for folder in (context.run.run.folder, Path.cwd()) if folder is not None]
    for place in places:
        if place.is_file():
            return place.read_text(encoding="utf-8")
    raise TemplateError(
        f"renderer.template is {path!r}, and there is no such file; looked at {', '.join(map(str, places))}",
        fix="correct the path, relative to the run file",
    )


@hookimpl
def miles_renderer() -> Provider[ChatConfig, ChatRenderer]:
    return Provider(name="chat", config=ChatConfig, build=_build, summary="conversations through a chat template")
