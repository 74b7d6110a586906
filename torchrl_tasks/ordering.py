"""A customer orders, and leaves out what it is then asked for: the policy learns what to ask.

The customer is a :class:`~torchrl_envs.SimulatedUser`: a function that is written here, or a
language model. The demonstrations ask for anything at random, and guess what they don't know.
"""

import random
import re
from collections.abc import Sequence
from typing import Any, Final

from torchrl_data.messages import Message
from torchrl_envs.answerers.answerer import Answers
from torchrl_envs.rewards.functions import RewardFunctions
from torchrl_envs.tasks.call_texts import ROLES, call_text
from torchrl_envs.tasks.task import Row, Task
from torchrl_envs.tasks.users import simulated_user
from torchrl_envs.transforms.simulated_user import END

ITEMS: Final = ("apples", "pears", "plums", "figs")
COLOURS: Final = ("red", "green", "yellow", "brown")
NUMBERS: Final = range(2, 10)
SYSTEM_PROMPT: Final = "Take orders. Ask for the number and the colour if they are not said."
QUESTIONS: Final = {"number": "How many?", "colour": "Which colour?"}
"""What the demonstrations ask, by what they want to know."""
QUESTION_COST: Final = 0.2
_WANTED: Final = re.compile(r"You want (?P<number>\d+) (?P<colour>\w+) (?P<item>\w+)\.")


class Orders:
    """A shop that takes one order."""

    def reset(self, *, item: str, colour: str, number: int, **row: Any) -> None:
        """Note what the customer of a row wants."""
        del row
        self._wanted = (item, colour, number)
        self._ordered: tuple[str, str, int] | None = None

    def order(self, item: str, colour: str, number: int) -> str:
        """Place the order; there is no second one.

        Args:
            item: What is ordered.
            colour: Of which colour.
            number: How many.
        """
        if self._ordered is not None:
            raise ValueError("the order is placed already")
        self._ordered = (item, colour, number)
        return "placed"

    def is_right(self) -> bool:
        """The customer gets what it wants."""
        return self._ordered == self._wanted


def customer(questions: Sequence[Sequence[Message]]) -> Answers:
    """Answer for customers who know what they want: the one thing that is asked, and no more.

    Args:
        questions: of a :class:`~torchrl_envs.SimulatedUser` whose instructions have the scenario.
    """
    answers: Answers = []
    for question in questions:
        wanted = _WANTED.search(str(question[0]["content"]))
        asked = str(question[-1]["content"]).lower()
        if wanted is None:
            answers.append(ValueError(f"no scenario in {question[0]['content']!r:.80}"))
        elif "how many" in asked:
            answers.append(f"{wanted['number']}.")
        elif "colour" in asked or "color" in asked:
            answers.append(f"{wanted['colour'].capitalize()}.")
        else:
            answers.append(END)
    return answers


def right(environments: Sequence[Orders], **_: Any) -> list[float]:
    """1 for the order that the customer wanted."""
    return [float(shop.is_right()) for shop in environments]


def num_questions(completions: Sequence[Sequence[Message]], **_: Any) -> list[float]:
    """Number of questions that the customer answered."""
    return [float(sum(m["role"] == "user" for m in messages)) for messages in completions]


def ordering_task(
    *,
    user: str | None = None,
    user_model: str | None = None,
    user_temperature: float = 0.0,
    num_rows: int = 4096,
    num_held_out: int = 256,
    num_demonstrations: int = 8192,
    seed: int = 0,
) -> Task:
    """Orders that leave out the number or the colour, both, or nothing; a customer who answers.

    The reward is 1 for the right order, less 0.2 for each question that the customer answered: who
    asks for what is missing, and no more, gets 0.8 on average.

    Args:
        user: who plays the customer: a server, http://host:8000/v1; module:name, a function of
            yours; or a hub id or folder of a model; one that is written here when not given.
        user_model: its name at the server.
        user_temperature: of a server's or a model's answers.
        num_rows: training rows, each an order.
        num_held_out: rows of the test, drawn independently.
        num_demonstrations: conversations for the warm start.
        seed: of everything.

    Raises:
        ValueError: a server is given and no model, or a model and no server.
    """
    rng = random.Random(seed)

    def row(i: int) -> Row:
        item, colour, number = rng.choice(ITEMS), rng.choice(COLOURS), rng.choice(NUMBERS)
        says_number, says_colour = bool(i & 1), bool(i & 2)
        words = [str(number)] * says_number + [colour] * says_colour + [item]
        return {
            "prompt": f"I would like {' '.join(words)}.",
            "scenario": f"You want {number} {colour} {item}.",
            **{"item": item, "colour": colour, "number": number},
            **{"says_number": says_number, "says_colour": says_colour},
        }

    train, held_out = [row(i) for i in range(num_rows)], [row(i) for i in range(num_held_out)]
    name = user or f"{__name__}:customer"
    return Task(
        name="ordering",
        environment=Orders,
        user=lambda: simulated_user(name, model=user_model, temperature=user_temperature),
        train_rows=train,
        held_out_rows=held_out,
        system_prompt=SYSTEM_PROMPT,
        rewards=lambda: [RewardFunctions([right, num_questions], weights=[1.0, -QUESTION_COST])],
        solved_by=("right",),
        demonstrations=[_demonstration(rng.choice(train), rng) for _ in range(num_demonstrations)],
        max_turns=5,
        max_new_tokens=40,
        isolated=r"\d+",
        phrases=[
            *ROLES,
            SYSTEM_PROMPT,
            *QUESTIONS.values(),
            *("I would like", "Done.", "placed", *ITEMS, *COLOURS),
            *(colour.capitalize() for colour in COLOURS),
            *_around_arguments(),
        ],
    )


def _demonstration(row: Row, rng: random.Random) -> list[Message]:
    """An order with questions by chance, in which what is not known is guessed."""
    known = {"item": row["item"]}
    known |= {name: row[name] for name in QUESTIONS if row[f"says_{name}"]}
    messages: list[Message] = [{"role": "user", "content": row["prompt"]}]
    for name in rng.sample([*QUESTIONS], rng.randint(0, len(QUESTIONS))):
        known[name] = row[name]
        messages.append({"role": "assistant", "content": QUESTIONS[name]})
        messages.append({"role": "user", "content": f"{str(row[name]).capitalize()}."})
    guess = {"number": rng.choice(NUMBERS), "colour": rng.choice(COLOURS)}
    arguments = {name: known.get(name, guess.get(name)) for name in ("item", "colour", "number")}
    call = {"function": {"name": "order", "arguments": arguments}}
    return [
        *messages,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "placed"},
        {"role": "assistant", "content": "Done."},
    ]


def _around_arguments() -> list[str]:
    """Return what stands before, between and after the values of a call, but for quotes."""
    text = call_text("order", {"item": 0, "colour": 0, "number": 0})
    return [part.strip(" ") for part in text.split("0")]
