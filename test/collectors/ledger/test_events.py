"""What each event does to a group, to the books and to the metrics, by hand."""

import hashlib
import re

import pytest

from collectors.ledger import (
    Drop,
    Eviction,
    GroupLedger,
    GroupState,
    IllegalTransition,
    LedgerError,
    Refill,
    Wait,
)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make(**settings):
    return GroupLedger(**({"groups_per_step": 1, "group_size": 2, "clock": Clock()} | settings))


def group_in(state, ledger):
    """A group brought to a state."""
    ticket = ledger.offer("a", 0)
    if state == "dispatched":
        return ticket
    ledger.start(ticket)
    if state == "running":
        return ticket
    ledger.finish(ticket, 0, [3, 4])
    if state == "finished":
        return ticket
    assert ledger.take() == [ticket]
    if state == "taken":
        return ticket
    if state == "trained":
        ledger.trained([ticket], 0)
    elif state == "returned":
        ledger.cancel(ticket)
    else:
        ledger.drop(ticket, "no_signal")
    return ticket


EVENTS = {
    "start": lambda ledger, ticket: ledger.start(ticket),
    "finish_episode": lambda ledger, ticket: ledger.finish_episode(
        ticket, 0, tokens=1, oldest_version=0
    ),
    "finish": lambda ledger, ticket: ledger.finish(ticket, 0, [3, 4]),
    "trained": lambda ledger, ticket: ledger.trained([ticket], 0),
    "fail": lambda ledger, ticket: ledger.fail(ticket, "no disk"),
    "drop": lambda ledger, ticket: ledger.drop(ticket, "no_signal"),
    "cancel": lambda ledger, ticket: ledger.cancel(ticket),
}
LEGAL = {
    "dispatched": {"start", "fail", "drop", "cancel"},
    "running": {"finish_episode", "finish", "fail", "drop", "cancel"},
    "finished": {"fail", "drop", "cancel"},
    "taken": {"trained", "fail", "drop", "cancel"},
    "trained": set(),
    "dropped": set(),
    "returned": set(),
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", LEGAL)
def test_every_event_in_every_state(state, event):
    ledger = make()
    ticket = group_in(state, ledger)
    before = ledger.state_dict()
    if event in LEGAL[state]:
        EVENTS[event](ledger, ticket)
        assert ledger.state_dict() != before
        return
    with pytest.raises(IllegalTransition) as raised:
        EVENTS[event](ledger, ticket)
    assert event in str(raised.value) or event == "fail"
    assert str(ticket) in str(raised.value)
    assert state in str(raised.value) or event == "trained"
    assert ledger.state_dict() == before  # nothing happened


def test_a_late_event_of_an_earlier_attempt_is_told_apart():
    ledger = make()
    first = group_in("running", ledger)
    assert ledger.fail(first, "engine gone") == Refill(ordinal=0, group_id="a", attempt=1)
    second = ledger.offer("a", 0)
    ledger.start(second)
    assert ledger.state_of(first) is None
    assert ledger.state_of(second) is GroupState.RUNNING
    with pytest.raises(IllegalTransition, match=r"in flight again as Ticket\(.*attempt=1"):
        ledger.finish(first, 0, 7)


def test_offers_that_are_refused():
    ledger = make(policy=Wait(1))
    ledger.fail(ledger.offer("a", 0), "x")
    with pytest.raises(ValueError, match="ordinal 0 is owed as group 'a', got 'b'"):
        ledger.offer("b", 0)
    assert ledger.owed == (Refill(0, "a", 1),)
    ticket = ledger.offer("a", 0)
    with pytest.raises(IllegalTransition, match=f"dispatched as {re.escape(str(ticket))}"):
        ledger.offer("a", 0)
    ledger.drop(ticket, "x", refill="next")
    with pytest.raises(IllegalTransition, match="offer of ordinal 0: it is done"):
        ledger.offer("a", 0)
    with pytest.raises(TypeError, match=r"int or str, got \(1, 2\)"):
        ledger.offer((1, 2), 1)
    ledger.offer("b", 1)
    ledger.offer("c", 2)
    assert not ledger.can_admit()
    with pytest.raises(LedgerError, match=r"no slot is free.*2 of at most 2 groups.*2 slots"):
        ledger.offer("d", 3)
    assert ledger.balance.offered.groups == 4


def test_slots_are_free_when_the_weights_are_pulled_and_not_before():
    ledger = make(groups_per_step=2, policy=Wait(1, pipeline_depth=1, window=0))
    tickets = [ledger.offer(i, i) for i in range(4)]
    assert not ledger.can_admit()
    for ticket in tickets[:2]:
        ledger.start(ticket)
        ledger.finish(ticket, 0, 10)
    taken = ledger.take()
    assert taken == tickets[:2]
    assert not ledger.can_admit()
    ledger.trained(taken, 0)
    assert not ledger.can_admit()
    ledger.weights_pulled(1)
    fresh = [ledger.offer(i, i) for i in (4, 5)]
    assert [ticket.version for ticket in fresh] == [1, 1]
    assert not ledger.can_admit()
    ledger.fail(fresh[0], "x")  # a dropped group frees its slot at once
    assert ledger.can_admit()


def test_a_group_dropped_in_training_holds_its_slot_until_the_pull():
    """Or 5 groups of version 0 would follow step 0, and the last would be 2 versions old."""
    ledger = make(groups_per_step=2, policy=Wait(1, pipeline_depth=1, window=0))
    tickets = [ledger.offer(i, i) for i in range(4)]
    for ticket in tickets[:2]:
        ledger.start(ticket)
        ledger.finish(ticket, 0, 10)
    ledger.take()
    ledger.drop(tickets[0], "no_signal")
    assert not ledger.can_admit()
    with pytest.raises(IllegalTransition, match="trained at step 0"):
        ledger.trained(tickets[:2], 0)
    ledger.trained(tickets[1:2], 0)
    assert not ledger.can_admit()
    ledger.weights_pulled(1)
    assert ledger.can_admit()


@pytest.mark.parametrize(
    ("version", "message"),
    [
        pytest.param(2, r"weights_pulled\(2\): the generators are at version 1, the trainer at 1"),
        pytest.param(0, r"weights_pulled\(0\)"),
    ],
)
def test_pulled_versions_are_those_that_the_trainer_made(version, message):
    ledger = make()
    ledger.trained([group_in("taken", ledger)], 0)
    ledger.weights_pulled(1)
    with pytest.raises(IllegalTransition, match=message):
        ledger.weights_pulled(version)


def test_steps_are_trained_in_order():
    ledger = make()
    with pytest.raises(IllegalTransition, match="the next step is 0"):
        ledger.trained([], 0)
    ticket = group_in("taken", ledger)
    with pytest.raises(IllegalTransition, match=r"step 1 .*the next step is 0"):
        ledger.trained([ticket], 1)


def test_the_next_batch_can_be_taken_while_a_step_trains():
    ledger = make(policy=Wait(2, pipeline_depth=2))
    tickets = [ledger.offer(i, i) for i in range(3)]
    for ticket in tickets:
        ledger.start(ticket)
        ledger.finish(ticket, 0, 10)
    assert [ledger.take(), ledger.take(), ledger.take()] == [[ticket] for ticket in tickets]
    assert ledger.metrics()["staleness/max"] == 2
    assert ledger.metrics()["staleness/at_1_fraction"] == pytest.approx(1 / 3)
    assert not ledger.can_admit()
    assert ledger.batches == [[ticket] for ticket in tickets]


@pytest.mark.parametrize("versions", [(0, 2, 1), (2, 1, 0)], ids=str)
def test_the_oldest_token_of_all_episodes_counts(versions):
    """A group that began at version 0 is used at step 2, after two others that overtook it."""
    ledger = make(group_size=3, policy=Wait(3, pipeline_depth=3, window=1.0))
    slow, *others = [ledger.offer(i, i) for i in range(3)]
    for ticket in (*others, slow):
        ledger.start(ticket)
    for step, ticket in enumerate(others):
        ledger.finish(ticket, 0, 10)
        ledger.trained(ledger.take(), step)
        ledger.weights_pulled(step + 1)
    for index, version in enumerate(versions):
        newest = min(version + 1, 2)
        ledger.finish_episode(slow, index, tokens=1, oldest_version=version, newest_version=newest)
    ledger.finish(slow)
    assert ledger.take() == [slow]
    assert ledger.metrics()["staleness/max"] == 2
    assert ledger.metrics()["versions_span/max"] == 1  # within one episode


def test_the_last_step_takes_what_is_left():
    ledger = make(groups_per_step=3)
    tickets = [ledger.offer(i, i) for i in range(2)]
    ledger.start(tickets[0])
    ledger.finish(tickets[0], 0, 10)
    assert ledger.take() is None
    assert ledger.take(2) is None
    assert ledger.take_rest() is None
    with pytest.raises(
        ValueError, match=r"fewer only when no more are in flight; got .*=1 while 2"
    ):
        ledger.take(1)
    with pytest.raises(ValueError, match=r"groups_per_step=3 groups.*got num_groups=4"):
        ledger.take(4)
    ledger.start(tickets[1])
    ledger.finish(tickets[1], 0, 10)
    assert ledger.take_rest() == tickets
    assert ledger.take_rest() == []


def test_episodes_one_by_one_or_all_at_once():
    ledger = make(group_size=3)
    ticket = ledger.offer("a", 0)
    ledger.start(ticket)
    ledger.finish_episode(ticket, 2, tokens=5, oldest_version=0)
    with pytest.raises(IllegalTransition, match=r"episode 2 is over already"):
        ledger.finish_episode(ticket, 2, tokens=5, oldest_version=0)
    with pytest.raises(ValueError, match="index must be below group_size=3, got 3"):
        ledger.finish_episode(ticket, 3, tokens=5, oldest_version=0)
    with pytest.raises(IllegalTransition, match="2 of its 3 episodes are not over"):
        ledger.finish(ticket)
    ledger.finish_episode(ticket, 0, tokens=7, oldest_version=0)
    ledger.finish_episode(ticket, 1, tokens=0, oldest_version=None, stop_reason="error: gone")
    with pytest.raises(ValueError, match="num_tokens is 12 by its episodes, got 13"):
        ledger.finish(ticket, 0, 13)
    ledger.finish(ticket, 0, 12)
    other = ledger.offer("b", 1)
    ledger.start(other)
    with pytest.raises(ValueError, match=r"each of group_size=3 episodes, got 2"):
        ledger.finish(other, 0, [4, 4])
    ledger.finish(other, 0, 11)  # 4 + 4 + 3
    assert ledger.balance.offered == ledger.balance.in_flight == (2, 23)
    assert ledger.lengths[0].num_lengths == 6
    assert ledger.metrics()["stop/error"] == 1


@pytest.mark.parametrize(
    ("oldest", "newest", "message"),
    [
        pytest.param(0, None, "version 0, from before its admission", id="an engine lags"),
        pytest.param(2, None, "versions 2 to 2; .* at most the trainer's 1", id="from the future"),
        pytest.param(1, 0, "versions 1 to 0", id="out of order"),
        pytest.param(None, None, "versions None to None", id="not given"),
    ],
)
def test_versions_that_cannot_be(oldest, newest, message):
    ledger = make()
    ledger.trained([group_in("taken", ledger)], 0)
    ledger.weights_pulled(1)
    ticket = ledger.offer("b", 1)
    ledger.start(ticket)
    with pytest.raises(ValueError, match=message):
        ledger.finish_episode(ticket, 0, tokens=1, oldest_version=oldest, newest_version=newest)
    assert ledger.balance.in_flight == (1, 0)


@pytest.mark.parametrize("refill", ["same", "next"])
def test_a_prompt_whose_engine_died_is_offered_again_as_it_was(refill):
    ledger = make(refill=refill, max_attempts=2)
    ticket = first = ledger.offer("a", 0)
    for _ in range(5):
        ledger.start(ticket)
        owed = ledger.drop(ticket, "engine_died: no answer")
        assert owed == Refill(0, "a", 0)
        ticket = ledger.offer("a", 0)
        assert ticket.seed == first.seed
    assert ledger.balance.dropped["engine_died"].groups == 5
    assert ledger.frontier == 0


def test_drop_refills_with_the_same_prompt_so_often_and_then_with_the_next():
    ledger = make(max_attempts=3, seed=11)
    seeds = []
    for attempt in range(3):
        ticket = ledger.offer("a", 0)
        assert ticket.attempt == attempt
        seeds.append(ticket.seed)
        refill = ledger.drop(ticket, "no_signal: all 1.0")
        assert refill == (Refill(0, "a", attempt + 1) if attempt < 2 else None)
    assert ledger.frontier == 1
    assert ledger.owed == ()
    assert ledger.balance.dropped == {"no_signal": (3, 0)}
    base = int.from_bytes(hashlib.blake2b(b"11/0", digest_size=4).digest(), "big")
    first = hashlib.blake2b(f"{base}/1".encode(), digest_size=4).digest()
    assert seeds[:2] == [base, int.from_bytes(first, "big")]
    assert len(set(seeds)) == 3


def test_cancel_asks_for_the_same_seed_again():
    ledger = make()
    first = ledger.offer("a", 0, seed=42)
    ledger.start(first)
    ledger.finish_episode(first, 1, tokens=9, oldest_version=0)
    assert ledger.cancel(first, cut_lengths=[6]) == Refill(0, "a", 0)
    second = ledger.offer("a", 0, seed=42)
    assert (first.seed, second.seed, second.attempt, second.dispatch) == (42, 42, 0, 1)
    assert first != second
    assert ledger.balance.returned == (1, 15)
    assert ledger.balance.offered == (2, 15)


def test_cut_episodes_count_as_sampled_and_dropped():
    ledger = make(group_size=3)
    ticket = ledger.offer("a", 0)
    ledger.start(ticket)
    ledger.finish_episode(ticket, 1, tokens=10, oldest_version=0)
    with pytest.raises(ValueError, match=r"3 episodes of .* but only 2 are not over"):
        ledger.drop(ticket, "stale", cut_lengths=[1, 2, 3])
    ledger.drop(ticket, "stale", cut_lengths=[100, 7])
    assert ledger.balance.offered == ledger.balance.num_dropped == (1, 117)
    assert ledger.lengths[0].num_lengths == 3
    assert ledger.lengths[1].num_lengths == 0


def test_frontier_stays_at_the_first_prompt_that_is_not_done():
    ledger = make(policy=Wait(4, pipeline_depth=4, window=1.0))
    tickets = [ledger.offer(i, i) for i in range(4)]
    for ticket in (tickets[2], tickets[1]):
        ledger.start(ticket)
        ledger.finish(ticket, 0, 1)
        ledger.trained(ledger.take(), ledger.version)
    assert (ledger.frontier, ledger.done_above, ledger.next_ordinal) == (0, (1, 2), 4)
    assert [ledger.needs(ordinal) for ordinal in range(5)] == [False, False, False, False, True]
    ledger.fail(tickets[0], "x")
    assert ledger.needs(0)
    ledger.drop(ledger.offer(0, 0), "x", refill="next")
    assert (ledger.frontier, ledger.done_above) == (3, ())


def test_drop_evicts_what_is_too_old_at_use():
    """Three groups of version 0, max_staleness 1: steps 0 and 1 may use them, step 2 not."""
    ledger = make(policy=Drop(1, pipeline_depth=4), refill="next")
    tickets = [ledger.offer(i, i) for i in range(5)]
    for ticket in tickets[:4]:
        ledger.start(ticket)
    for ticket in (tickets[2], tickets[0], tickets[1]):
        ledger.start(ticket) if ledger.state_of(ticket) is GroupState.DISPATCHED else None
        ledger.finish(ticket, 0, 10)
    for step, ticket in enumerate((tickets[2], tickets[0])):  # in the order of finishing
        assert ledger.stale_tickets() == []
        assert ledger.take() == [ticket]
        ledger.trained([ticket], step)
        ledger.weights_pulled(step + 1)
    assert ledger.stale_tickets() == [tickets[3]]  # runs since version 0; 4 has not begun
    assert ledger.take() is None
    assert ledger.take_evicted() == [Eviction(tickets[1], None)]
    assert ledger.take_evicted() == []
    assert ledger.balance.dropped == {"stale": (1, 10)}
    ledger.start(tickets[4])
    assert ledger.stale_tickets() == [tickets[3]]


def test_what_has_no_tokens_has_no_age():
    ledger = make(policy=Drop(0, pipeline_depth=1))
    tickets = [ledger.offer(i, i) for i in range(2)]
    for ticket, tokens in zip(tickets, (10, 0), strict=True):
        ledger.start(ticket)
        ledger.finish(ticket, 0, tokens)
    ledger.trained(ledger.take(), 0)
    assert ledger.take() == tickets[1:]
    assert ledger.metrics()["staleness/max"] == 0


def test_a_policy_that_chooses_too_old_a_token_is_caught():
    class Careless(Drop):
        def evict(self, view):
            return []

    ledger = make(policy=Careless(0, pipeline_depth=2))
    tickets = [ledger.offer(i, i) for i in range(2)]
    for ticket in tickets:
        ledger.start(ticket)
        ledger.finish(ticket, 0, 10)
    ledger.trained(ledger.take(), 0)
    with pytest.raises(LedgerError, match=r"Careless\(.*ordinal=1.* for step 1, .* version 0"):
        ledger.take()


def test_the_balance_as_a_table():
    ledger = make(groups_per_step=2, group_size=2)
    tickets = [ledger.offer(i, i) for i in range(6)]
    for ticket in tickets[:4]:
        ledger.start(ticket)
        ledger.finish(ticket, 0, [1000, 234])
    ledger.trained(ledger.take(), 0)
    ledger.drop(tickets[2], "no_signal")
    ledger.fail(tickets[4], "no disk: full")
    ledger.cancel(tickets[5])
    assert str(ledger).splitlines() == [
        "GroupLedger at step 1, generators at version 0",
        "                      groups          tokens",
        "offered                    6           4,936",
        "trained                    2           2,468",
        "dropped                    2           1,234",
        "  failed                   1               0",
        "  no_signal                1           1,234",
        "returned                   1               0",
        "in flight                  1           1,234",
        "in flight: 0 unfinished, 1 waiting, 0 in training",
    ]
    assert ledger.return_all() == [tickets[3]]
    assert ledger.balance.returned == (2, 1234)
    assert ledger.balance.in_flight == (0, 0)
    assert {refill.ordinal for refill in ledger.owed} == {2, 3, 4, 5}


def test_the_oldest_unfinished_group_is_shown():
    ledger = make()
    tickets = [ledger.offer(i, i) for i in range(2)]
    ledger.cancel(tickets[0])
    assert str(ledger).endswith("1 unfinished (oldest: ordinal 1), 0 waiting, 0 in training")


def test_metrics_by_hand():
    clock = Clock()
    ledger = make(groups_per_step=2, group_size=1, policy=Wait(3, pipeline_depth=3), clock=clock)
    tickets = [ledger.offer(i, i) for i in range(4)]
    for ticket, finished_at, length in zip(tickets, (1, 2, 4, 8), (8, 16, 32, 64), strict=True):
        ledger.start(ticket)
        clock.now = finished_at
        if ticket is not tickets[3]:
            ledger.finish(ticket, 0, length)
    clock.now = 10
    ledger.trained(ledger.take(), 0)
    assert ledger.metrics()["queue_s/mean"] == pytest.approx((9 + 8) / 2)
    ledger.weights_pulled(1)
    ledger.finish_episode(tickets[3], 0, tokens=64, oldest_version=0, newest_version=1)
    ledger.finish(tickets[3])
    clock.now = 14
    ledger.take()
    metrics = ledger.metrics()
    expected = {
        "staleness/mean": 1,
        "staleness/max": 1,
        "staleness/at_0_fraction": 0.5,
        "staleness/at_1_fraction": 0.5,
        "queue_s/max": 10,
        "versions_span/mean": 0.5,
        "versions_span/max": 1,
        "length/offered_mean": 30,
        "length/trained_mean": 12,
        "length/distance": 0.5,
        "groups/trained": 2,
        "tokens/in_flight": 96,
        "in_flight/taken": 2,
        "in_flight/unfinished": 0,
        "versions_ahead": 0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
