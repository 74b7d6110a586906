"""A customer and an agent that do what the reference of a task does: to try and audit tasks with.

The customer says why it writes, and when it is spoken to it does all that the reference has it do.
The agent calls the reference's tools, and tells what has to be told.
"""

from collections.abc import Sequence
from typing import Any

from torchrl_data.messages import Message
from torchrl_data.tool_calls.call_messages import message_with_calls
from torchrl_data.tool_calls.records import ToolCall
from torchrl_envs.answerers.answerer import Answers
from torchrl_envs.audit.audited_task import AgentView
from torchrl_envs.audit.scripted_agents import tool_call_text
from torchrl_envs.transforms.simulated_user import END

from .domain import load_domain
from .tools import TASK_COLUMN

DOMAIN_COLUMN = "domain"
"""The column with the name of a task's domain."""


class ReferenceCustomer:
    """A customer who does the reference's actions, and is content when the agent has spoken.

    Args:
        domain: the name of a domain.
    """

    def __init__(self, domain: str) -> None:
        self.domain = load_domain(domain)

    def __call__(self, questions: Sequence[Sequence[Message]]) -> Answers:
        """Answer for all customers.

        Args:
            questions: of a :class:`~torchrl_envs.SimulatedUser` whose instructions are the id of a
                task.
        """
        return [self._answer(question) for question in questions]

    def _answer(self, question: Sequence[Message]) -> str | Message:
        task = self.domain.tasks[str(question[0]["content"])]
        told = task.user_scenario.instructions
        if len(question) == 2:  # it begins
            return str(getattr(told, "reason_for_call", told))
        calls = [ToolCall(a.name, a.arguments, f"user{i}") for i, a in _actions(task, "user")]
        if not calls or question[-1]["role"] == "tool":
            return END
        return message_with_calls({"role": "assistant"}, "", calls)


def solution(view: AgentView) -> str | None:
    """Return the next turn of the reference: ``--solution torchrl_tasks.tau2.reference:solution``.

    Args:
        view: of an episode of ``task=tau2``.
    """
    task = load_domain(view.row[DOMAIN_COLUMN]).tasks[view.row[TASK_COLUMN]]
    actions = _actions(task, "assistant")
    if view.turn < len(actions):
        _, action = actions[view.turn]
        return tool_call_text(action.name, action.arguments)
    criteria = task.evaluation_criteria
    told = [] if criteria is None else criteria.communicate_info or []
    return " ".join(["Done.", *told]) if view.turn == len(actions) else None


def _actions(task: Any, requestor: str) -> list[tuple[int, Any]]:
    """The reference's actions of one of the two, numbered among all."""
    criteria = task.evaluation_criteria
    actions = [] if criteria is None else criteria.actions or []
    return [(i, action) for i, action in enumerate(actions) if action.requestor == requestor]
