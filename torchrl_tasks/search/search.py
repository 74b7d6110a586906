"""Search: questions whose answer lies some pages away, and a tool that finds pages.

Most demonstrations look up any facts one after the other, as many as they like: which to look up
and when to answer is for the policy to find. In each the names are swapped, so that none tells a
fact.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torchrl_data.checks import check_columns, check_counts, check_numbers, one_of
from torchrl_data.messages import Message
from torchrl_envs.datasets.loading import load_rows
from torchrl_envs.datasets.prompt_limit import opening_messages
from torchrl_envs.graders.answers import final_text, reads_messages
from torchrl_envs.graders.short_answers import exact_match_of, f1_of
from torchrl_envs.tasks.task import Task, load_task_rows

from .bm25 import BM25
from .world import NAME, Hops, Page, make_world, questions_from

SYSTEM_PROMPT: Final = (
    "Look things up with the tool search, as often as needed. Then answer with nothing but the "
    "answer."
)
SCORES: Final[dict[str, Callable[[str, Any], float]]] = {"exact_match": exact_match_of, "f1": f1_of}
"""How an answer is scored, by name."""
_NUM_SEARCHES: Final = (1, 2, 3)
"""How often demonstrations search."""


@dataclass(eq=False, repr=False)
class Search:
    """A question, and a tool to look things up.

    Args:
        texts: of the pages.
        index: searches them.
        num_results: pages that a search shows.
        score: of an answer.
    """

    _texts: Sequence[str]
    _index: BM25
    _num_results: int
    _score: Callable[[str, Any], float]

    def reset(self, *, answer: Any, **row: Any) -> None:
        """Take the question of a row.

        Args:
            answer: the right one, or a list of them.
            **row: other columns.
        """
        del row
        self.answer = answer
        self.shown: list[str] = []

    def search(self, query: str) -> str:
        """Search the pages.

        Args:
            query: What to look for.
        """
        found = [self._texts[index] for index in self._index.search(query, self._num_results)]
        self.shown += found
        return "\n".join(found) or "nothing found"

    def get_reward(self, *, messages: Sequence[Message]) -> float:
        """Score the last message; 0 for an episode that ended without an answer."""
        return self._score(final_text(messages), self.answer)


@reads_messages
def exact_match(
    completions: Sequence[Sequence[Message]], answer: Sequence[Any], **_: Any
) -> list[float]:
    """1 where the last message is the answer, but for case, punctuation and articles."""
    return [exact_match_of(final_text(c), a) for c, a in zip(completions, answer, strict=True)]


@reads_messages
def f1(completions: Sequence[Sequence[Message]], answer: Sequence[Any], **_: Any) -> list[float]:
    """The F1 score of the words of the last message."""
    return [f1_of(final_text(c), a) for c, a in zip(completions, answer, strict=True)]


def found_answer(environments: Sequence[Search], **_: Any) -> list[float]:
    """1 where a page that the searches found holds the answer: the retrieval's recall."""
    found = []
    for environment in environments:
        is_one = isinstance(environment.answer, str)
        shown = "\n".join(environment.shown).lower()
        answers = [environment.answer] if is_one else environment.answer
        found.append(float(any(str(answer).lower() in shown for answer in answers)))
    return found


def search_task(
    *,
    corpus: Any = None,
    dataset: Any = None,
    split: str | None = None,
    held_out_split: str | None = None,
    skip_bad_rows: bool = False,
    num_pages: int = 192,
    max_hops: int = 2,
    num_results: int = 1,
    max_turns: int = 5,
    score: str = "exact_match",
    system_prompt: str | None = SYSTEM_PROMPT,
    num_held_out: int = 256,
    num_demonstrations: int = 4096,
    right_fraction: float = 0.3,
    seed: int = 0,
) -> Task:
    """Questions to be answered with a search tool, over pages that are made here or given.

    Args:
        corpus: pages of your own with ``title`` and ``text``: a file, a folder, a hub id, or rows.
        dataset: its questions, with ``question`` and ``answer`` (one or a list of them): the same.
        split: of the data set, to train on; the only one, or ``"train"``, when not given.
        held_out_split: to test on; when not given, rows of ``split``.
        skip_bad_rows: leave out rows that can't be used, and log how many; else they are refused.
        num_pages: that are made, where no corpus is given.
        max_hops: of the questions that are made, the most pages between question and answer.
        num_results: pages that a search shows.
        max_turns: most turns of an episode, each a search or the answer.
        score: the reward: exact_match or f1.
        system_prompt: says what to do.
        num_held_out: questions held out; of those that are made, none starts at a page at which a
            training question starts.
        num_demonstrations: conversations for the warm start, of questions that are made.
        right_fraction: fraction of the demonstrations that find the answer.
        seed: of pages and questions.

    Raises:
        ValueError: a setting is out of range, pages or questions lack a column, one of the two is
            given without the other, or there are too few questions to hold so many out.
    """
    check_counts("search", num_results=num_results, max_turns=max_turns, max_hops=max_hops)
    check_numbers("search", "[0, 1]", right_fraction=right_fraction)
    score = one_of("score", score, list(SCORES), who="search")
    if (corpus is None) != (dataset is None):
        raise ValueError("search: corpus and dataset go together; give both, or neither.")
    if corpus is None:
        world = make_world(num_pages, seed)
        facts = [(page, relation) for page in world.values() for relation in page.facts]
        titles = [f"{relation} of {page.title}" for page, relation in facts]
        texts = [page.told(relation) for page, relation in facts]
        rng = random.Random(seed)
        questions = _made_questions(world, max_hops, num_held_out, rng)
        train, held_out = (
            [
                {"prompt": h.question, "answer": h.path[-1]}
                | {"num_hops": len(h.path), "start": h.start}
                for h in part
            ]
            for part in questions
        )
        demonstrations = [
            _demonstration(rng.choice(questions[0]), world, rng, right_fraction, system_prompt)
            for _ in range(num_demonstrations)
        ]
    else:
        (titles, texts), demonstrations = _pages_of(corpus), []
        splits: Any = {"split": split, "held_out_split": held_out_split}
        splits |= {"num_held_out": num_held_out, "skip_bad_rows": skip_bad_rows}
        train, held_out = load_task_rows(dataset, prompt_column="question", **splits)
    index = BM25([f"{title} {text}" for title, text in zip(titles, texts, strict=True)])
    return Task(
        name="search",
        environment=partial(Search, texts, index, num_results, SCORES[score]),
        train_rows=train,
        held_out_rows=held_out,
        columns=("answer",),
        skip_bad_rows=skip_bad_rows,
        prompt_column="prompt" if corpus is None else "question",
        system_prompt=system_prompt,
        demonstrations=demonstrations,
        metrics=(exact_match, f1, found_answer),
        max_turns=max_turns,
        max_new_tokens=32,
        final_answer=lambda text: text.strip() or None,
        isolated=NAME,
    )


def _pages_of(corpus: Any) -> tuple[list[str], list[str]]:
    """Titles and texts of pages."""
    titles, texts = [], []
    for number, row in enumerate(load_rows(corpus)):
        check_columns(f"search: page {number}", row, ("title", "text"))
        titles.append(str(row["title"]))
        texts.append(f"{row['title']}: {row['text']}")
    return titles, texts


def _made_questions(
    world: Mapping[str, Page], max_hops: int, num_held_out: int, rng: random.Random
) -> tuple[list[Hops], list[Hops]]:
    """Training and held-out questions, which start at different pages."""
    starts = list(world)
    rng.shuffle(starts)
    held_out: list[Hops] = []
    while starts and len(held_out) < num_held_out:
        held_out += questions_from(world, starts.pop(), max_hops)
    train = [hops for start in starts for hops in questions_from(world, start, max_hops)]
    if len(train) < num_held_out or not train:
        raise ValueError(
            f"search: {len(held_out) + len(train)} questions are too few to hold {num_held_out} "
            "out. Make more pages (num_pages) or hold out fewer (evaluate.num_prompts=)."
        )
    rng.shuffle(held_out)
    rng.shuffle(train)
    return train, held_out[:num_held_out]


def _demonstration(
    hops: Hops,
    world: Mapping[str, Page],
    rng: random.Random,
    right_fraction: float,
    system_prompt: str | None,
) -> list[Message]:
    """A conversation along the facts of the question, or any, in a world of swapped titles."""
    is_right = rng.random() < right_fraction
    titles = list(world)
    name = dict(zip(titles, rng.sample(titles, len(titles)), strict=True))
    question = hops._replace(start=name[hops.start]).question
    messages: list[Any] = opening_messages(question, system_prompt)
    title = hops.start
    for step in range(len(hops.relations) if is_right else rng.choice(_NUM_SEARCHES)):
        page = world[title]
        relation = hops.relations[step] if is_right else rng.choice(list(page.facts))
        query = f"{relation} of {name[title]}"
        call = {"function": {"name": "search", "arguments": {"query": query}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        title = page.facts[relation]
        shown = page._replace(title=name[page.title], facts={relation: name[title]})
        messages.append({"role": "tool", "content": shown.told(relation)})
    return [*messages, {"role": "assistant", "content": name[title]}]
