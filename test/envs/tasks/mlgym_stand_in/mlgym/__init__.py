"""A stand-in with the interface of MLGym that torchrl_envs uses; its containers are folders."""

from pathlib import Path

CONFIG_DIR = Path(__file__).parent.parent / "configs"
