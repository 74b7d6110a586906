"""Program that serves a model with SGLang, run by the Python that SGLang is installed for.

It takes the options of ``sglang serve`` and reads what asks it for a token from the environment, so
that no list of processes shows it. `start_sglang_server` runs it as a file: of this project it
imports nothing, which need not be installed there.
"""

import os
import sys

TOKEN_VARIABLE = "TORCHRL_SGLANG_TOKEN"


def main() -> None:
    """Serve until killed."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]  # its neighbours are named otherwise
    from sglang.launch_server import run_server  # type: ignore[import-not-found]
    from sglang.srt.plugins import load_plugins  # type: ignore[import-not-found]
    from sglang.srt.server_args import prepare_server_args  # type: ignore[import-not-found]

    load_plugins()
    token = os.environ.get(TOKEN_VARIABLE)
    words = [*sys.argv[1:], *(["--api-key", token] if token else [])]
    run_server(prepare_server_args(words))


if __name__ == "__main__":
    main()
