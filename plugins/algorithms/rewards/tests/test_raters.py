"""`format`, `group-reward` and `reward-model`: what they see of an answer, and how they fail."""

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
from miles_algo_rewards import config as c
from miles_algo_rewards.conformance import tiny_model
from miles_algo_rewards.items import Item, Rater, turns_of
from miles_algo_rewards.model import ModelRater, batches
from miles_algo_rewards.raters import Format, GroupFunction, load

from miles_core.errors import CapabilityError, ConfigError, RewardError
from miles_core.records import Message, Task, Trajectory
from miles_core.testing.suites.batches import trajectory
from miles_core.testing.toys.rendering import ToyRenderer, ToyTokenizer

TOKENIZER = ToyTokenizer()
RENDERER = ToyRenderer(TOKENIZER)


def said(name, text, prompt="1>"):
    return trajectory(name, TOKENIZER.encode(prompt), TOKENIZER.encode(text))


def item(text, group="g", name="g/0/0", prompt="?"):
    return Item(id=name, group=group, text=text, finish="stop", prompt=prompt)


def rate(rater, items):
    return asyncio.run(_list(rater, items))


async def _list(rater, items):
    return list(await rater(items))


# --- what a rater sees -----------------------------------------------------------------------------------------------


def seen_by(turns, trajectories, tasks=()):
    seen = []

    async def remember(items):
        seen.extend(items)
        return [0.0] * len(items)

    asyncio.run(Rater("r", remember, RENDERER, turns).score(trajectories, ["r.reward"], tasks))
    return seen


def two_turns():
    tokens = np.array(TOKENIZER.encode("1>22>34"), np.int32)
    origin = np.array([0, 0, 1, 1, 2, 1, 1], np.uint8)
    columns = {"tokens": tokens, "origin": origin, "trainable": origin == 1}
    return Trajectory(id="e:train:0#1/3/0", length=7, columns=columns)


def test_an_item_is_the_answer_with_its_task():
    task = Task(id="e:train:0", prompt=(Message(role="user", content="1>"),), answer="2", metadata={"level": 3})
    [one] = seen_by(c.Turns.last, [two_turns()], [task])
    assert (one.text, one.group, one.id, one.task) == ("34", "e:train:0#1", "e:train:0#1/3/0", "e:train:0")
    assert one.plain() == {
        "id": one.id,
        "group": one.group,
        "task": "e:train:0",
        "text": "34",
        "finish": "stop",
        "answer": "2",
        "prompt": [{"role": "user", "content": "1>"}],
        "metadata": {"level": 3},
    }


def test_without_a_task_the_prompt_is_what_its_tokens_say():
    [one] = seen_by(c.Turns.all, [two_turns()])
    assert one.text == "22\n34" and one.prompt == "1>" and one.answer is None
    assert turns_of(two_turns()) == [TOKENIZER.encode("22"), TOKENIZER.encode("34")]


def test_an_answer_without_tokens_is_an_empty_text():
    assert [i.text for i in seen_by(c.Turns.last, [said("g/0/0", "")])] == [""]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "1"])
def test_what_is_no_finite_number_is_refused_by_name(reward):
    async def odd(items):
        return [1.0, reward]

    rater = Rater("r", odd, RENDERER, c.Turns.last)
    with pytest.raises(RewardError, match=r"the scorer 'r' gave .* as the reward of 'g/1/0'"):
        asyncio.run(rater.score([said("g/0/0", "1"), said("g/1/0", "2")], ["r.reward"]))


def test_a_wrong_count_and_another_column():
    async def none(items):
        return []

    rater = Rater("r", none, RENDERER, c.Turns.last)
    with pytest.raises(RewardError, match="0 rewards for 1 answers"):
        asyncio.run(rater.score([said("g/0/0", "1")], ["r.reward"]))
    with pytest.raises(CapabilityError, match=r"'teacher\.logprobs' is something else"):
        asyncio.run(rater.score([said("g/0/0", "1")], ["teacher.logprobs"]))


# --- format ----------------------------------------------------------------------------------------------------------


def test_format():
    answers = [item("<answer>4</answer>"), item("so\n<answer>4</answer>"), item("4")]
    assert rate(Format(c.FormatConfig(pattern="<answer>.*</answer>")), answers) == [0.0, 0.0, -1.0]
    full = c.FormatConfig(pattern="<answer>.*</answer>", match=c.Whole.full, right=2.0, wrong=0.5)
    assert rate(Format(full), answers) == [2.0, 0.5, 0.5]


# --- a function of the whole group -----------------------------------------------------------------------------------


def written(tmp_path, code):
    (tmp_path / "judge.py").write_text(code)
    return [tmp_path]


def group_rater(tmp_path, code, name="judge.py:judge", **options):
    return GroupFunction(c.GroupRewardConfig(function=name, **options), written(tmp_path, code))


def test_a_function_sees_all_answers_of_a_group_at_once(tmp_path):
    rater = group_rater(tmp_path, "def judge(texts, prompt):\n    return [len(texts) + len(t) / 10 for t in texts]\n")
    answers = [item("a", "g"), item("bb", "h"), item("ccc", "g")]  # groups may be mixed: order is kept
    assert rate(rater, answers) == pytest.approx([2.1, 1.2, 2.3])


def test_a_coroutine_judges_groups_side_by_side(tmp_path):
    code = """
import asyncio
inside = most = 0
async def judge(texts, **anything):
    global inside, most
    inside += 1
    most = max(most, inside)
    await asyncio.sleep(0.01)
    inside -= 1
    return [most] * len(texts)
"""
    rater = group_rater(tmp_path, code, concurrency=3)
    assert max(rate(rater, [item("a", f"g{i}") for i in range(9)])) == 3


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def judge(texts): return [1.0]", r"gave 1 rewards for 2 answers \(group 'g'\)"),
        ("def judge(texts): return 1.0", r"gave 1.0, not a list of numbers"),
        ("def judge(texts): raise KeyError('x')", "failed: KeyError: 'x'"),
        ("async def judge(texts): raise KeyError('x')", "failed: KeyError: 'x'"),
        ("def judge(texts): raise StopIteration", "failed: RuntimeError"),
    ],
)
def test_a_function_that_fails_is_named_with_its_group(tmp_path, code, message):
    with pytest.raises(RewardError, match=message):
        rate(group_rater(tmp_path, code), [item("a"), item("b")])


@pytest.mark.parametrize(
    "code",
    [
        "import time\ndef judge(texts): time.sleep(1)",
        "import asyncio\nasync def judge(texts): await asyncio.sleep(1)",
    ],
)
def test_a_function_that_hangs_is_left_behind(tmp_path, code):
    with pytest.raises(RewardError, match=r"gave nothing within 0.05 s"):
        rate(group_rater(tmp_path, code, deadline_s=0.05), [item("a")])
    assert all(t.daemon for t in threading.enumerate() if t.name == "miles-algo-rewards")  # it holds no process


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("", "judge.py:judge", "has no function 'judge'"),
        ("def other(texts): ...", "judge.py:judge", "has no function 'judge'"),
        ("def judge(text): ...", "judge.py:judge", "asks for 'text', which is not offered"),
        ("def judge(texts, /): ...", "judge.py:judge", "asks for 'texts', which is not offered"),
        ("import nothing_like_this", "judge.py:judge", "its import fails: ModuleNotFoundError"),
        ("x = 1 / 0", "judge.py:judge", "its import fails: ZeroDivisionError"),
        ("", "nowhere.py:judge", "no such file or module; looked at .*nowhere.py"),
        ("", "nothing_like_this:judge", "no such file or module; looked at .*nothing_like_this.py"),
    ],
)
def test_a_function_that_cannot_be_had_is_found_before_the_run(tmp_path, code, name, message):
    with pytest.raises(ConfigError, match=message):
        load(name, written(tmp_path, code))


def test_a_function_comes_from_a_file_by_module_name_or_from_an_installed_module(tmp_path):
    assert load("judge:judge", written(tmp_path, "def judge(texts): return texts"))(["a"]) == ["a"]
    assert load("miles_algo_rewards.conformance:distinct", [tmp_path])(["a", "b", "a"]) == [0.0, 1.0, 0.0]


# --- reward model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    name = tmp_path_factory.mktemp("models")
    tiny_model(name / "one")
    tiny_model(name / "three", labels=3)
    return name


def model(folder, source="one", **options):
    return ModelRater(c.RewardModelConfig(source=source, **options), [Path("/nowhere"), folder])


def test_the_model_rates_whatever_is_beside_an_answer_and_in_any_order(folder):
    answers = [item(t, prompt=p) for t, p in (("4", "2+2"), ("a longer answer", "why?"), ("", "x"), ("4", "3+1"))]
    wide, narrow = model(folder), model(folder, batch_tokens=1)
    together, alone = rate(wide, answers), rate(narrow, answers)
    assert together == pytest.approx(alone, abs=1e-5) and len(set(together)) == 4
    assert rate(wide, answers) == together  # to the bit
    assert rate(wide, answers[::-1])[::-1] == together  # to the bit, too: batches are made of the sorted inputs


def test_the_same_answers_meet_in_the_same_batches(folder, monkeypatch):
    answers = [item(t, prompt="?") for t in ("4", "a longer answer", "", "5", "33", "another long one")]
    made, met = model(folder, batch_tokens=24), []
    forward = made._forward
    monkeypatch.setattr(made, "_forward", lambda rows: met.append(rows) or forward(rows))
    rate(made, answers)
    first, met[:] = list(met), []
    rate(made, answers[::-1])
    assert met == first and [len(rows) for rows in first] == [4, 1, 1]


def test_what_pads_a_batch_is_seen_by_no_answer(folder, tmp_path):
    """A bidirectional classifier would look at it."""
    import shutil

    import torch
    from transformers import BertConfig, BertForSequenceClassification

    shutil.copytree(folder / "one", tmp_path / "bert", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=97, max_position_embeddings=64, pad_token_id=0, num_labels=1, **shape)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    answers = [item(t, prompt="?") for t in ("4", "a longer answer", "", "33")]
    together = rate(model(tmp_path, "bert"), answers)
    assert together == pytest.approx(rate(model(tmp_path, "bert", batch_tokens=1), answers), abs=1e-6)
    assert len({round(r, 6) for r in together}) == 4


def test_the_model_by_hand(folder):
    """The number is the classifier's own, at the last token of prompt and answer."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "three")
    classifier = AutoModelForSequenceClassification.from_pretrained(folder / "three").eval()
    ids = tokenizer("2+2", "4", return_tensors="pt")
    with torch.no_grad():
        logits = classifier(input_ids=ids["input_ids"]).logits[0]
    answer = [item("4", prompt="2+2")]
    assert rate(model(folder, "three", label=2), answer)[0] == pytest.approx(float(logits[2]), abs=1e-6)
    probability = model(folder, "three", label=1, output=c.Output.probability, scale=10.0)
    assert rate(probability, answer)[0] == pytest.approx(10 * float(logits.softmax(-1)[1]), abs=1e-5)
    sigmoid = model(folder, output=c.Output.probability)
    assert rate(sigmoid, answer)[0] == pytest.approx(1 / (1 + np.exp(-rate(model(folder), answer)[0])), abs=1e-6)


def test_a_chat_template_is_used_where_there_is_one(folder, tmp_path):
    import shutil

    shutil.copytree(folder / "one", tmp_path / "chat")
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    (tmp_path / "chat" / "chat_template.jinja").write_text(template)
    plain, chat = model(folder), model(tmp_path, "chat")
    text = chat._tokenizer.decode(chat.ids(item("4", prompt="2")), skip_special_tokens=False).replace(" ", "")
    assert text == "u:2;a:4;"
    messages = (Message(role="system", content="s"), Message(role="user", content="2"))
    text = chat._tokenizer.decode(chat.ids(item("4", prompt=messages))).replace(" ", "")
    assert text == "s:s;u:2;a:4;" and len(plain.ids(item("4", prompt=messages))) == 4


def test_a_long_input_loses_its_beginning(folder):
    most = model(folder, max_tokens=5)
    assert most.ids(item("12345", prompt="abc")) == model(folder).ids(item("12345", prompt="abc"))[-5:]
    assert len(model(folder).ids(item("1" * 200))) == 64  # what the model takes


def test_batches_by_padded_tokens():
    assert batches([1, 2, 3, 3, 9], 9) == [[0, 1, 2], [3], [4]]
    assert batches([5, 6], 1) == [[0], [1]] and batches([], 9) == []


def test_models_that_cannot_rate_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"no config.json; looked at /nowhere/none"):
        model(folder, "none")
    with pytest.raises(ConfigError, match=r"label is 1, and the reward model .* has 1 outputs"):
        model(folder, label=1)
    import shutil

    from transformers import AutoModelForSequenceClassification, LlamaForCausalLM

    shutil.copytree(folder / "one", tmp_path / "lm")
    config = AutoModelForSequenceClassification.from_pretrained(folder / "one").config
    LlamaForCausalLM(config).save_pretrained(tmp_path / "lm")
    with pytest.raises(ConfigError, match=r"lacks score.weight: it would be a guess"):
        model(tmp_path, "lm")
