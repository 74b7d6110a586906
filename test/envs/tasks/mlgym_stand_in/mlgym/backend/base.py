"""The model's settings, which nobody here reads."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelArguments:
    model_name: str
