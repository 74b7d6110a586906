"""What is compiled is logged, kept for the next process, and told where PyTorch gives up."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from torchrl_modules import compilation
from torchrl_modules.compilation import Compiled

ROOT = Path(__file__).parents[2]
PROGRAM = """
import logging, torch
from torch._dynamo.utils import counters
from torchrl_modules import compilation
compilation._SHOWN_S = 0.0
logging.basicConfig(level=logging.INFO, format="LOG %(message)s")
double = compilation.Compiled(lambda x: (2 * x).sin(), "twice", slow="slow", dynamic=True)
x = torch.arange(6.0)
assert torch.allclose(double(x), (2 * x).sin())
double(x)
print("FOUND", counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.fixture(autouse=True)
def _forget_what_was_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.weekly
def test_compiled_code_is_logged_once_and_found_again_by_the_next_process(tmp_path):
    environment = {**os.environ, "TORCHRL_AGENTS_CACHE": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR")
    for expected in (0, 1):
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert f"FOUND {expected}" in ended.stdout
        told = [line for line in ended.stderr.splitlines() if line.startswith("LOG ")]
        assert len(told) == 1
        assert told[0].startswith("LOG twice: compiled in ")
        assert any((tmp_path / "compiled").rglob("*.cpp")), list(tmp_path.rglob("*"))


def test_another_folder_is_left_as_it_is_named(tmp_path, monkeypatch):
    compilation._keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHRL_AGENTS_CACHE", str(tmp_path / "file"))
    compilation._keep_compiled_code()  # a folder that can't be made
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    monkeypatch.setenv("TORCHRL_AGENTS_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_somebody")  # PyTorch's own
    compilation._keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled")


def test_too_many_versions_run_uncompiled_and_warn_once():
    graphs, runs = [], []

    def backend(graph, _):
        graphs.append(graph)

        def run(*args):
            runs.append(graph)
            return graph.forward(*args)

        return run

    compiled = Compiled(
        lambda x: x * 1.5, "scaling", slow="it is slow", backend=backend, dynamic=False
    )
    compiled(torch.ones(2))  # the first of them sets the limit that the library has
    sizes = (3, 4, 5, 6)
    why = "scaling is not compiled for other inputs from now on, so it is slow: .* limit of 2 "
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        pytest.warns(UserWarning, match=why) as told,
    ):
        found = [compiled(torch.ones(size)).tolist() for size in sizes]
    assert found == [[1.5] * size for size in sizes]
    assert len(told) == 1
    assert (len(graphs), len(runs)) == (2, 2)  # of sizes 2 and 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(torch.ones(2)).tolist() == [1.5, 1.5]
        assert compiled(torch.ones(7)).tolist() == [1.5] * 7
    assert (len(graphs), len(runs)) == (2, 3)  # what is compiled is used as before


def test_it_is_a_part_of_what_is_compiled_around_it():
    inner = Compiled(lambda x: x + 1, "inner", slow="slow", backend="eager")
    outer = torch.compile(lambda x: inner(x) * 2, backend="eager", fullgraph=True)
    assert outer(torch.ones(1)).item() == 4.0
    assert inner._compiled is None
