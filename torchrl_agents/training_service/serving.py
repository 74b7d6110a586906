"""A server in a program: a notebook's, say, or a test's."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from torchrl_data import import_package
from torchrl_data.checks import one_of
from torchrl_data.devices import accelerator
from torchrl_modules import local_model
from torchrl_modules.policies.loading import load_policy_model

from .adapted_model import AdaptedModel
from .checkpoint_folder import CheckpointFolder
from .http_server import application
from .messages import INSTALL
from .sampling_engine import engine_here, engine_of_server
from .service import TrainingService


def load_adapted_model(
    name: str,
    source: str,
    *,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    engine: Literal["transformers", "vllm"] = "transformers",
    engine_url: str | None = None,
    engine_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> AdaptedModel:
    """Load a model that clients train adapters of.

    Args:
        name: by which clients ask for it.
        source: hub id or folder, or the name of a package's model.
        device: the accelerator where it is not given, if there is one.
        dtype: of the frozen weights; adapters are float32.
        engine: draws: the model itself, or vLLM, which has the same weights once more.
        engine_url: of a vLLM server that runs, started with ``--enable-lora``; without it vLLM is
            built in this process.
        engine_kwargs: settings of vLLM in this process, as of :class:`~torchrl_modules.VLLMEngine`;
            it computes as the model does, and takes adapters of ranks up to 32, if nothing else is
            said.
        **options: of :class:`~.adapted_model.AdaptedModel`.

    Raises:
        ImportError: PEFT is missing.
        OSError: there is no such model, or nobody answers at the URL.
        RuntimeError: there is no vLLM server, or vLLM can't run the model.
        ValueError: it can't be loaded, trained or drawn from so.
    """
    one_of("engine", engine, ("transformers", "vllm"), who="serve-training")
    if engine != "vllm" and (engine_url or engine_kwargs):
        raise ValueError("serve-training: engine_url and engine_kwargs are for engine=vllm.")
    if engine_url and engine_kwargs:
        raise ValueError(
            f"serve-training: engine_kwargs={dict(engine_kwargs)} are of a vLLM in this process; "
            f"the one at {engine_url} has the settings that it was started with."
        )
    folder = local_model(source)
    place = {
        "device": torch.device(device) if device else accelerator(),
        "dtype": dtype,
        "attn_implementation": None,
        "model_kwargs": None,
    }
    model: Any
    model, tokenizer, _ = load_policy_model(folder, None, None, place)
    where = str(Path(folder).resolve()) if Path(folder).is_dir() else folder
    adapted = AdaptedModel(name, model, tokenizer, where, **options)
    if engine == "vllm":
        if engine_url:
            drawing = engine_of_server(engine_url)
        else:
            computes = options.get("autocast_dtype") or dtype
            settings = {
                "dtype": str(computes).removeprefix("torch."),
                "max_model_len": adapted.max_model_len,
                **(engine_kwargs or {}),
            }
            drawing = engine_here(where, settings)
        try:
            adapted.draw_with(drawing)
        except BaseException:
            drawing.close()
            raise
    return adapted


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
        OSError: there is no such model, or nobody answers at ``engine_url``.
        RuntimeError: there is no vLLM server, or vLLM can't run the model.
        ValueError: a model can't be loaded, trained or drawn from so.
    """
    if options.get("engine_url") and len(models) > 1:
        raise ValueError(
            f"serve-training: engine_url is of one model, and there are {len(models)}: serve each "
            "by a server of its own."
        )
    loaded = [load_adapted_model(name, source, **options) for name, source in models.items()]
    with serve_at_free_port(
        TrainingService(loaded, CheckpointFolder(Path(folder))), api_key=api_key
    ) as url:
        yield url
