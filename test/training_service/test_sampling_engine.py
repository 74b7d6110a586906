"""Which adapters are at an engine that draws for the service, and settings that can't work."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agents.training_service.command import main
from torchrl_agents.training_service.sampling_engine import SamplingEngine
from torchrl_modules import SamplingParameters
from torchrl_modules.engines.whole_batch_engine import KeptAdapters

PARAMS = SamplingParameters()


class Engine:
    """Keeps adapters, and says what it draws with; a draw of seed 1 waits to be let on."""

    vocab_size, max_model_len = 9, 16

    def __init__(self, max_adapters):
        self.max_adapters = max_adapters
        self.here, self.log, self.go_on = set(), [], threading.Event()

    def keep_adapters(self, weights):
        kept = KeptAdapters(f"{weights}-{len(self.log)}")
        self.here.add(kept)
        self.log.append(("keep", weights))
        return kept

    def drop_adapters(self, kept):
        self.here.remove(kept)
        self.log.append(("drop", kept.name.partition("-")[0]))

    def generate(self, prompts, params, *, max_new_tokens, seeds, adapters):
        if seeds == [1]:
            assert self.go_on.wait(30)
        assert adapters is None or adapters in self.here
        return adapters and adapters.name.partition("-")[0]


def draw(engine, name, seed=0):
    named = None if name is None else (name, lambda: name)
    return engine.draw(named, [[1]], PARAMS, [1], [seed])


@given(st.lists(st.sampled_from([*"abcd", None])), st.integers(1, 3))
def test_the_adapters_drawn_with_last_are_there(names, size):
    """The engine holds what a list of the last different names would hold."""
    inside = Engine(size)
    engine, last, sent = SamplingEngine(inside, "it"), [], 0
    for name in names:
        assert draw(engine, name) == name
        if name is not None:
            sent += name not in last
            last = [*(one for one in last if one != name), name][-size:]
        assert {kept.name.partition("-")[0] for kept in inside.here} == set(last)
    assert [what for what, _ in inside.log].count("keep") == sent
    engine.close()
    assert not inside.here


def test_adapters_in_use_stay_and_those_of_many_requests_are_sent_once():
    inside = Engine(1)
    engine = SamplingEngine(inside, "it")
    with ThreadPoolExecutor(4) as pool:
        begun = [pool.submit(draw, engine, "a", 1) for _ in range(3)]
        while not (kept := engine._kept.get("a")) or kept.num_users < 3:
            threading.Event().wait(0.001)
        assert draw(engine, "b") == "b"  # beside it, though there is one place
        inside.go_on.set()
        assert [one.result() for one in begun] == ["a"] * 3
    draw(engine, "c")
    assert inside.log == [
        *(("keep", "a"), ("keep", "b")),
        *(("drop", "a"), ("drop", "b"), ("keep", "c")),
    ]


def test_an_engine_without_adapters_is_refused():
    with pytest.raises(ValueError, match=r"the vLLM takes no adapters.*--enable-lora"):
        SamplingEngine(Engine(0), "the vLLM")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--engine-url", "unix:///x"], "are for engine=vllm"),
        (["--engine-kwarg", "max_loras=2"], "are for engine=vllm"),
        (
            ["--engine", "vllm", "--engine-url", "unix:///x", "--engine-kwarg", "max_loras=2"],
            "{'max_loras': 2} are of a vLLM in this process",
        ),
        (["other", "--engine", "vllm", "--engine-url", "unix:///x"], "1 times for 2 models"),
        (["--engine", "vllm", "--max-rows", "8"], "vLLM has max_num_seqs"),
        (["--engine", "vllm", "--engine-url", "unix:///nowhere/socket"], "unix:///nowhere/socket"),
    ],
)
def test_settings_that_can_not_work_are_refused_by_name(tiny_folder, capsys, words, told):
    assert main([str(tiny_folder), *words, "--device", "cpu"]) == 2
    assert told in capsys.readouterr().err


def test_settings_of_vllm_are_given_as_name_and_value(tiny_folder, capsys):
    with pytest.raises(SystemExit):
        main([str(tiny_folder), "--engine", "vllm", "--engine-kwarg", "max_loras"])
    assert "must be NAME=VALUE, got 'max_loras'" in capsys.readouterr().err
