"""A real vLLM server on this machine: generation, updates by file, and no server left behind."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch

from torchrl_modules.engines.engine import EngineDied
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.vllm.access_control import TOKEN_VARIABLE
from torchrl_modules.vllm.releases import server_module
from torchrl_modules.vllm.server import start_server
from torchrl_modules.vllm.server_engine import VLLMServerEngine

PROMPTS = [[5, 6, 7, 8] * 10, [9, 10], [11] * 40, [12, 13, 14]]
PARAMS = SamplingParameters(max_new_tokens=24, temperature=0.7, top_k=20, stop_token_ids=(3,))
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@torch.no_grad()
def assert_from(model, rows):
    for prompt, row in zip(PROMPTS, rows, strict=True):
        logits = model(torch.tensor([prompt + row.ids])).logits[0, len(prompt) - 1 : -1] / 0.7
        logits = logits.masked_fill(logits < logits.topk(20, -1).values[:, -1:], -torch.inf)
        expected = logits.log_softmax(-1)[torch.arange(len(row.ids)), torch.tensor(row.ids)]
        # vLLM's kernels sum in another order.
        torch.testing.assert_close(torch.tensor(row.log_probs), expected, atol=5e-5, rtol=0)


@pytest.fixture
def engine(server_engine):
    return server_engine


def test_log_probs_are_those_of_the_distribution_sampled_from(engine, model):
    rows = engine.generate(PROMPTS, PARAMS)
    assert {row.finish_reason for row in rows} <= {"stop", "length"}
    assert_from(model, rows)


def test_a_bad_row_alone_is_marked(engine):
    prompts = [[], [1] * 128, [337], [-1], [5], PROMPTS[1]]
    rows = engine.generate(prompts, PARAMS, max_new_tokens=[4, 4, 4, 4, 0, 4])
    assert [row.finish_reason for row in rows[:5]] == ["error"] * 5
    assert all(row.error for row in rows[:5])
    assert rows[5].ids


def test_an_update_changes_the_outputs_to_those_of_the_new_weights(engine, model, other_model):
    assert_from(model, engine.generate(PROMPTS, PARAMS))
    version = engine.version
    engine.update_weights(other_model.state_dict())
    assert engine.version == version + 1
    assert_from(other_model, engine.generate(PROMPTS, PARAMS))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        pytest.param("model.norm.weight", torch.ones(3), r"shape \(3,\)", id="shape"),
        pytest.param("model.norm.weight", torch.full((64,), torch.nan), "not finite", id="NaN"),
        pytest.param("extra", torch.ones(3), "no use for", id="unknown name"),
        pytest.param("model.norm.weight", [1.0], "no whole torch.Tensor", id="no tensor"),
    ],
)
def test_a_wrong_update_is_refused_whole(engine, model, other_model, name, value, message):
    version = engine.version
    with pytest.raises(ValueError, match=message):
        engine.update_weights({**other_model.state_dict(), name: value})
    assert engine.version == version
    assert_from(model, engine.generate(PROMPTS, PARAMS))


def test_weights_that_another_client_sent_are_noticed(engine, server, other_model):
    other = VLLMServerEngine(server, num_connections=1)
    other.update_weights(other_model.state_dict(), version=engine.version + 100)
    with pytest.raises(RuntimeError, match="another client"):
        engine.generate(PROMPTS, PARAMS)
    other.close()
    engine.update_weights(other_model.state_dict(), version=engine.version + 200)
    assert_from(other_model, engine.generate(PROMPTS, PARAMS))


def test_a_server_that_cannot_start_says_why(tmp_path):
    with (
        pytest.raises(RuntimeError, match="did not start"),
        start_server(str(tmp_path / "nothing")),
    ):
        pass


def test_a_server_started_by_hand_serves_over_http(
    model_directory, model, other_model, monkeypatch
):
    monkeypatch.setenv(TOKEN_VARIABLE, "a secret of many letters")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--dtype=float32", "--max-model-len=128", f"--kv-cache-memory-bytes={16 << 20}"]
    module = [sys.executable, "-m", "torchrl_modules.vllm.server"]
    process = subprocess.Popen([*module, model_directory, f"--port={port}", *options])
    try:
        engine = VLLMServerEngine(f"http://127.0.0.1:{port}", wait_s=120, num_connections=8)
        assert_from(model, engine.generate(PROMPTS, PARAMS))
        engine.update_weights(other_model.state_dict())
        assert_from(other_model, engine.generate(PROMPTS, PARAMS))
        engine.close()
    finally:  # alone, as the kernel does when memory is short
        children = psutil.Process(process.pid).children(recursive=True)
        shared = shared_memory_of(children)
        process.kill()
        process.wait(timeout=30)
    assert_all_gone(children, shared)


def shared_memory_of(processes):
    """The files of shared memory that processes map."""
    names = {entry.path for each in processes for entry in each.memory_maps()}
    found = {Path(name) for name in names if name.startswith("/dev/shm/psm_")}
    assert found
    return found


def assert_all_gone(processes, shared):
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert not [path for path in shared if path.exists()]


ORPHAN = """
import sys
from torchrl_modules import SamplingParameters, make_vllm_worker
engine = make_vllm_worker(
    sys.argv[1], devices=[0], dtype="float32", kv_cache_memory_bytes=16 << 20, max_model_len=128
)
params = SamplingParameters(max_new_tokens=4, stop_token_ids=())
(row,) = engine.generate([[5, 6, 7]], params)
assert len(row.ids) == len(row.log_probs) == 4, row
(member,) = engine.inside._members
print(member.engine._client._client.url, flush=True)
sys.stdin.read()
"""


def test_a_server_ends_with_its_parent_and_a_client_notices(
    model, model_directory, pytestconfig, request
):
    folder = tempfile.TemporaryDirectory()  # paths of sockets are short
    request.addfinalizer(folder.cleanup)
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, model_directory],
        cwd=pytestconfig.rootpath,
        env=os.environ | {"TMPDIR": folder.name},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    url = parent.stdout.readline().strip()
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) >= 2  # the server and its engine
    client, trainer = (VLLMServerEngine(url, num_connections=8, stall_timeout_s=3.0) for _ in "12")

    # Its engine is stopped, with all connections open.
    engine = next(child for child in children if "EngineCore" in child.name())
    # The kernel puts a program's memory somewhere else each time that it is started.
    places = [Path(f"/proc/{p.pid}/auxv").read_bytes() for p in (engine.parent(), engine)]
    assert places[0] == places[1], "it is a fork, which imports nothing again"
    engine.suspend()
    begin = time.monotonic()
    with pytest.raises(EngineDied, match="made no progress for"):
        client.generate(PROMPTS, PARAMS)
    assert time.monotonic() - begin < 8
    client.close()
    begin = time.monotonic()
    with pytest.raises(EngineDied, match="made no progress for"):
        trainer.update_weights(model.state_dict())
    assert time.monotonic() - begin < 8
    trainer.close()

    # Stopped processes are ended with the others: the engine, its server and all of their group.
    shared = shared_memory_of(children)
    for child in children:
        if os.getpgid(child.pid) == os.getpgid(engine.pid):
            child.suspend()
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    assert_all_gone(children, shared)
    # Neither are vLLM's own sockets and files, which a process that is killed does not remove.
    assert [p for p in Path(folder.name).iterdir() if "torchinductor" not in p.name] == []
    with pytest.raises(ConnectionError, match="No answer"):
        VLLMServerEngine(url)


def test_seeds_make_a_response_repeat(engine):
    first = engine.generate(PROMPTS, PARAMS, seeds=[1, 2, 3, 4])
    again = engine.generate(PROMPTS, PARAMS, seeds=[1, 2, 3, 4])
    assert [row.ids for row in again] == [row.ids for row in first]
    other = engine.generate(PROMPTS, PARAMS, seeds=[5, 6, 7, 8])
    assert [row.ids for row in other] != [row.ids for row in first]


@pytest.mark.weekly  # test_engine_faults.py asks it of a stand-in
def test_a_plain_server_can_be_drawn_from_but_not_updated(model_directory, model, tmp_path):
    """`vllm serve --enable-scale-out`, and what this machine and a model without tokenizer need."""
    options = ["--dtype=float32", "--max-model-len=128", f"--kv-cache-memory-bytes={16 << 20}"]
    if "launchers" in server_module():  # from 0.29 on; before that it always can
        options.append("--enable-scale-out")
    path = tmp_path / "socket"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", server_module()),
            *("--model", model_directory, f"--uds={path}", "--skip-tokenizer-init"),
            *("--enforce-eager", "--no-enable-chunked-prefill", *options),
        ],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1"},
    )
    try:
        engine = VLLMServerEngine(f"unix://{path}", wait_s=240, num_connections=8)
        plain = SamplingParameters(max_new_tokens=8, stop_token_ids=(3,))
        rows = engine.generate(PROMPTS, plain)
        assert all(len(row.ids) == len(row.log_probs) > 0 for row in rows)
        with torch.no_grad():
            logits = model(torch.tensor([PROMPTS[1] + rows[1].ids])).logits[0, 1:-1]
        expected = logits.log_softmax(-1)[torch.arange(len(rows[1].ids)), rows[1].ids]
        torch.testing.assert_close(torch.tensor(rows[1].log_probs), expected, atol=5e-5, rtol=0)
        with pytest.raises(ValueError, match="reports raw log-probs"):
            engine.generate(PROMPTS, PARAMS)
        with pytest.raises(RuntimeError, match=r"worker-extension-cls .*VLLM_SERVER_DEV_MODE=1"):
            engine.update_weights(model.state_dict())
        engine.close()
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait(timeout=30)
