"""A tiny model with tied embeddings, and the one vLLM engine of a test session."""

import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # references that several files compare with

# Before torch and vLLM are imported, where the command line has not set them.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_PLUGINS": "",
}.items():
    os.environ.setdefault(_name, _value)

import pytest  # noqa: E402
import torch  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

STOP = 3


def build_model(seed: int = 0, *, tied: bool = True) -> Qwen3ForCausalLM:
    """A float32 Qwen3 for `chatml_tokenizer`, whose distributions are far from uniform."""
    config = Qwen3Config(
        vocab_size=337,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=STOP,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float().eval()


@pytest.fixture(scope="session", name="build_model")
def build_model_fixture():
    """The function that builds a model, for tests of other files."""
    return build_model


@pytest.fixture(scope="session")
def model():
    """The weights that `vllm_engine` starts each test with."""
    return build_model(0)


@pytest.fixture(scope="session")
def other_model():
    """Other weights of the same shapes."""
    return build_model(1)


@pytest.fixture(scope="session")
def model_directory(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def session_engine(model_directory):
    from torchrl_modules.vllm.engine import VLLMEngine

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own, while it is imported and built
        engine = VLLMEngine(
            model_directory,
            dtype="float32",
            max_model_len=128,
            kv_cache_memory_bytes=64 << 20,
            block_size=32,  # the default of 128 would share no short prefix
        )
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def server(model_directory):
    """The URL of the session's one vLLM server."""
    from torchrl_modules.vllm.server import start_server

    options = {
        "dtype": "float32",
        "max_model_len": 128,
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": 32,
    }
    with start_server(model_directory, **options) as url:
        yield url


@pytest.fixture
def server_engine(server, model):
    """A client of the session's server, which has the weights of `model`."""
    from torchrl_modules.vllm.server_engine import VLLMServerEngine

    engine = VLLMServerEngine(server, timeout_s=60, num_connections=8)
    if engine.version:
        engine.update_weights(model.state_dict())
    yield engine
    engine.close()


@pytest.fixture
def vllm_engine(session_engine, model):
    """The session's engine, with the weights of `model`."""
    if session_engine.version:
        session_engine.update_weights(model.state_dict())
    return session_engine
