"""A run that is cut at any event goes on with every prompt, and trains none twice."""

import json
import random
from collections import Counter

import pytest

from collectors.ledger import Drop, GroupLedger, LedgerError, OnPolicy, Wait

NUM_PROMPTS = 24


def make(policy, **settings):
    settings = {"groups_per_step": 2, "group_size": 2, "max_attempts": 99} | settings
    return GroupLedger(policy=policy, clock=lambda: 0.0, **settings)


def events(ledger, rng, trained):
    """Run to the end of the data, with faults; stops after each event. Draws from the frontier."""
    for _ in range(5000):
        ways = [
            ledger.can_admit() and prompts_left(ledger),
            ledger.tickets("dispatched"),
            ledger.tickets("running"),
            ledger.tickets("finished"),
            ledger.batches,
            ledger.version > ledger.pulled_version,
        ]
        if not any(ways):
            return
        way = rng.choice([number for number, found in enumerate(ways) if found])
        found = ways[way]
        if way == 0:
            ledger.offer(f"group {found[0]}", found[0])
        elif way == 1:
            ledger.start(rng.choice(found))
        elif way == 2:
            run(ledger, rng.choice(found), rng)
        elif way == 3:
            ledger.take() if prompts_left(ledger) else ledger.take_rest()
            ledger.take_evicted()
        elif way == 4:
            ledger.trained(found[0], ledger.version)
            trained.extend(ticket.ordinal for ticket in found[0])
        else:
            ledger.weights_pulled(ledger.version)
        yield
    raise AssertionError(f"the run goes on for ever:\n{ledger}")


def prompts_left(ledger):
    return [i for i in range(ledger.frontier, NUM_PROMPTS) if ledger.needs(i)]


def run(ledger, ticket, rng):
    if rng.random() < 0.2:
        rng.choice([ledger.fail, ledger.drop])(ticket, "fault")
    else:
        ledger.finish(ticket, ticket.version, rng.randrange(100))


@pytest.mark.parametrize("rows", ["all restored", "half lost"])
@pytest.mark.parametrize("policy", [OnPolicy(), Wait(2), Wait(3, window=0.9), Drop(1)], ids=repr)
def test_cut_at_every_event(policy, rows):
    ledger, trained, rng = make(policy), [], random.Random(3)
    num_cuts = 0
    for _ in events(ledger, rng, trained):
        state, done = json.loads(json.dumps(ledger.state_dict())), list(trained)
        waiting = [t.ordinal for s in ("finished", "taken") for t in ledger.tickets(s)]
        restored = None if rows == "all restored" else waiting[::2]
        resumed = make(policy)
        resumed.load_state_dict(state, restored=restored)
        assert {t.ordinal for t in resumed.tickets()} == set(
            waiting if restored is None else restored
        )
        for _ in events(resumed, random.Random(num_cuts), done):
            pass
        assert Counter(done) == Counter(range(NUM_PROMPTS))
        assert resumed.frontier == NUM_PROMPTS
        assert resumed.balance.in_flight == (0, 0)
        num_cuts += 1
    assert Counter(trained) == Counter(range(NUM_PROMPTS))
    assert num_cuts > 4 * NUM_PROMPTS


def test_the_gate_is_as_narrow_as_before():
    """8 slots: 2 wait, 2 are being trained, 4 ran; so 4 may begin until the weights are pulled."""
    ledger = make(Wait(3, pipeline_depth=3, window=1.0))
    tickets = [ledger.offer(i, i) for i in range(8)]
    for ticket in tickets[:4]:
        ledger.start(ticket)
        ledger.finish(ticket, 0, [3, 4])
    assert ledger.take() == tickets[:2]
    resumed = make(Wait(3, pipeline_depth=3, window=1.0))
    resumed.load_state_dict(ledger.state_dict())
    assert resumed.batches == [tickets[:2]]
    resumed.trained(tickets[:2], 0)
    again = []
    while resumed.can_admit():
        refill = resumed.owed[0]
        again.append(resumed.offer(refill.group_id, refill.ordinal))
    assert [(t.ordinal, t.attempt, t.seed) for t in again] == [
        (t.ordinal, t.attempt, t.seed) for t in tickets[4:]
    ]
    assert [t.dispatch for t in again] == [1] * 4
    resumed.weights_pulled(1)
    assert resumed.can_admit()
    assert resumed.balance.returned == (4, 0)


def test_time_and_metrics_go_on():
    now = [100.0]
    ledger = GroupLedger(groups_per_step=1, group_size=1, clock=lambda: now[0])
    ticket = ledger.offer(0, 0)
    ledger.start(ticket)
    ledger.finish(ticket, 0, 32)
    now[0] = 107.0
    state = json.loads(json.dumps(ledger.state_dict()))
    resumed = GroupLedger(groups_per_step=1, group_size=1, clock=lambda: now[0] - 100)
    resumed.load_state_dict(state)
    assert resumed.metrics() == ledger.metrics()
    assert resumed.state_dict() == state
    assert resumed.take() == [ticket]
    assert resumed.metrics()["queue_s/max"] == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"group_size": 3}, "the saved run had group_size=2, this one has 3"),
        pytest.param({"groups_per_step": 4}, "groups_per_step=2, this one has 4"),
        pytest.param({"policy": Wait(3)}, r"policy='Wait\(max_staleness=2, .*max_staleness=3"),
        pytest.param({"seed": 1}, "seed=0, this one has 1"),
    ],
)
def test_another_run_is_refused(settings, message):
    state = make(Wait(2)).state_dict()
    with pytest.raises(ValueError, match=message):
        make(settings.pop("policy", Wait(2)), **settings).load_state_dict(state)


@pytest.mark.parametrize("ways", [(OnPolicy(), Wait(0)), (Wait(0, window=0.7), OnPolicy())])
def test_on_policy_may_be_written_in_another_way(ways):
    before, now = map(make, ways)
    before.offer(7, 0)
    now.load_state_dict(before.state_dict())
    assert [(owed.group_id, owed.ordinal) for owed in now.owed] == [(7, 0)]


def test_a_used_ledger_is_refused():
    ledger = make(Wait(2))
    state = ledger.state_dict()
    ledger.offer(0, 0)
    with pytest.raises(LedgerError, match="seen nothing"):
        ledger.load_state_dict(state)
