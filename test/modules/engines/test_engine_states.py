"""What is known of an engine in another process: every transition, and engines that come and go."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torchrl_modules.engines.supervision import EngineState, Supervision

EVENTS = {
    "restarting": lambda s: s.restarting(),
    "started": lambda s: s.started(),
    "acknowledged what is wanted": lambda s: s.acknowledged(s.incarnation, s.wanted),
    "acknowledged something newer": lambda s: s.acknowledged(s.incarnation, s.wanted + 1),
    "acknowledged something older": lambda s: s.acknowledged(s.incarnation, s.wanted - 1),
    "an earlier engine acknowledged": lambda s: s.acknowledged(s.incarnation - 1, s.wanted),
    "wanted again": lambda s: s.wants(s.wanted),
    "something newer is wanted": lambda s: s.wants(s.wanted + 1),
    "suspected": lambda s: s.suspected(s.incarnation),
    "an earlier engine was suspected": lambda s: s.suspected(s.incarnation - 1),
    "cleared": lambda s: s.cleared(s.incarnation),
    "an earlier engine was cleared": lambda s: s.cleared(s.incarnation - 1),
    "died": lambda s: s.died(s.incarnation),
    "an earlier engine died": lambda s: s.died(s.incarnation - 1),
}
DEAD, RESTARTING, STALE, SUSPECT, HEALTHY = EngineState
SAME = (DEAD, RESTARTING, STALE, SUSPECT, HEALTHY)
# Where each event leads from each state, in the order above; None: it is refused.
TRANSITIONS = {
    "restarting": (RESTARTING, None, None, None, None),
    "started": (STALE, STALE, None, None, None),
    "acknowledged what is wanted": (DEAD, RESTARTING, HEALTHY, HEALTHY, HEALTHY),
    "acknowledged something newer": (DEAD, RESTARTING, HEALTHY, HEALTHY, HEALTHY),
    "acknowledged something older": (DEAD, RESTARTING, STALE, STALE, STALE),
    "an earlier engine acknowledged": SAME,
    "wanted again": SAME,
    "something newer is wanted": (DEAD, RESTARTING, STALE, STALE, STALE),
    "suspected": (DEAD, RESTARTING, STALE, SUSPECT, SUSPECT),
    "an earlier engine was suspected": SAME,
    "cleared": (DEAD, RESTARTING, STALE, HEALTHY, HEALTHY),
    "an earlier engine was cleared": SAME,
    "died": (DEAD, DEAD, DEAD, DEAD, DEAD),
    "an earlier engine died": SAME,
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", EngineState, ids=lambda state: state.value)
def test_E03_every_transition(state, event):
    served = 3 if state in (SUSPECT, HEALTHY) else None
    before = Supervision(state, incarnation=2, served=served, wanted=3)
    expected = TRANSITIONS[event][SAME.index(state)]
    if expected is None:
        with pytest.raises(RuntimeError, match="only after it died"):
            EVENTS[event](before)
        return
    after = EVENTS[event](before)
    assert after.state is expected
    assert after.may_serve == (expected is HEALTHY)
    if event.startswith("an earlier") or event == "wanted again":
        assert after == before


def test_E03_the_only_way_to_healthy_from_death_is_an_acknowledged_update():
    ways = {
        (state, event)
        for event, ends in TRANSITIONS.items()
        for state, end in zip(SAME, ends, strict=True)
        if end is HEALTHY and state not in (HEALTHY, SUSPECT)
    }
    assert ways == {
        (STALE, "acknowledged what is wanted"),
        (STALE, "acknowledged something newer"),
    }


class Engines(RuleBasedStateMachine):
    """Engines come and go, and the news of them arrive late; what serves has what is wanted."""

    def __init__(self):
        super().__init__()
        self.known = Supervision()
        self.real = {}  # incarnation to the version that it really has; gone when it is dead
        self.newest = 0

    @precondition(lambda self: self.known.state in (DEAD, RESTARTING))
    @rule(told=st.booleans())
    def start(self, told):
        if told and self.known.state is DEAD:
            self.known = self.known.restarting()
        self.known = self.known.started()
        self.real = {self.known.incarnation: 0}

    @precondition(lambda self: self.known.incarnation in self.real)
    @rule(step=st.integers(0, 2))
    def push(self, step):
        self.newest = max(self.newest, self.known.wanted + step)
        self.real[self.known.incarnation] = self.known.wanted + step
        self.known = self.known.acknowledged(self.known.incarnation, self.known.wanted + step)

    @rule(step=st.integers(0, 2))
    def want(self, step):
        self.newest = max(self.newest, self.known.wanted + step)
        self.known = self.known.wants(self.known.wanted + step)

    @rule(well=st.booleans())
    def look(self, well):
        look = self.known.cleared if well else self.known.suspected
        self.known = look(self.known.incarnation)

    @rule(back=st.integers(1, 3), version=st.integers(0, 9))
    def late_news(self, back, version):
        before = self.known
        self.known = self.known.acknowledged(before.incarnation - back, version)
        self.known = self.known.died(before.incarnation - back)
        assert self.known == before

    @rule()
    def die(self):
        self.real.pop(self.known.incarnation, None)
        self.known = self.known.died(self.known.incarnation)

    @invariant()
    def only_what_is_wanted_serves(self):
        if self.known.may_serve:
            assert self.real[self.known.incarnation] == self.known.served == self.known.wanted
        assert self.known.wanted <= self.newest or self.newest == 0


TestEngines = Engines.TestCase
TestEngines.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
