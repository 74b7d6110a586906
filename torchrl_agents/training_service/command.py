"""The command ``torchrl-agents serve-training``: a training loop behind a wire.

    torchrl-agents serve-training smollm2
    torchrl-agents serve-training HuggingFaceTB/SmolLM2-135M-Instruct=smollm2 --port 8000
    torchrl-agents serve-training smollm2 --engine vllm --engine-kwarg max_lora_rank=64

Clients of Tinker (the package `tinker`) train and sample adapters of the models that are named
here, several runs at once. A model is a hub id, a folder, also that of a run, or NAME=MODEL, where
NAME is what clients ask for.
"""

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

from torchrl_data import import_package

from .adapted_model import AdaptedModel
from .checkpoint_folder import CheckpointFolder
from .http_server import application
from .messages import INSTALL
from .service import TrainingService
from .serving import load_adapted_model

_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_KEY: Final = "TRAINING_SERVER_API_KEY"


def main(arguments: Sequence[str]) -> int:
    """The command; gives 0 when it was ended, 2 for what can't be served."""
    args = _parser().parse_args(arguments)
    key = os.environ.get(_KEY) or None
    if key is None and args.host not in _LOOPBACK:
        return _refuse(
            f"--host {args.host} can be reached from other machines, where whoever comes trains: "
            f"set {_KEY} to a key that begins with tml-, which clients have as TINKER_API_KEY."
        )
    if key is not None and not key.startswith("tml-"):
        return _refuse(f"{_KEY} must begin with tml-: clients send no other key.")
    try:
        import_package("tinker", who="serve-training", install=INSTALL)
        import_package("uvicorn", who="serve-training", install=INSTALL)
        urls = _engine_urls(args)
        listening = _bound(args.host, args.port)  # a port that is taken shows before models load
    except (ImportError, ValueError, OSError) as error:
        return _refuse(str(error))
    with listening:
        return _serve(args, urls, key, listening)


def _serve(
    args: argparse.Namespace, urls: Sequence[str | None], key: str | None, listening: socket.socket
) -> int:
    """Load the models, and serve until the program is ended."""
    try:
        models = [_model(given, args, url) for given, url in zip(args.models, urls, strict=True)]
    except (ImportError, ValueError, OSError, RuntimeError) as error:
        return _refuse(str(error))
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        return _refuse(f"Two models have the same name: {', '.join(names)}. Give NAME=MODEL.")
    service = TrainingService(
        models,
        CheckpointFolder(args.folder),
        max_rows=args.max_rows or 256,
        session_timeout_s=args.session_timeout,
        missing_timeout_s=args.missing_timeout,
    )
    import uvicorn

    host = f"[{args.host}]" if ":" in args.host else args.host
    url = f"http://{host}:{listening.getsockname()[1]}"
    print(f"Serving {', '.join(names)} at {url}; adapters are saved in {args.folder.resolve()}.")
    print(
        f"Clients: TINKER_BASE_URL={url} TINKER_API_KEY={'...' if key else 'tml-local'}", flush=True
    )
    config = uvicorn.Config(
        application(service, key),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
    )
    try:
        with suppress(KeyboardInterrupt):  # the server has ended by then
            uvicorn.Server(config).run([listening])
    finally:
        service.close()
    return 0


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has the address, and does not listen yet: clients are refused until it does.

    Raises:
        OSError: another program has it, or it is none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that has just ended had it
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        raise OSError(
            f"--host {host} --port {port} can't be listened at: {error}. Give another --port, or 0 "
            "for one that is free."
        ) from error
    return found


def _parser() -> argparse.ArgumentParser:
    description, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="torchrl-agents serve-training",
        description=f"{description}\n\n{rest}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="+", metavar="[NAME=]MODEL", help="models to serve")
    parser.add_argument("--host", default="127.0.0.1", help="where it listens (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0: one that is free (%(default)s)")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("training-service"),
        help="where adapters are saved (%(default)s)",
    )
    parser.add_argument("--device", help="cpu, cuda, ...; the accelerator if there is one")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="of the frozen weights; adapters are float32 (%(default)s)",
    )
    parser.add_argument("--autocast", choices=("bfloat16", "float16"), help="compute in this type")
    parser.add_argument("--max-model-len", type=_positive, help="most tokens of a sequence")
    parser.add_argument(
        "--micro-batch-tokens",
        type=_positive,
        help="most tokens of a training pass, shared beginnings counted once (2048 on a CPU; on a "
        "GPU as many as fit)",
    )
    parser.add_argument(
        "--max-rows", type=_positive, help="most sequences that a model draws at once (256)"
    )
    parser.add_argument(
        "--engine",
        default="transformers",
        choices=("transformers", "vllm"),
        help="what draws: the trained model itself, or vLLM (%(default)s)",
    )
    parser.add_argument(
        "--engine-url",
        action="append",
        metavar="URL",
        help="of a vLLM server that runs already, started with --enable-lora (docs/vllm.md); once "
        "for each model; without it vLLM is built in this process",
    )
    parser.add_argument(
        "--engine-kwarg",
        action="append",
        type=_setting,
        metavar="NAME=VALUE",
        help="a setting of vLLM in this process, such as gpu_memory_utilization=0.4; several times",
    )
    parser.add_argument(
        "--lora-alpha",
        type=float,
        default=32.0,
        help="adapters are scaled by it over their rank (%(default)s)",
    )
    parser.add_argument(
        "--session-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="a session of which nothing is heard has ended after so long (%(default)s)",
    )
    parser.add_argument(
        "--missing-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="a request that later ones of its run wait for is given up then (%(default)s)",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return int(text)


def _setting(text: str) -> tuple[str, Any]:
    name, is_given, value = text.partition("=")
    if not (is_given and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _engine_urls(args: argparse.Namespace) -> list[str | None]:
    """The server of each model; none has one, or each has."""
    urls: list[str | None] = args.engine_url or [None] * len(args.models)
    if len(urls) != len(args.models):
        raise ValueError(
            f"--engine-url is given {len(urls)} times for {len(args.models)} models: a vLLM server "
            "has one model, so give one for each, in the order of the models."
        )
    if args.engine != "transformers" and args.max_rows is not None:
        raise ValueError(
            f"--max-rows={args.max_rows} is of --engine transformers; vLLM has max_num_seqs: "
            "--engine-kwarg max_num_seqs=..., or --max-num-seqs of a server."
        )
    return urls


def _model(given: str, args: argparse.Namespace, engine_url: str | None) -> AdaptedModel:
    name, _, source = given.rpartition("=")
    return load_adapted_model(
        name or source,
        source,
        device=args.device,
        dtype=getattr(torch, args.dtype),
        engine=args.engine,
        engine_url=engine_url,
        engine_kwargs=dict(args.engine_kwarg or ()),
        lora_alpha=args.lora_alpha,
        max_model_len=args.max_model_len,
        micro_batch_tokens=args.micro_batch_tokens,
        autocast_dtype=None if args.autocast is None else getattr(torch, args.autocast),
    )


def _refuse(message: str) -> int:
    print(f"serve-training: {message}", file=sys.stderr)
    return 2
