"""Runs environments as OpenEnv servers: serve.py <port> <path>=<environment>:<sessions> ...

To be run with an interpreter that has openenv, with the repository on its path. It ends when its
standard input does, so that it never outlives the program that started it.
"""

import os
import sys
import threading

import environments
import planted_environments as planted
import uvicorn
from calculator import Calculator
from fastapi import FastAPI
from openenv.core.env_server import CallToolAction, CallToolObservation, create_app

ENVIRONMENTS = {
    "echo": (environments.Echo, environments.EchoAction, environments.EchoObservation),
    "async_echo": (environments.AsyncEcho, environments.EchoAction, environments.EchoObservation),
    "catch": (environments.Catch, environments.CatchAction, environments.CatchObservation),
    "wordle": (
        environments.Wordle,
        environments.TextArenaAction,
        environments.TextArenaObservation,
    ),
    "calculator": (Calculator, CallToolAction, CallToolObservation),
    **{
        each.__name__: (each, planted.ColourAction, planted.ColourObservation)
        for each in planted.PLANTED
    },
}


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    app = FastAPI()
    for mount in sys.argv[2:]:
        path, _, served = mount.partition("=")
        name, _, num_sessions = served.partition(":")
        inner = create_app(*ENVIRONMENTS[name], max_concurrent_envs=int(num_sessions))
        app.mount(f"/{path}", inner)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")


if __name__ == "__main__":
    main()
