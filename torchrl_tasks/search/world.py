"""A small world that is made up: things that refer to each other, and questions along the way.

Nothing in it can be known by heart: the names are syllables drawn at random, and another seed
gives another world.
"""

import random
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Final, NamedTuple

NAME: Final = r"[A-Z][aeiou][a-z][aeiou]\b"
"""A name, a regular expression."""
RELATIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "book": {"author": "person", "setting": "town"},
    "person": {"birthplace": "town", "teacher": "person"},
    "town": {"country": "country", "mayor": "person"},
    "country": {"capital": "town", "ruler": "person"},
}
"""Of each kind of page: what it tells, and of which kind that is."""
_SHARES: Final = {"country": 1, "town": 4, "book": 5, "person": 6}
"""Pages of each kind, of sixteen."""
_CONSONANTS: Final = "bdfgklmnprst"


class Page(NamedTuple):
    """Something, and what is told of it."""

    title: str
    kind: str
    facts: Mapping[str, str]
    """The title of something else, by relation."""

    def told(self, relation: str) -> str:
        """A fact in words."""
        return f"The {relation} of {self.title} is {self.facts[relation]}."


class Hops(NamedTuple):
    """A question: from page to page along some relations."""

    start: str
    relations: tuple[str, ...]
    path: tuple[str, ...]
    """The titles on the way, the answer last."""

    @property
    def question(self) -> str:
        """In words: the last relation first."""
        steps = "".join(f"the {relation} of " for relation in reversed(self.relations))
        return f"What is {steps}{self.start}?"


def make_world(num_pages: int, seed: int = 0) -> dict[str, Page]:
    """Pages by title.

    Args:
        num_pages: of all kinds.
        seed: of names and facts.

    Raises:
        ValueError: there are too few for each kind to have two, or more than there are names.
    """
    syllables = [consonant + vowel for consonant, vowel in product(_CONSONANTS, "aeiou")]
    most = len(syllables) ** 2
    if not 2 * sum(_SHARES.values()) <= num_pages <= most:
        raise ValueError(
            f"make_world: num_pages must be between {2 * sum(_SHARES.values())} and {most}, got "
            f"{num_pages}."
        )
    rng = random.Random(seed)
    pairs = rng.sample(list(product(syllables, repeat=2)), num_pages)
    names = [first.capitalize() + second for first, second in pairs]
    of_kind: dict[str, list[str]] = {}
    for kind, share in _SHARES.items():
        count = num_pages * share // sum(_SHARES.values())
        of_kind[kind] = [names.pop() for _ in range(count)]
    of_kind["person"] += names  # what is left of a number that can't be shared out
    world = {}
    for kind, titles in of_kind.items():
        for title in titles:
            facts = {}
            for relation, target in RELATIONS[kind].items():
                while (fact := rng.choice(of_kind[target])) == title:
                    pass
                facts[relation] = fact
            world[title] = Page(title, kind, facts)
    return world


def questions_from(world: Mapping[str, Page], start: str, max_hops: int) -> Iterator[Hops]:
    """Every question that starts at a page and never comes to one twice.

    Args:
        world: pages by title.
        start: the title that the question names.
        max_hops: most relations of one.
    """
    ways: list[tuple[tuple[str, ...], tuple[str, ...]]] = [((), ())]
    for _ in range(max_hops):
        ways = [
            ((*relations, relation), (*path, title))
            for relations, path in ways
            for relation, title in world[path[-1] if path else start].facts.items()
            if title not in (start, *path)
        ]
        for relations, path in ways:
            yield Hops(start, relations, path)
