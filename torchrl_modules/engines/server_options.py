"""Command lines of the servers that draw tokens."""

import json
from collections.abc import Mapping
from typing import Any


def as_options(settings: Mapping[str, Any]) -> list[str]:
    """Settings as a command line of a server holds them; a flag has no value.

    Example:
        >>> as_options({"eager": True, "chunked": False, "max_model_len": 8, "config": {"a": 1}})
        ['--eager', '--no-chunked', '--max-model-len', '8', '--config', '{"a": 1}']
    """
    words: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
