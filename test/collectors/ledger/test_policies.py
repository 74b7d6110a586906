"""How many may begin and which are trained, by hand; what could never move is refused."""

import pytest

from collectors.ledger import Drop, GroupLedger, OnPolicy, Replay, Wait
from collectors.ledger import generation_ledger as ledger_module


def make(groups_per_step, policy, **settings):
    return GroupLedger(
        groups_per_step=groups_per_step, group_size=2, policy=policy, clock=lambda: 0.0, **settings
    )


def finish(ledger, *tickets):
    for ticket in tickets:
        ledger.start(ticket)
        ledger.finish(ticket, ticket.version, 10)


@pytest.mark.parametrize(
    ("policy", "sync", "slots", "capacity"),
    [
        pytest.param(OnPolicy(), 1, 8, 8, id="on policy: one step"),
        pytest.param(Wait(0), 1, 8, 8, id="staleness 0 is on policy"),
        pytest.param(Wait(1), 1, 16, 16, id="one step ahead at least"),
        pytest.param(Wait(4), 1, 32, 32, id="one less than the bound"),
        pytest.param(Wait(4, pipeline_depth=4), 1, 40, 40, id="as far as the bound"),
        pytest.param(Wait(4, pipeline_depth=0), 1, 8, 8, id="no step ahead"),
        pytest.param(Wait(4), 5, 40, 40, id="pulled every 5 steps takes the whole bound"),
        pytest.param(Drop(4), 1, 40, 8, id="drop: a step's groups can always go"),
        pytest.param(Drop(1, pipeline_depth=9), 1, 80, 8, id="drop may run far ahead"),
    ],
)
def test_slots_and_the_buffer_that_they_take(policy, sync, slots, capacity):
    ledger = make(8, policy, weight_sync_steps=sync, buffer_capacity=capacity)
    assert (ledger.num_slots, ledger.required_capacity) == (slots, capacity)
    with pytest.raises(ValueError, match=rf"buffer_capacity must be at least {capacity} groups"):
        make(8, policy, weight_sync_steps=sync, buffer_capacity=capacity - 1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(
            lambda: make(8, Wait(2), weight_sync_steps=4),
            "Wait: max_staleness must be at least 3, got 2.*weight_sync_steps=4",
            id="the last step before a pull is too old",
        ),
        pytest.param(
            lambda: make(8, Wait(4, pipeline_depth=2), weight_sync_steps=4),
            "Wait: pipeline_depth must be at least 3, got 2",
            id="no slot is left before a pull",
        ),
        pytest.param(
            lambda: make(8, Drop(2, pipeline_depth=9), weight_sync_steps=4),
            "Drop: max_staleness must be at least 3, got 2",
            id="all would be dropped before a pull",
        ),
        pytest.param(
            lambda: make(8, OnPolicy(), weight_sync_steps=2),
            "OnPolicy: max_staleness must be at least 1, got 0",
            id="on policy pulls each step",
        ),
        pytest.param(
            lambda: Wait(2, pipeline_depth=3),
            "pipeline_depth=3 is more than max_staleness=2",
            id="deeper than the bound",
        ),
        pytest.param(lambda: Wait(-1), "max_staleness must be .* at least 0, got -1", id="below 0"),
        pytest.param(lambda: Wait(window=1.5), r"window .* in \[0, 1\], got 1.5", id="window"),
        pytest.param(lambda: Drop(2, -1), "Drop: pipeline_depth", id="depth below 0"),
        pytest.param(
            lambda: make(8, Wait(), max_inflight_groups=0), "max_inflight_groups", id="none runs"
        ),
        pytest.param(lambda: make(8, Wait(), refill="never"), "refill must be one of", id="refill"),
    ],
)
def test_what_could_never_move_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_window_is_anchored_at_the_oldest_unfinished_group():
    """B = 10, W = floor(0.3 * 10) = 3: two younger groups overtake the first, no third one."""
    ledger = make(2, Wait(9, pipeline_depth=4))
    tickets = [ledger.offer(i, i) for i in range(10)]
    finish(ledger, *tickets[3:])
    assert ledger.take() is None
    finish(ledger, tickets[2])
    assert ledger.take() is None  # 2 alone lies within [0, 3)
    finish(ledger, tickets[1])
    assert ledger.take() == tickets[1:3]
    assert ledger.take() is None
    finish(ledger, tickets[0])
    assert ledger.take() == [tickets[0], tickets[3]]


def test_window_moves_on_with_its_anchor():
    ledger = make(2, Wait(9, pipeline_depth=4))
    tickets = [ledger.offer(i, i) for i in range(10)]
    finish(ledger, tickets[0], tickets[3], tickets[4])
    assert ledger.take() == [tickets[0], tickets[3]]  # 1 is the oldest: [1, 4)
    finish(ledger, tickets[1])
    assert ledger.take() == [tickets[1], tickets[4]]  # 2 is the oldest: [2, 5)


def test_overtaking_ends_where_another_would_become_too_old():
    """B = W = 6. Group 5 began at version 0, so that step 2 has to train it and waits for it.

    The window alone would let 4 and 6 go: it reaches to group 10.
    """
    ledger = make(2, Wait(2, pipeline_depth=2, window=1.0))
    tickets = [ledger.offer(i, i) for i in range(6)]
    finish(ledger, *tickets[:5])
    for step in range(2):
        ledger.trained(ledger.take(), step)
        ledger.weights_pulled(step + 1)
        tickets += [ledger.offer(i, i) for i in (2 * step + 6, 2 * step + 7)]
        finish(ledger, *tickets[-2:])
    assert ledger.take() is None
    finish(ledger, tickets[5])
    assert ledger.take() == tickets[4:6]
    assert ledger.metrics()["staleness/max"] == 2


def test_on_policy_takes_turns_and_keeps_the_order():
    ledger = make(3, OnPolicy())
    for step in range(3):
        tickets = [ledger.offer(i, i) for i in range(3 * step, 3 * step + 3)]
        assert not ledger.can_admit()
        finish(ledger, *reversed(tickets))
        assert ledger.take() == tickets
        ledger.trained(tickets, step)
        assert not ledger.can_admit()
        ledger.weights_pulled(step + 1)
    assert ledger.metrics()["staleness/at_0_fraction"] == 1


def test_pulled_every_two_steps_the_slots_last_that_long():
    """P = 2, depth 1: four of version 0 are trained in steps 0 and 1, then they are pulled."""
    ledger = make(2, Wait(1, pipeline_depth=1, window=0), weight_sync_steps=2)
    tickets = [ledger.offer(i, i) for i in range(4)]
    finish(ledger, *tickets)
    for step in range(2):
        ledger.trained(ledger.take(), step)
        assert not ledger.can_admit()
    assert ledger.metrics()["staleness/max"] == 1
    ledger.weights_pulled(2)
    assert [ledger.offer(i, i).version for i in range(4, 8)] == [2] * 4
    assert not ledger.can_admit()


def test_what_is_no_policy_is_refused_by_name():
    with pytest.raises(TypeError, match=r"GroupLedger: policy takes StalenessPolicy.*got 'wait'"):
        make(2, "wait")


def test_a_cap_on_what_runs_at_once():
    ledger = make(2, Wait(4), max_inflight_groups=1)
    first = ledger.offer(0, 0)
    assert not ledger.can_admit()
    finish(ledger, first)
    assert ledger.can_admit()  # a finished group runs no longer


class TestReplay:
    def run(self, policy, order, num_steps=4):
        """A run whose groups finish in an order: what each step trains, and when."""
        ledger, order, waiting = make(2, policy), list(order), {}
        while len(ledger.schedule) < num_steps:
            while ledger.can_admit():
                ticket = ledger.offer(ledger.next_ordinal, ledger.next_ordinal)
                ledger.start(ticket)
                waiting[ticket.ordinal] = ticket
            tickets = ledger.take()
            if tickets is not None:
                ledger.trained(tickets, ledger.version)
                ledger.weights_pulled(ledger.version)
                continue
            ticket = waiting.pop(next(ordinal for ordinal in order if ordinal in waiting))
            ledger.finish(ticket, ticket.version, 10)
        return ledger.schedule

    def test_a_schedule_has_the_latest_steps(self, monkeypatch):
        monkeypatch.setattr(ledger_module, "_MAX_SCHEDULE", 3)
        ledger = make(1, OnPolicy())
        for number in range(5):
            finish(ledger, ledger.offer(number, number))
            ledger.trained(ledger.take(), number)
            ledger.weights_pulled(number + 1)
        assert ledger.schedule == [(2,), (3,), (4,)]

    def test_a_schedule_is_trained_again_whatever_finishes_first(self):
        # The oldest takes long: within the window of 4 of 8 slots, three overtake it.
        policy = Wait(6, pipeline_depth=3, window=0.5)
        recorded = self.run(policy, [1, 3, 2, 0, *range(4, 40)])
        assert recorded == [(1, 3), (0, 2), (4, 5), (6, 7)]
        assert self.run(policy, range(40)) == [(0, 1), (2, 3), (4, 5), (6, 7)]
        for order in (range(40), range(39, -1, -1), [5, 3, 0, 2, 7, 1, 4, 6, *range(8, 40)]):
            assert self.run(Replay(recorded, policy), order) == recorded
        longer = self.run(Replay(recorded, policy), range(40), num_steps=5)
        assert longer == [*recorded, (8, 9)]

    def test_a_policy_of_ones_own_is_kept(self):
        class Late(Wait):
            def slots(self, groups_per_step, weight_sync_steps):
                return super().slots(groups_per_step, weight_sync_steps) + 1

        replay = Replay([(0, 1)], Late(2, window=0.5))
        assert (replay.slots(2, 1), replay.max_staleness, replay.window) == (5, 2, 0.5)
        assert replay != Replay([(1, 0)], Late(2, window=0.5))

    def test_what_can_not_be_replayed_is_refused(self):
        with pytest.raises(TypeError, match=r"Replay: policy takes Wait.*got Drop"):
            Replay([(0, 1)], Drop(4))
        with pytest.raises(ValueError, match=r"trains the prompts \[1\] twice"):
            Replay([(0, 1), (1, 2)])
        # Two steps of two fill the slots, and the prompts of a later step never come.
        with pytest.raises(ValueError, match=r"prompts \[40, 41\], and waits .* \[0, 1, 2, 3\]"):
            self.run(Replay([(40, 41)], Wait(2)), range(40))
        with pytest.raises(ValueError, match="step 0 trained 3 groups, and 2 are asked for"):
            self.run(Replay([(0, 1, 2)], Wait(2)), range(40))
