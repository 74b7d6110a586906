"""A server in a program: a notebook's, say, or a test's."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchrl_data import import_package
from torchrl_modules import local_model
from torchrl_modules.policies.loading import accelerator, load_model

from .adapted_model import AdaptedModel
from .checkpoint_folder import CheckpointFolder
from .http_server import application
from .messages import INSTALL
from .service import TrainingService


def load_adapted_model(
    name: str,
    source: str,
    *,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> AdaptedModel:
    """Load a model that clients train adapters of.

    Args:
        name: by which clients ask for it.
        source: hub id or folder, or the name of a package's model.
        device: the accelerator where it is not given, if there is one.
        dtype: of the frozen weights; adapters are float32.
        **options: of :class:`~.adapted_model.AdaptedModel`.

    Raises:
        ImportError: PEFT is missing.
        OSError: there is no such model.
        ValueError: it can't be loaded or trained so.
    """
    folder = local_model(source)
    place = {
        "device": torch.device(device) if device else accelerator(),
        "dtype": dtype,
        "attn_implementation": None,
        "model_kwargs": None,
    }
    model: Any
    model, tokenizer, _ = load_model(folder, None, None, place)
    where = str(Path(folder).resolve()) if Path(folder).is_dir() else folder
    return AdaptedModel(name, model, tokenizer, where, **options)


@contextmanager
def serve_at_free_port(service: TrainingService, *, api_key: str | None = None) -> Iterator[str]:
    """Serve at a free port of this machine; gives the address, and ends with the block.

    Args:
        service: does what is asked for; it is closed in the end.
        api_key: which clients have to send; ``None`` lets in every program of this machine.

    Raises:
        ImportError: ``tinker``, ``starlette`` or ``uvicorn`` is missing.
    """
    import_package("uvicorn", who="serve-training", install=INSTALL)
    import uvicorn

    config = uvicorn.Config(
        application(service, api_key),
        port=0,
        log_level="error",
        lifespan="off",
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    listening = config.bind_socket()
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
        service.close()


@contextmanager
def serve_training(
    models: Mapping[str, str], folder: str | Path, *, api_key: str | None = None, **options: Any
) -> Iterator[str]:
    """Serve models at a free port of this machine, as ``torchrl-agents serve-training`` does.

    Args:
        models: hub id or folder by the name that clients ask for.
        folder: where adapters are saved.
        api_key: which clients have to send; ``None`` lets in every program of this machine.
        **options: of :func:`load_adapted_model`.

    Yields:
        The address, for ``tinker.ServiceClient(base_url=...)``.

    Raises:
        ImportError: a package is missing; the message names it.
        OSError: there is no such model.
        ValueError: a model can't be loaded or trained so.
    """
    loaded = [load_adapted_model(name, source, **options) for name, source in models.items()]
    with serve_at_free_port(
        TrainingService(loaded, CheckpointFolder(Path(folder))), api_key=api_key
    ) as url:
        yield url
