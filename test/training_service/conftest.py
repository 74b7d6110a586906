"""A server in this process, and a client of Tinker's own package that talks to it."""

import os
from contextlib import ExitStack
from types import SimpleNamespace

# Before vLLM is imported, where the command line has not set it: two plugins are slow.
os.environ.setdefault("VLLM_PLUGINS", "")

import pytest
import tinker

from torchrl_agents.training_service import serving
from torchrl_agents.training_service.adapted_model import AdaptedModel
from torchrl_agents.training_service.checkpoint_folder import CheckpointFolder
from torchrl_agents.training_service.service import TrainingService

NAME = "mine/tiny"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory, make_tiny_model, chatml_tokenizer):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model().save_pretrained(folder)
    chatml_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def adapted(make_tiny_model, chatml_tokenizer, tiny_folder):
    return AdaptedModel(NAME, make_tiny_model(), chatml_tokenizer, str(tiny_folder))


@pytest.fixture
def serve(adapted, tmp_path, monkeypatch):
    """Starts a server over a model; gives its service, its address and a client."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with ExitStack() as opened:

        def start(model=adapted, *, key=None, **options):
            service = TrainingService([model], CheckpointFolder(tmp_path / "saved"), **options)
            url = opened.enter_context(serving.serve_at_free_port(service, api_key=key))
            client = tinker.ServiceClient(base_url=url, api_key=key or "tml-any")
            opened.callback(lambda: client.close("success").result())
            return SimpleNamespace(service=service, url=url, client=client, model=model)

        yield start


@pytest.fixture
def served(serve):
    return serve()
