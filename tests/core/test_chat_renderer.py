"""Renderer `chat` against templates in the style of real models, with transformers as the oracle of what they print."""

import datetime
import json
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from miles_core.builtin import chat, hf_tokenizer
from miles_core.builtin.chars import CharsTokenizer
from miles_core.builtin.chat import ChatConfig, ChatRenderer
from miles_core.contracts.rendering import Renderer
from miles_core.errors import MissingExtraError, TemplateError
from miles_core.records import Message

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

QWEN2 = """{%- if tools %}
    {{- 'tools' }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Cuts the thinking of turns before the last question: rendered anew, a conversation is not append-only.
QWEN3 = """{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.found and message.role == "user" %}
        {%- set ns.found = true %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + (message.content | tojson) + "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

MISTRAL = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{% if message['role'] == 'user' %}\
{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] + eos_token}}{% endgeneration %}{% else %}{% continue %}{% endif %}{% endfor %}"""

# Passes over what it does not know; ends turns in plain text.
PLAIN = """{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}
{% elif m.role == 'assistant' %}Bot: {{ m.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}Bot: {% endif %}"""

TEMPLATES = {"chatml": CHATML, "qwen2": QWEN2, "qwen3": QWEN3, "llama3": LLAMA3, "mistral": MISTRAL, "plain": PLAIN}
ENDS = {"chatml": "<|im_end|>", "qwen2": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>"}
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
NOW = datetime.datetime(2026, 2, 3)

TEXTS = st.text(st.sampled_from("abc é日\n '\"{}%<>|/"), max_size=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level BPE with a few merges over line breaks and spaces: joints in the wrong place would show."""
    path = tmp_path_factory.mktemp("bpe")
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ċ", "Ċ"), ("a", "b"), ("Ġ", "a"), ("ab", "c"), ("U", "s"), (":", "Ġ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return hf_tokenizer.load(folder)


@pytest.fixture(scope="module")
def oracle(folder):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)

    def render(name, messages, opens, **arguments):
        plain = [{"role": m.role, "content": m.content} for m in messages]
        return theirs.apply_chat_template(
            plain, chat_template=TEMPLATES[name], add_generation_prompt=opens, tokenize=False, **arguments
        )

    return render


def make(tokenizer, name, **options):
    return ChatRenderer(tokenizer, TEMPLATES[name], now=NOW, **options)


def user(text):
    return Message(role="user", content=text)


def assistant(text):
    return Message(role="assistant", content=text)


@pytest.mark.parametrize("name", ["chatml", "qwen2", "qwen3", "mistral", "plain"])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_prompts_are_what_transformers_prints(name, tokenizer, oracle, data):
    turns = [user(data.draw(TEXTS))]
    for _ in range(data.draw(st.integers(0, 2))):
        turns += [assistant(data.draw(TEXTS)), user(data.draw(TEXTS))]
    renderer = make(tokenizer, name)
    assert renderer.prompt(tuple(turns)) == tokenizer.encode(oracle(name, turns, True))
    assert isinstance(renderer, Renderer)


# Templates that print a turn the same whatever follows it: here a continuation must equal a fresh rendering.
@pytest.mark.parametrize("name", ["chatml", "qwen2", "mistral"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_continuation_is_what_a_fresh_rendering_is(name, tokenizer, oracle, data):
    renderer = make(tokenizer, name)
    turns = [user(data.draw(TEXTS))]
    ids = renderer.prompt(tuple(turns))
    drifted = False
    for _ in range(data.draw(st.integers(1, 3))):
        said = data.draw(TEXTS)
        sampled = tokenizer.encode(said)
        if data.draw(st.booleans(), label="stopped"):
            sampled.append(renderer.stop_ids[0])
        new = [user(data.draw(TEXTS))]
        if name == "qwen2":
            new = data.draw(
                st.sampled_from([new, [Message(role="tool", content="4"), Message(role="tool", content="5")]])
            )
        turns += [assistant(said), *new]
        ids = ids + sampled
        ids = ids + renderer.extend(ids, new)
        fresh = oracle(name, turns, True)
        assert tokenizer.decode(ids, skip_special=False) == fresh
        # A line break that was sampled first would, rendered anew, merge with the template's own: what was sampled
        # stays. Everything else has the very same ids.
        drifted = drifted or said.startswith("\n")
        assert drifted or ids == tokenizer.encode(fresh)


@pytest.mark.parametrize("name", TEMPLATES)
def test_stop_ids(name, tokenizer):
    end = tokenizer.encode(ENDS.get(name, "</s>"))
    assert list(make(tokenizer, name).stop_ids) == list(dict.fromkeys([*end, *tokenizer.encode("</s>")]))


def test_thinking_stays_in_what_was_sampled(tokenizer, oracle):
    renderer = make(tokenizer, "qwen3")
    before = renderer.prompt("a") + tokenizer.encode("<think>\nb\n</think>\n\nc<|im_end|>")
    after = renderer.extend(before, [user("d")])
    text = tokenizer.decode(before + after, skip_special=False)
    assert text == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\nb\n</think>\n\nc<|im_end|>\n"
        "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
    )
    fresh = oracle("qwen3", [user("a"), assistant("<think>\nb\n</think>\n\nc"), user("d")], True)
    assert "<think>" not in fresh  # the template itself would have cut it, and the prefix would have changed


def test_template_arguments(tokenizer):
    renderer = make(tokenizer, "qwen3", arguments={"enable_thinking": False})
    opening = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.decode(renderer.prompt("a"), skip_special=False).endswith(opening)
    after = renderer.extend([*renderer.prompt("a"), renderer.stop_ids[0]], [user("b")])
    assert tokenizer.decode(after, skip_special=False) == f"\n<|im_start|>user\nb<|im_end|>\n{opening}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_a_turn_is_added_once(name, tokenizer):
    renderer = make(tokenizer, name)
    cut_off = renderer.prompt("q") + tokenizer.encode("ab")
    ended = [*cut_off, renderer.stop_ids[0]]
    whole, rest = renderer.extend(cut_off, [user("r")]), renderer.extend(ended, [user("r")])
    if name == "plain":  # its turns end in text, which follows whether or not the model sampled the end token
        assert whole == rest == tokenizer.encode("\nUser: r\nBot: ")
    else:
        assert whole == [renderer.stop_ids[0], *rest]


def test_another_stop_token_leaves_the_templates_own(tokenizer):
    renderer = make(tokenizer, "chatml")
    before = renderer.prompt("q") + tokenizer.encode("ab</s>")
    assert renderer.extend(before, [user("r")]) == renderer.extend(before[:-1], [user("r")])


def test_nothing_new(tokenizer):
    renderer = make(tokenizer, "chatml")
    before = renderer.prompt("q") + tokenizer.encode("ab")
    assert renderer.extend(before, []) == []
    opened = renderer.extend([*before, renderer.stop_ids[0]], [])
    assert tokenizer.decode(opened, skip_special=False) == "\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", TEMPLATES)
def test_demonstrations_train_the_assistant_and_its_end(name, tokenizer):
    renderer = make(tokenizer, name)
    ids, mask = renderer.demonstration("q", "ab é")
    prompt = renderer.prompt("q")
    end = renderer.stop_ids[0]
    assert ids == prompt + tokenizer.encode("ab é") + [end]
    assert mask == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    several, mask = renderer.demonstration(
        (user("q"),), (assistant("a"), user("r"), assistant("bc"), user("unanswered"))
    )
    marked = [i for i, m in zip(several, mask, strict=True) if m]
    assert marked == [*tokenizer.encode("a"), end, *tokenizer.encode("bc"), end]
    first = [*prompt, *tokenizer.encode("a"), end]
    assert several == [*first, *renderer.extend(first, [user("r")]), *tokenizer.encode("bc"), end]
    assert len(several) == len(mask)


def test_demonstrations_of_two_turns_in_a_row(tokenizer):
    renderer = make(tokenizer, "chatml")
    ids, mask = renderer.demonstration("q", (assistant("a"), assistant("b")))
    text = "a<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    assert tokenizer.decode(ids, skip_special=False).endswith(text)
    assert sum(mask) == 4


def test_dates_are_fixed(tokenizer):
    text = tokenizer.decode(make(tokenizer, "llama3").prompt("q"), skip_special=False)
    assert text.startswith("<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 03 Feb 2026<|eot_id|>")
    with pytest.raises(ValueError, match="2026-99"):
        ChatConfig(date="2026-99")


def test_json_escaped_tool_answers_are_shown(tokenizer):
    renderer = make(tokenizer, "llama3")
    before = [*renderer.prompt("q"), renderer.stop_ids[0]]
    told = tokenizer.decode(renderer.extend(before, [Message(role="tool", content='é "x"')]), skip_special=False)
    assert '"é \\"x\\""<|eot_id|>' in told


def test_a_hidden_message_is_an_error(tokenizer):
    renderer = make(tokenizer, "plain")
    with pytest.raises(TemplateError, match="leaves out a message of role 'tool'"):
        renderer.extend(renderer.prompt("q"), [Message(role="tool", content="result")])


def test_content_that_looks_like_the_stand_in(tokenizer):
    renderer = make(tokenizer, "chatml")
    said = f"{chat.STAND_IN} {chat.STAND_IN}x"
    before = [*renderer.prompt("q"), renderer.stop_ids[0]]
    after = tokenizer.decode(renderer.extend(before, [user(said)]), skip_special=False)
    assert after == f"\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"


def test_text_and_system(tokenizer):
    renderer = make(tokenizer, "chatml", system="be brief")
    assert tokenizer.decode(renderer.prompt("q"), skip_special=False).startswith(
        "<|im_start|>system\nbe brief<|im_end|>"
    )
    sampled = tokenizer.encode("ab<think>c</think><|im_end|>")
    assert renderer.text(sampled) == "ab<think>c</think>"
    assert renderer.parse(sampled) == assistant("ab<think>c</think>")


def test_refusals(tokenizer):
    with pytest.raises(TemplateError, match="roles user, user: Conversation roles must alternate"):
        make(tokenizer, "mistral").prompt((user("a"), user("b")))
    with pytest.raises(TemplateError, match="ends with an assistant's turn"):
        make(tokenizer, "chatml").prompt((user("a"), assistant("b")))
    with pytest.raises(TemplateError, match="is empty"):
        make(tokenizer, "chatml").prompt(())
    with pytest.raises(TemplateError, match="is no Jinja, line 2"):
        ChatRenderer(tokenizer, "{{ 1 }}\n{% if %}")
    with pytest.raises(TemplateError, match="does not print an assistant's message"):
        ChatRenderer(tokenizer, "nothing")
    bare = CharsTokenizer("ab")
    bare.eos_ids = ()
    with pytest.raises(TemplateError, match="which token ends a turn"):
        ChatRenderer(bare, "{% for m in messages %}a{{ m.content }}b{% endfor %}")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_the_sandbox(tokenizer, attack):
    with pytest.raises(TemplateError, match="cannot render"):
        ChatRenderer(tokenizer, attack + CHATML)


def test_the_sandbox_hides_the_inside_of_its_globals(tokenizer):
    renderer = ChatRenderer(tokenizer, "<{{ raise_exception.__globals__ }}>" + CHATML)
    assert tokenizer.decode(renderer.prompt("q"), skip_special=False).startswith("<><|im_start|>")


def build(tokenizer, config=None, folder=None):
    model = SimpleNamespace(asked="./tiny")
    run = SimpleNamespace(run=SimpleNamespace(folder=str(folder) if folder else None))
    context = SimpleNamespace(tokenizer=tokenizer, model=model, run=run)
    return chat.miles_renderer().build(config or ChatConfig(), context)


def test_build(tokenizer, tmp_path):
    with pytest.raises(
        TemplateError, match=r"tokenizer of model './tiny' has no chat template\nFix: use an instruction"
    ):
        build(tokenizer)
    (tmp_path / "t.jinja").write_text(CHATML)
    config = ChatConfig(template="t.jinja", date="2026-02-03")
    assert build(tokenizer, config, tmp_path).prompt("q") == make(tokenizer, "chatml").prompt("q")
    with pytest.raises(TemplateError, match=r"there is no such file; looked at .*no.jinja"):
        build(tokenizer, ChatConfig(template="no.jinja"), tmp_path)
    own = SimpleNamespace(**{n: getattr(tokenizer, n) for n in dir(tokenizer) if not n.startswith("__")})
    own.chat_template = QWEN2
    assert build(own).prompt("q") == make(tokenizer, "qwen2").prompt("q")


def test_jinja_is_an_extra(tokenizer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'miles-core\[render\]'"):
        make(tokenizer, "chatml")
