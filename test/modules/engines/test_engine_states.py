"""What is known of an engine in another process: every transition, and engines that come and go."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torchrl_modules.engines.engine_state import EngineState, Supervision

EVENTS = {
    "started": lambda s: s.started(),
    "acknowledged what is wanted": lambda s: s.acknowledged(s.incarnation, s.wanted),
    "acknowledged something newer": lambda s: s.acknowledged(s.incarnation, s.wanted + 1),
    "acknowledged something older": lambda s: s.acknowledged(s.incarnation, s.wanted - 1),
    "an earlier engine acknowledged": lambda s: s.acknowledged(s.incarnation - 1, s.wanted),
    "died": lambda s: s.died(s.incarnation),
    "an earlier engine died": lambda s: s.died(s.incarnation - 1),
}
DEAD, STALE, HEALTHY = EngineState
# Where each event leads from each state; None: it is refused.
TRANSITIONS = {
    "started": (STALE, None, None),
    "acknowledged what is wanted": (DEAD, HEALTHY, HEALTHY),
    "acknowledged something newer": (DEAD, HEALTHY, HEALTHY),
    "acknowledged something older": (DEAD, STALE, STALE),
    "an earlier engine acknowledged": (DEAD, STALE, HEALTHY),
    "died": (DEAD, DEAD, DEAD),
    "an earlier engine died": (DEAD, STALE, HEALTHY),
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", EngineState, ids=lambda state: state.value)
def test_E03_every_transition(state, event):
    served = {DEAD: None, STALE: None, HEALTHY: 3}[state]
    before = Supervision(state, incarnation=2, served=served, wanted=3)
    expected = TRANSITIONS[event][list(EngineState).index(state)]
    if expected is None:
        with pytest.raises(RuntimeError, match="only after it died"):
            EVENTS[event](before)
        return
    after = EVENTS[event](before)
    assert after.state is expected
    assert after.may_serve == (expected is HEALTHY)
    if event.startswith("an earlier"):
        assert after == before


class Engines(RuleBasedStateMachine):
    """Engines come and go, and the news of them arrive late; what serves has what is wanted."""

    def __init__(self):
        super().__init__()
        self.known = Supervision()
        self.real = {}  # incarnation to the version that it really has; gone when it is dead
        self.newest = 0

    @precondition(lambda self: self.known.state is EngineState.DEAD)
    @rule()
    def start(self):
        self.known = self.known.started()
        self.real = {self.known.incarnation: 0}

    @precondition(lambda self: self.known.incarnation in self.real)
    @rule(step=st.integers(0, 2))
    def push(self, step):
        self.newest = max(self.newest, self.known.wanted + step)
        self.real[self.known.incarnation] = self.known.wanted + step
        self.known = self.known.acknowledged(self.known.incarnation, self.known.wanted + step)

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
