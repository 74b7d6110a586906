"""The agent's settings: templates, and commands that its shell has."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlgym.backend.base import ModelArguments


@dataclass
class Command:
    name: str
    code: str


@dataclass
class ToolsHandler:
    command_docs: str
    env_variables: dict[str, str]


@dataclass
class AgentConfig:
    command_files: list[str]
    system_template: str = "You have these commands:\n{command_docs}"
    task_template: str = "{name}: {description} Steps left: {remaining_steps}, in {working_dir}."
    strategy_template: str | None = None
    next_step_template: str = "{observation}\n(step {current_step}, in {working_dir})"
    next_step_no_output_template: str = "No output.\n(step {current_step})"
    state_command: Command = field(
        default_factory=lambda: Command(
            "state", 'state() { echo "{\\"working_dir\\": \\"$(basename $PWD)\\"}"; }'
        )
    )
    env_variables: dict[str, str] = field(default_factory=lambda: {"WINDOW": "100"})

    @property
    def tools_handler(self) -> ToolsHandler:
        return ToolsHandler("submit, validate", self.env_variables)


@dataclass(frozen=True)
class AgentArguments:
    model: ModelArguments
    agent_config_path: Path

    @property
    def config(self) -> Any:
        commands = self.agent_config_path.parent.parent.parent / "commands"
        return AgentConfig([str(path) for path in sorted(commands.iterdir())])
