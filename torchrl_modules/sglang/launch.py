"""Program that serves a model with SGLang, run by the Python that SGLang is installed for.

It takes the options of ``sglang serve`` and reads what asks it for a token from the environment, so
that no list of processes shows it. `start_sglang_server` runs it as a file: of this project it
imports nothing, which need not be installed there.
"""

import os
import sys
from pkgutil import resolve_name

TOKEN_VARIABLE = "TORCHRL_SGLANG_TOKEN"


def main() -> None:
    """Serve until killed."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]  # its neighbours are named otherwise
    run_server = resolve_name("sglang.launch_server:run_server")
    resolve_name("sglang.srt.plugins:load_plugins")()
    token = os.environ.get(TOKEN_VARIABLE)
    words = [*sys.argv[1:], *([f"--api-key={token}"] if token else [])]  # it may begin with a dash
    run_server(resolve_name("sglang.srt.server_args:prepare_server_args")(words))


if __name__ == "__main__":
    main()
