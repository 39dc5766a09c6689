"""Every data set of reasoning-gym, three items each: made, split, judged."""

import asyncio
from types import SimpleNamespace

import pytest
from miles_env_reasoning_gym.config import ReasoningGymConfig
from miles_env_reasoning_gym.environment import UNSOUND, ReasoningGym, VerifierError
from reasoning_gym.factory import DATASETS

from miles_core.config.binding import bind

#: They ask for any solution and hand out none; their verifiers check what is proposed.
WITHOUT_REFERENCE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
#: Their verifiers raise on an answer of words (`unjudged: zero` is for these).
RAISING = {"prime_factorization"}


def judged(environment, task, text):
    try:
        return asyncio.run(environment.score(task, SimpleNamespace(text=text, finish="stop"))).reward
    except VerifierError as error:
        return str(error)


@pytest.mark.slow
def test_every_data_set_makes_and_judges_items():
    names = sorted(set(DATASETS) - {"composite"})
    assert len(names) >= 105
    odd = {}
    kept = []  # the children are shared by all
    for name in names:
        options = {"dataset": name, "extract": ["whole"], "unsound": name in UNSOUND, "max_answer_chars": 10**6}
        environment = ReasoningGym(bind(ReasoningGymConfig, options, "env"), name="rg", seed=3)
        kept.append(environment)
        environment.check()
        tasks = [environment.tasks("train").task(i) for i in range(3)]
        found = []
        if [t.answer is None for t in tasks] != [name in WITHOUT_REFERENCE] * 3:
            found.append(f"references {[t.answer for t in tasks]}")
        if len({t.prompt for t in tasks}) < 2:
            found.append("one question only")
        right = [judged(environment, t, t.answer) for t in tasks if t.answer]
        if any(reward != 1.0 for reward in right):
            found.append(f"own answers earn {right}")
        wrong = [judged(environment, t, "certainly no answer") for t in tasks]
        if name not in UNSOUND and any(isinstance(w, str) != (name in RAISING) for w in wrong):
            found.append(f"wrong answers: {wrong}")
        if name not in UNSOUND | dict.fromkeys(RAISING) and any(w > 0.2 for w in wrong):
            found.append(f"wrong answers earn {wrong}")
        if found:
            odd[name] = found
    assert not odd
