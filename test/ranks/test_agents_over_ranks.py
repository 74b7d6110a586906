"""Agents with weights of their own on several ranks: what one process trains, and to the bit."""

import pytest

from .agent_cases import KINDS, NUM_STEPS, TRAINED


def gap_of(ours, theirs):
    """The largest between the weights of two runs, of all agents."""
    gaps = []
    for agent in TRAINED:
        own, other = ours["weights"][agent], theirs["weights"][agent]
        assert own.keys() == other.keys()
        gaps += [float((value - other[name]).abs().max()) for name, value in own.items()]
    return max(gaps)


@pytest.mark.parametrize("kind", KINDS)
def test_agents_of_ranks_are_those_of_one_process(found, kind):
    """Also where ranks have no row of an agent, or none has, and where one process goes on."""
    runs = found(f"recipe with agents: {kind}")
    one, critics = runs["one"], [rows["critic"] for rows in runs["one"]["rows"]]
    # None is left out: no row of the critic (before the first save, too), one, and several.
    assert len(critics) == NUM_STEPS
    assert {min(count, 2) for count in critics} == {0, 1, 2}
    for other in (runs[name] for name in ("two", "three") if name in runs):
        assert other["rows"] == one["rows"]
        assert gap_of(one, other) < 2e-6
        for ours, theirs in zip(other["metrics"], one["metrics"], strict=True):
            names = [key for key in theirs if key.startswith("agents/") and "max" not in key]
            assert ours.keys() == theirs.keys()
            assert ours["verify/tokens"] > 0 == ours["verify/at_fault"]
            for key in ("loss", "grad_norm", *names):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key
    moved = [
        float((value - one["weights"]["critic"][name]).abs().max())
        for name, value in one["weights"]["writer"].items()
    ]
    assert max(moved) > 1e-3, "both are trained, and become different"


def test_a_run_of_agents_on_ranks_that_was_cut_leaves_the_same_bytes(found):
    """Cut when one agent had no row so far, of which an optimizer remembers nothing."""
    runs = found("recipe with agents: adapters")
    assert runs["one"]["rows"][0]["critic"] == 0
    assert runs["cut"]["files"] == runs["two"]["files"]
    losses = [[step["loss"] for step in runs[name]["metrics"]] for name in ("cut", "two")]
    assert losses[0] == losses[1]


def test_another_run_on_ranks_begins_with_what_one_has_left_of_its_agents(found):
    """Of a learning rate at which no bit changes, drawn beside training."""
    runs = found("recipe with agents: adapters")
    assert gap_of(runs["one"], runs["again"]) == 0
