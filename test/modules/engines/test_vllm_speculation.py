"""Speculative decoding of the real vLLM on a CPU: the same ids and log-probs, in fewer steps."""

import subprocess
import sys
import warnings

import pytest
import torch

from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.vllm import server

pytestmark = pytest.mark.vllm

PROMPTS = [[5, 6, 7, 8] * 10, [9, 10], [11] * 40, [12, 13, 14]]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
GREEDY = SamplingParameters(max_new_tokens=24, temperature=0.0, stop_token_ids=(3,))


@pytest.fixture(scope="module")
def speculating(model_directory):
    from torchrl_modules.vllm.engine import VLLMEngine

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own, while it is built
        engine = VLLMEngine(
            model_directory,
            max_model_len=128,
            kv_cache_memory_bytes=64 << 20,
            block_size=32,
            speculative_config={**DRAFTS, "prompt_lookup_min": 1},
        )
    yield engine
    engine.close()


@pytest.fixture
def count_steps(monkeypatch):
    """Draws, and counts the steps of the engine."""

    def count(engine, prompts):
        core, steps = engine._llm.llm_engine, []
        step = core.step
        monkeypatch.setattr(core, "step", lambda: (steps.append(1), step())[1])
        rows = engine.generate(prompts, GREEDY)
        monkeypatch.undo()
        return rows, len(steps)

    return count


def test_greedy_ids_and_log_probs_are_those_without_it(speculating, vllm_engine, count_steps):
    found, _ = count_steps(speculating, PROMPTS)
    expected, num_expected = count_steps(vllm_engine, PROMPTS)
    assert [row.ids for row in found] == [row.ids for row in expected]
    assert sum(len(row.ids) for row in found) > 80
    for row, other in zip(found, expected, strict=True):
        # Tokens that are read several at once are added up in another order.
        log_probs = [torch.tensor(each.log_probs) for each in (row, other)]
        torch.testing.assert_close(*log_probs, rtol=0, atol=5e-5)
        assert row.finish_reason == other.finish_reason
    # Drafts were accepted: a repetitive row takes fewer steps than it has tokens.
    _, alone = count_steps(speculating, PROMPTS[2:3])
    assert num_expected >= 24
    assert alone < 20


def test_new_weights_draw_as_without_it(speculating, vllm_engine, model, other_model):
    for engine in (speculating, vllm_engine):
        engine.update_weights(other_model.state_dict())
    rows = [engine.generate(PROMPTS, GREEDY) for engine in (speculating, vllm_engine)]
    for engine in (speculating, vllm_engine):
        engine.update_weights(model.state_dict())
    ids = [[row.ids for row in each] for each in rows]
    assert ids[0] == ids[1]
    assert ids[0] != [row.ids for row in speculating.generate(PROMPTS, GREEDY)]


def test_above_temperature_0_a_cpu_is_refused_by_engine_and_server(speculating):
    params = SamplingParameters(max_new_tokens=4, temperature=1.0)
    with pytest.raises(ValueError, match="Sample with temperature=0, on a GPU, or without it"):
        speculating.check_sampling(params)
    with pytest.raises(ValueError, match="kernels that accept drafts need Triton"):
        speculating.generate(PROMPTS, params)
    with pytest.raises(SystemExit, match="--speculative-config vLLM draws wrongly"):
        server._check_drafts({"--speculative-config", "--model"}, is_cpu=True)
    server._check_drafts({"--speculative-config", "--model"}, is_cpu=False)
    server._check_drafts({"--model"}, is_cpu=True)


@pytest.mark.weekly
def test_a_server_of_a_cpu_ends_where_it_would_draw_wrongly(model_directory):
    command = [sys.executable, "-m", "torchrl_modules.vllm.server", model_directory]
    done = subprocess.run(
        [*command, "--speculative-config", "{}"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    assert "--speculative-config vLLM draws wrongly" in done.stderr
