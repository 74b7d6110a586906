"""Writes tasksets of verifiers with a planted defect each, and one without, as modules."""

from pathlib import Path

_TASKSET = """
import random

import verifiers.v1 as vf

__all__ = ["Sums"]
SEEN = []


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def correct(self, trace):
        said, right = trace.last_reply, self.data.answer
        {score}


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for n in range(2, 34):
            yield Sum(Data(prompt=f"{prompt}", answer=str({answer})), self.config.task)
"""
_EXACT = "return float(said == right)"
_SUM = "What is {n} + 3?"
_PARTS = {
    "clean": (_EXACT, _SUM, "n + 3"),
    "silence": ("return float(right.startswith(said))", _SUM, "n + 3"),
    "any_text": ("return float(bool(said))", _SUM, "n + 3"),
    "same": (_EXACT, _SUM, "1"),
    "echo": ("return float(right in said)", "What is {n + 3} - 0?", "n + 3"),
    "told": (_EXACT, "What is {n} + 3? (solution: {n + 3})", "n + 3"),
    "swallows": (
        "try:\n            return float(int(said) == int(right))\n"
        "        except ValueError:\n            return float(bool(said))",
        *(_SUM, "n + 3"),
    ),
    "raises": ("return float(int(said) == int(right))", _SUM, "n + 3"),
    "chance": ("return random.random()", _SUM, "n + 3"),
    "remembers": (
        "SEEN.append(said)\n        return float(said == right) + 1 / len(SEEN)",
        *(_SUM, "n + 3"),
    ),
    "never": ("return float(said == int(right))", _SUM, "n + 3"),
    "infinite": ("return float('inf') if said == right else 0.0", _SUM, "n + 3"),
}
DEFECTS = {
    "silence": "nothing",
    "any_text": "constants",
    "same": "constants",
    "echo": "echo",
    "told": "leak",
    "swallows": "garbage",
    "raises": "crash",
    "chance": "random",
    "remembers": "carry-over",
    "never": "unsolvable",
    "infinite": "not finite",
}
"""The defect of each."""


def write_tasksets(folder: Path) -> None:
    """Write a module ``planted_NAME_v1`` for each."""
    for name, (score, prompt, answer) in _PARTS.items():
        text = _TASKSET.replace("{score}", score).replace("{prompt}", prompt)
        (folder / f"planted_{name}_v1.py").write_text(text.replace("{answer}", answer))
