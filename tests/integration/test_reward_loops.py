"""Whole loops whose reward is composed: of a scorer asked in the learner, of a function of the group, of ranks."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from miles_core.errors import CombinationError, LearnerError, RewardError

SHORT = ("run.steps=4", "schedule.groups_per_step=4", "schedule.group_size=4")


def test_a_format_penalty_is_learned_beside_the_reward(toy):
    """The environment rewards the right digit; the scorer asks for a 7 at the end. With base 0 only that counts."""
    ran = toy(
        "run.steps=40",
        "optimizer.lr=0.3",
        "scorers={seven: {use: format, pattern: '7'}}",
        "algorithm.penalties={mix: {use: compose, base: 0.0, weights: {seven.reward: 1.0}}}",
    )
    asked, told = ran.curve("rollout/reward_penalised"), ran.curve("train/mix/seven")
    assert asked == pytest.approx(told) and all(-1 <= x <= 0 for x in asked)
    assert sum(asked[-5:]) / 5 > sum(asked[:5]) / 5 + 0.3
    assert len(ran.curve("rollout/reward.mix")) == 40


def test_a_function_of_the_group_and_repeats(toy):
    Path("judge.py").write_text("def judge(texts, task):\n    return [float(texts.count(t) == 1) for t in texts]\n")
    ran = toy(
        *SHORT,
        "scorers={lone: {use: group-reward, function: 'judge.py:judge'}}",
        "algorithm.penalties={repeats: {use: duplicates, weight: 1.0}, lone: {use: rank, of: lone.reward}}",
    )
    assert len(ran.curve("rollout/reward.repeats")) == 4 == len(ran.curve("rollout/reward.lone"))
    assert all(-1 <= x <= 0 for x in ran.curve("rollout/reward.repeats"))
    assert all(x == pytest.approx(0.5) for x in ran.curve("rollout/reward.lone"))  # ranks average one half


class Service(BaseHTTPRequestHandler):
    broken = 0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).broken -= 1
        status = 503 if type(self).broken >= 0 else 200
        content = json.dumps({"rewards": [float(len(item["text"])) for item in body["items"]]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


def test_a_service_rates_every_step_and_may_fail_in_between(toy, url):
    Service.broken = 2
    ran = toy(
        *SHORT,
        f"scorers={{judge: {{use: http-reward, url: '{url}', backoff_s: 0.001}}}}",
        "algorithm.penalties={mix: {use: compose, weights: {judge.reward: 0.1}}}",
    )
    assert ran.status == "finished" and len(ran.curve("train/mix/judge")) == 4 and Service.broken == -4  # 2 of 6


def test_a_service_that_stays_broken_stops_the_run_with_its_address(toy, url):
    Service.broken = 1000
    with pytest.raises(RewardError, match=f"the reward service {url} did not rate .* in 2 attempts: status 503"):
        toy(
            *SHORT,
            f"scorers={{judge: {{use: http-reward, url: '{url}', backoff_s: 0.001, retries: 1}}}}",
            "algorithm.penalties={mix: {use: compose, weights: {judge.reward: 0.1}}}",
        )


def test_a_scorer_that_is_not_in_the_run(toy):
    with pytest.raises(CombinationError, match=r"needs column 'judge.reward', and nothing writes it"):
        toy(*SHORT, "algorithm.penalties={mix: {use: compose, weights: {judge.reward: 0.1}}}")


def test_a_component_that_nobody_reports(toy):
    with pytest.raises(LearnerError, match="no episode reports the component 'tydy'"):
        toy(*SHORT, "algorithm.penalties={mix: {use: compose, weights: {tydy: 0.1}}}")
