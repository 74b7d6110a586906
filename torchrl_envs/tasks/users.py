"""The simulated user of a task, as settings name it: a server, or a function of one's own."""

from collections.abc import Callable, Sequence
from typing import Any

from torchrl_data.import_path import import_callable
from torchrl_envs.answerers.answerer import Answerer
from torchrl_envs.answerers.chat_completions import ChatCompletions
from torchrl_envs.transforms.simulated_user import INSTRUCTIONS, SimulatedUser


def simulated_user(
    user: str | None,
    *,
    model: str | None = None,
    instructions: str | None = None,
    opens: bool = False,
    tools: Sequence[Callable[..., Any]] = (),
) -> SimulatedUser | None:
    """The simulated user that settings ask for; ``None`` where they ask for none.

    Args:
        user: the address of a server that speaks OpenAI's protocol, ``http://host:8000/v1``; or
            ``module:name``, something that answers questions.
        model: its name at the server.
        instructions: see :class:`~torchrl_envs.SimulatedUser`; the usual ones when not given.
        opens: whether the user begins.
        tools: functions that the user alone can call.

    Raises:
        ValueError: a setting has no effect, or a server has no model.
        ImportError: a package is missing.
    """
    if user is None:
        given = {"user_model": model, "user_instructions": instructions, "user_opens": opens}
        given |= {"user_tools": tools}
        if without := [name for name, value in given.items() if value]:
            raise ValueError(f"{without[0]} has no effect: give user=, who plays the user.")
        return None
    said = INSTRUCTIONS if instructions is None else instructions
    return SimulatedUser(_answerer(user, model), instructions=said, opens=opens, tools=tools)


def _answerer(user: str, model: str | None) -> Answerer:
    if not user.startswith(("http://", "https://")):
        if model is not None:
            raise ValueError(f"user_model={model!r} has no effect: user={user!r} is no server.")
        return import_callable("user", user)
    if model is None:
        raise ValueError(f"user={user!r} is a server: give user_model=, the name of a model there.")
    return ChatCompletions(model, base_url=user)
