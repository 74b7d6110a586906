"""An environment whose container is a shell in a temporary folder."""

import re
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlgym import CONFIG_DIR

OPEN: list["MLGymEnv"] = []
"""All environments whose shell runs."""
END = "##END "


@dataclass
class TaskConfig:
    id: str
    name: str
    description: str
    baseline_scores: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class EnvironmentArguments:
    task_config_path: str
    max_steps: int = 100
    seed: int = 42
    container_type: str = "docker"
    verbose: bool = False
    aliases_file: str | None = None


class MLGymEnv:
    def __init__(self, args: EnvironmentArguments, devices: list[str]) -> None:
        if not (CONFIG_DIR / args.task_config_path).exists():
            raise FileNotFoundError(args.task_config_path)
        self.args = args
        self.devices = devices
        name = Path(args.task_config_path).stem
        self.task_args = TaskConfig(name, name, "Write a number.", [{"Score": 1.0}])
        self.current_step = 0
        self.max_steps = args.max_steps
        self.returncode: int | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=self._folder.name,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        OPEN.append(self)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.current_step = 0
        self.communicate("mkdir workspace && cd workspace")
        return {"observation": None}, {}

    def step(self, action: str) -> tuple[str | None, float, bool, dict[str, Any]]:
        info: dict[str, Any] = defaultdict(list)
        self.current_step += 1
        if self.current_step > self.max_steps:
            return self._evaluate(info, "max_steps")
        output = self.communicate(action.strip())
        if "<<VALIDATION||" in output:
            return self._evaluate(info, "validate")
        if "<<SUBMISSION||" in output:
            return self._evaluate(info, "submit")
        return output, 0, False, info

    def _evaluate(self, info, why) -> tuple[str | None, float, bool, dict[str, Any]]:
        found = re.fullmatch(r"(\d+)\n", self.communicate("cat number"))
        if found is None:
            return "Submission artefact not found.", 0, why != "validate", info
        info["score"].append({"Score": float(found[1])})
        if why == "validate":
            return f"Evaluation Score: {info['score'][-1]}", 0, False, info
        return f"Exited ({why})", 0, True, info

    def communicate(self, input: str, timeout_duration: float = 25) -> str:
        if self._shell.poll() is not None:
            raise RuntimeError("Failed to communicate with container")
        self._shell.stdin.write(f"{input}\necho; echo '{END}'$?\n")
        self._shell.stdin.flush()
        lines: list[str] = []
        for line in self._shell.stdout:
            if line.startswith(END):
                self.returncode = int(line.removeprefix(END))
                return "".join(lines)[:-1]
            lines.append(line)
        raise RuntimeError("Failed to communicate with container")

    def add_commands(self, commands: list[dict[str, str]]) -> None:
        folder = Path(self._folder.name) / "commands"
        folder.mkdir()
        self.communicate(f"export PATH=$PATH:{folder}")
        for command in commands:
            path = folder / command["name"]
            path.write_text(command["contents"])
            if command["type"] == "source_file":
                self.communicate(f"source {path}")
            elif command["type"] == "script":
                path.chmod(0o755)

    def close(self) -> None:
        OPEN.remove(self)
        self._shell.kill()
        self._shell.communicate()
        self._folder.cleanup()
