"""The calculator's questions, answered by an agent that owns its loop; to copy for one of yours.

``answer`` is what somebody might have written for a hosted model: its own prompt, its own reading
of calls, its own tools, and OpenAI's client. Needs the package ``openai`` (``pip install
torchrl-agents[graders]``).
"""

import functools
import json
import re
from dataclasses import replace
from importlib import import_module
from typing import Any, Final

from torchrl_data import import_package
from torchrl_envs.agents.agent_command import AgentEndpoint
from torchrl_envs.agents.agent_program import AgentProgram
from torchrl_envs.tasks.calculator import TOOLS, calculator_task
from torchrl_envs.tasks.reasoning_gym import score_answer
from torchrl_envs.tasks.task import Task

MAX_REQUESTS: Final = 4
_CALL: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@functools.lru_cache(maxsize=8)
def _client(base_url: str) -> Any:
    return import_module("openai").OpenAI(base_url=base_url, api_key="of each", max_retries=0)


def answer(endpoint: AgentEndpoint, *, prompt: str, entry: dict[str, Any], generator: str) -> float:
    """Answer one question with the calculator's tools.

    Args:
        endpoint: of the policy.
        prompt: the question.
        entry: reasoning-gym's, which scores.
        generator: of the question.

    Returns:
        1 for a right answer and 0 for another one.
    """
    client = _client(endpoint.base_url).with_options(api_key=endpoint.api_key)
    chat: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(MAX_REQUESTS):
        reply = client.chat.completions.create(model=endpoint.model, messages=chat)
        text = reply.choices[0].message.content
        chat.append({"role": "assistant", "content": text})
        call = _CALL.search(text)
        if call is None:
            return float(score_answer(text, {"entry": entry, "generator": generator}) >= 1.0)
        try:
            asked = json.loads(call[1])
            tool: Any = TOOLS[asked["name"]]
            result = tool(None, **asked["arguments"])
        except (ValueError, KeyError, TypeError, ArithmeticError) as error:
            result = f"error: {type(error).__name__}: {error}"
        chat.append({"role": "tool", "content": result})
    return 0.0


def calculator_agent_task(
    *, num_rows: int = 4096, num_held_out: int = 256, num_demonstrations: int = 8192, seed: int = 0
) -> Task:
    """The task ``calculator``, by an agent.

    Args:
        num_rows: most rows; as many for each tool.
        num_held_out: rows held out.
        num_demonstrations: conversations for the warm start.
        seed: of everything.

    Raises:
        ValueError: too few different questions to hold so many out.
        ImportError: the package ``openai`` is not installed.
    """
    install = "pip install 'torchrl-agents[graders]'"
    import_package("openai", who="calculator_agent", install=install)
    counts = {"num_held_out": num_held_out, "num_demonstrations": num_demonstrations}
    task = calculator_task(num_rows=num_rows, seed=seed, **counts)
    own: Any = {"name": "calculator_agent", "environment": None, "max_turns": MAX_REQUESTS}
    return replace(task, tools=lambda _: [AgentProgram(answer, timeout_s=60.0)], **own)
