"""Answerers: servers, policies or functions that answer questions in text; and how one is asked."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from torchrl_data.messages import Message
from torchrl_envs.concurrency.calls import accepted_arguments, is_async
from torchrl_envs.concurrency.outcome import guarded
from torchrl_envs.concurrency.threads import DaemonThreads

Answers = list[str | Message | Exception]
"""What was answered to each question, or why there is no answer. A message of the assistant is for
who is offered tools: its ``tool_calls`` are what is called."""
Answerer = Callable[..., Answers | Awaitable[Answers]]
"""Answers questions, each a list of messages; may be ``async``, and be called in any thread. It is
given what it names of ``tools``, the JSON schemas of what each question may call, and ``streams``,
the number by which the random numbers of each are told apart."""


def as_exception(error: BaseException) -> Exception:
    """An error that ends what asked, and not the program or its event loop.

    Args:
        error: ``SystemExit`` and the like are made a ``RuntimeError``.
    """
    if isinstance(error, Exception):
        return error
    made = RuntimeError(f"{type(error).__name__}: {error}".rstrip(": "))
    made.__cause__ = error
    return made


async def ask(
    answerer: Answerer,
    questions: Sequence[Sequence[Message]],
    *,
    who: str,
    tools: Sequence[Sequence[dict[str, Any]]] = (),
    streams: Sequence[int | None] = (),
) -> Answers:
    """Ask all questions at once; a function that is not ``async`` runs on a thread of its own.

    Args:
        answerer: is called once.
        questions: messages each.
        who: is asked, named in the error.
        tools: JSON schemas of what the answer to each may call; none when not given.
        streams: names the random numbers of each answer, see :func:`~torchrl_data.stream_number`.

    Returns:
        An answer to each, or why there is none.

    Raises:
        Exception: what it raises.
        TypeError: it gives something else than a list.
        ValueError: it gives more or fewer answers than there are questions.
    """
    given = _accepted(answerer, {"tools": tools, "streams": streams})
    if is_async(answerer):
        answers: Any = answerer(questions, **given)
    else:
        # One that hangs must not hold up the end of the program.
        thread = DaemonThreads(1)
        answering = thread.submit(functools.partial(guarded, lambda: answerer(questions, **given)))
        thread.close()
        outcome = await asyncio.wrap_future(answering)
        if outcome.error is not None:
            raise as_exception(outcome.error)
        answers = outcome.value
    try:
        answers = await answers if inspect.isawaitable(answers) else answers
    except (SystemExit, KeyboardInterrupt) as error:  # which would end the loop that all share
        raise as_exception(error) from error
    if not isinstance(answers, Sequence) or isinstance(answers, str):
        raise TypeError(
            f"{who} must give a list with an answer to each question, it gave {answers!r:.80}"
        )
    if len(answers) != len(questions):
        raise ValueError(f"{who} gave {len(answers)} answers to {len(questions)} questions")
    return list(answers)


def _accepted(answerer: Answerer, more: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Arguments that go with the questions, as far as an answerer names them."""
    try:
        return accepted_arguments(answerer, {name: each for name, each in more.items() if each})
    except ValueError:  # a function that is not written in Python has no signature
        return {}
