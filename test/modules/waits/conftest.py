"""The counter of waits, which the benchmarks have."""

import importlib
from pathlib import Path

import pytest

from torchrl_modules.engines import slot_reader
from torchrl_modules.scoring import slot_attention

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def device_waits(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("device_waits")


@pytest.fixture
def attention_of_a_gpu(monkeypatch):
    """Every step reads slots by length, by the form of its attention that needs no kernel."""
    monkeypatch.setattr(slot_reader, "_BY_LENGTH", {"cpu"})
    monkeypatch.setattr(slot_reader, "has_slot_attention", lambda *_, **__: True)
    monkeypatch.setattr(slot_attention, "_has_cpu_kernel", lambda _: False)
