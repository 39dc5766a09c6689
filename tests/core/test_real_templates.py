"""Demonstrations of several turns through the chat templates of real models: what is trained, and what is only read.

SmolLM2's template is written here; those of Qwen3 and Qwen3.5 are shipped by miles-tito-tokenizers (Apache-2.0), in the
form that a conversation is only ever appended to. The oracle of what a template prints is transformers.
"""

from importlib.metadata import PackageNotFoundError, distribution

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from miles_core.builtin import hf_tokenizer
from miles_core.builtin.chat import ChatRenderer
from miles_core.errors import TemplateError
from miles_core.records import Message

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHIPPED = {"qwen3": "qwen3_fixed", "qwen3.5": "qwen3.5_fixed"}
PLAIN = {"enable_thinking": False}


def template(name):
    if name == "smollm2":
        return SMOLLM2
    try:
        folder = distribution("miles-tito-tokenizers").locate_file("miles_tito_tokenizers/templates")
    except PackageNotFoundError:
        pytest.skip("miles-tito-tokenizers, which ships this template, is not installed")
    return (folder / f"{SHIPPED[name]}.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level tokenizer with the special tokens of ChatML and of thinking."""
    path = tmp_path_factory.mktemp("bytes")
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"ĊĊ": 256}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>", "<tool_response>", "</tool_response>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        '{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    return path


@pytest.fixture(scope="module")
def oracle(folder):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)

    def render(name, messages, opens, **arguments):
        plain = [{"role": m.role, "content": m.content} for m in messages]
        return theirs.apply_chat_template(
            plain, chat_template=template(name), add_generation_prompt=opens, tokenize=False, **arguments
        )

    return render


def make(folder, name, **arguments):
    return ChatRenderer(hf_tokenizer.load(folder), template(name), arguments=arguments)


def told(*turns):
    return tuple(Message(role=role, content=content) for role, content in turns)


def runs(renderer, ids, mask):
    """The text in runs of equal mask: (trained?, text)."""
    found: list[tuple[bool, list[int]]] = []
    for token, trained in zip(ids, mask, strict=True):
        if not found or found[-1][0] != trained:
            found.append((trained, []))
        found[-1][1].append(token)
    return [(trained, renderer.tokenizer.decode(part, skip_special=False)) for trained, part in found]


QUESTION = told(("system", "Be brief."), ("user", "2+2?"))
ANSWERS = told(("assistant", "4"), ("user", "and 3+3?"), ("assistant", "6.\n"), ("user", "thanks"), ("assistant", "é"))
ALL = [("smollm2", {}), ("qwen3", {}), ("qwen3", PLAIN), ("qwen3.5", PLAIN)]


@pytest.mark.parametrize(("name", "arguments"), ALL)
def test_only_the_assistants_turns_and_their_ends_are_trained(name, arguments, folder):
    renderer = make(folder, name, **arguments)
    ids, mask = renderer.demonstration(QUESTION, ANSWERS)
    said = [text for trained, text in runs(renderer, ids, mask) if trained]
    want = ["4<|im_end|>", "6.\n<|im_end|>", "é<|im_end|>"]
    if name == "qwen3.5":  # trims what is told
        want[1] = "6.<|im_end|>"
    assert said == want
    assert mask[-1] and not any(mask[: len(renderer.prompt(QUESTION))])


@pytest.mark.parametrize(("name", "arguments"), ALL)
def test_the_rest_is_what_sampling_would_have_read(name, arguments, folder):
    """Turn by turn: the prompt, the answer, what the template puts behind it."""
    renderer = make(folder, name, **arguments)
    ids, mask = renderer.demonstration(QUESTION, ANSWERS)
    end = renderer.stop_ids[0]
    built = renderer.prompt(QUESTION)
    for index, turn in enumerate(ANSWERS):
        if turn.role == "assistant":
            start = len(built)
            built += [*ids[start : ids.index(end, start)], end]
            assert all(mask[start : len(built)])
        else:
            more = renderer.extend(built, ANSWERS[index : index + 1])
            assert not any(mask[len(built) : len(built) + len(more)])
            built += more
    assert built == ids


def test_smollm2_and_transformers_print_the_same_conversation(folder, oracle):
    renderer = make(folder, "smollm2")
    ids, _ = renderer.demonstration(QUESTION, ANSWERS)
    text = renderer.tokenizer.decode(ids, skip_special=False)
    assert text + "\n" == oracle("smollm2", QUESTION + ANSWERS, False)
    alone, _ = renderer.demonstration("2+2?", "4")
    assert renderer.tokenizer.decode(alone, skip_special=False).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    )


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
@pytest.mark.parametrize("arguments", [{}, PLAIN])
def test_qwens_last_turn_is_the_templates_own(name, arguments, folder, oracle):
    """Of one turn, prompt and answer are what the template prints: with its empty thinking where it opens with one."""
    if (name, arguments) == ("qwen3", {}):
        return  # it leaves the beginning to the model: see below
    renderer = make(folder, name, **arguments)
    for answer in ("4", "<think>\nTwo and two.\n</think>\n\n4"):
        if "think" in answer and arguments:
            continue  # see below: such an answer cannot follow an empty thinking
        ids, mask = renderer.demonstration(QUESTION, answer)
        text = renderer.tokenizer.decode(ids, skip_special=False)
        assert text + "\n" == oracle(name, QUESTION + told(("assistant", answer)), False, **arguments)
        opening = oracle(name, QUESTION, True, **arguments)
        assert text.startswith(opening) and runs(renderer, ids, mask)[0] == (False, opening)


def test_thinking_that_the_template_opens_is_gone_on_with_and_closed(folder):
    renderer = make(folder, "qwen3.5")
    thought = "<think>\nTwo and two.\n</think>\n\n4"
    turns = told(("assistant", thought), ("user", "sure?"), ("assistant", "yes"))
    said = runs(renderer, *renderer.demonstration("2+2?", turns))
    assert [text for trained, text in said if trained] == [
        "Two and two.\n</think>\n\n4<|im_end|>",
        "\n</think>\n\nyes<|im_end|>",
    ]
    assert all(text.endswith("<|im_start|>assistant\n<think>\n") for trained, text in said if not trained)


def test_qwen3_leaves_the_beginning_to_the_demonstration(folder):
    renderer = make(folder, "qwen3")
    for answer in ("4", "<think>\nTwo and two.\n</think>\n\n4"):
        said = runs(renderer, *renderer.demonstration("2+2?", answer))
        assert said[-1] == (True, f"{answer}<|im_end|>") and said[-2][1].endswith("<|im_start|>assistant\n")


def test_thinking_behind_an_empty_thinking_is_refused(folder):
    renderer = make(folder, "qwen3.5", **PLAIN)
    with pytest.raises(TemplateError, match="begins every answer with '<think>") as found:
        renderer.demonstration("2+2?", "<think>\nTwo and two.\n</think>\n\n4")
    assert "enable_thinking" in str(found.value.fix)


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
def test_tools_answers_are_read_and_not_trained(name, folder):
    renderer = make(folder, name, **PLAIN)
    turns = told(("assistant", "call"), ("tool", "42"), ("assistant", "it is 42"))
    said = runs(renderer, *renderer.demonstration("?", turns))
    assert [text for trained, text in said if trained] == ["call<|im_end|>", "it is 42<|im_end|>"]
    assert "<tool_response>\n42\n</tool_response>" in said[-2][1]


def test_a_template_that_drops_what_it_opened_takes_demonstrations_that_begin_alike(folder):
    """As reasoning models have it whose template cuts all thinking: the opening has it, no printed answer does."""
    cut = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    renderer = ChatRenderer(hf_tokenizer.load(folder), cut)
    said = runs(renderer, *renderer.demonstration("2+2?", "<think>\nfour\n</think>4"))
    assert said[-1] == (True, "four\n</think>4<|im_end|>") and said[-2][1].endswith("assistant\n<think>\n")
    with pytest.raises(TemplateError, match="does not go on from there: '4'"):
        renderer.demonstration("2+2?", "4")
