"""Process of a node that starts servers for a run: ``python -m torchrl_agents.engine_node``.

A job of ``torchrl-agents slurm --engine-nodes=2`` runs it. It says on standard output where it is
asked, and which GPUs it has. At SIGTERM and SIGUSR2, which srun forwards, it ends with all servers.
"""

import json
import logging
import os
import signal
import socket
import sys

import torch

from torchrl_modules import start_server, start_sglang_server
from torchrl_modules.engines.server_host import ServerHost

from .settings.engine_nodes import MARK, TOKEN_VARIABLE


def main() -> None:
    """Start servers for who asks, until this process is told to end."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    logging.basicConfig(format=f"{node}: %(message)s", level=logging.INFO)
    # The ranks are warned before the end of a job's time; what draws for them goes on.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda *_: sys.exit(0))
    starters = {"vllm": start_server, "sglang": start_sglang_server}
    with ServerHost(starters, token=os.environ[TOKEN_VARIABLE]) as host:
        said = {"node": node, "port": host.port, "devices": _devices()}
        print(f"{MARK}{json.dumps(said)}", flush=True)
        host.serve_forever()


def _devices() -> list[str]:
    """GPUs of this process, by number or UUID."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(number) for number in range(torch.cuda.device_count())]


if __name__ == "__main__":
    main()
