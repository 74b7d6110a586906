"""The door to vLLM: what it says when vLLM is missing, and what it puts back."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from torchrl_modules.vllm.runtime import preserved_globals


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


WITHOUT_VLLM = """
import sys
sys.modules["vllm"] = None
from torchrl_modules.vllm.engine import VLLMEngine
try:
    VLLMEngine("anything")
except ImportError as error:
    assert "requirements/vllm-cpu.txt" in str(error), error
else:
    raise AssertionError
"""
OWN_PROCESS = """
from torchrl_modules.vllm.engine import VLLMEngine
try:
    VLLMEngine("anything")
except RuntimeError as error:
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" in str(error), error
else:
    raise AssertionError
"""
LAZY = """
import sys
import torchrl_modules.vllm.engine
assert "vllm" not in sys.modules
"""


@pytest.mark.parametrize(
    ("code", "environment"),
    [
        pytest.param(WITHOUT_VLLM, {}, id="not installed: the message says how to install it"),
        pytest.param(
            OWN_PROCESS, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, id="engine in its own process"
        ),
        pytest.param(LAZY, {}, id="importing the engine imports no vLLM"),
    ],
)
def test_in_a_fresh_process(code, environment, pytestconfig):
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=pytestconfig.rootpath,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
