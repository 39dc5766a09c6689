"""Exactly-once: any sequence of moves keeps the books balanced; snapshots; what the history check finds."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from miles_core.admission import limit
from miles_core.cli.accounting import check_history, check_published
from miles_core.config.schema import ScheduleConfig
from miles_core.errors import LedgerError
from miles_core.journal import Frame, Journal, read
from miles_core.ledger import Ledger
from miles_core.records import Episode, Group, Span, Task, Trajectory, Version, group_id
from miles_core.testing.simulation import imbalances

STRICT = ScheduleConfig(groups_per_step=2, group_size=1)


def group_of(lease, number=0):
    columns = {"tokens": np.array([1, lease.position], np.int32), "trainable": np.array([False, True])}
    span = Span(start=1, end=2, version=Version(policy=lease.policy, lineage=0, number=number))
    name = group_id(lease.task.id, lease.attempt)
    leaf = Trajectory(id=f"{name}/0/0", length=2, columns=columns, spans=(span,))
    return Group(
        id=name,
        policy=lease.policy,
        slot=lease.slot,
        attempt=lease.attempt,
        task=lease.task,
        episodes=(Episode(id=f"{name}/0", member=0, trajectories=(leaf,), reward=1.0),),
    )


def take(ledger, policy="main"):
    slot = ledger.next_slot(policy)
    position = ledger.next_position(policy, slot)
    task = Task(id=f"toy:train:{position}", prompt="")
    return ledger.lease(policy, slot=slot, position=position, env="toy", task=task, attempt=0)


def publish(ledger, number, policy="main"):
    ledger.publish(Version(policy=policy, lineage=ledger.lineage, number=number), {}, True)


class Moves(RuleBasedStateMachine):
    """Leases, finishes, drops, returns, training, publications, checkpoints and crashes in any order."""

    def __init__(self):
        super().__init__()
        import tempfile
        from pathlib import Path

        self.place = tempfile.TemporaryDirectory()
        self.folder = Path(self.place.name) / "journal"
        self.journal = Journal(self.folder)
        self.schedule = ScheduleConfig(groups_per_step=2, group_size=1, max_staleness=2, order="ready")
        self.ledger = Ledger(self.journal, {"main": self.schedule})
        self.flying, self.claimed = [], []
        self.saved = None
        self.trained = {}  # group id -> step, in the valid history
        publish(self.ledger, 0)

    def teardown(self):
        self.journal.close()
        self.place.cleanup()

    @property
    def book(self):
        return self.ledger.books["main"]

    @precondition(lambda self: self.ledger.next_slot("main") < limit(self.schedule, self.book.published, 1000))
    @rule()
    def lease(self):
        self.flying.append(take(self.ledger))

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), late=st.booleans())
    def finish(self, data, late):
        lease = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        self.ledger.finish(lease, group_of(lease, self.book.published if late else lease.started_version))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def drop(self, data):
        lease = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        self.ledger.drop(lease, "bad", newest=lease.started_version)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def give_back(self, data):
        lease = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        self.ledger.give_back(lease, "later")
        assert self.ledger.next_position("main", lease.slot) == lease.position

    @rule()
    def train(self):
        step = self.book.consumed
        fresh = [o for o in self.ledger.waiting("main") if step - o.versions[0] <= 2][:2]
        for entry in self.ledger.waiting("main"):
            if step - entry.versions[0] > 2:
                self.ledger.drop(entry.lease, "stale", newest=entry.versions[1])
        if len(fresh) < 2:
            return
        leases = [o.lease for o in fresh]
        for group in self.ledger.claim("main", leases):
            assert group.id not in self.trained, "trained twice"
            self.trained[group.id] = step
        self.ledger.trained("main", step, leases, min(o.versions[0] for o in fresh))
        publish(self.ledger, step + 1)

    @rule()
    def save(self):
        self.saved = json.loads(json.dumps(self.ledger.snapshot()))

    @precondition(lambda self: self.saved)
    @rule()
    def crash(self):
        self.journal.close()
        self.journal = Journal(self.folder)
        self.ledger = Ledger.resume(self.saved, self.journal, {"main": self.schedule})
        self.flying = []
        self.trained = {g: s for g, s in self.trained.items() if s < self.book.consumed}
        publish(self.ledger, self.book.consumed)

    @invariant()
    def balanced(self):
        assert imbalances(self.ledger) == []

    @invariant()
    def proven(self):
        assert check_history(read(self.folder), {"main": self.schedule}) == []


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.fixture
def ledger(tmp_path):
    journal = Journal(tmp_path / "journal")
    made = Ledger(journal, {"main": STRICT})
    publish(made, 0)
    yield made
    journal.close()


def test_ids_slots_and_positions(ledger):
    a, b = take(ledger), take(ledger)
    assert (a.id, a.slot, a.position, a.started_version) == ("main/0.0", 0, 0, 0)
    assert (b.id, b.slot, b.position, b.group) == ("main/0.1", 1, 1, "toy:train:1#0")


def test_replacements_do_not_depend_on_which_drop_came_first():
    """G = 2: slot 0 has positions 0, 2, 4 …, slot 1 has 1, 3, 5 …; what was skipped opens the next batch."""
    ends = []
    for first in (0, 1):
        ledger = Ledger(None, {"main": STRICT})
        publish(ledger, 0)
        leases = {lease.slot: lease for lease in (take(ledger), take(ledger))}
        for slot in (first, 1 - first):
            ledger.drop(leases[slot], "bad", newest=0)
            leases[slot] = take(ledger)
        ledger.drop(leases[1], "bad", newest=0)
        leases[1] = take(ledger)
        found = [leases[slot].position for slot in (0, 1)]
        for slot in (0, 1):
            ledger.finish(leases[slot], group_of(leases[slot]))
        ledger.claim("main", [leases[0], leases[1]])
        ledger.trained("main", 0, [leases[0], leases[1]], 0)
        publish(ledger, 1)
        found += [take(ledger).position, take(ledger).position]
        ends.append(found)
        assert imbalances(ledger) == []
    assert ends == [[2, 5, 4, 6], [2, 5, 4, 6]]


def test_what_would_break_the_accounting_is_refused(ledger):
    a, b = take(ledger), take(ledger)
    with pytest.raises(LedgerError, match="slot 0 or position 7"):
        ledger.lease("main", slot=0, position=7, env="toy", task=a.task, attempt=0)
    with pytest.raises(LedgerError, match="slot 9 or position 0"):
        ledger.lease("main", slot=9, position=0, env="toy", task=a.task, attempt=0)
    with pytest.raises(LedgerError, match="finished with group"):
        ledger.finish(a, group_of(b))
    with pytest.raises(LedgerError, match=r"main/0\.0 cannot be claimed"):
        ledger.claim("main", [a])
    ledger.finish(a, group_of(a))
    with pytest.raises(LedgerError, match="finished with group"):
        ledger.finish(a, group_of(a))
    ledger.finish(b, group_of(b))
    with pytest.raises(LedgerError, match="a group was never claimed"):
        ledger.trained("main", 0, [a, b], 0)
    ledger.claim("main", [a, b])
    for step, leases, oldest, why in (
        (1, [a, b], 1, "step 0 with 2 is due"),
        (0, [a], 0, "it consumed 1 groups"),
        (0, [a, a], 0, "it consumed 2 groups; step 0 with 2 is due"),
        (0, [a, b], -1, "a token of version -1 is older than max_staleness 0"),
    ):
        with pytest.raises(LedgerError, match=why):
            ledger.trained("main", step, leases, oldest)
    ledger.trained("main", 0, [a, b], 0)
    for late in (ledger.drop, ledger.give_back):
        with pytest.raises(LedgerError, match="it is not open"):
            late(a, "again")
    assert imbalances(ledger, finished=True) == []


def test_check_finds_each_kind_of_imbalance(ledger):
    """Every sentence of `check` is seen once."""
    a = take(ledger)
    book = ledger.books["main"]
    assert imbalances(ledger, finished=True) == ["policy main: 1 leases have no end"]
    book.slots.give(0)
    assert imbalances(ledger) == ["policy main: slots taken, against consumed and open ones: 0 and 1"]
    book.slots.take(0)
    book.positions.take(5)
    assert imbalances(ledger) == ["policy main: positions taken, against leases that hold one: 2 and 1"]
    book.positions.give(5)
    book.consumed = 1
    assert "policy main: groups trained, against steps consumed: 0 and 2" in imbalances(ledger)
    book.consumed = 0
    ledger.finish(a, group_of(a))
    book.finished.clear()
    assert imbalances(ledger) == ["policy main: finished groups, against waiting and claimed ones: 1 and 0"]
    book.finished[a.id] = None
    book.ended["issued"] = 7
    assert imbalances(ledger) == ["policy main: leases issued, against ended and open ones: 7 and 1"]


def test_a_snapshot_is_json_and_resumes_into_the_same_books(ledger):
    a, _ = take(ledger), take(ledger)
    ledger.finish(a, group_of(a))
    ledger.notes["best"] = [3, 0.5]
    saved = json.loads(json.dumps(ledger.snapshot()))
    ledger.journal.close()
    journal = Journal(ledger.journal.folder)
    again = Ledger.resume(saved, journal, {"main": STRICT})
    assert again.lineage == 1 and again.notes == {"best": [3, 0.5]}
    assert [o.lease for o in again.waiting("main")] == [a]
    assert again.waiting("main")[0].group.episodes[0].trajectories[0].columns["tokens"].tolist() == [1, 0]
    assert (again.next_slot("main"), again.next_position("main", 1)) == (1, 1)  # slot 1 gets its task again
    publish(again, 0)
    assert take(again).id == "main/1.0"
    assert imbalances(again) == []
    journal.close()


def test_what_was_in_flight_at_a_checkpoint_is_settled_by_every_resume_from_it(ledger):
    a, b = take(ledger), take(ledger)
    saved = json.loads(json.dumps(ledger.snapshot()))
    for lineage in (1, 2):
        again = Ledger.resume(saved, Journal(ledger.journal.folder), {"main": STRICT})
        assert again.lineage == lineage and imbalances(again) == []
        assert [again.next_position("main", lease.slot) for lease in (a, b)] == [a.position, b.position]
        last = [f.header for f in read(ledger.journal.folder) if f.kind == "lineage"][-1]
        assert last["returned"] == [a.id, b.id]
        again.journal.close()


def test_groups_that_a_later_version_touched_are_not_kept(tmp_path):
    schedule = replace(STRICT, max_staleness=2)
    journal = Journal(tmp_path / "journal")
    ledger = Ledger(journal, {"main": schedule})
    publish(ledger, 0)
    leases = [take(ledger) for _ in range(3)]
    saved = json.loads(json.dumps(ledger.snapshot()))
    for lease, number in zip(leases, (0, 1, 0), strict=True):
        ledger.finish(lease, group_of(lease, number))
    journal.close()
    again = Ledger.resume(saved, Journal(tmp_path / "journal"), {"main": schedule})
    assert [o.lease.slot for o in again.waiting("main")] == [0, 2]
    assert (again.next_slot("main"), again.next_position("main", 1)) == (1, leases[1].position)
    again.journal.close()


def test_a_light_journal_cannot_bring_groups_with_large_columns_back(tmp_path):
    journal = Journal(tmp_path / "journal")
    ledger = Ledger(journal, {"main": STRICT}, omit=frozenset({"tokens"}))
    publish(ledger, 0)
    a = take(ledger)
    ledger.finish(a, group_of(a))
    saved = json.loads(json.dumps(ledger.snapshot()))
    journal.close()
    journal = Journal(tmp_path / "journal")
    again = Ledger.resume(saved, journal, {"main": STRICT})
    assert again.waiting("main") == [] and again.next_position("main", 0) == a.position
    journal.close()


@pytest.mark.parametrize("broken", [{"format": 2}, {"policies": {}}])
def test_a_ledger_of_another_run_is_refused(ledger, broken):
    with pytest.raises(LedgerError, match="were expected"):
        Ledger.resume(ledger.snapshot() | broken, ledger.journal, {"main": STRICT})


def frames(*records):
    return [
        Frame(position=(0, i), header={"kind": kind, **fields}, body=memoryview(b""))
        for i, (kind, fields) in enumerate(records)
    ]


def lease_frame(n, slot=None, position=None, policy="main"):
    slot = n if slot is None else slot
    task = f"toy:{n if position is None else position}"
    fields = {"id": f"l{n}", "policy": policy, "slot": slot, "position": n, "task": task, "attempt": 0}
    return "lease", {**fields, "split": "train", "started_version": 0}


def group_frame(n, number=0, versions=None, **other):
    group = {"policy": "main", "slot": n, "attempt": 0, "task": {"id": f"toy:{n}"}} | other
    spans = [["t", 3, "stop", 0, "toy", "token", [[1, 3, 0]]]]
    versions = [["main", 0, number]] if versions is None else versions
    return "group", {"lease": f"l{n}", "group": group, "trajectories": spans, "versions": versions}


def trained(step, *leases, oldest=0, lineage=0):
    fields = {"policy": "main", "step": step, "lineage": lineage, "oldest": oldest}
    return "trained", {**fields, "leases": [f"l{n}" for n in leases]}


def end(n, what, why="x"):
    return "end", {"lease": f"l{n}", "end": what, "why": why}


GOOD = (lease_frame(0), lease_frame(1), group_frame(0), group_frame(1), trained(0, 0, 1, oldest=0))
RESUMED = {"lineage": 1, "cut": [0, 0], "steps": {}, "kept": [], "dropped": [], "returned": []}
AGAIN = (
    lease_frame(3, 0),
    lease_frame(4, 1),
    group_frame(3, slot=0),
    group_frame(4, slot=1),
    trained(0, 3, 4, lineage=1),
)


@pytest.mark.parametrize(
    ("records", "found"),
    [
        (GOOD, []),
        ((*GOOD, lease_frame(2)), ["lease l2 has no end, and the run finished"]),
        ((*GOOD, lease_frame(1)), ["lease l1 was issued twice", "lease l1 has no end, and the run finished"]),
        ((*GOOD, end(5, "dropped")), ["lease l5 was dropped, and was never issued"]),
        ((*GOOD, end(1, "dropped")), ["lease l1 was dropped after it had ended as trained (0)"]),
        ((*GOOD, group_frame(1)), ["lease l1 was finished after it had ended as trained (0)"]),
        (
            (*GOOD[:3], trained(0, 0, 1)),
            ["step 0 of policy main (lineage 0): lease l1 was trained and never finished"],
        ),
        (
            (*GOOD[:4], trained(0, 1, 0)),
            ["step 0 of policy main (lineage 0): slots [1, 0] are not its own, in order"],
        ),
        ((*GOOD[:4], trained(0, 0, 1, lineage=3)), ["step 0 of policy main (lineage 3): the journal is in lineage 0"]),
        (
            (*GOOD[:4], trained(0, 0, 1, oldest=-1)),
            [
                "step 0 of policy main (lineage 0): its oldest token is of version 0, by its groups; it says -1",
                "step 0 of policy main (lineage 0): a token of version -1 was trained",
            ],
        ),
        (
            (*GOOD[:3], group_frame(1, -2), trained(0, 0, 1, oldest=-2)),
            [
                "step 0 of policy main (lineage 0): lease l1 holds a token of version -2",
                "step 0 of policy main (lineage 0): a token of version -2 was trained",
            ],
        ),
        (
            (*GOOD[:3], group_frame(1, 1), trained(0, 0, 1, oldest=1)),
            ["step 0 of policy main (lineage 0): its oldest token is of version 0, by its groups; it says 1"],
        ),
        ((*GOOD[:3], group_frame(1, versions=[]), GOOD[4]), ["lease l1: its tokens are of 1 versions, 0 are named"]),
        (
            (*GOOD[:3], group_frame(1, slot=0, task={"id": "toy:0"}), GOOD[4]),
            [
                "lease l1 is of slot 1, and was finished with a group of slot 0",
                "lease l1 is of task 'toy:1', and was finished with a group of task 'toy:0'",
            ],
        ),
        (
            (lease_frame(0), group_frame(0), trained(0, 0)),
            ["step 0 of policy main (lineage 0): 1 groups, 2 were due"],
        ),
        (
            (
                *GOOD,
                *(lease_frame(2), lease_frame(3, position=0)),
                *(group_frame(2, 1), group_frame(3, 1, task={"id": "toy:0"}), trained(1, 2, 3, oldest=1)),
            ),
            ["group toy:0#0 of policy main was trained twice: leases l0 and l3"],
        ),
        (
            (
                *GOOD[:2],
                lease_frame(2),
                lease_frame(3),
                group_frame(2, 1),
                group_frame(3, 1),
                trained(1, 2, 3, oldest=1),
            ),
            [
                "step 1 of policy main was trained where step 0 was due",
                "lease l0 has no end, and the run finished",
                "lease l1 has no end, and the run finished",
            ],
        ),
        (
            (
                *GOOD,
                ("lineage", {**RESUMED, "cut": [0, 5], "steps": {"main": 1}, "kept": ["l9"]}),
            ),
            ["lineage 1 builds on lease l9, which is not in the history"],
        ),
        (
            (*GOOD, ("trained", {"policy": "other", "step": 0, "lineage": 0, "oldest": None, "leases": []})),
            ["step 0 was trained by policy other, which the run file does not name"],
        ),
        ((*GOOD[:4], group_frame(0), GOOD[4]), ["lease l0 was finished twice"]),
        ((*GOOD[:2], lease_frame(2), ("lineage", {**RESUMED, "returned": ["l0", "l1", "l2"]}), *AGAIN), []),
        (
            (*GOOD[:2], lease_frame(2), ("lineage", {**RESUMED, "returned": ["l0", "l1"]}), *AGAIN),
            ["lease l2 has no end, and lineage 1 went on without it"],
        ),
    ],
)
def test_the_history_check_finds_each_broken_promise(records, found):
    assert check_history(frames(*records), {"main": STRICT}, finished=True) == found


@pytest.mark.parametrize("order", [[2], [1], [2, 2], [1, 1], [2, 1], [1, 2], [1, 2, 2], [2, 1, 2]], ids=str)
def test_resumes_from_any_checkpoint_in_any_order_break_no_promise(order, tmp_path):
    """Also from one that an earlier resume had gone back behind: it does not see what happened in between."""
    schedules, kept = {"main": STRICT}, {}
    journal = Journal(tmp_path / "journal")
    ledger = Ledger(journal, schedules)
    publish(ledger, 0)
    for step in range(2):
        leases = [take(ledger), take(ledger)]
        for lease in leases:
            ledger.finish(lease, group_of(lease, step))
        ledger.claim("main", leases)
        ledger.trained("main", step, leases, step)
        publish(ledger, step + 1)
        kept[step + 1] = json.loads(json.dumps(ledger.snapshot()))
    take(ledger)
    journal.close()
    for step in order:
        journal = Journal(tmp_path / "journal")
        ledger = Ledger.resume(kept[step], journal, schedules)
        publish(ledger, step)
        take(ledger), take(ledger)
        journal.close()
    assert check_history(list(read(tmp_path / "journal")), schedules) == []


@pytest.mark.parametrize("order", [[2], [1, 2], [1, 1, 2], [2, 1, 2]], ids=str)
def test_a_group_that_waited_at_a_checkpoint_is_its_own_whatever_came_in_between(order, tmp_path):
    schedules, kept = {"main": replace(STRICT, order="ready", max_staleness=2)}, {}
    journal = Journal(tmp_path / "journal")
    ledger = Ledger(journal, schedules)
    publish(ledger, 0)

    def step(number):
        leases = [entry.lease for entry in ledger.waiting("main")]
        while len(leases) < 2:
            leases.append(take(ledger))
            ledger.finish(leases[-1], group_of(leases[-1], number))
        ledger.claim("main", leases)
        ledger.trained("main", number, leases, number)
        publish(ledger, number + 1)

    for number in range(2):
        step(number)
        if number == 1:
            ledger.finish(waits := take(ledger), group_of(waits, 2))
        kept[number + 1] = json.loads(json.dumps(ledger.snapshot()))
    journal.close()
    for number in order:
        journal = Journal(tmp_path / "journal")
        ledger = Ledger.resume(kept[number], journal, schedules)
        publish(ledger, number)
        if number == 2:
            step(2)
        else:
            take(ledger)
        journal.close()
    assert check_history(list(read(tmp_path / "journal")), schedules) == []


def published(number, changed=True, receipts=(("live", "r"),)):
    engines = {f"e{i}": list(receipt) for i, receipt in enumerate(receipts)}
    return "published", {"policy": "main", "lineage": 0, "number": number, "changed": changed, "engines": engines}


@pytest.mark.parametrize(
    ("before", "good"),
    [
        ([published(0)], True),
        ([published(-1), published(0, changed=False, receipts=())], True),  # an alias of what was verified
        ([published(-2), published(0, changed=False, receipts=())], True),  # of the last one: publish_every
        ([], False),
        ([published(1)], False),
        ([published(0, receipts=())], False),
        ([published(0, receipts=(("live", "r"), ("", None)))], False),
        ([published(0, changed=False, receipts=())], False),
    ],
)
def test_what_sampled_must_have_been_verified(before, good):
    found = check_published(frames(*before, *GOOD))
    assert found == [] if good else found[0].endswith("version main@0.0 sampled for it and was never verified")


def test_what_sampled_must_be_of_the_policy_that_is_trained():
    other = published(0)
    other[1]["policy"] = "other"
    kind, group = GOOD[2]
    assert kind == "group"
    versions = [["other", *version[1:]] for version in group["versions"]]
    (found,) = check_published(
        frames(published(0), other, *GOOD[:2], (kind, group | {"versions": versions}), *GOOD[3:])
    )
    assert found == "step 0 of policy main: version other@0.0 sampled for it and is of another policy"


def test_masked_groups_are_judged_by_what_was_trained():
    schedule = replace(STRICT, on_stale="mask")
    records = (*GOOD[:3], group_frame(1, -2), trained(0, 0, 1, oldest=0))
    assert check_history(frames(*records), {"main": schedule}, finished=True) == []
