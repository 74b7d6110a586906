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


_WITH_TOOLS = """
import verifiers.v1 as vf

__all__ = ["Vaults"]


class Data(vf.TaskData):
    answer: str


class Notes(vf.State):
    opened: list[str] = []


class Vault(vf.Toolset[vf.ToolsetConfig, Notes]):
    async def setup_task(self, task):
        self.code = task.answer

    @vf.tool
    async def open(self, code: str) -> str:
        \"\"\"Try to open the vault.

        Args:
            code: of it.
        \"\"\"
        self.state.opened.append(code)
        return {told}


class Open(vf.Task[Data, Notes, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Vault(vf.ToolsetConfig())]

    @vf.reward
    async def is_open(self, trace):
        tried = trace.state.opened
        return float({score})


class Vaults(vf.Taskset[Open, vf.TasksetConfig]):
    def load(self):
        for n in range(20, 52):
            yield Open(Data(prompt=f"The code is twice {n}.", answer=str(2 * n)), self.config.task)
"""
_EQUAL = "'open' if code == self.code else 'closed'"
_TOOL_PARTS = {
    "vault": (_EQUAL, "tried[:1] == [self.data.answer]"),
    "any_call": (_EQUAL, "bool(tried)"),
    "telling": ("f'wrong, the answer is {self.code}'", "self.data.answer in tried"),
}
TOOL_DEFECTS = {"any_call": "constants", "telling": "leak"}
"""The defect of each taskset with tools; ``vault`` has none."""


def write_tasksets(folder: Path) -> None:
    """Write a module ``planted_NAME_v1`` for each."""
    for name, (score, prompt, answer) in _PARTS.items():
        text = _TASKSET.replace("{score}", score).replace("{prompt}", prompt)
        (folder / f"planted_{name}_v1.py").write_text(text.replace("{answer}", answer))
    for name, (told, score) in _TOOL_PARTS.items():
        text = _WITH_TOOLS.replace("{told}", told).replace("{score}", score)
        (folder / f"planted_{name}_v1.py").write_text(text)
