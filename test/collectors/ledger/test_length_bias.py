"""Lognormal episode times: waiting trains what was drawn, dropping trains what is short."""

import importlib
import math
from pathlib import Path

import pytest

from collectors.ledger import Drop, OnPolicy, Wait
from collectors.ledger.accounts import LengthHistogram

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "collection"
NUM_STEPS = 120


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("ledger")


@pytest.fixture
def simulate(benchmark):
    def run(policy):
        seconds = benchmark.mean_time(500) / 5
        return benchmark.Simulation(policy, step_seconds=seconds).simulate(NUM_STEPS)

    return run


@pytest.mark.parametrize("policy", [OnPolicy(), Wait(1), Wait(4), Wait(4, window=1.0)], ids=repr)
def test_waiting_discards_nothing_and_starves_nobody(simulate, policy):
    run = simulate(policy)
    assert run.ledger.balance.dropped == {}
    assert len(run.trained) == NUM_STEPS * 16
    assert max(run.ages) <= policy.max_staleness
    assert run.distance < run.critical
    assert run.trained_fraction(0.9, 1.0) == 1.0


def test_dropping_trains_what_is_short(simulate):
    run = simulate(Drop(4))
    balance = run.ledger.balance
    assert max(run.ages) <= 4
    assert balance.num_dropped.tokens > 0.3 * balance.offered.tokens
    assert run.distance > 3 * run.critical
    assert run.trained_fraction(0.9, 1.0) < 0.5 < run.trained_fraction(0.0, 0.1)
    metrics = run.ledger.metrics()  # the ledger says so itself
    assert metrics["length/trained_mean"] < 0.7 * metrics["length/offered_mean"]
    assert metrics["length/distance"] > 0.1


def test_distance_of_histograms_by_hand():
    short, long = LengthHistogram(), LengthHistogram()
    for length in (0, 10, 100, 1000):
        short.add(length)
    for length in (100, 1000, 1000, 10_000):
        long.add(length)
    assert short.distance(long) == long.distance(short) == 0.5
    assert short.distance(short) == 0
    assert math.isnan(short.distance(LengthHistogram()))
    assert list(short.edges().values()) == [1, 1, 1, 1]
    for edge, length in zip(short.edges(), (0, 10, 100, 1000), strict=True):
        assert edge <= length <= edge * 2 ** (1 / 8)


def test_distance_by_hand(benchmark):
    assert benchmark.ks_distance([1, 2, 3, 4], [3, 4, 5, 6]) == 0.5
    assert benchmark.ks_distance([1, 2], [1, 2]) == 0
    assert benchmark.ks_critical(100, 100) == pytest.approx(1.628 * math.sqrt(2 / 100), rel=1e-3)
