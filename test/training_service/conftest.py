"""A server in this process, and a client of Tinker's own package that talks to it."""

import threading
from types import SimpleNamespace

import pytest
import tinker
import uvicorn

from torchrl_agents.training_service.adapted_model import AdaptedModel
from torchrl_agents.training_service.checkpoint_folder import CheckpointFolder
from torchrl_agents.training_service.http_server import application
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
    stops = []

    def serve(model=adapted, *, key=None, **options):
        service = TrainingService([model], CheckpointFolder(tmp_path / "saved"), **options)
        config = uvicorn.Config(
            application(service, key), port=0, log_level="error", lifespan="off"
        )
        server = uvicorn.Server(config)
        listening = config.bind_socket()
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        client = tinker.ServiceClient(base_url=url, api_key=key or "tml-any")

        def stop():
            client.close("success").result()
            server.should_exit = True
            thread.join()
            listening.close()
            service.close()

        stops.append(stop)
        return SimpleNamespace(service=service, url=url, client=client, model=model)

    yield serve
    for stop in stops:
        stop()


@pytest.fixture
def served(serve):
    return serve()
