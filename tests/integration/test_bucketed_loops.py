"""The bucketed transport in whole loops: the same bits as the toy transport, in one process and through memory."""

import pytest


def losses(ran):
    return ran.curve("train/loss"), ran.curve("rollout/reward")


@pytest.mark.parametrize("path", ["in_process", "shared_memory"])
def test_same_bits_as_the_toy_transport(toy, path):
    plain = toy("run.steps=4")
    bucketed = toy("run.steps=4", "run.name=bucketed", "sync.use=bucketed", f"sync.path={path}")
    assert losses(plain) == losses(bucketed)
    carried = bucketed.events("weights_carried")
    assert len(carried) == 5 and not any(event["alias"] for event in carried)


def test_a_trainer_and_samplers_in_processes_of_their_own(toy):
    plain = toy("run.steps=3")
    spread = toy(
        "run.steps=3",
        "run.name=spread",
        "sync.use=bucketed",
        "launcher=toy-processes",
        "rollout={use: toy-socket, max_new_tokens: 2}",
        "schedule.samplers=2",
    )
    assert losses(plain) == losses(spread)
