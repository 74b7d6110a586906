"""The simulated user of a task, as settings name it: a server, a model, or one's own function."""

from collections.abc import Callable, Sequence
from typing import Any

from torchrl_data.checks import NOT_NEGATIVE, check_counts, check_numbers
from torchrl_data.import_path import import_callable
from torchrl_envs.answerers.answerer import Answerer
from torchrl_envs.answerers.chat_completions import ChatCompletions
from torchrl_envs.transforms.simulated_user import INSTRUCTIONS, SimulatedUser


def names_model(user: str) -> bool:
    """Return whether a setting names a model of this process: a folder, a file or a hub id.

    Args:
        user: the setting.
    """
    return ":" not in user


def simulated_user(
    user: str | Answerer | None,
    *,
    model: str | None = None,
    temperature: float = 0.0,
    max_tokens: int | None = None,
    instructions: str | None = None,
    opens: bool = False,
    tools: Sequence[Callable[..., Any]] = (),
) -> SimulatedUser | None:
    """The simulated user that settings ask for; ``None`` where they ask for none.

    Args:
        user: the address of a server that speaks OpenAI's protocol, ``http://host:8000/v1``;
            ``module:name``, something that answers questions; or what answers, itself.
        model: its name at the server.
        temperature: of a server's answers.
        max_tokens: most tokens of a server's answer; what it takes itself when not given.
        instructions: see :class:`~torchrl_envs.SimulatedUser`; the usual ones when not given.
        opens: whether the user begins.
        tools: functions that the user alone can call.

    Raises:
        ValueError: a setting has no effect, or a server has no model.
        ImportError: a package is missing.
    """
    if user is None:
        _refuse(
            "give user=, who plays the user.",
            **{"user_instructions": instructions, "user_opens": opens, "user_tools": tools},
            **{"user_model": model, "user_temperature": temperature, "user_max_tokens": max_tokens},
        )
        return None
    said = INSTRUCTIONS if instructions is None else instructions
    answerer = answerer_of(user, model=model, temperature=temperature, max_tokens=max_tokens)
    return SimulatedUser(answerer, instructions=said, opens=opens, tools=tools)


def answerer_of(
    user: str | Answerer, *, model: str | None, temperature: float, max_tokens: int | None
) -> Answerer:
    """Return who answers for a user, as settings name it.

    Args:
        user: see :func:`simulated_user`, and so are the others.
        model: the same.
        temperature: the same.
        max_tokens: the same.

    Raises:
        ValueError: a setting has no effect, or a server has no model.
        ImportError: a package is missing.
    """
    if not (isinstance(user, str) and user.startswith(("http://", "https://"))):
        drawing = {"user_temperature": temperature, "user_max_tokens": max_tokens}
        _refuse(f"user={user!r:.80} is no server.", user_model=model, **drawing)
        if not isinstance(user, str):
            return user
        if names_model(user):
            raise ValueError(
                f"user={user!r} names a model of this process, which the recipes load. Here give a "
                "server, http://host:8000/v1, or module:name, a function of questions."
            )
        return import_callable("user", user)
    if model is None:
        raise ValueError(f"user={user!r} is a server: give user_model=, the name of a model there.")
    check_numbers("the task", NOT_NEGATIVE, user_temperature=temperature)
    check_counts("the task", user_max_tokens=max_tokens)
    bound: Any = {} if max_tokens is None else {"max_tokens": max_tokens}
    return ChatCompletions(model, base_url=user, temperature=temperature, **bound)


def _refuse(why: str, **settings: Any) -> None:
    """Refuse settings that are given and have no effect.

    Raises:
        ValueError: one is.
    """
    if without := [name for name, value in settings.items() if value]:
        raise ValueError(f"{without[0]} has no effect: {why}")
