"""Any order of events: balanced after each, no token too old at use, and always a way on."""

import json
import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from collectors.ledger import Drop, GroupLedger, GroupState, OnPolicy, Wait

POLICIES = {
    "on policy": (OnPolicy(), 1),
    "one step ahead": (Wait(max_staleness=1), 1),
    "window": (Wait(max_staleness=4), 1),
    "wide window, hard bound": (Wait(max_staleness=2, pipeline_depth=2, window=1.0), 1),
    "first in first out": (Wait(max_staleness=3, window=0.0), 1),
    "pulled every 3 steps": (Wait(max_staleness=2, window=0.5), 3),
    "shallow": (Wait(max_staleness=5, pipeline_depth=1, window=0.9), 2),
    "drop": (Drop(max_staleness=2), 1),
    "drop, far ahead, pulled every 2": (Drop(max_staleness=1, pipeline_depth=5), 2),
}


class World:
    """Prompts, generators and a trainer around a ledger, with books of their own.

    What is true is kept here: which version each group began at, what became of it. ``choose``
    draws a number below its argument.
    """

    def __init__(self, policy, sync, choose, *, groups_per_step=3, group_size=2, max_inflight=-1):
        self.make = lambda: GroupLedger(
            groups_per_step=groups_per_step,
            group_size=group_size,
            policy=policy,
            weight_sync_steps=sync,
            max_inflight_groups=max_inflight,
            max_attempts=2,
            clock=lambda: 0.0,
        )
        self.ledger = self.make()
        self.policy, self.sync, self.choose = policy, sync, choose
        self.step_size, self.group_size = groups_per_step, group_size
        self.version = self.pulled = 0
        self.live = {}  # ticket -> [state, oldest version or None, tokens by episode]
        self.batches = []
        self.admitted_at = {}
        self.ends = Counter()
        self.tokens = Counter()
        self.owed, self.done, self.frontier = set(), set(), 0
        self.most_running = 1000
        self.next_ordinal = 0

    # What may happen, and what then holds ---------------------------------------------------------

    def pick(self, *states):
        found = [ticket for ticket, group in self.live.items() if group[0] in states]
        return found[self.choose(len(found))] if found else None

    def leave(self, ticket, end, *, again):
        """It is in flight no longer; its prompt is to be offered again, or done."""
        assert ticket.ordinal >= self.frontier
        assert ticket.ordinal not in self.done
        (self.owed if again else self.done).add(ticket.ordinal)
        while self.frontier in self.done:
            self.done.remove(self.frontier)
            self.frontier += 1
        tokens = sum(self.live.pop(ticket)[2].values())
        self.ends[end] += 1
        self.tokens[end] += tokens
        for batch in self.batches:
            if ticket in batch:
                batch.remove(ticket)

    def running(self):
        return [t for t, group in self.live.items() if group[0] in ("dispatched", "running")]

    def offer(self):
        if not self.ledger.can_admit() or len(self.running()) >= self.most_running:
            return False
        owed = self.ledger.owed
        ordinal = owed[0].ordinal if owed else self.next_ordinal
        self.next_ordinal = max(self.next_ordinal, ordinal + 1)
        ticket = self.ledger.offer(f"group {ordinal}", ordinal)
        assert ticket.version == self.pulled
        self.live[ticket] = ["dispatched", None, {}]
        self.owed.discard(ordinal)
        self.ends["offered"] += 1
        return True

    def start(self):
        ticket = self.pick("dispatched")
        if ticket is None:
            return False
        self.ledger.start(ticket)
        self.live[ticket][0] = "running"
        self.live[ticket][1] = None
        return True

    def finish_episode(self):
        ticket = self.pick("running")
        if ticket is None:
            return False
        group = self.live[ticket]
        left = [index for index in range(self.group_size) if index not in group[2]]
        index, tokens = left[self.choose(len(left))], self.choose(50)
        oldest = ticket.version + self.choose(self.pulled - ticket.version + 1)
        self.ledger.finish_episode(
            ticket, index, tokens=tokens, oldest_version=oldest, newest_version=self.pulled
        )
        group[2][index] = tokens
        self.tokens["offered"] += tokens
        if tokens:
            group[1] = oldest if group[1] is None else min(group[1], oldest)
        if len(left) == 1:
            self.ledger.finish(ticket)
            group[0] = "finished"
        return True

    def give_up(self, how):
        ticket = self.pick("dispatched", "running", "finished", "taken")
        if ticket is None:
            return False
        if how == "cancel":
            self.ledger.cancel(ticket)
            self.leave(ticket, "returned", again=True)
            return True
        if how == "fail":
            refill = self.ledger.fail(ticket, "no disk: full")
        else:
            refill = self.ledger.drop(ticket, "no_signal", refill="next")
        assert (refill is None) == (how != "fail" or ticket.attempt == 1)
        self.leave(ticket, "dropped", again=refill is not None)
        return True

    def limit(self, most):
        """The engine has room for so many: the youngest are given back, and run again later."""
        self.most_running = most
        for ticket in self.running()[most:]:
            assert self.ledger.drop(ticket, "load").attempt == ticket.attempt
            self.leave(ticket, "dropped", again=True)
            self.ends["load"] += 1

    def drop_stale(self):
        for ticket in self.ledger.stale_tickets():
            assert isinstance(self.policy, Drop)
            refill = self.ledger.drop(ticket, "stale")
            self.leave(ticket, "dropped", again=refill is not None)

    def take(self):
        step = self.version + len(self.batches)
        tickets = self.ledger.take()
        for eviction in self.ledger.take_evicted():
            assert isinstance(self.policy, Drop)
            assert step - self.live[eviction.ticket][1] > self.policy.max_staleness
            self.leave(eviction.ticket, "dropped", again=eviction.refill is not None)
        if tickets is None:
            return False
        assert len(tickets) == self.step_size
        for ticket in tickets:
            state, oldest, _ = self.live[ticket]
            assert state == "finished"
            age = 0 if oldest is None else step - oldest
            assert age <= self.policy.max_staleness
            self.live[ticket][0] = "taken"
        self.batches.append(list(tickets))
        return True

    def train(self):
        if not self.batches:
            return False
        batch = list(self.batches[0])
        self.ledger.trained(batch, self.version)
        for ticket in batch:
            self.leave(ticket, "trained", again=False)
        self.batches.pop(0)
        self.version += 1
        return True

    def pull(self):
        target = self.version - self.version % self.sync
        if target == self.pulled:
            return False
        self.pulled += self.sync
        self.ledger.weights_pulled(self.pulled)
        return True

    def restart(self, *, lose_rows=False):
        state = json.loads(json.dumps(self.ledger.state_dict()))
        kept = {t.ordinal for t, group in self.live.items() if group[0] in ("finished", "taken")}
        if lose_rows and kept:
            kept.remove(sorted(kept)[self.choose(len(kept))])
        self.ledger = self.make()
        self.ledger.load_state_dict(state, restored=kept if lose_rows else None)
        if not all(ticket.ordinal in kept for batch in self.batches for ticket in batch):
            for ticket in [ticket for batch in self.batches for ticket in batch]:
                self.live[ticket][0] = "finished"
            self.batches = []
        for ticket in [ticket for ticket in self.live if ticket.ordinal not in kept]:
            self.leave(ticket, "returned", again=True)

    def check(self):
        balance = self.ledger.balance
        for unit, mine in (("groups", self.ends), ("tokens", self.tokens)):
            for end in ("offered", "trained", "returned"):
                assert getattr(getattr(balance, end), unit) == mine[end]
            assert getattr(balance.num_dropped, unit) == mine["dropped"]
        assert balance.dropped.get("load", (0, 0))[0] == self.ends["load"]
        assert balance.in_flight.groups == len(self.live)
        assert balance.in_flight.tokens == sum(sum(g[2].values()) for g in self.live.values())
        assert self.ends["offered"] == sum(
            (self.ends["trained"], self.ends["dropped"], self.ends["returned"], len(self.live))
        )
        assert {t: self.ledger.state_of(t) for t in self.live} == {
            t: GroupState(group[0]) for t, group in self.live.items()
        }
        assert self.ledger.batches == self.batches
        assert self.ledger.frontier == self.frontier
        assert set(self.ledger.done_above) == self.done
        assert {refill.ordinal for refill in self.ledger.owed} == self.owed
        assert self.ledger.next_ordinal == self.next_ordinal
        above = self.owed | self.done | {ticket.ordinal for ticket in self.live}
        assert above == set(range(self.frontier, self.next_ordinal))
        if isinstance(self.policy, Wait):
            assert (
                self.queued() + self.step_size * (self.version + len(self.batches) - self.pulled)
                <= self.ledger.num_slots
            )

    def queued(self):
        return sum(group[0] != "taken" for group in self.live.values())

    def step_on(self):
        """Let one thing happen that brings the run forward; there always is one."""
        self.drop_stale()
        ways = [self.train, self.pull, self.take, self.offer, self.start, self.finish_episode]
        first = self.choose(len(ways))
        assert any(way() for way in ways[first:] + ways[:first]), f"stuck:\n{self.ledger}"
        self.check()


class Runs(RuleBasedStateMachine):
    @initialize(
        data=st.data(),
        policy=st.sampled_from(sorted(POLICIES)),
        groups_per_step=st.integers(1, 4),
        max_inflight=st.sampled_from([-1, 1, 5]),
    )
    def begin(self, data, policy, groups_per_step, max_inflight):
        self.world = World(
            *POLICIES[policy],
            max,
            groups_per_step=groups_per_step,
            max_inflight=max_inflight,
        )

    def choose_from(self, data):
        self.world.choose = lambda below: data.draw(st.integers(0, below - 1))

    @rule(data=st.data(), many=st.integers(1, 8))
    def offer(self, data, many):
        self.choose_from(data)
        for _ in range(many):
            self.world.offer()

    @rule(data=st.data(), many=st.integers(1, 8))
    def run(self, data, many):
        self.choose_from(data)
        for _ in range(many):
            self.world.start()
            self.world.finish_episode()

    @rule(data=st.data(), how=st.sampled_from(["cancel", "fail", "drop"]))
    def give_up(self, data, how):
        self.choose_from(data)
        self.world.give_up(how)

    @rule(most=st.integers(1, 6))
    def limit(self, most):
        self.world.limit(most)

    @rule()
    def take(self):
        self.world.take()

    @rule()
    def train(self):
        self.world.train()

    @rule()
    def pull(self):
        self.world.pull()

    @rule()
    def drop_stale(self):
        self.world.drop_stale()

    @rule(data=st.data(), lose_rows=st.booleans())
    def restart(self, data, lose_rows):
        self.choose_from(data)
        self.world.restart(lose_rows=lose_rows)

    @precondition(lambda self: hasattr(self, "world"))
    @invariant()
    def balanced(self):
        self.world.check()

    def teardown(self):
        """From wherever it is, the run goes on: three more steps are trained."""
        if hasattr(self, "world"):
            rng = random.Random(0)
            self.world.choose = lambda below: rng.randrange(below)
            goal = self.world.version + 3
            for _ in range(2000):
                if self.world.version == goal:
                    break
                self.world.step_on()
            assert self.world.version == goal


TestRuns = Runs.TestCase
TestRuns.settings = settings(stateful_step_count=50)


@pytest.mark.parametrize("policy", POLICIES)
def test_many_events(policy):
    """10^5 over all policies; weights are pulled and groups trained at any delay."""
    rng = random.Random(policy)
    world = World(*POLICIES[policy], lambda below: rng.randrange(below), groups_per_step=4)
    for _ in range(100_000 // len(POLICIES)):
        if rng.random() < 0.97:
            world.step_on()
        elif rng.random() < 0.3:
            world.limit(rng.randint(1, world.ledger.num_slots))
        elif rng.random() < 0.9:
            world.give_up(rng.choice(["cancel", "fail", "drop"]))
        else:
            world.restart(lose_rows=rng.random() < 0.5)
        world.check()
    assert world.version > 100
    if isinstance(world.policy, Wait):
        assert "stale" not in world.ledger.balance.dropped
