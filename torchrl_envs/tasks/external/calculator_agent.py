"""The calculator's questions, answered by an agent that owns its loop; to copy for one of yours.

``answer`` is what somebody might have written for a hosted model: its own prompt, its own reading
of calls, its own tools, and OpenAI's client. Needs the package ``openai``
(``pip install torchrl-agents[graders]``).
"""

import functools
import json
import re
from dataclasses import replace
from typing import Any, Final

from torchrl_envs.agents.agent_program import AgentProgram
from torchrl_envs.agents.programs import AgentEndpoint
from torchrl_envs.tasks.calculator import TOOLS, calculator_task
from torchrl_envs.tasks.questions.reasoning_gym import score_answer
from torchrl_envs.tasks.task import Task

MAX_REQUESTS: Final = 4
_CALL: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@functools.lru_cache(maxsize=8)
def _client(base_url: str) -> Any:
    return _openai().OpenAI(base_url=base_url, api_key="that of each episode", max_retries=0)


def _openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise ImportError(
            "calculator_agent asks with OpenAI's client: pip install 'torchrl-agents[graders]'."
        ) from error
    return openai


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
        chat.append({"role": "tool", "content": _result(call[1])})
    return 0.0


def _result(text: str) -> str:
    try:
        call = json.loads(text)
        tool: Any = TOOLS[call["name"]]
        return tool(None, **call["arguments"])
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        return f"error: {type(error).__name__}: {error}"


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
    _openai()
    task = calculator_task(
        num_rows=num_rows,
        num_held_out=num_held_out,
        num_demonstrations=num_demonstrations,
        seed=seed,
    )
    return replace(
        task,
        name="calculator_agent",
        environment=None,
        tools=lambda _: [AgentProgram(answer, timeout_s=60.0)],
        max_turns=MAX_REQUESTS,
    )
