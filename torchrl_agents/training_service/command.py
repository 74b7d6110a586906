"""The command ``torchrl-agents serve-training``: a training loop behind a wire.

    torchrl-agents serve-training smollm2
    torchrl-agents serve-training HuggingFaceTB/SmolLM2-135M-Instruct=smollm2 --port 8000

Clients of Tinker (the package `tinker`) train and sample adapters of the models that are named
here, several runs at once. A model is a hub id, a folder, or NAME=MODEL, where NAME is what clients
ask for.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

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
        models = [_model(given, args) for given in args.models]
    except (ImportError, ValueError, OSError) as error:
        return _refuse(str(error))
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        return _refuse(f"Two models have the same name: {', '.join(names)}. Give NAME=MODEL.")
    service = TrainingService(
        models,
        CheckpointFolder(args.folder),
        max_rows=args.max_rows,
        session_timeout_s=args.session_timeout,
    )
    import uvicorn

    url = f"http://{args.host}:{args.port}"
    print(f"Serving {', '.join(names)} at {url}; adapters are saved in {args.folder.resolve()}.")
    print(
        f"Clients: TINKER_BASE_URL={url} TINKER_API_KEY={'...' if key else 'tml-local'}", flush=True
    )
    try:
        uvicorn.run(
            application(service, key),
            host=args.host,
            port=args.port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=5,
        )
    finally:
        service.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    description, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="torchrl-agents serve-training",
        description=f"{description}\n\n{rest}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="+", metavar="[NAME=]MODEL", help="models to serve")
    parser.add_argument("--host", default="127.0.0.1", help="where it listens (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="(%(default)s)")
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
        "--max-rows", type=_positive, default=256, help="most sequences drawn at once (%(default)s)"
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
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return int(text)


def _model(given: str, args: argparse.Namespace) -> AdaptedModel:
    name, _, source = given.rpartition("=")
    return load_adapted_model(
        name or source,
        source,
        device=args.device,
        dtype=getattr(torch, args.dtype),
        lora_alpha=args.lora_alpha,
        max_model_len=args.max_model_len,
        micro_batch_tokens=args.micro_batch_tokens,
        autocast_dtype=None if args.autocast is None else getattr(torch, args.autocast),
    )


def _refuse(message: str) -> int:
    print(f"serve-training: {message}", file=sys.stderr)
    return 2
